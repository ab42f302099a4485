"""One rank of an island of `chaos.py`: an ordinary training script, and what the parent needs to
hurt it and to count.

    attach a preset; each step: data, backward, optimizer.step(); every few steps a digest and an
    evaluation, every few more a checkpoint

Three lines are not ordinary. Connections to other islands go to a relay of the parent (`relayed`).
What the others have agreed on is written down message by message (`noted`). Three files of the
folder are orders: `poison-<slot>` (the next gradients are NaN, Inf or huge), `full-<slot>` (the
next checkpoint finds no room on the disk) and `finish` (the step after which all islands finish).

It writes one JSON line for each step, message, digest, save, start and end to
`facts-<slot>.<rank>.jsonl`; times are those of the machine's monotonic clock. A model of 0.1
million parameters, without any other library, so that it starts soon.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import json
import logging
import os
import resource
import signal
import socket
import sys
import time
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]

from data import stdlib_files  # noqa: E402

from benchmarks.chaos_relay import slot_of  # noqa: E402
from fsdp_demo import Topology, attach, base_optimizer, guard, preset  # noqa: E402
from fsdp_demo.checkpoint import CheckpointManager, RunState  # noqa: E402
from fsdp_demo.peers.header import FAR, NOT_FINITE, PAYLOAD, SKIPPED  # noqa: E402

CONTEXT, WIDTH, DEPTH = 8, 128, 4
ROWS, LENGTH = 8, 64
BYTES = 4 << 20  # of text that an island reads
ROOM = 64 << 10  # bytes that a full disk still takes, beside what is there


class ByteModel(torch.nn.Module):
    """The next byte from the `CONTEXT` bytes before it: embedding, residual layers, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(256, 16)
        self.enter = torch.nn.Linear(16 * CONTEXT, WIDTH)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.head = torch.nn.Linear(WIDTH, 256)

    def forward(self, ids: Tensor) -> Tensor:
        """ids: int64 [rows, CONTEXT + n]; the mean loss of the last n bytes of each row, in
        nats.
        """
        seen = ids.unfold(1, CONTEXT, 1)[:, :-1]
        x = self.enter(self.embed(seen).flatten(2))
        for layer in self.layers:
            x = x + layer(torch.relu(x))
        return torch.nn.functional.cross_entropy(
            self.head(torch.relu(x)).flatten(0, 1), ids[:, CONTEXT:].flatten()
        )


class Text:
    """Real text; the rows of a step are a function of seed, place and step, so an island that comes
    back needs no position.
    """

    def __init__(self, seed: int, place: int):
        train, held_out = stdlib_files()
        self.ids, self._seed, self._place = _read(train), seed, place
        self.held_out = self._rows(_read(held_out[:40]), 8 * ROWS, torch.Generator().manual_seed(0))

    def batch(self, step: int) -> Tensor:
        """int64 [ROWS, CONTEXT + LENGTH]."""
        return self._rows(
            self.ids,
            ROWS,
            torch.Generator().manual_seed((self._seed * 1009 + self._place) * 1_000_003 + step),
        )

    @staticmethod
    def _rows(ids: Tensor, count: int, generator: torch.Generator) -> Tensor:
        starts = torch.randint(len(ids) - CONTEXT - LENGTH, (count, 1), generator=generator)
        return ids[starts + torch.arange(CONTEXT + LENGTH)].long()


def _read(files: list[Path]) -> Tensor:
    data = bytearray()
    for file in files:
        data += file.read_bytes()
        if len(data) > BYTES:
            break
    return torch.frombuffer(data[:BYTES], dtype=torch.uint8)


class Facts:
    """What this rank tells the parent: whole lines, from any thread."""

    def __init__(self, path: Path, **always: Any):
        self._file, self._always = (
            os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644),
            always,
        )

    def tell(self, what: str, **fields: Any) -> None:
        line = {"what": what, "time": time.monotonic(), **self._always, **fields}
        with suppress(OSError):
            os.write(self._file, (json.dumps(line) + "\n").encode())


# ---- what is not ordinary ----------------------------------------------------------------------


