"""The planner: the costs of a setting on a link, and which one to start with, before anything runs.

    from fsdp_demo import Link
    from fsdp_demo.tools.planner import Situation, choose, load, plan_rows

    situation = Situation(load("llama-3.2-1b"), islands=4, shards=8, link=Link(1e9, 0.04), step_seconds=0.8)
    rows = plan_rows(situation)                        # HSDP, every preset, and the settings that the planner would choose
    choice = choose(rows, situation, keep_inner="adamw")
    choice.row.compute_utilisation, choice.reason, choice.config.to_yaml()

`Situation` says for what (docs/plan.md explains the model). `plan_rows(situation, names or
configurations)` gives a `Row` each; `row.config` is its `ExchangeConfig` (None for HSDP),
`row.as_json()` plain data. `choose` takes one of the rows; `gbit_s` solves for the rate of the link.
Nothing here needs a network, a GPU or weights; a plan of a billion parameters takes seconds.
"""  # noqa: E501

from __future__ import annotations

from .choosing import Choice, choose, plan_rows
from .models import equal_layers, load
from .rows import Row, gbit_s
from .situation import PEAK, Situation

__all__ = [
    "PEAK",
    "Choice",
    "Row",
    "Situation",
    "choose",
    "equal_layers",
    "gbit_s",
    "load",
    "plan_rows",
]
