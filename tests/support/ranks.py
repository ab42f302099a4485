"""What a test and the rank server say to each other: a `Call` there, an `Outcome` of every rank
back.
"""

from __future__ import annotations

import importlib
import io
import os
import pickle
import sys
import time
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dill
import torch

HUNG = "did not end"


@dataclass(frozen=True)
class Rank:
    """Who a function run by `run_ranks` is: its island, its process in the island, and how many
    there are of each.
    """

    island: int
    proc: int
    islands: int
    procs: int
    rank: int  # over all islands, island by island
    folder: Path  # shared by all ranks of the call

    def mesh(self):
        """The island's shard mesh for `fully_shard`."""
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh("cpu", (self.procs,))

    def meet(self, turn: object) -> None:
        """Wait until all ranks of the call, on islands of one size, have come to this turn."""
        (self.folder / f"turn{turn}.{self.rank}").touch()
        while len(list(self.folder.glob(f"turn{turn}.*"))) < self.islands * self.procs:
            time.sleep(0.01)

    @property
    def log(self) -> Path:
        """What it wrote to the terminal."""
        return self.folder / f"rank{self.rank}.log"


@dataclass
class Outcome:
    """How one rank ended: its value, or its error as text, its exit status (negative: signal), what
    it wrote to the terminal.
    """

    rank: int
    value: Any = None
    error: str | None = None
    status: int | None = None
    log: str = ""
    raw: bytearray = field(default_factory=bytearray, repr=False)  # the value, pickled by the rank


@dataclass(frozen=True)
class Job:
    """What every rank does. It travels by dill, since tests pass closures."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    env: dict[str, str] | Callable[[Rank], dict[str, str]] | None
    patches: list[tuple[Any, str, Any]]  # (module, class or object; attribute; value)
    group: bool | None


@dataclass(frozen=True)
class Call:
    """One call of `run_ranks`: the ranks, the pickled `Job`, and the surroundings of the test
    process.
    """

    ranks: list[Rank]
    job: bytes
    common: dict[str, str]  # variables of all ranks
    store: str  # calls with the same word share a store (SHARED of stores.py: the drawn run ids)
    timeout: float  # seconds that all may take
    grace: float  # seconds that the others get to end after one has failed
    environ: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    path: list[str] = field(default_factory=lambda: list(sys.path))
    folder: str = field(default_factory=os.getcwd)


class _Pickler(dill.Pickler):
    """dill's, but a module travels by its name: dill would send the contents of those outside of
    site-packages.
    """

    dispatch = type(dill.Pickler.dispatch)(dill.Pickler.dispatch)


def _by_name(pickler: _Pickler, module: types.ModuleType) -> None:
    pickler.save_reduce(importlib.import_module, (module.__name__,), obj=module)


_Pickler.dispatch[types.ModuleType] = _by_name


def pack(job: Job) -> bytes:
    """The job as bytes. Functions of a module travel by name, nested ones by their code; the
    module's globals are those of the server.
    """
    out = io.BytesIO()
    try:
        _Pickler(out).dump(job)
    except Exception as error:
        raise TypeError(
            f"the function for the ranks does not travel to them ({type(error).__name__}: "
            f"{error}): it makes what cannot be pickled "
            "itself, and holds no fixture of pytest"
        ) from error
    return out.getvalue()


class _Values(pickle.Pickler):
    """The standard one, but a plain tensor travels as its bytes: torch's own way writes a file for
    each, 0.3 ms there and 0.3 ms back.
    """

    def reducer_override(self, value: Any) -> Any:
        if (
            type(value) is not torch.Tensor
            or value.requires_grad
            or value.device.type != "cpu"
            or value.layout != torch.strided
        ):
            return NotImplemented
        return _tensor, (
            value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(),
            value.dtype,
            tuple(value.shape),
        )


def _tensor(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return (
        torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
        if data
        else torch.empty(shape, dtype=dtype)
    )


def encode(value: Any) -> bytes:
    """What a rank gives back, for `pickle.loads`. Tensors that share memory do so no more."""
    out = io.BytesIO()
    _Values(out, pickle.HIGHEST_PROTOCOL).dump(value)
    return out.getvalue()


def unpack(data: bytes) -> Job:
    """The job. Modules that it names are imported here, so that all ranks of later calls have
    them.
    """
    importlib.invalidate_caches()
    return dill.loads(data)
