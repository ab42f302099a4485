"""One cell of the study: its replicas as processes of this machine, each an island of one rank, and
what they measured.

The replicas are forked, so that what is imported and loaded is there at once; they meet through the
library's own store and exchange over gloo on the loopback interface, as islands on separate
machines would.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import torch
from pretrain import TrainArguments, load_model, schedule
from study_cells import Cell, Setting
from torch.nn.utils import parameters_to_vector
from torch.optim.lr_scheduler import LambdaLR

from fsdp_demo import Exchange, Topology, attach, base_optimizer
from fsdp_demo.launch.processes import end_with_parent
from fsdp_demo.launch.store import serve

HOST = "127.0.0.1"
PATIENCE = 600.0
"""Seconds that a replica waits for another."""

FORK = multiprocessing.get_context("fork")


class Failed(RuntimeError):
    """A replica ended with an error; the message is its traceback."""


@dataclass
class Texts:
    """Rows of bytes as ids: train[i] [rows, length] of replica i, held_out [rows, length]; digest
    of both.
    """

    train: list[np.ndarray]
    held_out: np.ndarray
    digest: str


@dataclass
class Shared:
    """What the replicas of a cell have in common; `vectors` [replicas, parameters] fp32 lies in
    shared memory.
    """

    endpoint: str
    run: str
    vectors: torch.Tensor
    barrier: Any

    def meet(self) -> None:
        self.barrier.wait(PATIENCE)


@contextlib.contextmanager
def store() -> Iterator[str]:
    """Endpoint of a store in a process of its own (its threads must not run where replicas are
    forked), ended with this context.
    """
    here, there = FORK.Pipe()
    process = FORK.Process(target=_serve, args=(there,), daemon=True)
    process.start()
    try:
        yield here.recv()
    finally:
        process.kill()
        process.join()


def _serve(pipe: Connection) -> None:
    _belong_to_parent()
    served = serve(f"{HOST}:0")
    pipe.send(served.endpoint)
    signal.pause()


def _belong_to_parent() -> None:
    """Ctrl-C reaches the parent alone, which ends this process; so does the parent's own end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()


def run_cell(cell: Cell, setting: Setting, texts: Texts, endpoint: str) -> dict[str, Any]:
    """Train the replicas of a cell; returns the losses (nats per byte), bytes, exchanges and
    seconds, as plain data.

    Raises:
        Failed: a replica did; the others are ended.
    """
    began = time.monotonic()
    model = fresh_model(setting)
    size = sum(p.numel() for p in model.parameters())
    run = f"study-{os.getpid()}-{time.monotonic_ns()}"
    shared = Shared(
        endpoint, run, torch.zeros(cell.replicas, size).share_memory_(), FORK.Barrier(cell.replicas)
    )
    pipes, processes = [], []
    try:
        for i in range(cell.replicas):
            here, there = FORK.Pipe(duplex=False)
            process = FORK.Process(
                target=_child, args=(i, cell, setting, texts, model, shared, there), daemon=True
            )
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        results = _collect(pipes)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return {"parameters": size, **merge(results), "seconds": time.monotonic() - began}


def _collect(pipes: list[Connection]) -> list[dict[str, Any]]:
    found: dict[Connection, dict[str, Any]] = {}
    while len(found) < len(pipes):
        for pipe in wait([p for p in pipes if p not in found]):
            try:
                found[pipe] = pipe.recv()
            except EOFError:
                raise Failed(f"replica {pipes.index(pipe)} was killed") from None
            if "error" in found[pipe]:
                raise Failed(found[pipe]["error"])
    return [found[p] for p in pipes]


