"""Whether a checkpoint of the Trainer or of DeepSpeed is whole: the exchange's parts lie in
`exchange/`, beside files of theirs.
"""

from __future__ import annotations

from pathlib import Path

from .choice import Held, look
from .exchange_state import SavedExchange, load_exchange
from .folders import MANIFEST, misfits

PARTS = "exchange"


def whole(folder: Path, islands: int) -> tuple[Held, SavedExchange]:
    """What a checkpoint holds.

    Args:
        islands: how many there are now (`Held.applied`).

    Raises:
        ValueError: it is not whole, and why: parts that are torn or missing, files that do not fit
            the manifest.
    """
    saved = load_exchange(folder / PARTS)
    if not saved.complete:
        raise ValueError(
            f"{folder / PARTS} lacks the parts of (island, rank) {saved.missing[:4]}: "
            "half-written, or a file is lost"
        )
    if (folder / MANIFEST).exists() and (why := misfits(folder)):
        raise ValueError(f"{folder} is not complete: {why}")
    return Held(saved.step, *look(folder / PARTS, islands)), saved
