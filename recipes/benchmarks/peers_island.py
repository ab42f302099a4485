"""One island of `peers.py`: a process that trains one model under this library and its twin under
another program (`peers_twins.py`), in turns.

It reads one JSON command per line from its standard input and answers each with one line.

    {"do": "meet", "run": NAME, "peer": P, "period": H}   both models, equal, and both connections
    {"do": "time", "ours": true, "settle": S, "steps": N}           S steps that are not timed, then N that are
    {"do": "compare"}                                               how far the models are apart
"""  # noqa: E501

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist
from peers_twins import LIMIT, PEERS, Place, Twin
from slow_link_island import Island, answer, make_model

BATCHES = 8


class Twins(Island):
    """Two equal models in one process, each with a connection of its own."""

    def meet(self, run: str, peer: str, period: int) -> dict[str, Any]:
        chosen = PEERS[peer]
        found = self.attach(run, peer, chosen.all_settings(period))
        island, islands = self.topology.island, self.topology.islands
        host, port = os.environ["ISLAND_ENDPOINT"].rsplit(":", 1)
        place = Place(island, islands, os.environ["ISLAND_ADDRESS"], host, int(port) + 2)
        init = f"tcp://{host}:{int(port) + 1}"
        dist.init_process_group(
            "gloo", init_method=init, rank=island, world_size=islands, timeout=LIMIT
        )
        model = make_model(self.layers, self.tokenizer.vocab_size)
        self.twin: Twin = chosen.twin(model, chosen.config(period), period, place)
        self.some = [next(self.batches) for _ in range(BATCHES)]
        self.taken = {True: 0, False: 0}
        return found

    def step_of(self, ours: bool) -> None:
        """One step of an ordinary training loop; both models see the same batches."""
        batch = self.some[self.taken[ours] % BATCHES]
        self.taken[ours] += 1
        if not ours:
            self.twin.step(batch)
            return
        self.model(**batch).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def time(self, ours: bool, settle: int, steps: int) -> dict[str, Any]:
        """Wall seconds, and those of the processor: all threads of this process."""
        for _ in range(settle):
            self.step_of(ours)
        dist.barrier()
        began, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            self.step_of(ours)
        return {"seconds": time.perf_counter() - began, "cpu": time.process_time() - cpu}

    def compare(self) -> dict[str, Any]:
        """The largest difference of two parameters, over the largest parameter of the tensor; 0:
        bit-equal.
        """
        assert self.taken[True] == self.taken[False], self.taken
        pairs = zip(self.model.parameters(), self.twin.model.parameters(), strict=True)
        with torch.no_grad():
            return {"off": max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)}


if __name__ == "__main__":
    answer(Twins)
