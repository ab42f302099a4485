"""What hosts share where a replica takes over from others, or joins them under way: the moments on
its own disk, the schedule, small notes of the donor's host, and what to say. Parameters and the
exchange's shared state come through `attach`.
"""

from __future__ import annotations

import inspect
import json
import logging
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..config.schema import ExchangeConfig
from ..peers.votes import Ranks
from ..rendezvous.topology import Topology
from ..store import connection
from .exchange_state import load_exchange
from .folders import damaged

log = logging.getLogger("fsdp_demo")

LARGEST = connection.LARGEST // 2
"""Bytes of JSON that a donor's host tells: counters and settings, no data of the training. The rest
of the note, and what is quoted in it, have as much room.
"""


def moments_in(folder: Path, topology: Topology, ranks: Ranks) -> dict[str, Any] | None:
    """Whether an island that joins a run under way may take the inner optimizers' moments from a
    checkpoint of its own: that is whole, and of this island and run with as many ranks. All ranks
    of the island call it together, before `attach`: what replicas share comes with that, and takes
    the place of what was loaded.

    Returns:
        The head of this rank's part of the exchange's state; None, and a line in the log, where
        the moments begin anew.
    """
    head, why = {}, ""
    try:
        head = load_exchange(folder / "exchange").head(topology.rank, topology.island)
        if (head["run"], head["world"]) != (topology.run, topology.world):
            why = f"it is of run {head['run']!r} with {head['world']} ranks per island"
        elif bad := damaged(folder, topology.rank, topology.world):
            why = f"{', '.join(bad)}: checksum does not fit"
    except (OSError, ValueError, KeyError) as error:
        why = str(error)
    text = "%s: moments of the inner optimizer, where islands do not share them, "
    if ranks.any(bool(why)):
        text += "begin anew, %s cannot be used (%s)"
        log.info(text, topology.name, folder.name, why or "another rank has no part that fits")
        return None
    log.info(text + "go on from %s", topology.name, folder.name)
    return head


def begins_anew(config: ExchangeConfig, moments: bool = True) -> str:
    """What a replica that takes over does not get, for the log. `moments`: they did not come from
    its own checkpoint.

    >>> from fsdp_demo import preset
    >>> begins_anew(preset("diloco"))
    "the inner optimizer's moments and random states begin anew here"
    >>> begins_anew(preset("demo"))
    'what messages have left out so far (accumulators) and random states begin anew here'
    """
    parts = []
    if moments and not any(c.before_step for c in config.channels):
        parts.append("the inner optimizer's moments")
    if any(c.accumulator is not None for c in config.channels):
        parts.append("what messages have left out so far (accumulators)")
    return " and ".join(filter(None, [", ".join(parts), "random states"])) + " begin anew here"


def forward(scheduler: Any, steps: int) -> None:
    """Step a learning rate scheduler to its place, as the steps that were not taken here would
    have.

    One that goes by a metric (`ReduceLROnPlateau`) begins anew, with a warning.
    """
    why = f"is {-steps} steps ahead of what was taken over" if steps < 0 else ""
    if not why and "metrics" in inspect.signature(scheduler.step).parameters:
        why = "goes by a metric that this replica has not seen"
    if why:
        text = "%s %s: learning rates may differ from those of the other replicas"
        log.warning(text, type(scheduler).__name__, why)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of a scheduler that steps ahead of its optimizer
        for _ in range(steps):
            scheduler.step()


def small(values: dict[str, Any]) -> dict[str, Any]:
    """The items that JSON gives back as they were, as long as there is room for all of them: for a
    note to another host.

    >>> small({"epoch": 2, "rows": (1, 2), "at": {3: 4}})
    {'epoch': 2}
    """
    out, left = {}, LARGEST
    for key, value in values.items():
        # else it is no JSON, or has no plain comparison
        with suppress(TypeError, ValueError, RecursionError, RuntimeError):
            text = json.dumps({key: value})
            if len(text) <= left and bool(json.loads(text) == {key: value}):
                out[key], left = value, left - len(text)
    return out
