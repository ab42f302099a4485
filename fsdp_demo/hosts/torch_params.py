"""Parameters of torch optimizers: FSDP2 DTensors or plain tensors.

`TorchHost` finds them through the optimizer's `param_groups`, lazily at every use, because
frameworks swap what stands there (Accelerate replaces parameters in `prepare`). FSDP2 parameters
are DTensors; all work happens on `to_local()`, a view.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ..errors import counted, see
from ..rendezvous.position import ShardPosition
from .base import (
    LocalParam,
    TrainingHost,
    foreign_tensors,
    is_dtensor,
    is_foreign,
    is_fsdp1_module,
    is_fsdp_module,
    local_part,
    named_buffers,
    pieces,
    plain_name,
    strided_offset,
)
from .optimizers import materialise
from .step_checks import SCALED, scales
from .step_hooks import OptimizerStepHooks, TickCalls


class TorchHost(TrainingHost):
    """Parameters of torch optimizers: FSDP2 DTensors or plain tensors.

    Args:
        optimizers: as given to `attach`; those inside wrappers are stepped.
        model: gives parameters their names.
    """

    def __init__(self, optimizers: Sequence[Any], model: torch.nn.Module | None = None):
        self.optimizers, self._model = [unwrap(o) for o in optimizers], model
        self.wrappers = [w for o in optimizers for w in layers(o)[:-1]]
        if model is not None and any(map(is_fsdp1_module, model.modules())):
            raise ValueError(
                "the model is wrapped by FullyShardedDataParallel (FSDP1), which flattens "
                "parameters: use torch.distributed.fsdp.fully_shard (FSDP2; Accelerate: "
                "fsdp_version=2)"
            )
        # an evaluation leaves other parameters in the model than the optimizer holds
        reshard(model)
        self._places: list[tuple[int, int, int]] = []
        self._shards = max((pieces(p) for _, _, _, p, _ in _walk(self.optimizers)), default=1)
        self.params: list[LocalParam] = []
        self._list_parameters(model)
        if not self.params:
            raise ValueError(
                "the optimizer holds no parameters: attach after the optimizer was built (and "
                "after accelerator.prepare)"
            )
        known = {id(p) for p in model.parameters()} if model is not None else set()
        if known and not any(id(p) in known for _, _, _, p, _ in _walk(self.optimizers)):
            raise ValueError(
                "the optimizer holds no parameter of this model: pass the model that it trains, "
                "and build the optimizer after the model "
                "was sharded (one of before holds parameters that nobody uses)"
            )
        self._trained = [trained(o) for o in self.optimizers]
        self._count, self._looks = sum(map(len, self._trained)), 0
        self.device = local_part(self.parameter(0)).device

    def _list_parameters(self, model: torch.nn.Module | None) -> None:
        foreign = {id(t) for t in foreign_tensors(model).values()} if model is not None else set()
        for o, g, i, p, name in named_parameters(self.optimizers, model):
            if not p.requires_grad and (id(p) in foreign or is_foreign(p)):
                continue  # see `untrained_tensors`
            local = local_part(p)
            self._places.append((o, g, i))
            self.params.append(
                LocalParam(
                    name,
                    tuple(p.shape),
                    tuple(local.shape),
                    local.dtype,
                    not p.requires_grad,
                    strided_offset(p),
                    repeats=self._shards // pieces(p),
                )
            )

    def parameter(self, index: int) -> Tensor:
        o, g, i = self._places[index]
        return self.optimizers[o].param_groups[g]["params"][i]

    def assert_unchanged(self) -> None:
        """Compare the number of parameters. `check_trained` compares which are trained, since
        others may be switched off while one steps.
        """
        now = sum([len(g["params"]) for o in self.optimizers for g in o.param_groups])
        if now != self._count:
            raise RuntimeError(
                f"the optimizer has {now} parameters, at attach it had {self._count}: detach() and "
                "attach again"
            )

    def check_trained(self, index: int) -> None:
        """Raise RuntimeError if a parameter of this optimizer has another `requires_grad` or shape
        than at `attach`. Each call looks at every `TURNS`th of many.
        """
        before, self._looks = self._trained[index], self._looks + 1
        turns = min(TURNS, -(-len(before) // FEW))
        if turns > 1:
            groups = self.optimizers[index].param_groups
            params = groups[0]["params"] if len(groups) == 1 else _parameters(groups)
            turn = self._looks % turns
            if _shapes(params[turn::turns]) == before[turn::turns]:
                return
        now = trained(self.optimizers[index])
        # `assert_unchanged` looks at the number
        if now == before or len(now) != len(before):
            return
        places = [(o, g, i) for o, g, i, _, _ in _walk(self.optimizers) if o == index]
        (o, g, i), a, b = next(
            (place, a, b) for place, a, b in zip(places, now, before, strict=True) if a != b
        )
        named = dict(zip(self._places, (s.name for s in self.params), strict=True))
        # tied ones stand there once
        name = named.get((o, g, i), f"optimizer{o}.group{g}.parameter{i}")
        if a is not None and b is not None:
            raise RuntimeError(
                f"{name} has the shape {[*a]}, at attach it had {[*b]}, which settled what is "
                "exchanged: resize before attach, or detach() and attach again"
            )
        raise RuntimeError(
            f"requires_grad of {name} was switched {'off' if a is None else 'on'} after attach, "
            "which settled what is exchanged: detach() and attach again, or switch it back before "
            "the step"
        )

    def tensors(self, source: str) -> list[Tensor | None]:
        out: list[Tensor | None] = []
        for index, (o, _, _) in enumerate(self._places):
            p = self.parameter(index)
            if source == "parameter":
                out.append(local_part(p))
            elif source == "gradient":
                out.append(_gradient(p))
            else:
                state = self.optimizers[o].state.get(p, {}).get(source.removeprefix("state:"))
                out.append(None if state is None else local_part(state))
        return out

    def rates(self) -> list[float]:
        return [float(self.optimizers[o].param_groups[g]["lr"]) for o, g, _ in self._places]

    def prepare_gradients(self, wanted: Sequence[bool | None]) -> list[Tensor | None]:
        out: list[Tensor | None] = []
        for index, want in enumerate(wanted):
            p = self.parameter(index)
            if want is False:
                p.grad = None
            elif want and p.grad is None:
                p.grad = torch.zeros_like(p)
            out.append(_gradient(p))
        return out

    def shard_position(self, rank: int, world: int) -> ShardPosition:
        """Shard and copy of this rank in an island of `world` ranks, from DTensors' mesh."""
        shards = self._shards
        if world % shards:
            raise ValueError(
                f"an island of {counted(world, 'rank')} cannot hold whole copies of a model in "
                f"{counted(shards, 'shard')}: use a multiple of that"
            )
        return ShardPosition(shards, rank % shards, world // shards, rank // shards)

    def base_step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def commit(self, model: torch.nn.Module | None = None) -> None:
        """Free unsharded FSDP2 parameters."""
        reshard(model if model is not None else self._model)

    def hooks(self, calls: TickCalls) -> OptimizerStepHooks:
        """One tick is one complete round of the optimizers' steps."""
        return OptimizerStepHooks(self.optimizers, calls, self.check_trained)

    def optimizer_states(self) -> list[tuple[Tensor, dict[str, Any]]]:
        every = ((o.state, p) for o in self.optimizers for p in _parameters(o.param_groups))
        return [(p, state[p]) for state, p in every if p in state]

    def init_optimizer_state(self) -> None:
        for optimizer in self.optimizers:
            materialise(optimizer)

    def untrained_tensors(self, model: torch.nn.Module) -> dict[str, Tensor]:
        reshard(model)  # as at first
        named = [(plain_name(n), p) for n, p in model.named_parameters()]
        stepped = {s.name for s in self.params if not s.frozen}
        if not stepped & {n for n, _ in named}:  # attached without a model: names do not tell
            stepped = {n for n, p in named if p.requires_grad}
        left = {n: p for n, p in named if n not in stepped} | named_buffers(model)
        foreign = foreign_tensors(model)
        return {n: local_part(t) for n, t in left.items() if n not in foreign}

    def outside(self, model: torch.nn.Module) -> list[str]:
        mine = {id(p) for _, _, _, p, _ in _walk(self.optimizers)}
        return [
            plain_name(n)
            for n, p in model.named_parameters()
            if p.requires_grad and id(p) not in mine
        ]


FEW = 16
"""Parameters that are all looked at ahead of every step: each takes 0.1 to 0.2 microseconds."""

TURNS = 16
"""Steps in which all parameters were looked at, where there are many."""


def _gradient(p: Tensor) -> Tensor | None:
    """The local part of a gradient, cut as its parameter is; partial sums are added up here."""
    g = p.grad
    if is_dtensor(g) and is_dtensor(p) and g.placements != p.placements:
        g = p.grad = g.redistribute(placements=p.placements)
    return None if g is None else local_part(g)


def named_parameters(
    optimizers: Sequence[torch.optim.Optimizer], model: torch.nn.Module | None
) -> Iterator[tuple[int, int, int, Tensor, str]]:
    """Each parameter of the optimizers once: numbers of its optimizer and group, its place there,
    itself, and its name.

    That is its name in the model. Where the model has none, what the optimizer was given, else its
    place. Names outside the model may be there twice.
    """
    names = {id(p): plain_name(n) for n, p in model.named_parameters()} if model is not None else {}
    seen: set[int] = set()
    for o, g, i, p, given in _walk(optimizers):
        if id(p) in seen:  # tied weights handed over twice
            continue
        seen.add(id(p))
        name = names.get(id(p)) or plain_name(given) or f"optimizer{o}.group{g}.parameter{i}"
        yield o, g, i, p, name


def _walk(
    optimizers: Sequence[torch.optim.Optimizer],
) -> Iterator[tuple[int, int, int, Tensor, str]]:
    for o, optimizer in enumerate(optimizers):
        for g, group in enumerate(optimizer.param_groups):
            given = group.get("param_names", [])
            for i, p in enumerate(group["params"]):
                yield o, g, i, p, given[i] if i < len(given) else ""


def trained(optimizer: torch.optim.Optimizer) -> list[torch.Size | None]:
    """The shapes of all its parameters; None for one that does not require gradients."""
    return _shapes(_parameters(optimizer.param_groups))


def _shapes(parameters: Sequence[Tensor]) -> list[torch.Size | None]:
    return [p.shape if p.requires_grad else None for p in parameters]


def _parameters(groups: Sequence[dict[str, Any]]) -> list[Tensor]:
    return [p for g in groups for p in g["params"]]


def reshard(model: torch.nn.Module | None) -> None:
    """Free unsharded FSDP2 parameters, so that the next forward sees what was written into the
    shards. A forward without a backward (an evaluation) leaves the root unsharded."""
    for module in model.modules() if model is not None else ():
        if is_fsdp_module(module):
            module.reshard()


def unwrap_model(model: torch.nn.Module | None) -> Any:
    """The model without the wrappers of torch.compile and DDP; None where there is none."""
    inner: Any = getattr(model, "_orig_mod", model)
    return inner.module if isinstance(inner, DistributedDataParallel) else inner


def layers(optimizer: Any) -> list[Any]:
    """An optimizer and those that it wraps under `.optimizer` (Accelerate), the innermost last."""
    found = [optimizer]
    while not type(found[-1]).__module__.startswith("torch.optim"):
        inner = getattr(found[-1], "optimizer", None)
        if not isinstance(inner, torch.optim.Optimizer) or inner is found[-1]:
            break
        found.append(inner)
    return found


def unwrap(optimizer: Any) -> torch.optim.Optimizer:
    """The innermost torch optimizer under Accelerate-like wrappers (`.optimizer`), where hooks see
    the shards. Raises ValueError: there is none, or it steps copies of the parameters; Accelerate
    steps it by a loss scaler.
    """
    if scales(getattr(optimizer, "scaler", None)):  # of Accelerate
        raise ValueError(SCALED)
    seen = layers(optimizer)[-1]
    if not isinstance(seen, torch.optim.Optimizer):
        raise ValueError(
            "attach needs a torch.optim.Optimizer (or a wrapper with one under .optimizer), found "
            f"{type(optimizer).__name__}"
        )
    if type(seen).__name__ == "CPUOffloadOptimizer":  # of torchao
        raise ValueError(
            "CPUOffloadOptimizer steps copies of the parameters in host memory, on gradients that "
            "it takes in the backward pass: no exchange reaches them. Take torch.optim.AdamW, an "
            "8-bit AdamW, or DeepSpeed's offload_optimizer" + see("second-copy")
        )
    return seen
