"""What of a run must survive a restart, and where it lies.

    OUTPUT/<island>/checkpoint-<step>/model/      parameters and the inner optimizer's states: safetensors of torch.distributed.checkpoint,
                                                  which another number of shards can load
                                     /exchange/   a part per rank: accumulators, anchors, outer momenta, what was under way
                                     /loop/       a part per rank: position in the data, random states, the report's counters
                                     /manifest.json
    OUTPUT/<island>/emergency-<step>/             the same from ranks that were on their way out, each alone: local shards, no collectives

In a mesh `<island>` is `replica<i>`. The learning rate is a pure function of the step and needs no state.

Position in the data: batches handed out in an epoch, and the epoch. Rows with random access (files, a folder of `prepare_data.py`) are
shuffled by a sampler whose order follows from seed and epoch, so skipping is a matter of indices and costs nothing. A stream is read
again up to the position, since its shuffle buffer cannot be stored: exact too, but as slow as tokenising was. With other numbers of islands
or ranks the same share of the epoch counts as seen; since the split is another one, some rows come twice in it and others not at all.
"""

from __future__ import annotations

import json
import logging
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from data import Position, forever
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException

from fsdp_demo.checkpoint import Checkpoints, Saved, Snapshot, describe, open_exchange
from fsdp_demo.checkpoint.files import as_disk_error, copied, read_part, write_part
from fsdp_demo.checkpoint.finite import refuse_not_finite
from fsdp_demo.checkpoint.local_state import fill_replica, replica_tree
from fsdp_demo.checkpoint.reshard import average, shares
from fsdp_demo.hosts.base import local_part, plain_name
from fsdp_demo.hosts.optimizers import materialise

log = logging.getLogger("fsdp_demo")
warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # an island of one process is no mistake


# -- one rank alone: no collectives, so it works when peers are gone --------------------------------------------------------


def save_local(
    folder: Path, rank: int, optimizer: Any, exchange: Any, loop: Any = None, before_last: Callable[[], Any] = lambda: None
) -> None:
    """Write this rank's shards, optimizer states, exchange and loop; `rank<rank>.json` comes last, after `before_last()`.

    Raises:
        NotFinite: a tensor holds NaN or Inf; nothing is written.
    """
    kept, state = replica_tree([optimizer.optimizer]), exchange.state_dict()
    refuse_not_finite(("replica", kept), ("exchange", state))
    Snapshot(describe(exchange), state).write(folder / "exchange")
    head = {"step": exchange.step, "rank": rank, "world": exchange.topology.world, "exchange": True}
    write_part(folder, f"rank{rank}", head, {**kept, "loop": loop}, before_last)


def load_local(folder: Path, rank: int, optimizer: Any, shares: dict[Path, float] | None = None) -> dict[str, Any]:
    """Put this rank's shards and optimizer states back, before `attach`.

    Args:
        shares: folders of several islands and their weights, where their number has changed: parameters and states are their mean.

    Returns:
        "exchange": the `Saved` for `attach`; "loop": what was given to `save_local`.
    """
    shares = shares or {folder: 1.0}
    contents = {path: read_part(path / f"rank{rank}.json")[1] for path in shares}
    kept = [{key: content[key] for key in ("parameters", "optimizer")} for content in contents.values()]
    content = average(kept, list(shares.values()))
    fill_replica([optimizer.optimizer], content, str(folder))
    first = contents.get(folder) or next(iter(contents.values()))
    return {"exchange": open_exchange(*(path / "exchange" for path in shares)), "loop": first["loop"]}


# -- a replica together -----------------------------------------------------------------------------------------------------


def inner(model: torch.nn.Module) -> Any:
    """The model without the wrappers of torch.compile and DDP."""
    model = getattr(model, "_orig_mod", model)
    return model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model


def tensors_of(model: torch.nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    """The live tensors of a replica by name: `model.NAME` and `optimizer.NAME.STATE`; DTensors where it is sharded."""
    whole = inner(model)
    state = whole.state_dict()  # shards again what an evaluation has gathered
    out = {f"model.{plain_name(name)}": p.detach() for name, p in whole.named_parameters()}
    out |= {f"model.{plain_name(name)}": b for name, b in whole.named_buffers() if name in state}
    for name, p in whole.named_parameters():
        kept = optimizer.state.get(p, {})
        assert all(torch.is_tensor(v) for v in kept.values()), f"{name}: {kept.keys()}"
        out |= {f"optimizer.{plain_name(name)}.{key}": value for key, value in kept.items()}
    return out


def load_tensors(shares: dict[Path, float], model: torch.nn.Module, optimizer: Any, group: Any) -> None:
    """Fill the live tensors of a replica from the model folder of a checkpoint, or from the weighted mean of several replicas' (which
    becomes a copy of one where all are equal)."""
    materialise(optimizer.optimizer)
    live = tensors_of(model, optimizer)
    total: dict[str, torch.Tensor] = {}
    for folder, weight in shares.items():
        try:
            dcp.load(live, storage_reader=HuggingFaceStorageReader(str(folder)), process_group=group)
        except Exception as error:  # whatever the planner says about names and shapes
            raise ValueError(f"{folder} does not fit this model and optimizer (another --model or --exchange?): {error}") from error
        if len(shares) > 1:
            for name, tensor in live.items():
                part = local_part(tensor).double() * weight
                total[name] = total[name] + part if name in total else part
    for name, value in total.items():
        local_part(live[name]).copy_(value)


@contextmanager
def as_os_error() -> Iterator[None]:
    """What ranks could not write, as the error that it was: torch gathers it into an exception of its own, which is no `Exception`."""
    try:
        yield
    except CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()]
        if causes and all(isinstance(as_disk_error(c), OSError) for c in causes if isinstance(c, Exception)):
            raise OSError(f"{causes[0]} (rank {next(iter(error.failures))})") from None
        raise RuntimeError(str(error)) from None


