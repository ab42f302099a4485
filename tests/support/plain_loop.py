"""A loop in plain torch with checkpoints, as in the docstring of `RunState`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import fsdp_demo
from fsdp_demo.checkpoint import CheckpointManager, RunState


class PlainLoop:
    """One life of a loop. A subclass says what its loss is, and what else it keeps.

    Args:
        folder: of the run; each island has one of its name in it.
        options: of `attach`.

    Attributes:
        loaded: what `numbers` was before `attach`.
    """

    def __init__(
        self,
        folder: Path,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        config: fsdp_demo.ExchangeConfig,
        resume: Any,
        topology: fsdp_demo.Topology | None = None,
        facts: dict[str, Any] | None = None,
        fresh: bool = False,
        keep: int | None = None,
        **options: Any,
    ):
        self.model, self.optimizer = model, optimizer
        topology = topology or fsdp_demo.Topology.from_env()
        where, kept = folder / topology.name, {} if keep is None else {"keep": keep}
        self.checkpoints = CheckpointManager(where, topology, **kept)
        self.state = RunState(self.checkpoints, model, optimizer, facts)
        self.state.restore(resume, fresh=fresh)
        self.loaded = self.numbers()
        options |= {"step": self.state.step, "state": self.state.saved}
        self.exchange = fsdp_demo.attach(
            optimizer, config, model=model, topology=topology, **options
        )
        self.state.restore_random()

    def loss(self) -> torch.Tensor:
        """Of the step to come."""
        raise NotImplementedError

    def numbers(self) -> Any:
        """Copies of what must come back; by default the parameters."""
        return [p.detach().clone() for p in self.model.parameters()]

    def step(self) -> None:
        """One step."""
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def until(self, step: int) -> Any:
        """The steps up to this one; the numbers then."""
        while self.exchange.step < step:
            self.step()
        return self.numbers()

    def close(self) -> Any:
        """Leave without a last exchange; the numbers."""
        self.exchange.detach()
        self.checkpoints.close()
        return self.numbers()

    def finish(self) -> Any:
        """The last exchange; the numbers then."""
        self.exchange.finish()
        self.checkpoints.close()
        return self.numbers()