def relayed(slot: int, port: int) -> None:
    """From now on every connection to another island goes to a relay of the parent."""
    from fsdp_demo.elastic import newcomer
    from fsdp_demo.peers.connection import PeerConnection

    def relay(host: str, at: int) -> int:
        with socket.create_connection(("127.0.0.1", port), timeout=10.0) as door:
            door.sendall(json.dumps({"from": slot, "host": host, "port": at}).encode() + b"\n")
            return int(door.makefile("rb").readline())

    dial, ask_join_server = PeerConnection.dial, newcomer.ask_join_server

    def dial_relay(self: Any, where: str) -> None:
        host, _, at = where.removeprefix("tcp://").rpartition(":")
        far = slot_of(host) not in (slot, -1)
        dial(self, f"tcp://127.0.0.1:{relay(host, int(at))}" if far else where)

    def knock_at_relay(context: Any, keys: Any, host: str, at: int, *words: Any) -> Any:
        return ask_join_server(context, keys, "127.0.0.1", relay(host, at), *words)

    PeerConnection.dial, newcomer.ask_join_server = dial_relay, knock_at_relay


def noted(facts: Facts) -> None:
    """From now on each payload that this island has agreed on with the others is written down:
    number, step, who counts, whether it was settled in a change of members, and made again."""
    from fsdp_demo.elastic.peer_group import PeerGroup
    from fsdp_demo.exchange.watch import Norms

    run, finished, remember = PeerGroup._run, PeerGroup._finished, Norms.note
    settled: dict[int, Any] = {}
    # for the verdict on the norms in it, which comes next in the same thread
    waiting: list[dict[str, Any]] = []

    def finish(self: Any, message: Any) -> Any:
        view, due = self._driver.machine.record.view, finished(self, message)
        settled[id(self)] = (
            message.n,
            message.kind != "gather" and due.attempt > view,
            self._driver.machine.record.view != view,
        )
        return due

    def exchange(self: Any, header: Any, *words: Any, **named: Any) -> Any:
        settled.pop(id(self), None)
        waiting.clear()
        out = run(self, header, *words, **named)
        # else a newcomer was told what others have agreed on
        if header.kind == PAYLOAD and id(self) in settled:
            n, again, changed = settled[id(self)]
            waiting.append(
                {
                    "n": n,
                    "step": header.step,
                    "slots": list(self.slots),
                    "again": again,
                    "changed": changed,
                }
            )
        return out

    def note(self: Any, members: Any, step: int, headers: Any) -> None:
        remember(self, members, step, headers)
        for told in waiting:
            out = FAR | NOT_FINITE | SKIPPED
            counted = [
                s
                for s, h in zip(told["slots"], headers, strict=True)
                if h.weight > 0 and not h.flags & out
            ]
            late = [s for s, h in zip(told["slots"], headers, strict=True) if h.late]
            facts.tell("message", counted=counted, late=late, **told)
        waiting.clear()

    PeerGroup._finished, PeerGroup._run, Norms.note = finish, exchange, note


def ordered(folder: Path, name: str) -> str | None:
    """The text of an order, which is taken once."""
    path = folder / name
    if not path.exists():
        return None
    text = path.read_text()
    path.unlink(missing_ok=True)
    return text


