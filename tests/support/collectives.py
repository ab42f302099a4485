"""Every collective of this process by group and bytes: `with Recorder() as seen: ...;
seen.crossing(2)`.

Recorded where Python enters `ProcessGroup`, so that also what a library bound before (`f =
torch.distributed.all_reduce`) is seen, and whatever torch calls these methods (2.13 has
`all_gather_single` where 2.7 has `_allgather_base`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

VERBS = (
    "gather", "scatter", "reduce", "alltoall", "all_to_all", "broadcast", "barrier", "send", "recv",
)  # fmt: skip
OPERATIONS = [
    n
    for n, f in vars(dist.ProcessGroup).items()
    if callable(f) and any(verb in n for verb in VERBS)
]


class Event(NamedTuple):
    """One call: its name, the ranks of its group, and the bytes of the largest tensor given to
    it.
    """

    name: str
    ranks: tuple[int, ...]
    size: int


class Recorder:
    """Collects `events` while it is entered."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._before: dict[str, Any] = {}

    def __enter__(self) -> Recorder:
        for name in OPERATIONS:
            # with its binding, which getattr on the class would strip
            self._before[name] = vars(dist.ProcessGroup)[name]
            setattr(
                dist.ProcessGroup, name, self._recording(name, getattr(dist.ProcessGroup, name))
            )
        return self

    def __exit__(self, *exc: object) -> None:
        for name, original in self._before.items():
            setattr(dist.ProcessGroup, name, original)

    def _recording(self, name: str, original: Any) -> Any:
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            ranks = tuple(dist.get_process_group_ranks(group))
            self.events.append(
                Event(name, ranks, max((_bytes(a) for a in [*args, *kwargs.values()]), default=0))
            )
            return original(group, *args, **kwargs)

        return call

    def crossing(self, node: int) -> list[Event]:
        """Those whose group has ranks of several nodes of `node` consecutive ranks."""
        return [e for e in self.events if len({r // node for r in e.ranks}) > 1]


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, (list, tuple)):
        return sum(_bytes(v) for v in value)
    return 0
