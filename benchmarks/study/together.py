"""What the replicas of a run have in common while their threads train."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch.distributed as dist
from torch import Tensor

from study.cells import Run
from study.states import States
from study.texts import Texts

PATIENCE = 600.0
"""Seconds that a replica waits for another."""

Loss = Callable[[Mapping[str, Tensor], Tensor], Tensor]
"""(parameters by name, ids [rows, length] int64) -> mean loss per byte, nats."""


@dataclass
class Together:
    """What the replicas of a run have in common.

    Attributes:
        vectors: [replicas, parameters] fp32.
        start: the step they begin at, above 0 where the run goes on. spent: seconds until then.
    """

    run: Run
    texts: Texts
    loss: Loss
    states: States
    vectors: Tensor
    barrier: threading.Barrier
    store: dist.Store = field(default_factory=dist.HashStore)
    turn: threading.Lock = field(default_factory=threading.Lock)
    errors: list[str] = field(default_factory=list)
    shared: dict[str, Tensor] = field(default_factory=dict)
    start: int = 0
    spent: float = 0.0

    def meet(self) -> None:
        self.barrier.wait(PATIENCE)

    def rows(self, i: int) -> np.ndarray:
        """The training rows of replica i; one replica alone takes those of the first of four."""
        return self.texts.train[i :: max(self.run.cell.replicas, 4)]
