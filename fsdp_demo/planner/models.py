"""From what a user calls a model to the names and shapes of its parameters."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from ..doctor.model_hub import reachable
from .shapes import KNOWN, Tensors

_TUNED = re.compile(r"-(base|instruct|it)$")
"""What hub ids add for the same shapes with other weights."""


def load(name: str) -> Tensors:
    """Names and whole shapes of a model's trained parameters, ties once.

    Args:
        name: a known model (`shapes.KNOWN`), which needs neither a network nor transformers; the
            path of a config.json or of a folder with one; or a hub id, which need transformers.

    Raises:
        ValueError: nothing of the kind is known or reachable; names the nearest known models.

    Example:
        >>> from fsdp_demo.planner.models import load
        >>> load("tiny")[0]
        ('model.embed_tokens.weight', (258, 128))
    """
    path = Path(name)
    short = _TUNED.sub("", name.rpartition("/")[2].lower())
    if not path.exists() and (shape := KNOWN.get(short)) is not None:
        return shape.tensors()
    if not path.exists() and "/" not in name:
        raise ValueError(f"--model {name!r} is not known: {_allowed(name)}")
    if not path.exists() and (path.suffix == ".json" or name.startswith((".", "/", "~"))):
        raise ValueError(f"--model {name!r}: there is no such file")
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ValueError(
            f"the shapes of --model {name!r} need transformers: pip install 'fsdp-demo[hf]', or "
            f"take a known model ({error})"
        ) from None
    try:
        config = (
            AutoConfig.from_pretrained(path)
            if path.exists()
            else AutoConfig.from_pretrained(name, local_files_only=not reachable())
        )
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # whatever transformers makes of a wrong file, or of no network
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        what = (
            f"{path} does not describe a causal language model"
            if path.exists()
            else "it is no file that is there, and the hub did not give it"
        )
        raise ValueError(f"--model {name!r}: {what} ({reason[:160]}): {_allowed(name)}") from None
    return [(n, tuple(p.shape)) for n, p in model.named_parameters()]


def _allowed(name: str) -> str:
    near = difflib.get_close_matches(name.rpartition("/")[2].lower(), KNOWN, n=3, cutoff=0.3)
    known = f"the nearest known are {', '.join(near)}" if near else f"known are {', '.join(KNOWN)}"
    return f"{known}; else give the path of a config.json, or --params N"
