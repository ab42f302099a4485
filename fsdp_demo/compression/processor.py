"""The processor at hand, as far as compression on a CPU depends on it."""

from __future__ import annotations

import platform
from functools import lru_cache
from pathlib import Path

import torch


@lru_cache(maxsize=1)
def cpu_name() -> str:
    """The model of the processor, as it calls itself."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        text = ""
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if "model name" in line]
    return names[0] if names else platform.processor() or platform.machine()


def kernels() -> str:
    """The widest instructions that torch uses here, and the unit for products of matrices."""
    return torch.backends.cpu.get_cpu_capability() + (", AMX" if _supports("amx_tile") else "")


def intel() -> bool:
    """Whether it is Intel's: there MKL multiplies in fp32 faster than oneDNN, elsewhere half as
    fast.
    """
    return "intel" in cpu_name().lower()


@lru_cache(maxsize=1)
def fast_bf16() -> bool:
    """Whether products in bf16 take less time than in fp32. Without AMX Intel's take as long, and
    conversions come on top.
    """
    return _supports("amx_tile") or (_supports("avx512_bf16") and not intel())


def _supports(name: str) -> bool:
    found = getattr(torch.cpu, f"_is_{name}_supported", None)
    return bool(found()) if found is not None else False
