"""What of a training run must survive a restart, and where it lies.

    FOLDER/checkpoint-<step>/model/      parameters and the inner optimizer's states: safetensors that another number of shards can load
                            /exchange/   a part per rank: accumulators, anchors, outer momenta, what was under way
                            /loop/       a part per rank: random states, and what the training loop itself keeps
                            /config.json, facts.json, manifest.json

The learning rate should be a pure function of the step: then it needs no state.
"""  # noqa: E501

from __future__ import annotations

import json
import logging
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..channels.bind import masks
from ..exchange.exchange import Exchange
from ..exchange.refusals import refuse_shown
from ..hosts.base import plain_name
from ..hosts.torch_params import unwrap, unwrap_model
from .exchange_state import SavedExchange, describe_part, load_exchange
from .files import copied, read_part, refuse_not_finite, write_part
from .loader_place import LoaderPlace
from .manager import CheckpointManager
from .sharded_state import (
    load_tensors,
    model_tensors,
    outside,
    refuse_unsaveable,
    save_tensors,
    tensors_of,
)
from .taking_over import moments_in

log = logging.getLogger("fsdp_demo")

COUNTERS = "optimizer_groups"
"""In what a loop keeps: the numbers that optimizers have moved in their groups."""

LOADER = "loader"
"""In what a loop keeps: the place in the data, of `RunState.batches`."""


