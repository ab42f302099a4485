"""Writes what a run leaves of itself, while it trains: one object per island, on the rank that
writes for it.
"""

from __future__ import annotations

import socket
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from . import files


class RunRecord:
    """The files of one island (`files.py`).

    Args:
        folder: output folder of the island; made if it is not there.
        exchange: the island's exchange; read, never changed.
        steps: steps of the job, or None.
        parameters: number of parameters of the whole model.
        procs: ranks of the island.
        facts: further facts of the run by name, JSON values.

    A record that begins at a later step than 0 goes on with the files that are there, up to that
    step; at step 0 `files.set_aside` takes them away. What cannot be written is a warning
    (`files.spared`), and the next line that can be says how many are `missing` before it.

    Attributes:
        last: the last line of metrics.jsonl that an earlier start has left; empty without one.
    """

    def __init__(
        self,
        folder: Path,
        exchange: Any,
        *,
        steps: int | None,
        parameters: int,
        procs: int,
        facts: dict[str, Any] | None = None,
    ):
        self._folder, self._exchange = folder, exchange
        self._last: Any = None  # of the exchanges that were written
        self._seen = list(exchange.participants)
        self._left_out = self._counts()
        self._missing = Counter[str]()
        with files.spared(folder):
            folder.mkdir(parents=True, exist_ok=True)
            if not exchange.step:
                files.set_aside(folder)
        topology = exchange.topology
        head = {
            "format": files.FORMAT,
            "name": topology.name,
            "island": topology.island,
            "islands": topology.count,
            "host": socket.gethostname(),
            "procs": procs,
            **_method(exchange),
            "steps": steps,
            "parameters": parameters,
            "began": time.time(),
            "facts": facts or {},
        }
        with suppress(OSError, ValueError):  # of an earlier start; a damaged head counts as none
            (folder / files.SUMMARY_FILE).unlink(missing_ok=True)
            if exchange.step and (before := files.read_json(folder / files.HEAD_FILE)) is not None:
                head["began"] = before.get("began", head["began"])
        self._first, self._head = head["began"], head
        self._write_json(files.HEAD_FILE, head)
        self.resume(exchange.step)

    def resume(self, step: int) -> None:
        """Go on after `step`: what the files have of later steps was never part of this job."""
        at, last, joins = self._folder, step if step else -1, step and self._exchange.newcomer
        steps = files.keep_until(at / files.STEPS_FILE, last)
        files.keep_until(at / files.EXCHANGES_FILE, step - 1, "applied")
        events = files.keep_until(at / files.EVENTS_FILE, last)
        self.last = (steps or [{}])[-1]
        times = [line.get("seconds", 0.0) for line in (*steps, *events)]
        before = max(times, default=0.0)
        if joins:  # the others trained on meanwhile
            before = max(before, time.time() - self._first)
        self._began = time.perf_counter() - before
        if joins:
            self._event("joined", step, islands=[self._exchange.topology.island])
        else:
            self._event("resume" if step else "begin", step)

    @property
    def seconds(self) -> float:
        """Since the start of the job, pauses between starts not counted."""
        return time.perf_counter() - self._began

    def tick(self) -> None:
        """Once per step: note islands gone, new or left out, and what `auto` has chosen."""
        if self._exchange.config.preset != self._head["preset"]:
            self._head |= _method(self._exchange)
            self._write_json(files.HEAD_FILE, self._head)
            self.event("chosen", reason=self._exchange.chosen_because)
        now, before = list(self._exchange.participants), self._seen
        for kind, slots in (
            ("lost", [i for i in before if i not in now]),
            ("joined", [i for i in now if i not in before]),
        ):
            if now and slots:
                self.event(kind, islands=slots)
        self._seen = now or before
        counts = self._counts()
        for reason, count in counts.items():
            if count > self._left_out[reason]:
                self.event("skipped round", reason=reason)
        self._left_out = counts

    def _counts(self) -> dict[str, int]:
        metrics = self._exchange.metrics()
        return {
            "a contribution was not finite": metrics.get("not_finite", 0),
            "a contribution's norm was far from the others'": metrics.get("far", 0),
            "an island was late": metrics.get("late", 0),
        }

    def line(self, values: dict[str, Any]) -> None:
        """A line of metrics.jsonl, and the exchanges that have ended since the last."""
        self._write(files.STEPS_FILE, {"seconds": self.seconds, **values})
        self.exchanges()

    def exchanges(self) -> None:
        """Write the exchanges that have ended since the last call."""
        ended = []
        for flown in self._exchange.timeline(self._last):
            times = flown.began, flown.ended
            start, end = (None if t is None else t - self._began for t in times)
            self._last = flown
            ended.append(
                {
                    "step": flown.step,
                    "applied": flown.applied,
                    "channels": list(flown.channels),
                    "start": start,
                    "end": end,
                    "waiting": flown.waited,
                    "bytes": flown.sent,
                    "received": flown.received,
                    "islands": list(flown.islands),
                }
            )
        if ended:
            self._write(files.EXCHANGES_FILE, *ended)

    def event(self, kind: str, **fields: Any) -> None:
        """Write something that happened at this step to `events.jsonl`."""
        self._event(kind, self._exchange.step, **fields)

    def _event(self, kind: str, step: int, **fields: Any) -> None:
        event = {"kind": kind, "step": step, "seconds": self.seconds, **fields}
        self._write(files.EVENTS_FILE, event)

    def _write(self, name: str, *values: dict[str, Any]) -> None:
        missing, path = self._missing[name], self._folder / name
        told = {"missing": missing} if missing else {}
        self._missing[name] += len(values)
        with files.spared(path):
            files.append(path, [values[0] | told, *values[1:]])
            self._missing[name] = 0

    def _write_json(self, name: str, value: dict[str, Any]) -> None:
        with files.spared(self._folder / name):
            files.write_json(self._folder / name, value)

    def finish(self, summary: dict[str, Any]) -> None:
        """Write the last exchanges and the summary of a run that has ended."""
        self.exchanges()
        self.event("finish")
        self._write_json(files.SUMMARY_FILE, summary)


