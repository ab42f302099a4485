"""All rows of a plan."""

from __future__ import annotations

from collections.abc import Iterable

from ..config.load import preset
from ..config.presets import presets
from ..config.schema import ExchangeConfig
from .choosing import chosen_rows, cuts
from .rows import HSDP, Row, hsdp_row, plan_row
from .situation import Situation


def plan_rows(
    situation: Situation,
    exchanges: Iterable[str | ExchangeConfig] | None = None,
    keep_inner: str | None = None,
) -> list[Row]:
    """A row per setting.

    Args:
        exchanges: names of presets ("hsdp" for the baseline) or configurations; None: HSDP, all
            presets at their published settings, and for each method of `choosing.ladders` the
            settings that the planner would choose. Fragments are left out for a model whose
            parameter names hold no layer numbers.
        keep_inner: the inner optimizer that those must keep, or None.
    """
    wanted: list[str | ExchangeConfig] = (
        [HSDP, *(name for name in presets() if cuts(preset(name), situation))]
        if exchanges is None
        else list(exchanges)
    )
    rows = [
        hsdp_row(situation)
        if one == HSDP
        else plan_row(situation, preset(one) if isinstance(one, str) else one)
        for one in wanted
    ]
    return rows + (chosen_rows(situation, keep_inner) if exchanges is None else [])
