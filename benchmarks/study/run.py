"""One run of the study: the replicas of a cell as threads of one process, each an island of one
rank, and what they measured.

The replicas exchange through the library itself, over the loopback interface, as islands on
separate machines would. They compute in turn, so that one core is enough and each turn has the
caches to itself. All call one compiled forward and backward pass: the replicas differ in what they
pass to it, their parameters. Stacking them into batched products gained nothing on a CPU.
"""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import math
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from model import load_model
from pretrain_parts import Arguments, schedule
from torch import Tensor
from torch.func import functional_call
from torch.nn.utils import parameters_to_vector
from torch.optim.lr_scheduler import LambdaLR

from fsdp_demo import Exchange, ExchangeConfig, Topology, attach, base_optimizer, preset
from study.cells import Cell, Run, Setting
from study.precision import prepare, way
from study.rounds import Rounds
from study.states import States
from study.texts import load_texts
from study.together import PATIENCE, Loss, Together

COUNTS = ("bytes_sent", "bytes_received", "exchanges", "seconds_waiting")
"""Metrics that a run gives, counted on where it was interrupted."""

POINTS = 48
"""Points of a loss curve: means of the training loss over as many parts of the run."""


class Failed(RuntimeError):
    """A replica ended with an error; the message is its traceback."""


@functools.lru_cache(4)
def loss_of(model: str, precision: str, compiled: bool) -> Loss:
    """The loss of a Llama of recipes/models as a function of its parameters.

    Args:
        precision: "fp32", or "bf16" (precision.py).
    """
    body = load_model(model, 258)
    if precision == "bf16":
        prepare(body, way())
    mixed = precision == "bf16" and way() == "autocast"

    def loss(parameters: Mapping[str, Tensor], ids: Tensor) -> Tensor:
        # weights are cast once a step: a cache of casts would hold them between steps
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed, cache_enabled=False):
            out = functional_call(body, dict(parameters), (), {"input_ids": ids, "labels": ids})
        return out.loss

    return torch.compile(loss, dynamic=False, fullgraph=True) if compiled else loss


def train_run(run: Run, compiled: bool = True, folder: Path | None = None) -> dict[str, Any]:
    """Train the replicas of a run; returns losses (nats per byte), the loss curve, bytes, exchanges
    and seconds, as plain data.

    Args:
        compiled: forward and backward by torch.compile; False for short runs.
        folder: of states to go on from, and of those that a long run saves (states.py).

    Raises:
        Failed: a replica did.
    """
    torch.set_num_threads(1)
    setting, replicas = run.setting, run.cell.replicas
    texts = load_texts(setting.data, setting.length, setting.held_out)
    loss, model = loss_of(setting.model, setting.precision, compiled), fresh_model(run)
    warm(loss, model, run)
    began = time.monotonic()
    size = sum(p.numel() for p in model.parameters())
    barrier = threading.Barrier(replicas)
    states, vectors = States(folder, run), torch.zeros(replicas, size)
    together = Together(run, texts, loss, states, vectors, barrier, start=states.newest())
    results = at_once(together, model)
    losses = evaluate_all(together, model)
    return {
        "parameters": size,
        "loss": {name: value if math.isfinite(value) else None for name, value in losses.items()},
        **merge(results),
        "products": way() if setting.precision == "bf16" else "fp32",
        "seconds": together.spent + time.monotonic() - began,
    }


def fresh_model(run: Run) -> torch.nn.Module:
    """The initial weights: the same for every cell of a seed."""
    torch.manual_seed(run.seed)
    return load_model(run.setting.model, 258)


def warm(loss: Loss, model: torch.nn.Module, run: Run) -> None:
    """Compile on this thread what the replicas will call, for all numbers of rows they call it
    with.
    """
    setting = run.setting
    for rows in {setting.batch, *([setting.batch // 2] if run.cell.slow else [])}:
        ids = torch.zeros(rows, setting.length, dtype=torch.int64)
        loss(dict(model.named_parameters()), ids).backward()
    model.zero_grad()
    with torch.no_grad():
        loss(dict(model.named_parameters()), ids)
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])  # imports what an optimizer needs


def at_once(together: Together, model: torch.nn.Module) -> list[dict[str, Any]]:
    """Train every replica in a thread of its own. After an error the others are left as they are:
    they may wait for the one that failed until their patience ends, and the process is to end.
    """
    results: list[dict[str, Any]] = [{}] * together.run.cell.replicas

    def work(i: int) -> None:
        try:
            results[i] = replica(i, together, copy.deepcopy(model))
        except Exception:
            together.errors.append(f"replica {i}:\n{traceback.format_exc()}")

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(results))]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive() and not together.errors:
            thread.join(0.1)
    if together.errors:
        raise Failed(together.errors[0])
    gc.collect()  # with a process group its connections close
    return results


