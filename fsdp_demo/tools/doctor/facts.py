"""Facts of this machine: versions, interface, settings of TCP, speed of the disk, seconds of a
training step.
"""

from __future__ import annotations

import os
import platform
import socket
import statistics
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from ...net.address import interface_addresses
from ...peers.header import VERSION as WIRE
from ...version import __version__

SYSCTL = Path("/proc/sys/net/ipv4")
NETWORK = Path("/sys/class/net")
BLOCK = 8 << 20  # bytes per write


def versions() -> dict[str, str]:
    """The versions of python, torch, fsdp_demo and the wire format, by name."""
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "unknown"
    return {
        "python": platform.python_version(),
        "torch": torch,
        "fsdp_demo": __version__,
        "wire": str(WIRE),
    }


def interface(address: str) -> str:
    """The interface that holds an address; "" where none does, or it is not known (no Linux)."""
    if not sys.platform.startswith("linux"):
        return ""
    held = interface_addresses([name for _, name in socket.if_nameindex()])
    return next((name for name, there in held if there == address), "")


def speed(name: str) -> int | None:
    """Mbit/s of an interface as its driver says; None where it does not (wireless, virtual)."""
    value = _number(NETWORK / name / "speed") if name else None
    return value if value is not None and value > 0 else None


def mtu(name: str) -> int | None:
    """Bytes of the packets of an interface."""
    return _number(NETWORK / name / "mtu") if name else None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def tcp_settings() -> dict[str, object]:
    """The fields of `measured.Island` that Linux keeps for TCP; empty values elsewhere."""
    try:
        congestion = (SYSCTL / "tcp_congestion_control").read_text().strip()
    except OSError:
        congestion = ""
    after_idle = _number(SYSCTL / "tcp_slow_start_after_idle")
    return {
        "congestion": congestion,
        "slow_start_after_idle": None if after_idle is None else bool(after_idle),
    }


def disk_mb_s(folder: str | Path, size: int = 256 << 20) -> float:
    """MB/s (1e6 bytes) at which a file is written into a folder and reaches the disk (fsync). The
    file is removed.

    Args:
        size: bytes that are written at most, and within 3 s.

    Raises:
        ValueError: the folder is missing, or cannot be written.
    """
    block, written = memoryview(os.urandom(BLOCK)), 0
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix="fsdp-demo-doctor-") as file:
            start = time.perf_counter()
            while written < size and time.perf_counter() - start < 3.0:
                written += file.write(block)
            file.flush()
            os.fsync(file.fileno())
            return written / 1e6 / (time.perf_counter() - start)
    except OSError as error:
        raise ValueError(
            f"--folder {folder}: no file can be written there ({error.strerror or error}); give "
            "the folder of the checkpoints"
        ) from None


# Seconds of a training step of a given model on this machine.

STEPS = 5
SECONDS = 60.0
"""Seconds after which no further step begins: others wait for a slow island before they meet it."""

TOKENS = 512  # of one row


def step_seconds(name: str, tokens: int = TOKENS, seconds: float = SECONDS) -> float:
    """Seconds of forward, backward and AdamW with one row of tokens: the median of five steps,
    after one that is not counted. On the first GPU in bf16 (autocast) where there is one, else on
    the CPU in fp32.

    Args:
        name: config.json or folder of an architecture, a file of `recipes/models` by name, or a hub
            id; fresh weights.
        tokens: tokens of a row at most.
        seconds: time after which no further step begins; one is counted at least.

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
    while len(took) < 2 or (len(took) <= STEPS and sum(took) < seconds):
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
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ValueError(
            f"--model needs transformers ({error}): pip install 'fsdp_demo[hf]', or leave --model "
            "out, or give --step-time"
        ) from None
    clone = Path(__file__).parents[3]
    places = [Path(name), *(p / "recipes" / "models" / f"{name}.json" for p in (Path(), clone))]
    path = next((place for place in places if place.exists()), None)
    try:
        config = AutoConfig.from_pretrained(path or name)
        config.use_cache = False
        return AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).splitlines() or ["unknown"])[0][:160]
        raise ValueError(
            f"--model {name}: expected a config.json, a folder that holds one, a name of "
            f"recipes/models or a hub id ({reason})"
        ) from None