def summarise(exchange: Any, values: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The keys of summary.json that all hosts write.

    Args:
        values: the totals of the job, by the keys of a line of metrics.jsonl.
        seconds: since the start of the job.
    """
    sent, full = values["bytes_sent"], values["bytes_full"]
    return {
        "preset": exchange.config.preset,
        "islands": exchange.topology.count,
        "participants": list(exchange.participants),
        "tokens": values["tokens"],
        "tokens_per_second": values["tokens_per_second"],
        "bytes_sent_per_island": sent,
        "bytes_full_per_island": full,
        "ratio": full / sent if sent else None,
        "drift": exchange.drift,
        "wait_share": values["seconds_waiting"] / max(seconds, 1e-9),
        "seconds": seconds,
    }


def ledger_rows(exchange: Any) -> dict[str, Any]:
    """The ledger of the rank that writes, as it stands in summary.json: bytes sent and received."""
    page = exchange.ledger()
    rows = {name: [m.sent, m.received] for name, m in page.channels.items()}
    return {
        "channels": rows,
        "headers": [page.headers.sent, page.headers.received],
        "other": [page.other.sent, page.other.received],
    }


def _method(exchange: Any) -> dict[str, str]:
    """The keys of `run.json` that describe the method."""
    return {
        "preset": exchange.config.preset,
        "config": exchange.config.to_yaml(),
        "chosen_because": exchange.chosen_because,
    }


# ---- the metrics of an exchange by name: the same in every tracker -------------------------------

# docs/metrics.md has the table.

PREFIX = "exchange/"


def tracked(exchange: Any) -> dict[str, float]:
    """The island's metrics as trackers get them: `exchange/NAME`. A collective of the island: all
    its ranks call it together.

    >>> import torch, fsdp_demo
    >>> model = torch.nn.Linear(4, 4)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    >>> exchange = fsdp_demo.attach(optimizer, "diloco", model=model)
    >>> tracked(exchange)["exchange/bytes_sent"]
    0
    """
    found = {f"{PREFIX}{name}": value for name, value in exchange.totals().items()}
    for channel, share in exchange.kept_energy().items():
        found[f"{PREFIX}kept_energy/{channel}"] = share
    return found
