"""Copies between the device of the shards and the host, without a wait in the thread that trains.

Outgoing tensors are copied to pinned memory on a side stream: after the work that is already
queued, and concurrently with later work. The thread that sends waits for the copy. Incoming
tensors are pinned in that thread, so that the device copies them back by itself. Where shards are
on the CPU nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class Staging:
    """Copies of one rank's messages.

    Args:
        device: of the shards.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._stream: Any = None

    def to_host(self, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Start copying `tensors` (on the device, not written to any more) to the CPU.

        Returns:
            A function that waits for the copies and returns them; to be called in another thread
            than the one that trains. Where the device is the CPU it returns `tensors` themselves.
        """
        if self.device.type == "cpu":
            return lambda: list(tensors)
        device = torch.get_device_module(self.device)
        if self._stream is None:
            self._stream = device.Stream(self.device)
        self._stream.wait_stream(device.current_stream(self.device))
        # a thread that waits for it is to sleep, not to keep a core busy for as long as a step
        done = device.Event(**({"blocking": True} if self.device.type == "cuda" else {}))
        with device.stream(self._stream):
            hosts = [pinned(t).copy_(t, non_blocking=True) for t in tensors]
            done.record(self._stream)
        for t in tensors:
            # else its memory may go to others before it has been copied
            t.record_stream(self._stream)

        def wait() -> list[Tensor]:
            # a thread begins on the first device, where this process may have no business
            with device.device(self.device):
                done.synchronize()
            return hosts

        return wait

    def pin(self, tensors: list[Tensor]) -> list[Tensor]:
        """Copies of CPU tensors in pinned memory, from which the device fetches them by itself; the
        tensors themselves where the device is the CPU. They replace the tensors in the list, so
        that each is freed as soon as it has been copied.
        """
        if self.device.type != "cpu":
            with torch.get_device_module(self.device).device(self.device):
                for i, t in enumerate(tensors):
                    tensors[i] = pinned(t).copy_(t)
        return tensors


def synchronize(device: torch.device) -> None:
    """Wait for all that is queued on a device; nothing on the CPU."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def upload(t: Tensor, device: torch.device) -> Tensor:
    """A copy of a CPU tensor on `device`, made without waiting for what is queued there; the tensor
    itself where `device` is the CPU.
    """
    return t if device.type == "cpu" else pinned(t).copy_(t).to(device, non_blocking=True)


def pinned(like: Tensor) -> Tensor:
    """An empty CPU tensor of the shape and dtype of `like`, in pinned memory: a device copies from
    and to it by itself. torch keeps such memory and hands it out again.
    """
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=True)