def batches(rows: np.ndarray, run: Run, i: int) -> Iterator[Tensor]:
    """[batch, length] int64 in the order of replica i, the same for every cell; a new order for
    every pass over the rows.
    """
    epoch, batch = 0, run.setting.batch // (2 if run.cell.slow and i == 0 else 1)
    while True:
        order = np.random.default_rng([run.seed, i, epoch]).permutation(len(rows))
        for start in range(0, len(order) - batch + 1, batch):
            yield torch.from_numpy(rows[order[start : start + batch]].astype(np.int64))
        epoch += 1


def replica(i: int, together: Together, model: torch.nn.Module) -> dict[str, Any]:
    """Train replica i, then leave what can be called the model in `together`."""
    run = together.run
    cell, setting = run.cell, run.setting
    loop = Loop(i, together, model)
    if cell.attach_at:
        loop.attach(preset("full", value_dtype="bf16", clip=1.0), cell, 0)
        loop.train(0, cell.attach_at)
        loop.exchange.detach()
    start = together.start or cell.attach_at
    loop.attach(cell.config(), cell, start)
    loop.train(start, setting.steps)
    exchange = loop.exchange
    metrics = loop.counts()
    readings(model, exchange, i, together)
    return {
        "curve": loop.curve,
        "metrics": metrics,
        "rounds": {"successive": loop.rounds.successive, "islands": loop.rounds.islands},
        "drift": float((together.vectors[i] - (m := together.shared["mean"])).norm() / m.norm()),
        "equal_at_end": exchange.digests_equal(),
    }


class Loop:
    """The plain training loop of one replica; the exchange hangs on the optimizer's step.

    Attributes:
        curve: [points, 4] so far: bytes seen, seconds, bytes sent, training loss.
        losses: of the steps since the last point.
        earlier: metrics that an earlier exchange of this run had counted.
    """

    exchange: Exchange
    rounds: Rounds

    def __init__(self, i: int, together: Together, model: torch.nn.Module):
        self.i, self.together, self.model = i, together, model
        self.run = together.run
        self.parameters = dict(model.named_parameters())
        self.rows = batches(together.rows(i), self.run, i)
        self.curve: list[list[float]] = []
        self.losses: list[float] = []
        self.earlier = dict.fromkeys(COUNTS, 0)
        self.began, self.seen = time.monotonic(), 0
        self.optimizer: torch.optim.Optimizer | None = None

    def attach(self, config: ExchangeConfig, cell: Cell, step: int) -> None:
        """Join the other replicas. A second method goes on with the optimizer of the first."""
        if self.optimizer is None:
            # `full` before the method has the method's inner optimizer
            method, named = cell.config(), self.model.named_parameters()
            inner = next(iter(method.inner_optimizers), "")
            own = inner in ("muonadamw", "qhadamw", "lowrankadamw")
            options: dict[str, Any] = {} if own else {"fused": True}
            if inner == "muonadamw":  # a cell that names no rate has the one that it ran with
                options["adamw_lr"] = 4e-4 * cell.lr / 0.0224
            options |= cell.inner
            self.optimizer = base_optimizer(method, named, cell.lr, **options)
            self.rates = LambdaLR(self.optimizer, lambda t: rate(t, self.run.setting))
        else:
            self.earlier["bytes_sent"] = self.exchange.metrics()["bytes_sent"]
        state = self.restored() if self.together.start else {}
        # first: hooks run in the order in which they were hung on
        self.rounds = Rounds(self.i, self.together, self.model, config, step)
        rounds = self.rounds
        if state:
            rounds.load_state_dict(state["rounds"])
        self.optimizer.register_step_post_hook(lambda *_: rounds.stepped())
        topology = Topology.from_env({"ISLAND_COUNT": "1"})
        if cell.replicas > 1:
            store = dist.PrefixStore(f"from step {step}", self.together.store)
            topology = Topology.from_store(store, self.i, cell.replicas, PATIENCE)
        self.exchange = attach(
            self.optimizer,
            config,
            model=self.model,
            topology=topology,
            step=step,
            state=state.get("exchange"),
        )

    def restored(self) -> dict[str, Any]:
        """Go on from the states of `Together.start`; returns that of this replica, of which the
        exchange and the rounds are still to be taken.
        """
        assert self.optimizer is not None
        start = self.together.start
        state = self.together.states.read(start, self.i)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.rates.load_state_dict(state["rates"])
        self.rows = itertools.islice(self.rows, start, None)
        self.curve, self.losses, self.seen = state["curve"], state["losses"], state["seen"]
        self.earlier, self.together.spent = state["counts"], state["seconds"]
        self.began -= state["seconds"]
        return state

    def save(self, step: int) -> None:
        """Save this replica's state; the states before it go when all have saved."""
        assert self.optimizer is not None
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rates": self.rates.state_dict(),
            "exchange": self.exchange.state_dict(),
            "rounds": self.rounds.state_dict(),
            "curve": self.curve,
            "losses": self.losses,
            "seen": self.seen,
            "counts": self.counts(),
            "seconds": time.monotonic() - self.began,
        }
        self.together.states.write(step, self.i, state)
        self.together.meet()
        if self.i == 0:
            self.together.states.forget_before(step)

    def counts(self) -> dict[str, Any]:
        """The metrics of `COUNTS` from the first step on."""
        now = self.exchange.metrics()
        return {name: before + now[name] for name, before in self.earlier.items()}

    def train(self, start: int, end: int) -> None:
        """Steps `start` to `end`."""
        steps = self.run.setting.steps
        for step in range(start, end):
            self.losses.append(self.step())
            if (step + 1) * POINTS // steps > step * POINTS // steps:
                self.point()
            if self.together.states.due(step + 1):
                self.save(step + 1)

    def step(self) -> float:
        """One step; returns its loss."""
        ids = next(self.rows)
        with self.together.turn:
            loss = self.together.loss(self.parameters, ids)
            loss.backward()
        self.exchange.report(tokens=ids.numel())
        self.optimizer.step()  # type: ignore[union-attr]
        self.rounds.exchanged()
        self.optimizer.zero_grad()  # type: ignore[union-attr]
        self.rates.step()
        self.seen += ids.numel()
        return loss.item()

    def point(self) -> None:
        seconds, sent = time.monotonic() - self.began, self.counts()["bytes_sent"]
        self.curve.append([self.seen, seconds, sent, float(np.mean(self.losses))])
        self.losses = []


