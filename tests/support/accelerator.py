"""An accelerator for machines without one: tensors that say they lie on another device, and are
computed by the CPU.

Within an `Accelerator` the device DEVICE exists. What would make the host wait for a GPU, or fail
there, is refused: reading a tensor, whatever decides by values how large a result is, mixing it
with tensors of the host, and copies between host and device that wait, or are not from or to pinned
memory. `plug_in` gives it streams, which do everything at once and write down in which order they
were asked.

Not played: what a GPU computes differs in rounding, and nothing here shows how fast it is, only how
many kernels it is given.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from fsdp_demo.compression import formats, transform

DEVICE = torch.device("lazy", 0)  # a type of device that torch knows, and that no library serves
UNCOUNTED = (
    "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach",
    "lift_fresh",
)  # fmt: skip


def _leaves(value: Any) -> list[Any]:
    """What lists, tuples and dicts hold: an operation has no others, and torch's own walk takes ten
    times as long.
    """
    if isinstance(value, dict):
        return [leaf for part in value.values() for leaf in _leaves(part)]
    return (
        [leaf for part in value for leaf in _leaves(part)]
        if isinstance(value, (list, tuple))
        else [value]
    )


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """The same with `function` of each of `_leaves`."""
    if isinstance(value, dict):
        return {key: _mapped(function, part) for key, part in value.items()}
    return (
        type(value)([_mapped(function, part) for part in value])
        if isinstance(value, (list, tuple))
        else function(value)
    )


class Synchronised(AssertionError):
    """The host would have waited for the device."""


class There(Tensor):
    """A tensor on the device; `inner` holds its values."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> There:
        place = {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        out = Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=DEVICE, **place
        )
        out.inner = inner
        return out

    def __repr__(self, **_: Any) -> str:
        return f"There({tuple(self.shape)}, {self.dtype})"

    def record_stream(self, stream: Stream) -> None:
        stream.held.append(self)

    def __setitem__(self, key: Any, value: Any) -> None:
        """torch copies a number from the host where one element is assigned, and fills a part that
        has a shape (torch 2.11 on an H100, `set_sync_debug_mode`).
        """
        mode = _get_current_dispatch_mode()
        strict = isinstance(mode, Accelerator) and not mode.lenient
        if strict and not isinstance(value, Tensor) and self[key].dim() == 0:
            raise Synchronised(f"the assignment of {value} to one element waits")
        super().__setitem__(key, value)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(
            f"{func} on the device, where there is no Accelerator: "
            f"{threading.current_thread().name}"
        )


