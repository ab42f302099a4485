"""Seconds of a training step of a given model on this machine, and where models come from."""

from __future__ import annotations

import os
import socket
import statistics
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

STEPS = 5
SECONDS = 60.0
"""Seconds after which no further step begins: others wait for a slow island before they meet it."""

TOKENS = 512  # of one row
PROXIES = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")


def step_seconds(
    name: str, steps: int = STEPS, tokens: int = TOKENS, seconds: float = SECONDS
) -> float:
    """Seconds of forward, backward and AdamW with one row of tokens: the median of `steps`, after
    one that is not counted. On the first GPU in bf16 (autocast) where there is one, else on the CPU
    in fp32.

    Args:
        name: config.json or folder of an architecture, a file of `recipes/models` by name, or a hub
            id; fresh weights.
        seconds: after which no further step begins; one is counted at least.

    Raises:
        ValueError: no such model, or transformers is missing.
    """
    import torch

    model = _model(name)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    longest = getattr(model.config, "max_position_embeddings", tokens)
    shape = (1, min(tokens, longest))
    ids = torch.randint(0, model.config.vocab_size, shape, device=device)
    took: list[float] = []
    while len(took) < 2 or (len(took) <= steps and sum(took) < seconds):
        start = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        took.append(time.perf_counter() - start)
    return statistics.median(took[1:])


def _model(name: str) -> Any:
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise ValueError(
            f"--model needs transformers ({error}): pip install 'fsdp_demo[hf]', or leave --model "
            "out, or give --step-time"
        ) from None
    clone = Path(__file__).parents[3]
    places = [Path(name), *(p / "recipes" / "models" / f"{name}.json" for p in (Path(), clone))]
    path = next((place for place in places if place.exists()), None)
    try:
        config = model_config(path or name)
        config.use_cache = False
        return AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).splitlines() or ["unknown"])[0][:160]
        raise ValueError(
            f"--model {name}: expected a config.json, a folder that holds one, a name of "
            f"recipes/models or a hub id ({reason})"
        ) from None


def model_config(where: str | Path) -> Any:
    """The `PretrainedConfig` at a path, else of a hub id; what transformers raises."""
    from transformers import AutoConfig

    if Path(where).exists():
        return AutoConfig.from_pretrained(where)
    return AutoConfig.from_pretrained(where, local_files_only=not reachable())


def reachable(seconds: float = 3.0) -> bool:
    """Whether the hub at HF_ENDPOINT takes a connection within `seconds`; taken for granted behind
    a proxy, and refused by HF_HUB_OFFLINE. Without it only what is cached can be loaded.
    """
    if os.environ.get("HF_HUB_OFFLINE", "") not in ("", "0"):
        return False
    if any(os.environ.get(name) for name in PROXIES):
        return True
    place = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    try:
        socket.create_connection((place.hostname or "", place.port or 443), seconds).close()
    except OSError:
        return False
    return True
