"""The planner: the costs of a setting on a link, and which one to start with, before anything runs.

`plan_rows` counts the costs of settings in a `Situation`, a `Row` each; `choose` takes one of them;
`gbit_s` solves for the rate of the link. docs/plan.md explains the model and has an example.
Nothing here needs a network, a GPU or weights; a plan of a billion parameters takes seconds.
"""

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
