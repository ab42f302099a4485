"""`RunState.batches`: the place of a `StatefulDataLoader` through stops, cut-off steps and a join:
no row comes twice, and none is left out.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdp_demo
from fsdp_demo import preset
from fsdp_demo.checkpoint import CheckpointManager, RunState

from ..exchange.test_survivors import ENV
from ..support.forked import returns
from ..support.heard import heard
from ..support.inside import in_ranks


def loader_of(rows: int = 6, shuffle: bool = True) -> Any:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="needs torchdata")
    data = torch.arange(float(rows)).reshape(rows, 1)
    return torchdata.StatefulDataLoader(data, 2, shuffle=shuffle)


class Loop:
    """A loop that takes `draws` batches for a step. rows: of the steps that were taken."""

    def __init__(self, folder: Path, loader: Callable[[], Any], seed: int = 0, draws: int = 1):
        torch.manual_seed(seed)
        self.model, topology = torch.nn.Linear(1, 1), fsdp_demo.Topology.from_env()
        optimizer = torch.optim.AdamW(self.model.parameters())
        manager = CheckpointManager(folder / topology.name, topology)
        self.state, self.optimizer = RunState(manager, self.model, optimizer), optimizer
        self.state.restore("auto")
        self.exchange = fsdp_demo.attach(
            optimizer,
            preset("diloco", period=3),
            model=self.model,
            topology=topology,
            step=self.state.step,
            state=self.state.saved,
        )
        self.batches = self.state.batches(loader(), self.exchange)
        self.rows: list[float] = []
        self.draws = draws

    def draw(self) -> torch.Tensor:
        return torch.cat([next(self.batches) for _ in range(self.draws)])

    def until(self, step: int) -> list[float]:
        while self.exchange.step < step:
            batch = self.draw()
            torch.nn.functional.dropout(self.model(batch)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.rows += batch.flatten().tolist()
        return self.rows


@pytest.mark.parametrize("draws", [1, 2])
@pytest.mark.parametrize("stop", [2, 3, 4])  # in an epoch of three batches, and at its end
def test_loader_place_resume_equals_whole_run(tmp_path: Path, draws: int, stop: int) -> None:
    """A resume goes on with the rows and random numbers of the run that was not stopped, also
    where batches were drawn for a step that was not taken.
    """
    whole = Loop(tmp_path / "whole", loader_of, draws=draws)
    rows = whole.until(7)
    first = Loop(tmp_path / "cut", loader_of, draws=draws)
    begin, kept = [*first.until(stop)], torch.get_rng_state()
    if draws == 2:
        first.draw()
        torch.set_rng_state(kept)
    first.state.save(first.exchange)
    again = Loop(tmp_path / "cut", loader_of, seed=9, draws=draws)
    assert again.state.step == stop
    assert begin + again.until(7) == rows and len(rows) == 7 * 2 * draws
    for name, p in again.model.named_parameters():
        assert torch.equal(p, whole.model.get_parameter(name))
    for loop in (whole, first, again):
        loop.exchange.detach()


def test_loader_place_other_loaders_refused(tmp_path: Path) -> None:
    """A loader that keeps no place is refused with what does; an empty one, too."""
    with pytest.raises(TypeError, match="DataLoader keeps no place.*StatefulDataLoader"):
        Loop(tmp_path, partial(torch.utils.data.DataLoader, [1.0]))
    with pytest.raises(ValueError, match="no batch"):
        Loop(tmp_path, partial(loader_of, 0, shuffle=False)).draw()


def life(me: Any, dies: int = 0) -> Any:
    """Island 1 saves at step 6, and dies there; its next life goes on for 12 steps."""
    loop = Loop(me.folder.parent / "disk", partial(loader_of, 400, shuffle=False))
    ends = me.folder.parent / "ends"
    if loop.exchange.newcomer:
        ends.with_suffix(".part").write_text(str(loop.exchange.step + 12))
        os.replace(ends.with_suffix(".part"), ends)
    while not ends.exists() or loop.exchange.step < int(ends.read_text()):
        begun = loop.exchange.step
        loop.until(begun + 1)
        if begun + 1 == dies:
            loop.state.save(loop.exchange)
            os._exit(9)
        time.sleep(0.05 if begun > 6 else 0)
    loop.exchange.finish(close=False)
    equal = loop.exchange.digests_equal()
    loop.exchange.finish()
    return loop.rows, equal


def test_loader_place_of_island_that_comes_back(run_ranks: Any) -> None:
    """An island that joins a run under way goes on behind the rows of its own checkpoint, though
    the others are steps ahead.
    """
    loader_of()  # skips here, not in a rank
    ranks = run_ranks(partial(returns, life=life), islands=2, procs=1, timeout=150, env=ENV)
    (stayed, equal), (came, alike) = ranks
    assert equal and alike
    assert stayed == [float(i) for i in range(len(stayed))]
    assert came == [float(i) for i in range(12, 12 + len(came))] and 24 <= len(came) < len(stayed)


@in_ranks(2, 1)
def test_loader_place_of_other_islands(me: Any) -> None:
    """Of a checkpoint of more islands the place is no rank's: the loader begins anew."""
    loop = Loop(me.folder, loader_of)
    loop.until(3)
    loop.state.save(loop.exchange)
    loop.exchange.detach()
    lines = heard(logging.WARNING)
    if me.island == 0:
        os.environ |= {"ISLAND_COUNT": "1", "ISLAND_RUN": "alone"}
        alone = Loop(me.folder, partial(loader_of, shuffle=False))
        assert alone.exchange.step == 3 and alone.until(4) == [0.0, 1.0]
        assert any("place in the data is that of other islands" in line for line in lines), lines
        alone.exchange.detach()
