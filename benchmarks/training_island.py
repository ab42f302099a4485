"""One island of `slow_link.py`: a process that trains when it is told to and counts what that took.

It reads one JSON command per line from its standard input and answers each with one line. Between
commands nothing is under way on the link, so that counters of bytes belong to what was asked for.

    {"do": "attach", "run": NAME, "method": P, "settings": {...}}   a fresh model, attached by the library's own door
    {"do": "connect", "run": NAME}                                  new connections in place of the old ones
    {"do": "train", "settle": S, "steps": N}                        S steps that are not timed, then N that are
    {"do": "leave"}                                                 detach
"""  # noqa: E501

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "recipes")]

from data import forever, load_data, load_tokenizer  # noqa: E402

import fsdp_demo  # noqa: E402
from fsdp_demo import Topology, attach, base_optimizer, preset  # noqa: E402
from fsdp_demo.rendezvous.position import ShardPosition  # noqa: E402

SHAPE = {
    "hidden_size": 320,
    "intermediate_size": 896,
    "num_hidden_layers": 6,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
}
"""A Llama of 7.9 million parameters: whole gradients of it take 13 s at 10 Mbit/s, one step of it
some tenths of a second on one core.
"""


def pin(island: int) -> None:
    """One thread on one core; islands share cores only where there are more of them."""
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[island % len(cores)]})


def make_model(layers: int, vocabulary: int) -> torch.nn.Module:
    """Fresh weights, the same on every island."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {**SHAPE, "num_hidden_layers": layers}
    return LlamaForCausalLM(
        LlamaConfig(**shape, vocab_size=vocabulary, use_cache=False, tie_word_embeddings=False)
    )


def interface() -> tuple[int, int]:
    """Bytes that the cable's interface has sent and received."""
    counts = Path("/sys/class/net/eth0/statistics")
    return tuple(int((counts / f"{way}_bytes").read_text()) for way in ("tx", "rx"))  # type: ignore[return-value]


class Island:
    """Model, data and exchange of one process."""

    def __init__(self, rows: int, length: int, layers: int):
        self.rows, self.length, self.layers = rows, length, layers
        self.tokenizer = load_tokenizer("bytes")
        self.topology = Topology.from_env()
        sets = load_data(
            "stdlib",
            self.tokenizer,
            length,
            island=self.topology.island,
            islands=self.topology.islands,
        )
        self.loader = _Epochs(sets.loaders(rows)[0])
        self.batches = forever(self.loader)

    def attach(self, run: str, method: str, settings: dict[str, Any]) -> dict[str, Any]:
        os.environ["ISLAND_RUN"] = run
        config = preset(method, **settings)
        self.model = make_model(self.layers, self.tokenizer.vocab_size)
        self.optimizer = base_optimizer(config, self.model.named_parameters(), lr=config.lr or 4e-4)
        self.exchange = attach(
            self.optimizer, config, model=self.model, topology=Topology.from_env()
        )
        return {"parameters": sum(p.numel() for p in self.model.parameters())}

    def connect(self, run: str) -> dict[str, Any]:
        """TCP remembers what a link was like: a link that has changed gets new connections, as a
        job on it would have made them.
        """
        os.environ["ISLAND_RUN"] = run
        self._drained()
        new, _ = Topology.from_env().join(ShardPosition())
        old: Any = self.exchange.peers
        old.meter.setup_bytes += new.meter.setup_bytes
        old.release()
        old._me, old._next, old._closed = new._me, new._next, False
        old.drive(new._driver, new.num_connections)
        return {"connections": old.num_connections}

    def step(self) -> None:
        """One step of an ordinary training loop."""
        batch = next(self.batches)
        self.model(**batch).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, settle: int, steps: int) -> dict[str, Any]:
        """All islands start together. What is in flight at the end is waited for, outside the time,
        so that bytes are complete.
        """
        first = self._drained()
        for _ in range(settle):
            self.step()
        waited, cpu = self.exchange.metrics()["seconds_waiting"], time.process_time()
        began, times = time.perf_counter(), []
        for _ in range(steps):
            self.step()
            times.append(time.perf_counter())
        cpu, seconds = time.process_time() - cpu, times[-1] - began
        waiting = self.exchange.metrics()["seconds_waiting"] - waited
        last = self._drained()
        moved = {name: last[name] - first.get(name, 0) for name in last}
        each = [b - a for a, b in zip([began, *times], times, strict=False)]
        return {
            "seconds": seconds,
            "waiting": waiting,
            "cpu": cpu,
            "tokens": steps * self.rows * self.length,
            "each": each,
            **moved,
        }

    def _drained(self) -> dict[str, int]:
        """Counts of the meter and of the interface when nothing is under way."""
        self.exchange.across_islands.mean([0.0])
        meter, (sent, received), page = (
            self.exchange.metrics(),
            interface(),
            self.exchange.ledger(),
        )
        packets = Path("/sys/class/net/eth0/statistics/tx_packets").read_text()
        rows = {**page.channels, "headers": page.headers, "other": page.other}
        return {
            "metered": meter["bytes_sent"] + meter["setup_bytes"],
            "messages": meter["messages"],
            "setup": meter["setup_bytes"],
            "tx": sent,
            "rx": received,
            "tx_packets": int(packets),
            **{f"row {name}": moved.sent for name, moved in rows.items()},
        }

    def leave(self) -> dict[str, Any]:
        self._drained()
        self.exchange.detach()
        del self.model, self.optimizer, self.exchange
        return {}


class _Epochs:
    """A loader with the `set_epoch` that Accelerate's have."""

    def __init__(self, loader: Any):
        self.loader, self.dataset = loader, loader.dataset

    def set_epoch(self, epoch: int) -> None:
        torch.manual_seed(1000 + epoch)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Any:
        return iter(self.loader)


def answer(kind: type[Island]) -> None:
    """Do what is asked for on the standard input, until that ends."""
    rows, length, layers = (int(word) for word in sys.argv[-3:])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing that a library prints gets between the answers
    pin(int(os.environ["ISLAND_RANK"]))
    island = kind(rows, length, layers)
    for line in sys.stdin:
        order = json.loads(line)
        found = getattr(island, order.pop("do"))(**order)
        answers.write(json.dumps(found) + "\n")
        answers.flush()
    fsdp_demo.status.leave(0)


if __name__ == "__main__":
    answer(Island)
