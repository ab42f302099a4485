"""The fp32 partitions of a ZeRO engine as the exchange's `TrainingHost`.

A rank holds of each parameter a stretch of the flattened tensor: all of it, a part, or nothing. The
stretch becomes

* one shard of whole rows [rows, ...] where it begins and ends at rows: what FSDP2 would hold where
  ZeRO-3 cuts dim 0 evenly;
* else up to three: the end of a row (flat), whole rows, the beginning of a row (flat).

Which is decided by the parameter's shape and the stretch alone, so that it is the same on every
island. Parameters of which this rank holds nothing are there as empty shards: all ranks of an
island see the same names, and make the same channels of them.

Padding belongs to no shard: it is neither sent nor compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from deepspeed import comm
from torch import Tensor

from fsdp_demo.hosts.base import (
    LocalParam,
    TrainingHost,
    foreign_tensors,
    named_buffers,
    plain_name,
)
from fsdp_demo.hosts.optimizers import fresh_state
from fsdp_demo.hosts.step_hooks import TickCalls
from fsdp_demo.rendezvous.position import ShardPosition

from .step_hooks import EngineStepHooks
from .wrappers import adapter


@dataclass(frozen=True)
class _Piece:
    """One shard of a parameter: the elements of a master from `offset` on, viewed as `shape`."""

    master: int
    offset: int
    shape: tuple[int, ...]

    def view(self, flat: Tensor) -> Tensor:
        """The shard in a flat tensor that lies as the master does."""
        return flat.detach().narrow(0, self.offset, prod(self.shape)).view(self.shape)


class ZeroHost(TrainingHost):
    """Parameters of a DeepSpeed engine at ZeRO-1, 2 or 3.

    Args:
        engine: what `deepspeed.initialize` returned.

    Raises:
        ValueError: the engine shards nothing.
        RuntimeError: DeepSpeed's internals are not those this was written for.

    Example:
        >>> from deepspeed_ext import ZeroHost
        >>> host = ZeroHost(engine)  # doctest: +SKIP
        >>> host.params[0].name  # doctest: +SKIP
        'model.embed_tokens.weight'
    """

    def __init__(self, engine: Any):
        self.engine, self.partitions = engine, adapter(engine)
        self.wrappers: list[Any] = []
        self.partitions.check()
        self.params: list[LocalParam] = []
        self._pieces: list[_Piece] = []
        masters = self.partitions.masters()
        for f in self.partitions.fragments():
            for start, shape in pieces(f.shape, f.start, f.numel):
                self._pieces.append(_Piece(f.master, f.offset + start - f.start, shape))
                name, dtype = plain_name(f.name), masters[f.master].dtype
                self.params.append(LocalParam(name, f.shape, shape, dtype, False, start))
        self.device = masters[0].device
        self._parameters = dict(engine.module.named_parameters())
        self._by_name = {plain_name(n): p for n, p in self._parameters.items()}
        self._trained = [p.requires_grad for p in self._parameters.values()]

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:  # type: ignore[override]
        """The optimizer that ZeRO steps, asked for anew: DeepSpeed may replace the object."""
        return [self.partitions.inner]

    @property
    def clips(self) -> str:
        norm = self.partitions.zero.clip_grad
        return f"DeepSpeed clips each replica's own gradient to norm {norm:g}" if norm else ""

    def parameter(self, index: int) -> Tensor:
        return self._by_name[self.params[index].name]

    def tensors(self, source: str) -> list[Tensor | None]:
        """fp32 views into the masters, their gradients and their states."""
        flats = [self._flat(master, source) for master in self.partitions.masters()]
        return [None if (flat := flats[p.master]) is None else p.view(flat) for p in self._pieces]

    def _flat(self, master: Tensor, source: str) -> Tensor | None:
        if source == "parameter":
            return master
        if source == "gradient":
            return master.grad
        kept = self.partitions.inner.state.get(master, {}).get(source.removeprefix("state:"))
        return kept if isinstance(kept, Tensor) and kept.shape == master.shape else None

    def rates(self) -> list[float]:
        return [float(self.partitions.group_of(p.master)["lr"]) for p in self._pieces]

    def optimizer_states(self) -> list[tuple[Tensor, dict[str, Any]]]:
        """The masters that have a state, with it."""
        state = self.partitions.inner.state
        return [(m, state[m]) for m in self.partitions.masters() if m in state]

    def init_optimizer_state(self) -> None:
        """Make the state that a first step would make (`hosts/optimizers.py`). DeepSpeed's own
        Adam makes it in a step on zero gradients, with learning rate and decay zero, one master at
        a time; then step counters are set back.
        """
        inner, masters = self.partitions.inner, self.partitions.masters()
        if any(m in inner.state for m in masters):
            return
        for i, master in enumerate(masters):
            if made := fresh_state(inner, self.partitions.group_of(i), master):
                inner.state[master] = made
        theirs = type(inner).__module__.startswith("deepspeed.")
        if not theirs or self.optimizer_names[0] not in ("Adam", "AdamW"):
            return
        kept = [{key: g[key] for key in ("lr", "weight_decay")} for g in inner.param_groups]
        for g in inner.param_groups:
            zero = torch.zeros_like(g["lr"]) if isinstance(g["lr"], Tensor) else 0.0
            g.update(lr=zero, weight_decay=0.0)
        self.partitions.step_on_zeros()
        for g, before in zip(inner.param_groups, kept, strict=True):
            g.update(before)
        for counted in [*(state for _, state in self.optimizer_states()), *inner.param_groups]:
            if "step" in counted:
                counted["step"] = counted["step"] * 0

    def untrained_tensors(self, model: torch.nn.Module) -> dict[str, Tensor]:
        """Of a parameter that ZeRO-3 has cut, this rank's part (`ds_tensor`)."""
        stepped = {s.name for s in self.params}
        named = ((plain_name(n), p) for n, p in model.named_parameters())
        left = {n: p for n, p in named if n not in stepped} | named_buffers(model)
        foreign = foreign_tensors(model)
        return {
            n: (t.ds_tensor if hasattr(t, "ds_tensor") else t).detach()
            for n, t in left.items()
            if n not in foreign
        }

    def prepare_gradients(self, wanted: Sequence[bool | None]) -> list[Tensor | None]:
        """A master's gradient is removed if nothing in it is wanted; else the rest is zeros."""
        for index, master in enumerate(self.partitions.masters()):
            here = [
                (p, want) for p, want in zip(self._pieces, wanted, strict=True) if p.master == index
            ]
            if all(want is False for _, want in here):
                master.grad = None
            elif master.grad is None and any(want for _, want in here):
                self.partitions.zero_gradient(index)
            elif master.grad is not None:
                for p, want in here:
                    if want is False:
                        p.view(master.grad).zero_()
        return self.tensors("gradient")

    def base_step(self) -> None:
        self.partitions.step()

    def commit(self, model: torch.nn.Module | None = None) -> None:
        """Push the masters to the model's parameters: stages 1 and 2 gather them inside the island,
        stage 3 its persistent ones.
        """
        with torch.no_grad():
            self.partitions.push()

    def outside(self, model: torch.nn.Module) -> list[str]:
        mine = {s.name for s in self.params}
        named = [(plain_name(n), p) for n, p in model.named_parameters()]
        return [n for n, p in named if p.requires_grad and n not in mine]

    def assert_unchanged(self) -> None:
        """Raise RuntimeError if masters or a parameter's `requires_grad` have changed."""
        if len(self.partitions.masters()) != 1 + max(p.master for p in self._pieces):
            raise RuntimeError(
                "the ZeRO engine has other partitions than at attach: detach() and attach again"
            )
        now = [p.requires_grad for p in self._parameters.values()]
        if now != self._trained:
            both = zip(self._parameters, now, self._trained, strict=True)
            name, is_on = next((n, a) for n, a, b in both if a != b)
            raise RuntimeError(
                f"requires_grad of {plain_name(name)} was switched {'on' if is_on else 'off'} "
                "after attach, which ZeRO does not follow: "
                "switch it back, or set it before deepspeed.initialize, and attach again"
            )

    def check_loaded(self) -> None:
        self.partitions.check()

    def shard_position(self, rank: int, world: int) -> ShardPosition:
        """This rank's place among the shards: one per rank of ZeRO's data-parallel group, no
        copies.

        Raises:
            ValueError: the group is not the island.
        """
        group = self.engine.seq_data_parallel_group
        shards, shard = comm.get_world_size(group=group), comm.get_rank(group=group)
        if (shards, shard) != (world, rank):
            raise ValueError(
                f"ZeRO shards over {shards} ranks (this one is {shard}), the replica has {world} "
                f"(this one is {rank}): in one world over "
                "several nodes call deepspeed_ext.shard_within_node(node_size) before "
                "deepspeed.initialize; islands need none"
            )
        return ShardPosition(shards, shard, 1, 0)

    def hooks(self, calls: TickCalls) -> EngineStepHooks:
        """Hooks on `engine.step`, which count the steps that the engine counts."""
        return EngineStepHooks(self.engine, self.partitions, calls)


def pieces(shape: Sequence[int], start: int, numel: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Cut elements start..start + numel of a flattened tensor into (start, shape): whole rows keep
    the tensor's dims, the rest is flat.

    Example:
        >>> list(pieces((4, 3), 2, 8))
        [(2, (1,)), (3, (2, 3)), (9, (1,))]
    """
    row = prod(shape[1:]) if len(shape) > 1 else 1
    if numel == prod(shape):
        yield start, tuple(shape)
        return
    head = min(-start % row, numel)
    rows, tail = divmod(numel - head, row)
    if numel == 0:
        yield start, (0, *shape[1:]) if shape else (0,)
    if head:
        yield start, (head,)
    if rows:
        yield start + head, (rows, *shape[1:])
    if tail:
        yield start + head + rows * row, (tail,)