class Accelerator(TorchDispatchMode):
    """Runs operations on the device in this thread, and refuses those that are named above.

    Attributes:
        kernels: how often each operation ran on the device that is not a view and does more than
            take memory.
        lenient: nothing is refused.
    """

    pinned: dict[int, Tensor] = {}  # by storage; kept, so that none is taken for another

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.lenient = False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Within this context the host may wait for the device: before training starts, and to look
        at what came out.
        """
        before, self.lenient = self.lenient, True
        try:
            yield
        finally:
            self.lenient = before

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here: torch's guard against it takes as long as the rest."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), func.overloadpacket.__name__
        tensors = [t for t in _leaves((args, kwargs)) if isinstance(t, Tensor)]
        there, target = [t for t in tensors if isinstance(t, There)], kwargs.get("device")
        to_device = bool(there) if target is None else target.type == DEVICE.type
        if not there and not to_device:
            return func(*args, **kwargs)
        if target is not None:
            kwargs["device"] = torch.device("cpu")
        if not self.lenient:
            (_check_copy if name in ("copy_", "_to_copy") else _check)(
                func, name, args, kwargs, tensors, to_device
            )
        if not func.is_view and name not in UNCOUNTED:
            self.kernels[name] += 1
        known = {id(t.inner): t for t in there}
        inner_args, inner_kwargs = _mapped(
            lambda t: t.inner if isinstance(t, There) else t, (args, kwargs)
        )
        found = func(*inner_args, **inner_kwargs)
        if name == "copy_":
            return args[0]
        return (
            _mapped(
                lambda t: (
                    known.get(id(t)) if id(t) in known else There(t) if isinstance(t, Tensor) else t
                ),
                found,
            )
            if to_device
            else found
        )


def _check(
    func: Any, name: str, args: Any, kwargs: Any, tensors: Sequence[Tensor], to_device: bool
) -> None:
    places = (
        [t for t in _leaves(args[1]) if isinstance(t, Tensor)]
        if name in ("index", "index_put", "index_put_")
        else []
    )
    masks = any(t.dtype in (torch.bool, torch.uint8) for t in places)
    if (
        masks
        or torch.Tag.data_dependent_output in func.tags
        or (torch.Tag.dynamic_output_shape in func.tags and name != "index")
    ):
        raise Synchronised(f"{name} reads {tensors[0]}")
    if any(
        not isinstance(t, There) and not (t.dim() == 0 and torch.Tag.pointwise in func.tags)
        for t in tensors
    ):
        raise AssertionError(f"{name} mixes tensors of the device and of the host: {tensors}")


def _check_copy(
    func: Any, name: str, args: Any, kwargs: Any, tensors: Sequence[Tensor], to_device: bool
) -> None:
    source, target = (args[1], args[0]) if name == "copy_" else (args[0], None)
    if isinstance(source, There) == (to_device if target is None else isinstance(target, There)):
        return
    host = target if isinstance(source, There) else source
    if not kwargs.get("non_blocking", name == "copy_" and len(args) > 2 and args[2]):
        raise Synchronised(
            f"a copy of {tuple(source.shape)} from {source.device.type} to the other side waits"
        )
    if host is None or host.untyped_storage()._cdata not in Accelerator.pinned:
        raise Synchronised(
            f"a copy of {tuple(source.shape)} from {source.device.type} to the other side: the "
            "host's memory is not pinned"
        )


# ---- streams -----------------------------------------------------------------------------------


class Stream:
    """A stream: what it was asked, in order, and the tensors whose memory it holds on to."""

    def __init__(self, plug: Plug, name: str):
        self.plug, self.name, self.held = plug, name, []

    def wait_stream(self, other: Stream) -> None:
        self.plug.log.append(f"{self.name} waits for {other.name}")


class Event:
    """An event; `synchronize` notes the thread that waits."""

    def __init__(self, plug: Plug):
        self.plug, self.on = plug, ""

    def record(self, stream: Stream) -> None:
        self.on = stream.name
        self.plug.log.append(f"event on {stream.name}")

    def synchronize(self) -> None:
        assert self.on
        self.plug.log.append(f"{threading.current_thread().name} waits for {self.on}")


class Plug:
    """Stands in for `torch.cuda` and its like.

    Attributes:
        log: what was asked, in words. streams: the one that trains, and those made. blocking: of
            each event, whether a thread that waits for it sleeps.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.streams = [Stream(self, "training")]
        self.blocking: list[bool] = []

    def is_available(self) -> bool:
        """torch's own question, which for a real device would lead to captured graphs."""
        return False

    def Stream(self, device: torch.device) -> Stream:
        self.streams.append(Stream(self, f"stream{len(self.streams)}"))
        return self.streams[-1]

    def Event(self, blocking: bool = False) -> Event:
        self.blocking.append(blocking)
        return Event(self)

    def current_stream(self, device: torch.device) -> Stream:
        return self.streams[0]

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.log.append(f"to {stream.name}")
        yield
        self.log.append(f"from {stream.name}")

    def device(self, device: torch.device) -> Any:
        return nullcontext()

    def synchronize(self, device: torch.device) -> None:
        self.log.append("everything")


def pin(t: Tensor) -> Tensor:
    """Call a tensor's memory pinned."""
    Accelerator.pinned[t.untyped_storage()._cdata] = t
    return t


@contextmanager
def plug_in() -> Iterator[Plug]:
    """Within this context the device has streams, and the host memory that is pinned for it;
    constants made for it go at the end.
    """
    plug, cached, plain = Plug(), (transform._matrix, formats.table), torch.empty

    def empty(*size: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        if not pin_memory:
            return plain(*size, **options)
        plug.log.append("room")
        return pin(plain(*size, **options))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_device_module", lambda device: plug)
        patch.setattr(torch, "empty", empty)
        try:
            yield plug
        finally:
            Accelerator.pinned.clear()
            for function in cached:
                function.cache_clear()
