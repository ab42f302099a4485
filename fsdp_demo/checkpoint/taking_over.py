"""A replica without a checkpoint goes on beside others that have one: parameters and the exchange's
shared state come through `attach`.

What hosts share (plain DeepSpeed, the Trainer) for the rest: the schedule, small notes of the
donor's host, and what to say.
"""

from __future__ import annotations

import inspect
import json
import logging
import warnings
from typing import Any

from ..comm import store_wire
from ..config.schema import ExchangeConfig

log = logging.getLogger("fsdp_demo")

LARGEST = store_wire.LARGEST // 2
"""Bytes of JSON that a donor's host tells: counters and settings, no data of the training. The rest
of the note, and what is quoted in it, have as much room.
"""


def begins_anew(config: ExchangeConfig) -> str:
    """What a replica that takes over does not get, for the log.

    Example:
        >>> from fsdp_demo import preset
        >>> begins_anew(preset("diloco"))
        "the inner optimizer's moments and random states begin anew here"
        >>> begins_anew(preset("demo"))
        'what messages have left out so far (accumulators) and random states begin anew here'
    """
    parts = [] if any(c.before_step for c in config.channels) else ["the inner optimizer's moments"]
    parts += (
        ["what messages have left out so far (accumulators)"]
        if any(c.accumulator is not None for c in config.channels)
        else []
    )
    return " and ".join(filter(None, [", ".join(parts), "random states"])) + " begin anew here"


def forward(scheduler: Any, steps: int) -> None:
    """Step a learning rate scheduler to its place, as the steps that were not taken here would
    have.

    One that goes by a metric (`ReduceLROnPlateau`) begins anew, with a warning.
    """
    if steps < 0 or "metrics" in inspect.signature(scheduler.step).parameters:
        why = (
            "goes by a metric that this replica has not seen"
            if steps >= 0
            else f"is {-steps} steps ahead of what was taken over"
        )
        log.warning(
            "%s %s: learning rates may differ from those of the other replicas",
            type(scheduler).__name__,
            why,
        )
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of a scheduler that steps ahead of its optimizer
        for _ in range(steps):
            scheduler.step()


def small(values: dict[str, Any]) -> dict[str, Any]:
    """The items that JSON gives back as they were, as long as there is room for all of them: for a
    note to another host.

    Example:
        >>> small({"epoch": 2, "rows": (1, 2), "at": {3: 4}})
        {'epoch': 2}
    """
    out, left = {}, LARGEST
    for key, value in values.items():
        try:
            text = json.dumps({key: value})
            if len(text) <= left and bool(json.loads(text) == {key: value}):
                out[key], left = value, left - len(text)
        except (TypeError, ValueError, RecursionError, RuntimeError):
            # no JSON, or no plain comparison
            continue
    return out