def merge(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Results of the replicas -> of the cell. Losses come as sums over each replica's part of the
    held-out rows.
    """
    rows, losses = sum(r["rows"] for r in results), results[0]["sums"]
    number = {name: sum(r["sums"][name] for r in results) / rows for name in losses}
    curve = np.mean([r["curve"] for r in results], axis=0)
    counts = [r["metrics"] for r in results]
    return {
        "loss": {name: value if math.isfinite(value) else None for name, value in number.items()},
        "curve": [float(v) if math.isfinite(v) else None for v in curve],
        "drift": max(r["drift"] for r in results),
        "bytes_sent": max(m["bytes_sent"] for m in counts),
        "bytes_received": max(m["bytes_received"] for m in counts),
        "exchanges": counts[0]["exchanges"],
        "seconds_waiting": sum(m["seconds_waiting"] for m in counts) / len(counts),
        "seconds_training": max(r["seconds_training"] for r in results),
        "equal_at_end": results[0]["equal_at_end"],
    }


def _child(
    i: int,
    cell: Cell,
    setting: Setting,
    texts: Texts,
    model: torch.nn.Module,
    shared: Shared,
    pipe: Connection,
) -> None:
    _belong_to_parent()
    try:
        pipe.send(replica(i, cell, setting, texts, model, shared))
    except Exception:
        shared.barrier.abort()
        pipe.send({"error": f"{cell.name}, replica {i}:\n{traceback.format_exc()}"})


def fresh_model(setting: Setting) -> torch.nn.Module:
    """The initial weights: the same for every cell of a setting."""
    torch.manual_seed(setting.seed)
    return load_model(setting.model, 258)


def batches(rows: np.ndarray, setting: Setting, i: int) -> Iterator[torch.Tensor]:
    """[batch, length] int64 in the order of replica i, the same for every cell; a new order for
    every pass over the rows.
    """
    epoch = 0
    while True:
        order = np.random.default_rng([setting.seed, i, epoch]).permutation(len(rows))
        for start in range(0, len(order) - setting.batch + 1, setting.batch):
            yield torch.from_numpy(rows[order[start : start + setting.batch]].astype(np.int64))
        epoch += 1


def replica(
    i: int, cell: Cell, setting: Setting, texts: Texts, model: torch.nn.Module, shared: Shared
) -> dict[str, Any]:
    """Train replica i, then evaluate its part of the held-out rows under each reading of "the
    model".
    """
    config = cell.config()
    islands = (
        {"ISLAND_RANK": str(i), "ISLAND_COUNT": str(cell.replicas)} if cell.replicas > 1 else {}
    )
    where = {
        "ISLAND_ENDPOINT": shared.endpoint,
        "ISLAND_RUN": shared.run,
        "ISLAND_ADDRESS": HOST,
        "ISLAND_TIMEOUT": str(PATIENCE),
    }
    optimizer = base_optimizer(config, model.named_parameters(), cell.lr)
    exchange = attach(
        optimizer, config, model=model, topology=Topology.from_env({**islands, **where})
    )
    began = time.monotonic()
    curve = train(model, optimizer, batches(texts.train[i], setting, i), setting)
    seconds = time.monotonic() - began
    vectors, metrics = readings(model, exchange, i, shared)
    mine = texts.held_out[i :: cell.replicas]
    return {
        "rows": len(mine),
        "sums": evaluate_all(model, vectors, mine, setting.batch),
        "drift": float((shared.vectors[i] - vectors["mean"]).norm() / vectors["mean"].norm()),
        "curve": curve,
        "metrics": metrics,
        "seconds_training": seconds,
        "equal_at_end": exchange.digests_equal(),
    }


def train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    rows: Iterator[torch.Tensor],
    setting: Setting,
) -> list[float]:
    """The plain training loop; the exchange hangs on the optimizer's step. Returns the training
    loss, as means over tenths of the run.
    """
    facts = TrainArguments(steps=setting.steps, warmup_steps=setting.warmup)
    rates = LambdaLR(optimizer, lambda step: schedule(step, facts))
    losses = np.zeros(setting.steps)
    for step in range(setting.steps):
        ids = next(rows)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        rates.step()
        losses[step] = loss.item()
    return [float(part.mean()) for part in np.array_split(losses, min(10, setting.steps))]


def readings(
    model: torch.nn.Module, exchange: Exchange, i: int, shared: Shared
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """What can be called the model after the last step, as vectors of all parameters, and the
    counts until then; ends the exchange.

    method: what the library shows for evaluation. mean: the mean of the replicas' parameters.
    replica: those of replica 0. finished: what every replica holds after `finish()`.
    """

    def flat() -> torch.Tensor:
        return parameters_to_vector(model.parameters()).detach().clone()

    metrics = exchange.metrics()
    shared.vectors[i] = flat()
    shared.meet()
    with exchange.outer_parameters(model):
        method = flat()
    exchange.finish()
    return {
        "method": method,
        "mean": shared.vectors.mean(0),
        "replica": shared.vectors[0],
        "finished": flat(),
    }, metrics


def evaluate_all(
    model: torch.nn.Module, vectors: dict[str, torch.Tensor], rows: np.ndarray, batch: int
) -> dict[str, float]:
    """`evaluate` under each vector; equal vectors once."""
    found: dict[str, float] = {}
    for name, vector in vectors.items():
        twin = next((other for other in found if torch.equal(vectors[other], vector)), None)
        found[name] = found[twin] if twin else evaluate(model, vector, rows, batch)
    return found


@torch.no_grad()
def evaluate(model: torch.nn.Module, vector: torch.Tensor, rows: np.ndarray, batch: int) -> float:
    """Sum over rows of the mean loss of a row's bytes, under the parameters in `vector`."""
    parameters = list(model.parameters())
    for p, part in zip(parameters, vector.split([p.numel() for p in parameters]), strict=True):
        p.copy_(part.view_as(p))
    total = 0.0
    for start in range(0, len(rows), batch):
        ids = torch.from_numpy(rows[start : start + batch].astype(np.int64))
        total += len(ids) * model(input_ids=ids, labels=ids).loss.item()
    return total
