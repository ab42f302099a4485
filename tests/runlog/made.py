"""Runs as `RunRecord` leaves them, without training: an exchange that is told what to say."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsdp_demo
from fsdp_demo.exchange.ledger import ExchangeRecord
from fsdp_demo.runlog.record import RunRecord


@dataclass
class Place:
    """A topology, as far as a record reads it."""

    island: int
    count: int
    kind: str = "islands"

    @property
    def name(self) -> str:
        return f"island{self.island}"


@dataclass
class Said:
    """An exchange that says what it is told."""

    topology: Place
    preset: str = "demo"
    step: int = 0
    newcomer: bool = False
    participants: list[int] = field(default_factory=list)
    flown: list[ExchangeRecord] = field(default_factory=list)
    not_finite: int = 0
    chosen_because: str = ""

    def __post_init__(self) -> None:
        self.config = fsdp_demo.preset(self.preset)
        self.participants = self.participants or list(range(self.topology.count))

    def metrics(self) -> dict[str, Any]:
        return {"not_finite": self.not_finite, "far": 0, "loss": None}

    def timeline(self, after: ExchangeRecord | None = None) -> list[ExchangeRecord]:
        return self.flown[self.flown.index(after) + 1 if after in self.flown else 0 :]


class Clock:
    """Stands for `time.perf_counter` in a record: it goes on when it is told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def summary(lines: list[dict[str, Any]], equal: bool | None = True) -> dict[str, Any]:
    channels = {"channels": {"momentum": [900, 800]}, "headers": [90, 90], "other": [10, 10]}
    sent = {f"bytes_{kind}_per_island": lines[-1][f"bytes_{kind}"] for kind in ("sent", "full")}
    return {"digests_equal": equal, "bytes": channels, **sent}


def record(folder: Path, exchange: Said | None = None, steps: int = 9, **facts: Any) -> RunRecord:
    """The record of a run of one rank; an island alone, if none is given."""
    exchange = exchange or Said(Place(0, 1))
    return RunRecord(folder, exchange, steps=steps, parameters=10_000, procs=1, **facts)


def run(
    monkeypatch: Any,
    folder: Path,
    *,
    islands: int = 2,
    steps: int = 40,
    preset: str = "demo",
    each: int = 5000,
    speed: float = 1.0,
    lost_at: int | None = None,
    ended: bool = True,
    equal: bool | None = True,
) -> Path:
    """A run of `steps` steps, a line every 5: `each` bytes a step, `speed` steps a second."""
    for island in range(islands):
        clock = Clock()
        monkeypatch.setattr("fsdp_demo.runlog.record.time.perf_counter", clock)
        exchange = Said(Place(island, islands), preset)
        own = folder / f"island{island}"
        kept = record(own, exchange, steps, facts={"model": "tiny", "seed": 0})
        lines = []
        for step in range(1, steps + 1):
            began = clock.now
            clock.now += 1 / speed
            exchange.step, end = step, clock.now
            span = max(end - 0.6 / speed, began), end, (0.1 + 0.1 * island) / speed
            sent = each, each, tuple(exchange.participants)
            exchange.flown.append(ExchangeRecord(step - 1, step - 1, ("momentum",), *span, *sent))
            if step == lost_at:
                exchange.participants = [i for i in exchange.participants if i != islands - 1]
            if lost_at and step == lost_at + 10:
                exchange.participants = list(range(islands))
            if lost_at and step == lost_at + 15:
                exchange.not_finite += 1
            kept.tick()
            tokens, sent, loss = 512 * step, each * step, 5 * math.exp(-step * each / 4e5)
            if step % 20 == 0:
                kept.event("evaluation", loss=loss + 1, tokens=tokens, bytes_sent=sent)
                kept.event("checkpoint")
            if step % 5 == 0:
                line = {"step": step, "loss": loss + 1.1 + 0.1 * island, "global_loss": None}
                line |= {"lr": 1e-3 * (1 - step / 1000), "tokens": tokens, "bytes_sent": sent}
                line |= {"tokens_per_second": 512 * speed, "bytes_full": 20_000 * step}
                line |= {"seconds_waiting": step * (0.1 + 0.1 * island) / speed}
                lines.append(line)
                kept.line(line)
        if ended:
            kept.finish(summary(lines, equal))
    monkeypatch.undo()
    return folder