def rate(step: int, setting: Setting) -> float:
    """Factor of the learning rate: that of pretrain.py, which ends at a tenth, or, with another
    `floor`, the same cosine stretched to end there.
    """
    given = schedule(step, Arguments(steps=setting.steps, warmup_steps=setting.warmup))
    if setting.floor == Setting.floor:
        return given
    rise = min(1.0, (step + 1) / (setting.warmup + 1))
    return rise * (setting.floor + (1 - setting.floor) * (given / rise - 0.1) / 0.9)


def readings(model: torch.nn.Module, exchange: Exchange, i: int, together: Together) -> None:
    """What can be called the model after the last step, as vectors of all parameters in
    `together.shared`; ends the exchange.

    method: what the library shows for evaluation. mean: the mean of the replicas' parameters.
    replica: those of replica 0. finished: what every replica holds after `finish()`.
    """

    def flat() -> Tensor:
        return parameters_to_vector(model.parameters()).detach().clone()

    together.vectors[i] = flat()
    together.meet()
    with exchange.outer_parameters(model):
        method = flat()
    exchange.finish()
    if i == 0:
        together.shared |= {
            "finished": flat(),
            "method": method,
            "mean": together.vectors.mean(0),
            "replica": together.vectors[0],
        }
    together.meet()


def merge(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Results of the replicas -> of the run: the curve's mean, the bytes of who sent most."""
    counts = [r["metrics"] for r in results]
    sent = [r["curve"][-1][2] for r in results]
    curve = np.mean([r["curve"] for r in results], axis=0)
    columns = dict(zip(("tokens", "seconds", "bytes", "loss"), curve.T.tolist(), strict=True))
    columns["loss"] = [v if math.isfinite(v) else None for v in columns["loss"]]
    return {
        "curve": columns,
        "rounds": results[0]["rounds"],
        "drift": max(r["drift"] for r in results),
        "bytes_sent": max(int(s) for s in sent),
        "bytes_received": max(m["bytes_received"] for m in counts),
        "exchanges": counts[0]["exchanges"],
        "seconds_waiting": sum(m["seconds_waiting"] for m in counts) / len(counts),
        "equal_at_end": results[0]["equal_at_end"],
    }


def evaluate_all(together: Together, model: torch.nn.Module) -> dict[str, float]:
    """The held-out loss under each of `together.shared`; of equal ones once."""
    found: dict[str, float] = {}
    for name, vector in together.shared.items():
        twin = next((o for o in found if torch.equal(together.shared[o], vector)), None)
        found[name] = found[twin] if twin else evaluate(together, model, vector)
    return found


@torch.no_grad()
def evaluate(together: Together, model: torch.nn.Module, vector: Tensor) -> float:
    """Mean loss of the held-out rows under the parameters in `vector`."""
    parameters = dict(model.named_parameters())
    parts = vector.split([p.numel() for p in parameters.values()])
    for p, part in zip(parameters.values(), parts, strict=True):
        p.copy_(part.view_as(p))
    rows, batch = together.texts.held_out, together.run.setting.batch
    rows = rows[: len(rows) // batch * batch]  # one shape for the compiler
    total = 0.0
    for start in range(0, len(rows), batch):
        ids = torch.from_numpy(rows[start : start + batch].astype(np.int64))
        total += together.loss(parameters, ids).item()
    return total * batch / len(rows)