def random_states() -> dict[str, Any]:
    """Of python, numpy, torch and this rank's GPU."""
    version, words, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state()
    out = {"python": [version, torch.tensor(words), gauss], "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), *rest]}
    out["torch"] = torch.get_rng_state()
    return out | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def set_random_states(states: dict[str, Any]) -> None:
    """The inverse of `random_states`."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


class RunState:
    """Saves and restores a run of `pretrain.py`.

    Args:
        checkpoints: of this replica.
        model, optimizer: as `accelerator.prepare` gave them.
        rows: of one micro-batch over all ranks of all islands, to move the position where their number has changed.

        accumulation: micro-batches per step.
        facts: of the run, for whoever exports the model.

    Attributes:
        step: what was resumed from; 0 for a new run, and where everything is taken over from other islands.
        done: steps whose end (report, schedule, evaluation) the loop has seen; one less than `step` after a stop inside of one.
        saved: the exchange's state for `attach`, or None.
        position: in the data.
    """

    def __init__(
        self, checkpoints: Checkpoints, model: torch.nn.Module, optimizer: Any, rows: int, accumulation: int, facts: dict[str, Any]
    ):
        self.checkpoints, self.model, self.optimizer = checkpoints, model, optimizer
        self.rows, self.accumulation, self.facts = rows, accumulation, facts
        self.step = self.done = 0
        self.saved: Saved | None = None
        self.position = self._before = Position()
        self._random: dict[str, Any] | None = None
        self._counters: dict[str, Any] | None = None
        self.exchange: Any = None
        self.report: Any = None

    # ---- resuming ------------------------------------------------------------------------------------------------------

    def restore(self, resume: bool | str, take_over: bool = False, fresh: bool = False) -> None:
        """Agree with the other islands and load, before `attach`. `fresh`: leave the exchange's own state out.

        Raises:
            NeedsDecision: see `Checkpoints.agreed`.
            ValueError: damaged or foreign files.
        """
        step = self.checkpoints.agreed(resume, take_over)
        if step is None:
            return
        kind = self.checkpoints.holds(step)
        if kind == "emergency":
            self._load_left(step)
        elif kind or self._siblings("checkpoint", step):
            self._load(step, bool(kind))
        else:
            return  # at step 0, so that attach gives it what the others hold
        self.step = step
        log.info("resumed from %s of step %d", kind or "the other islands' checkpoints", step)
        if fresh:
            self.saved = None

    def _load(self, step: int, own: bool) -> None:
        """From this replica's checkpoint; with other numbers of islands or ranks, from all replicas' that this machine sees."""
        topology, rank = self.checkpoints.topology, self.checkpoints.topology.rank
        if own:
            self.checkpoints.verify(step)
        mine = self.checkpoints.path(step)
        of = self._replicas([mine] if own else [], self._siblings("checkpoint", step))
        assert self.saved is not None
        weights = shares(self.saved.islands, topology.islands)[topology.island]
        load_tensors({of[i] / "model": w for i, w in weights.items()}, self.model, self.optimizer, self.checkpoints.group)
        same = self._same()
        loops = mine if own else next(iter(of.values()))
        self._take(read_part(loops / "loop" / f"rank{rank if same else 0}.json")[1], same)

    def _load_left(self, step: int) -> None:
        """From what this rank left on its way out."""
        topology, mine = self.checkpoints.topology, self.checkpoints.emergency(step)
        of = self._replicas([mine], self._siblings("emergency", step))
        assert self.saved is not None
        weights = shares(self.saved.islands, topology.islands)[topology.island]
        content = load_local(mine, topology.rank, self.optimizer, {of[i]: w for i, w in weights.items()})
        self._take(content["loop"], self._same())

    def _replicas(self, own: list[Path], seen: list[Path]) -> dict[int, Path]:
        """Open the exchange's state in `own`, or, if this run has other numbers than that, in all that are seen; island -> folder."""
        self.saved = open_exchange(*(f / "exchange" for f in own or seen))
        if own and not self._same():
            self.saved = open_exchange(*(f / "exchange" for f in seen or own))
        return {island: path.parent.parent for (island, _), path in self.saved.paths.items()}

    def _same(self) -> bool:
        """Whether what was opened is this very replica's, in the same numbers."""
        assert self.saved is not None
        t, h = self.checkpoints.topology, self.saved.heads[0]
        return len(self.saved.islands) == 1 and (h["islands"], h["island"], h["world"]) == (t.islands, t.island, t.world)

    def _siblings(self, kind: str, step: int) -> list[Path]:
        """The folders of this step of all replicas that this machine sees."""
        sign = "manifest.json" if kind == "checkpoint" else "rank0.json"
        return sorted(p.parent for p in self.checkpoints.root.parent.glob(f"*/{kind}-{step}/{sign}"))

    def _take(self, loop: dict[str, Any], same: bool) -> None:
        """Position, random states and counters; random states only for the rank that saved them."""
        epoch, batch = loop["position"]
        self.position = Position(epoch, batch if same else round(batch * loop["rows"] / self.rows))
        self._random, self._counters = loop["random"] if same else None, loop["report"]

    def follow(self, exchange: Any, report: Any) -> None:
        """From now on these are saved, and their counters go on."""
        self.exchange, self.report = exchange, report
        report.counters = lambda: {"failed_saves": self.checkpoints.failed_saves, "not_finite": exchange.metrics()["not_finite"]}
        if self._counters is not None and exchange.step == self.step:
            report.load_state_dict(self._counters)
        elif exchange.step:  # all was taken over
            self.position = Position(0, exchange.step * self.accumulation)
        self.done = report.step
        self._before = Position(self.position.epoch, self.position.batch)

    def batches(self, loader: Any) -> Iterator[dict[str, torch.Tensor]]:
        """Batches from the position on; the random states come back where the uninterrupted run had them.

        Inside an epoch the loader's iterator is there already in that run; making it draws a number, so it comes first.
        """
        started, states = self.position.normal(loader), self._random
        if states is not None and not started:
            set_random_states(states)
        for i, batch in enumerate(forever(loader, self.position)):
            if i == 0 and states is not None and started:
                set_random_states(states)
            yield batch

    # ---- saving ----------------------------------------------------------------------------------------------------------

    def step_ended(self) -> None:
        """The loop has done everything of a step: the next one starts from here."""
        self._before = Position(self.position.epoch, self.position.batch)

    def loop(self) -> dict[str, Any]:
        """What the loop keeps. Batches of a step that was not taken are handed out again."""
        at = self.position if self.exchange.step > self.report.step else self._before
        return {
            "position": [at.epoch, at.batch],
            "rows": self.rows,
            "random": random_states(),
            "report": self.report.state_dict(),
        }

    def save(self, wait: bool = True) -> None:
        """A checkpoint of this step; with `wait` False training goes on while it is written (`torch.distributed.checkpoint.async_save`)."""
        group, rank = self.checkpoints.group, self.checkpoints.topology.rank
        head = {"step": self.exchange.step, "rank": rank, "world": self.checkpoints.topology.world}

        def copy() -> tuple[dict[str, torch.Tensor], Snapshot, Any]:
            live, state = tensors_of(self.model, self.optimizer), self.exchange.state_dict()  # waits for flights
            refuse_not_finite(("replica", live), ("exchange", state))
            kept = Snapshot(describe(self.exchange), state if wait else copied(state))
            return live, kept, self.loop() if wait else copied(self.loop())

        def write(folder: Path) -> Any:
            live, state, loop = self.checkpoints.ranks.together(copy, f"checkpoint of step {self.exchange.step}")
            writer = HuggingFaceStorageWriter(str(folder / "model"), save_distributed=True)
            # Collectives first: a rank that cannot write its own files must not leave the others waiting in them.
            under_way = dcp.async_save(live, storage_writer=writer, process_group=group) if not wait else None
            if wait:
                with as_os_error():
                    dcp.save(live, storage_writer=writer, process_group=group)

            def rest() -> None:
                if under_way is not None:
                    with as_os_error():
                        under_way.result()
                if rank == 0:
                    inner(self.model).config.save_pretrained(folder)
                    (folder / "facts.json").write_text(json.dumps(self.facts, indent=1) + "\n", encoding="utf-8")
                state.write(folder / "exchange")
                write_part(folder / "loop", f"rank{rank}", head, loop)

            return rest

        self.step_ended()
        self.checkpoints.save(self.exchange.step, write, wait)

    def emergency(self) -> None:
        """This rank's own, without collectives (for `guard`)."""
        rank, loop = self.checkpoints.topology.rank, self.loop()
        self.checkpoints.save_alone(
            self.exchange.step, lambda folder, check: save_local(folder, rank, self.optimizer, self.exchange, loop, check)
        )

    def finish(self) -> None:
        """The run came to its end: what was left on the way is not for a later resume."""
        self.checkpoints.forget_emergencies()
        self.checkpoints.close()
