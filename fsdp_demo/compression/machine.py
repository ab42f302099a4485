"""The CPU at hand, and the form in which its work is done here.

What is computed is one thing, in which form is another: how many blocks at once, in which library,
from packed blocks or from where they lie, by torch or in C. Forms give equal bits (`tuning.py`
tries that before it chooses one), so that islands may choose apart. `products` is the exception: it
is about what this rank selects, and what it sends is subtracted as it was sent.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path

import torch

VARIABLE = "ISLAND_TUNING"
"""Of the environment: see `wanted`."""

LIBRARIES = ("mkl", "onednn")
SELECTIONS = ("torch", "c")
PARTS = (16, 32, 64)
"""Blocks that may be transformed at once: they divide a window."""


@dataclass(frozen=True)
class Form:
    """How a CPU compresses.

    Attributes:
        part: blocks that are packed and transformed at once, one of `PARTS`.
        library: which one makes products in fp32, "mkl" (what torch takes by itself) or "onednn".
        strided: blocks are multiplied where they lie in a gradient, not packed first.
        products: of the forward transform under `transform_precision="bf16"`: "bf16" or "fp32".
        selection: what selects the largest coefficients: "torch" or "c" (`topk.c`).
    """

    part: int = 64
    library: str = "mkl"
    strided: bool = True
    products: str = "bf16"
    selection: str = "torch"

    def __post_init__(self) -> None:
        allowed: dict[str, tuple[object, ...]] = {
            "part": PARTS,
            "library": LIBRARIES,
            "strided": (False, True),
            "products": ("fp32", "bf16"),
            "selection": SELECTIONS,
        }
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ValueError(
                    f"{name}={getattr(self, name)}: allowed are {', '.join(map(str, values))}"
                )

    def __str__(self) -> str:
        return ",".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self))


@lru_cache(maxsize=1)
def cpu_name() -> str:
    """The model of the processor, as it calls itself."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def cpu_facts() -> str:
    """What code that was compiled for this processor depends on."""
    return f"{platform.machine()}, {cpu_name()}: {_cpuinfo('flags') or _cpuinfo('Features')}"


def _cpuinfo(key: str) -> str:
    """A line of /proc/cpuinfo; nothing where it is not Linux, or the processor does not say."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            return next(
                (line.split(":", 1)[1].strip() for line in file if line.startswith(key)), ""
            )
    except OSError:
        return ""


def cache_folder() -> Path:
    """Where this machine's findings are kept; it need not be there."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(home) / "fsdp_demo"


def kernels() -> str:
    """The widest instructions that torch uses here, and the unit for products of matrices."""
    return torch.backends.cpu.get_cpu_capability() + (", AMX" if _supports("amx_tile") else "")


@lru_cache(maxsize=1)
def fast_bf16() -> bool:
    """Whether products in bf16 take less time than in fp32: a fact of the processor, since islands
    on like machines decode alike. Without AMX Intel's take as long, and conversions come on top."""
    if _supports("amx_tile"):
        return True
    return _supports("avx512_bf16") and "intel" not in cpu_name().lower()


def _supports(name: str) -> bool:
    found = getattr(torch.cpu, f"_is_{name}_supported", None)
    return bool(found()) if found is not None else False


def wanted(env: Mapping[str, str] | None = None) -> Form | None:
    """What ISLAND_TUNING says: None where it is not set or "auto", and a form is to be measured;
    the default form where it is "off"; else that with some of its parts replaced, as in
    "part=32,library=mkl,strided=False,products=fp32,selection=c".

    Raises:
        ValueError: it says something else.
    """
    text = (os.environ if env is None else env).get(VARIABLE, "").strip()
    if text in ("", "auto"):
        return None
    form = default()
    if text == "off":
        return form
    try:
        for word in text.split(","):
            key, value = (w.strip() for w in word.split("="))
            form = replace(form, **{key: _read(key, value)})  # type: ignore[arg-type]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{VARIABLE}={text!r}: {error}; allowed are auto, off, or some of {default()}"
        ) from error
    return form


def _read(key: str, value: str) -> object:
    if key == "part":
        return int(value)
    return {"True": True, "False": False}[value] if key == "strided" else value


def default() -> Form:
    """The form where nothing was measured: a function of the processor alone."""
    products = "bf16" if fast_bf16() else "fp32"
    return Form(library="mkl" if "intel" in cpu_name().lower() else "onednn", products=products)


_current: list[Form] = []


def form() -> Form:
    """The form of this process."""
    if not _current:
        _current.append(wanted() or default())
    return _current[0]


def use(chosen: Form | None) -> None:
    """Let this be the form of this process; None: what it is where nothing was measured."""
    _current[:] = [] if chosen is None else [chosen]
