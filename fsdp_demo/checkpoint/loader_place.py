"""The place of a rank in its data, where the loader keeps it: torchdata's `StatefulDataLoader`, or
whatever else has `state_dict` and `load_state_dict` (a loader that Accelerate has prepared with
`use_stateful_dataloader`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..exchange.exchange import Exchange


class LoaderPlace:
    """Batches of a loader without end, and the place behind those of the steps that were taken.
    The loader's `state_dict` is asked for once per step.

    Args:
        loader, exchange: as for `RunState.batches`.
        saved: `state()` of an earlier life, or None.
        begun: called once, where a run that was not interrupted had drawn as many random numbers.

    Raises:
        TypeError: the loader keeps no place.
    """

    def __init__(
        self,
        loader: Any,
        exchange: Exchange,
        saved: Mapping[str, Any] | None,
        begun: Callable[[], None],
    ):
        if not all(hasattr(loader, name) for name in ("state_dict", "load_state_dict")):
            raise TypeError(
                f"{type(loader).__name__} keeps no place: give a loader with state_dict() and "
                "load_state_dict(), as torchdata's StatefulDataLoader has them, or work the place "
                "out from exchange.step"
            )
        self._loader, self._exchange, self._begun = loader, exchange, begun
        self._epoch, self._step = int(saved["epoch"]) if saved else 0, exchange.step
        # that of the end of step `_step`: batches drawn since belong to the step under way
        self._kept = dict(saved) if saved else {"epoch": 0, "loader": None}

    def state(self) -> dict[str, Any]:
        """The place behind the batches of all steps that were taken, for a checkpoint. A step that
        was cut off is taken again, with its batches."""
        return self._kept if self._exchange.step == self._step else self._now()

    def __iter__(self) -> Iterator[Any]:
        loader, empty, shuffled = self._loader, 0, self._loader
        if not hasattr(loader, "set_epoch"):
            shuffled = getattr(loader, "sampler", None)
        if self._kept["loader"] is None:
            self._begun()
        else:
            loader.load_state_dict(self._kept["loader"])
        while True:
            if hasattr(shuffled, "set_epoch"):
                shuffled.set_epoch(self._epoch)
            batches, empty = iter(loader), empty + 1  # which draws a number
            self._begun()
            for batch in batches:
                empty = 0
                yield batch
                if self._exchange.step != self._step:
                    self._kept, self._step = self._now(), self._exchange.step
            if empty > 1:  # once is the end of an epoch, where a run was stopped
                raise ValueError("the loader gives no batch: give more data, or smaller batches")
            self._epoch += 1

    def _now(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "loader": self._loader.state_dict()}