class RunState:
    """Saves and restores a run: model, inner optimizer, exchange, random states, and what the
    training loop keeps beside them (an example: docs/checkpoints.md).

    `restore` comes before `attach`, which then gets `step` and `saved`. All ranks of all islands
    make one and restore together.

    Args:
        checkpoints: of this replica.
        model, optimizer: sharded or not, as `accelerator.prepare` gave them; the optimizer as for
            `attach`. What it holds beside the model (a criterion that learns) is saved, too.
        facts: of the run (JSON), for whoever exports the model.

    Raises:
        ValueError: the optimizer keeps what cannot be saved (`NotSaveable`); one that makes its
            states at its first step raises there.

    Attributes:
        step: what was restored; 0 for a new run, and where everything is taken over from other
            islands.
        saved: the exchange's state for `attach`, or None; an island that joins a run takes from it
            how many steps were its own.
        extra: what the loop of this rank had kept (`save`); empty where nothing was restored.
        same: what was restored is this very rank's, of as many islands and ranks. Else `extra` is
            that of another rank, and random states begin anew.
    """

    def __init__(
        self,
        checkpoints: CheckpointManager,
        model: torch.nn.Module,
        optimizer: Any,
        facts: Mapping[str, Any] | None = None,
    ):
        self.checkpoints, self.model, self.facts = checkpoints, model, dict(facts or {})
        several = isinstance(optimizer, list | tuple)
        self.optimizers = [unwrap(o) for o in (optimizer if several else [optimizer])]
        refuse_unsaveable(model, self.optimizers)
        self._begun = [_numbers(group) for group in _groups(self.optimizers)]
        self.step, self.same = 0, True
        self._masks = {f"model.{plain_name(n)}" for n in masks(unwrap_model(model))}
        self.saved: SavedExchange | None = None
        self.extra: dict[str, Any] = {}
        self._random: dict[str, Any] | None = None
        self._place: LoaderPlace | None = None
        self._place_there: dict[str, Any] | None = None  # as it was saved
        if checkpoints.group is None:  # an island of one process is no mistake
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")

    # ---- restoring -----------------------------------------------------------------------------

    def restore(
        self, resume: bool | str = True, take_over: bool = False, fresh: bool = False
    ) -> None:
        """Agree with the other islands on a step and load it, before `attach`.

        An island whose folder holds nothing that fits loads nothing: `attach` brings what the
        others hold. An island that joins a run under way loads its newest checkpoint for the inner
        optimizers' moments alone: the rest comes with `attach`.

        Args:
            resume, take_over: see `CheckpointManager.resume_point`.
            fresh: leave the exchange's own state out: model and optimizer go on, the exchange
                starts anew. Of another optimizer than the one that saved it the state begins anew,
                too, with a warning.

        Raises:
            NeedsDecision: see `CheckpointManager.resume_point`.
            ValueError: damaged files, those of another model, or of another optimizer.
            PeerLost: islands that did not come in time.
        """
        saves = self.checkpoints
        point = saves.resume_point(resume, take_over)
        if point is None:
            if not fresh and saves.topology.under_way():
                self._load_moments()
        elif point.folder is not None:
            self._load(point.folder, fresh)
            self.step = point.step
            log.info("resumed from checkpoint of step %d", self.step)
        elif saves.topology.rank == 0:  # at step 0, so that attach gives it what the others hold
            log.warning(
                "%s: what messages have left out so far, moments of the inner optimizer that "
                "islands do not share, random states and its own count of tokens begin anew here",
                saves.topology.name,
            )

    def _load_moments(self) -> None:
        """Load the newest checkpoint of an island that joins a run under way."""
        saves = self.checkpoints
        step = saves.ranks.from_first(lambda: max(saves.whole(), default=-1))
        folder = saves.path(step)
        head = None if step < 0 else moments_in(folder, saves.topology, saves.ranks)
        if head is not None:
            self.saved = load_exchange(folder / "exchange")
            loop = self._load_model(folder, head["optimizers"], saves.topology.rank, True)
            self._place_there = loop.get(LOADER)

    def restore_random(self) -> None:
        """Put the random states back as they were when the checkpoint was made, where they are this
        rank's own.

        Only the first call does, so a loop can call it wherever the run that was not interrupted
        had drawn as many numbers: after all that draws some at the start, and before its next
        batch.
        """
        states, self._random = self._random, None
        if states is not None:
            set_random_states(states)

    def batches(self, loader: Any, exchange: Exchange) -> Iterator[Any]:
        """Batches of a loader without end, epoch after epoch, from the place that the last life of
        this rank has saved; every `save` keeps that place from here on. Random states come back
        as by `restore_random`, before the first batch.

        An island that joins a run under way goes on behind the rows of its own newest checkpoint,
        at whatever step the others are: after a stop no row comes twice, and none is left out.

        Args:
            loader: with `state_dict` and `load_state_dict`, such as torchdata's
                `StatefulDataLoader`. Take from it what a step needs, no more, before that step.

        Raises:
            TypeError: the loader has no such methods. ValueError: it gives no batch.
        """
        self._place = LoaderPlace(loader, exchange, self._place_there, self.restore_random)
        return iter(self._place)

    def _load(self, folder: Path, fresh: bool) -> None:
        """Load a checkpoint of this replica."""
        topology = self.checkpoints.topology
        self.checkpoints.verify(folder)
        saved = load_exchange(folder / "exchange")
        self.saved, head = None if fresh else saved, saved.heads[0]
        mine = topology.islands, topology.island, topology.world
        self.same = (head["islands"], head["island"], head["world"]) == mine
        rank = topology.rank if self.same else 0
        self.extra = self._load_model(folder, head["optimizers"], rank, fresh)
        drawn, place = self.extra.pop("random"), self.extra.pop(LOADER, None)
        self._random, self._place_there = (drawn, place) if self.same else (None, None)
        if place and not self.same and topology.rank == 0:
            log.warning(
                "%s: the place in the data is that of other islands or ranks, whose parts of the "
                "data are no more: the loader begins anew, and rows come again",
                topology.name,
            )

    def _load_model(
        self, folder: Path, kinds: Sequence[str], rank: int, weights_suffice: bool
    ) -> dict[str, Any]:
        """Load model and optimizers, and the numbers in their groups; returns what the loop of
        `rank` had kept.

        Args:
            kinds, weights_suffice: as for `load_tensors`.
        """
        model, group = folder / "model", self.checkpoints.group
        whole = load_tensors(model, self.model, self.optimizers, group, kinds, weights_suffice)
        loop: dict[str, Any] = read_part(folder / "loop" / f"rank{rank}.json")[1]
        counters = loop.pop(COUNTERS, {})
        if whole:  # the optimizers' states were loaded, too
            self._count_on(counters)
        return loop

    def _named(self) -> dict[str, torch.Tensor]:
        held = model_tensors(self.model)
        return held | outside(held, self.optimizers)

    def _counters(self) -> dict[str, dict[str, Any]]:
        """Numbers that optimizers keep in groups (Prodigy's d), by their first parameter's name."""
        names = {id(p): name for name, p in self._named().items()}
        out = {}
        for group, begun in zip(_groups(self.optimizers), self._begun, strict=False):
            moved = {k: v for k, v in _numbers(group).items() if v != begun.get(k, v)}
            if moved and group["params"]:
                out[names[id(group["params"][0])]] = moved
        return out

    def _count_on(self, saved: Mapping[str, dict[str, Any]]) -> None:
        """Go on from `_counters`."""
        named = self._named()
        for name, moved in saved.items():
            for group in _groups(self.optimizers):
                if any(p is named.get(name) for p in group["params"]):
                    group.update(moved)

    # ---- saving --------------------------------------------------------------------------------

    def save(
        self,
        exchange: Exchange,
        extra: Callable[[], Mapping[str, Any]] = dict,
        wait: bool = True,
        last: bool = False,
    ) -> None:
        """A checkpoint of this step. All ranks of the replica call it together; islands need not.

        Args:
            extra: gives what the training loop keeps on this rank (its place in the data,
                counters): tensors (of a DTensor the shard, `.to_local()`) and JSON values; asked
                when what is under way has arrived.
            wait: False: training goes on while it is written.
            last: the process ends after it, as under `guard`: see `CheckpointManager.save`.

        Raises:
            PeerLost: what was under way in the exchange is lost; called again it saves what was
                sent, to be sent once more (`guard` does so).
            OSError, NotFinite, NotSaveable: the third save in a row that failed, or the last one;
                before that a warning (`CheckpointManager.save`).
        """
        refuse_shown(exchange.shows_result, "RunState.save()")
        group, what = self.checkpoints.group, f"checkpoint of step {exchange.step}"

        def copy() -> tuple[dict[str, torch.Tensor], dict[str, Any], Any, Any]:
            # waits for what is under way
            live, state = tensors_of(self.model, self.optimizers), exchange.state_dict()
            kept = {n: t for n, t in live.items() if n not in self._masks}
            refuse_not_finite(("replica", kept), ("exchange", state))
            loop: Any = {**extra(), "random": random_states()}
            if counters := self._counters():
                loop[COUNTERS] = counters
            if self._place is not None:
                loop[LOADER] = self._place.state()
            if not wait:
                state, loop = copied(state), copied(loop)
            return live, describe_part(exchange), state, loop

        def write(folder: Path) -> Callable[[], None]:
            # Collectives first: a rank that cannot write its own files must not leave the others
            # waiting in them.
            live, head, state, loop = self.checkpoints.ranks.together(copy, what)
            written = save_tensors(folder / "model", live, group, wait)

            def rest() -> None:
                written()
                self._write_beside(folder, head, state, loop)

            return rest

        self.checkpoints.save(exchange.step, write, wait, last)

    def finish(self) -> None:
        """The run came to its end: wait for the last save, and delete what was put aside."""
        self.checkpoints.finish()

    def _write_beside(self, folder: Path, head: dict[str, Any], state: Any, loop: Any) -> None:
        """Write all of a checkpoint but the model's tensors."""
        rank, config = head["rank"], getattr(unwrap_model(self.model), "config", None)
        if rank == 0:
            facts = json.dumps(self.facts, indent=1) + "\n"
            (folder / "facts.json").write_text(facts, encoding="utf-8")
            if config is not None and hasattr(config, "save_pretrained"):
                config.save_pretrained(folder)  # of transformers: `fsdp-demo export` needs it
        write_part(folder / "exchange", f"rank{rank}", head, state)
        place = {key: head[key] for key in ("step", "rank", "world")}
        write_part(folder / "loop", f"rank{rank}", place, loop)


def _groups(optimizers: Sequence[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    return [group for o in optimizers for group in o.param_groups]


def _numbers(group: Mapping[str, Any]) -> dict[str, bool | int | float]:
    """Of a group all but the rate, which is the script's own."""
    rates = ("lr", "initial_lr")
    return {k: v for k, v in group.items() if isinstance(v, bool | int | float) and k not in rates}


def random_states() -> dict[str, Any]:
    """The random states of python, torch, this rank's GPU and a loaded numpy, for a checkpoint."""
    version, words, gauss = random.getstate()
    out: dict[str, Any] = {
        "python": [version, torch.tensor(words, dtype=torch.int64, device="cpu"), gauss]
    }
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, *rest = numpy.random.get_state()
        out["numpy"] = [kind, torch.from_numpy(keys.astype(numpy.int64)), *rest]
    out["torch"] = torch.get_rng_state()
    return out | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def set_random_states(states: dict[str, Any]) -> None:
    """The inverse of `random_states`."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    if "numpy" in states:
        import numpy

        kind, keys, *rest = states["numpy"]
        numpy.random.set_state((kind, keys.numpy().astype(numpy.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
