"""The exchange's state on disk, one part (`files.py`) per rank: `FOLDER/rank<r>.json` and
`FOLDER/rank<r>.safetensors`.

The tree is that of `Exchange.state_dict()`; the head says who saved it, under which settings, and
how the model lay.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..config.auto import method_note
from ..exchange.exchange import Exchange
from ..exchange.saved_state import ExchangeState
from ..rendezvous.position import form
from ..rendezvous.topology import Topology
from .files import FRESH, OTHER, read_head, write_part
from .reshard import PartSet, reshard, without_messages

log = logging.getLogger("fsdp_demo")

# of a head: with equal ones a rank holds what it held
PLACE = ("shards", "shard", "copies", "copy", "active_copies")


def describe_part(exchange: Exchange) -> dict[str, Any]:
    """The head of this rank's part: everything but format, package and file."""
    topology, place = exchange.topology, exchange.channels[0].position
    left_out = exchange.step - exchange.steps_taken
    return {
        "step": exchange.step,
        **({"left_out": left_out} if left_out else {}),
        "preset": exchange.config.preset,
        "digest": exchange.config.digest(),
        **method_note(exchange.config, exchange.auto_choice),
        "kind": topology.kind,
        "island": topology.island,
        "islands": topology.islands,
        "name": topology.name,
        "run": topology.run,
        "rank": topology.rank,
        "world": topology.world,
        "shards": place.num_shards,  # as parts on disk have always named them
        "shard": place.shard,
        "copies": place.num_copies,
        "copy": place.copy,
        "active_copies": exchange.channels[0].active_copies,
        "torch": torch.__version__,
        "applied": exchange.applied,
        "history": exchange.history,
        "participants": exchange.applied_by,
        "optimizers": exchange.host.optimizer_names,
        "parameters": [
            {
                "name": s.name,
                "global_shape": s.global_shape,
                "shape": s.shape,
                "offset": s.offset,
                "dtype": str(s.dtype)[len("torch.") :],
                "frozen": s.frozen,
            }
            for s in exchange.host.params
        ],
    }


def save_exchange(folder: Path, exchange: Exchange) -> None:
    """Write this rank's part of an exchange's state into `folder`, one folder per replica. No
    collectives.

    What is in flight is waited for and saved with it, to be applied at its own step.
    """
    name, head = f"rank{exchange.topology.rank}", describe_part(exchange)
    write_part(Path(folder), name, head, exchange.state_dict())