@contextmanager
def full_disk(folder: Path) -> Any:
    """Nothing that is much longer than the longest file of this run can be written."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    longest = max((p.stat().st_size for p in folder.glob("*.*") if p.is_file()), default=0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (longest + ROOM, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# ---- the ordinary loop -------------------------------------------------------------------------


class Training:
    """Model, exchange and checkpoints of one rank."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.folder = args, Path(args.folder)
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        if self.world > 1:
            dist.init_process_group("gloo")
        self.topology = Topology.from_env()
        self.slot, self.rank = self.topology.island, self.topology.rank
        life = int(os.environ["CHAOS_LIFE"])
        self.facts = Facts(self.folder / f"facts-{self.slot}.{self.rank}.jsonl", life=life)
        self.facts.tell("start", pid=os.getpid(), slot=self.slot, rank=self.rank)
        if os.environ.get("CHAOS_DOOR"):
            relayed(self.slot, int(os.environ["CHAOS_DOOR"]))
        noted(self.facts)
        self.text = Text(args.seed, self.slot * self.world + self.rank)
        torch.manual_seed(args.seed)
        self.model: Any = ByteModel()
        if self.world > 1:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.model, mesh=init_device_mesh("cpu", (self.world,)))
        config = preset(args.preset, **json.loads(args.settings))
        self.optimizer = base_optimizer(
            config, self.model.named_parameters(), lr=args.lr or config.lr or 1e-3
        )
        self.state = RunState(
            CheckpointManager(self.folder / self.topology.name, self.topology),
            self.model,
            self.optimizer,
        )
        self.exchange = attach(self.optimizer, config, model=self.model, topology=self.topology)
        self.facts.tell("attached", step=self.exchange.step)

    def pad(self) -> float:
        """Seconds that the coming step takes at least: more on the slow island."""
        turn, islands = -1, self.topology.islands
        if self.args.turns:
            turn = self.exchange.step // self.exchange.channels[0].channel.schedule.sync_every
        return self.args.pad / (self.args.slow if self.slot == turn % islands else 1.0)

    def run(self) -> None:
        """Train until all finish; the last line says how it ended."""
        with guard(self.exchange, save=lambda: self.state.save(self.exchange, last=True)):
            while self.exchange.step < self.last_step():
                began, pad = time.monotonic(), self.pad()
                self.step()
                time.sleep(max(0.0, pad - (time.monotonic() - began)))
            self.facts.tell("finishing", step=self.exchange.step)
            self.exchange.finish()
        self.look()
        self.facts.tell("end", step=self.exchange.step, equal=self.exchange.digests_equal())

    def last_step(self) -> float:
        path = self.folder / "finish"
        return int(path.read_text()) if path.exists() else self.args.steps or float("inf")

    def step(self) -> None:
        exchange, before = self.exchange, self.exchange.metrics()["seconds_waiting"]
        loss = self.model(self.text.batch(exchange.step))
        loss.backward()
        if (value := ordered(self.folder, f"poison-{self.slot}.{self.rank}")) is not None:
            for p in self.model.parameters():
                p.grad.add_(float(value))
            self.facts.tell("poisoned", step=exchange.step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        line: Any = exchange.peers
        waited = exchange.metrics()["seconds_waiting"] - before
        epoch = line._driver.machine.record.epoch if line._driver is not None else -1
        told = {
            "loss": loss.item(),
            "tokens": ROWS * LENGTH,
            "stall": waited,
            "epoch": epoch,
            "members": list(line.alive),
        }
        self.facts.tell("step", step=exchange.step, **told)
        if exchange.step % self.args.look_every == 0:
            self.look()
        if self.args.save_every and exchange.step % self.args.save_every == 0:
            self.save()

    @torch.no_grad()
    def look(self) -> None:
        """A digest of what must be equal on all islands, and the loss on held-out text under it."""
        digest = hashlib.blake2b(digest_size=8)
        # else a round of its own would be needed
        known = self.exchange.result_kind != "mean" or self.exchange.finished
        with self.exchange.outer_parameters(self.model) if known else nullcontext():
            for p in self.model.parameters():
                here = p.to_local() if hasattr(p, "to_local") else p
                digest.update(
                    here.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                )
            loss = self.model(self.text.held_out).item()
        self.facts.tell(
            "look", step=self.exchange.step, digest=digest.hexdigest() if known else "", loss=loss
        )

    def save(self) -> None:
        full, step = (
            ordered(self.folder, f"full-{self.slot}.{self.rank}") is not None,
            self.exchange.step,
        )
        failed = self.state.checkpoints.failed_saves
        self.facts.tell("saving", step=step, full=full)
        with full_disk(self.folder) if full else nullcontext():
            self.state.save(self.exchange)
        self.facts.tell("saved", step=step, failed=self.state.checkpoints.failed_saves > failed)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    parser.add_argument("--preset", default="demo")
    parser.add_argument("--settings", default="{}", help="changes of the preset, as JSON")
    parser.add_argument("--lr", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=0, help="0: until the file `finish` says when")
    parser.add_argument("--pad", type=float, default=0.05)
    parser.add_argument("--slow", type=float, default=1.0, help="speed of the slow island")
    parser.add_argument("--turns", action="store_true", help="each island is it in its turn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--look-every", type=int, default=5)
    parser.add_argument("--save-every", type=int, default=50)
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1)  # who stands still is asked where, before it is killed
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s.%(msecs)03d %(message)s", datefmt="%H:%M:%S"
    )
    training = Training(parser.parse_args())
    training.run()


if __name__ == "__main__":
    main()