class SavedExchange(PartSet):
    """Parts that an exchange can go on from: `attach(state=load_exchange(folder))`."""

    def left_out(self, topology: Topology) -> int:
        """Ticks that this island had left out; 0 where the rows are dealt anew, to another number
        of islands.
        """
        mine = topology.islands, topology.island
        own = [h for h in self.heads if (h["islands"], h["island"]) == mine]
        return int(own[0].get("left_out", 0)) if own else 0

    def state_for(self, exchange: Exchange) -> dict[str, Any]:
        """The state of `exchange`'s rank: as it was saved if it stands where it stood, else what of
        it goes on with other numbers or another order of parameters.

        An island that is not among the saved ones takes the part of the first of them. In a mesh of
        another number of replicas all take only what they share.

        Raises:
            ValueError: another preset or model; parts that are missing or damaged.
        """
        mine = self.check(exchange)
        island = mine["island"] if mine["island"] in self.islands else self.islands[0]
        # the same rank, of another number of ranks the first one
        first = self.of_island(island)[0]
        head = self.head(mine["rank"], island) if first["world"] == mine["world"] else first
        islands = head["islands"] == mine["islands"]
        ranks = all(head[k] == mine[k] for k in PLACE) and _stretches(head) == _stretches(mine)
        # of another island, or of others, the place in the data is not this one's
        foreign: dict[str, Any] = {} if islands and island == mine["island"] else {"pace": {}}
        if ranks and islands:
            return self.state(mine["rank"], island) | foreign
        shared = not islands and len(self.islands) > 1
        if ranks and not shared:
            saved = ExchangeState.from_tree(self.state(mine["rank"], island))
            state = without_messages(saved)
        else:
            saved = self.outline(head["rank"], island)
            state = reshard(self, island, exchange, mine, shared)
        if mine["rank"] == 0:
            part = "what replicas share; the rest begins anew" if shared else "all of it"
            _say(head, mine, [f.step + 1 for f in saved.in_flight], part)
        return state.to_tree() | foreign

    def check(self, exchange: Exchange) -> dict[str, Any]:
        """Refuse what `exchange` cannot take over, by the heads alone; returns the head of its own
        rank, were it saved now.

        Raises:
            ValueError: another preset or model, parameters that are no longer fp32 or now are.
        """
        mine = describe_part(exchange)
        for h in self.heads:
            if h["preset"] != mine["preset"]:
                raise ValueError(
                    f"{self.folder} was saved by preset {h['preset']!r}, this run has "
                    f"{mine['preset']!r}: give the same preset, {FRESH}"
                )
            theirs, ours = (
                {p["name"]: tuple(p["global_shape"]) for p in x["parameters"]} for x in (h, mine)
            )
            if theirs != ours:
                name = next(n for n in [*ours, *theirs] if ours.get(n) != theirs.get(n))
                there, here = (x.get(name, "absent") for x in (theirs, ours))
                raise ValueError(
                    f"{self.folder} belongs to another model: {name} is {there} there, {here} "
                    f"here ({len(theirs)} tensors there, {len(ours)} here): give the model it was "
                    f"saved with, {FRESH}"
                )
        if any(c.source == "delta" for c in exchange.config.channels):
            self._check_dtypes(mine)
        return mine

    def _check_dtypes(self, mine: Mapping[str, Any]) -> None:
        """Beside an anchor the state of parameters in bf16 also has what rounding took away."""
        theirs, ours = (
            {p["name"]: p.get("dtype", "float32") for p in x["parameters"]}
            for x in (self.heads[0], mine)
        )
        for name, dtype in ours.items():
            if "float32" in (dtype, theirs[name]) and dtype != theirs[name]:
                raise ValueError(
                    f"{self.folder} was saved with {name} in {theirs[name]}, this run has it in "
                    f"{dtype}: load the model with dtype=torch.{theirs[name]}, {FRESH}"
                )


def load_exchange(folder: Path | str) -> SavedExchange:
    """Read the heads of all parts in a folder, which may also hold a folder per replica (a mesh).

    Raises:
        ValueError: no parts; parts that are half-written, damaged, of another format, or of
            several checkpoints.
    """
    folder = Path(folder)
    paths = sorted([*folder.glob("rank*.json"), *folder.glob("*/rank*.json")])
    if not paths:
        what = "no part of an exchange's state (rank0.json, ...)"
        if half := sorted(path.name for path in folder.glob("rank*")):
            what = f"only unfinished files ({', '.join(half[:4])})"
        raise ValueError(
            f"{folder} holds {what}: it was saved without an exchange, or the save was cut off; "
            f"{OTHER}, {FRESH}"
        )
    parts = {path: read_head(path)[0] for path in paths}
    for path, head in parts.items():
        if "island" not in head or "digest" not in head:
            raise ValueError(
                f"{path} is no part of an exchange's state: name the folder `exchange` beside it; "
                f"{OTHER}, {FRESH}"
            )
    by_rank = {(h["island"], h["rank"]): path for path, h in parts.items()}
    steps = sorted({h["step"] for h in parts.values()})
    if len(by_rank) < len(parts) or len(steps) > 1:
        raise ValueError(
            f"{folder} holds parts of several checkpoints (steps {steps}): name the folder of one"
        )
    heads = sorted(parts.values(), key=lambda h: (h["island"], h["rank"]))
    return SavedExchange(folder, heads, by_rank)


def _say(saved: Mapping[str, Any], mine: Mapping[str, Any], flying: list[int], part: str) -> None:
    """Log what of a state goes on with other numbers, and what does not."""
    before, now = (f"{h['islands']} x {form(h['shards'], h['copies'])}" for h in (saved, mine))
    dropped = f"; messages in flight (steps {flying}) are dropped" if flying else ""
    text = "%s: state of %s (islands x shards x copies) taken over by %s: %s%s"
    log.info(text, mine["name"], before, now, part, dropped)


def _stretches(head: Mapping[str, Any]) -> list[tuple[str, tuple[int, ...], int | None]]:
    """Name, local shape and offset in the whole (None: cut along dim 0) of each tensor."""
    return [(p["name"], tuple(p["shape"]), p.get("offset")) for p in head["parameters"]]
