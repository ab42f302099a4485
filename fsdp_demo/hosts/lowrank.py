"""AdamW whose moments of matrices lie in a subspace of few dimensions, which exchanges choose."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..config.channel import EMBEDDINGS, matches
from ..config.parsing import in_range
from .muon import split
from .qhadamw import QHAdamW

PROJECTION = "projection"
"""The name of a projection in an optimizer's state."""

ITERATIONS = 2
"""Steps of subspace iteration at an exchange; each begins where the last projection was."""

RIDGE = 1e-6
"""The share of the last projection in a new one: it fills the directions without any change."""


class LowRankAdamW(QHAdamW):
    """AdamW with moments of the projected gradient: matrices [n, k] keep two of [n, rank].

    With the gradient G of a matrix and its projection Q [k, rank], whose columns are orthonormal: p
    = G Q; u and v are Adam's moments of p, u' and v' corrected for their start; theta -= lr
    weight_decay theta; theta -= lr [(1 - nu) G / (sqrt(w) + eps) + nu (u' / (sqrt(v') + eps)) Q^T].
    With `error_feedback` p = (G + E) Q and E becomes G + E - p Q^T. After an exchange Q becomes a
    basis of the right singular subspace of the anchor's change, which is equal on all islands.
    Embeddings, heads, vectors, and matrices of at most `rank` columns, are AdamW's.

    Published (LoRDO, arXiv 2602.04396, without code): all that, and clocks of u and v. Ours: w, the
    mean of v' over a row; Q on the side of the columns, so that FSDP2's rows need no message in a
    step; a random first Q; subspace iteration, with a reduction of [k, rank], in place of an SVD; u
    and v turned into the new basis, as in LDAdam (arXiv 2410.16103), with the mean of a row where
    it is new; by default no E, which is as large as the matrix.

    State of a projected matrix: `exp_avg`, `exp_avg_sq` [n, rank] and `error` [n, k], sharded as it
    is; `projection` [k, rank], whole; a count `step`. Of all others as `QHAdamW`.

    Args:
        params: named parameters, or groups of them; a group with a `rank` of its own (0: AdamW) is
            taken as it is.
        rank: columns of the moments; GaLore takes a quarter of the model's width.
        lr, betas, eps, weight_decay: as AdamW's.
        nu: of projected matrices, the share of u in a step; 1 never leaves the first subspace.
        error_feedback: keep what projection leaves out, for later steps.

    Raises:
        ValueError: a number out of its range; parameters without names; at the first step a matrix
            in half precision, or cut otherwise than by rows.

    Example:
        >>> import torch, fsdp_demo
        >>> model = torch.nn.Linear(8, 4)
        >>> optimizer = fsdp_demo.LowRankAdamW(model.named_parameters(), rank=2)
        >>> fsdp_demo.attach(optimizer, "desloc", rank=2).finish()
        >>> [tuple(state.shape) for state in optimizer.state[model.weight].values()]
        [(), (8, 2), (4, 2), (4, 2)]
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        rank: int = 128,
        betas: tuple[float, float] = (0.9, 0.95),
        nu: float = 0.8,
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        error_feedback: bool = False,
    ):
        in_range("rank", rank, 0)
        entries, groups = list(params), list[dict[str, Any]]()
        if not (entries and isinstance(entries[0], dict)):
            entries = [{"params": entries}]
        for group in [{"error_feedback": error_feedback, **entry} for entry in entries]:
            if "rank" in group:
                groups.append(group)
                continue
            matrices, rest = split(list(group["params"]), EMBEDDINGS, "LowRankAdamW")
            groups.append({**group, "params": matrices, "rank": rank})
            groups.append({**group, "params": rest, "rank": 0})
        groups = [group for group in groups if group["params"]]
        super().__init__(groups, lr, betas, nu, eps, weight_decay)

    def fresh(self, group: dict[str, Any], p: Tensor) -> dict[str, Tensor]:
        """As `QHAdamW.fresh`."""
        rank = group["rank"]
        if not (p.ndim == 2 and 0 < rank < p.shape[1]):
            return super().fresh(group, p)
        if p.dtype not in (torch.float32, torch.float64) or _owners(p) == "other":
            raise ValueError(
                f"LowRankAdamW takes matrices in fp32, whole or cut by rows; found one of "
                f"{list(p.shape)} in {p.dtype}, {getattr(p, 'placements', 'whole')}: load the "
                "model in fp32 and shard it by fully_shard alone, or give its group rank=0"
            )
        local = torch.zeros(_local(p).shape[0], rank, dtype=p.dtype, device=p.device)
        basis = torch.empty(p.shape[1], rank, dtype=p.dtype, device=p.device)
        if not p.is_meta:
            basis.copy_(_first(p.shape[1], rank))
        count = torch.zeros((), dtype=torch.float32, device="cpu")
        found = {"step": count, PROJECTION: _like(p, basis, False)}
        found |= {n: _like(p, local.clone(), True) for n in ("exp_avg", "exp_avg_sq")}
        return found | ({"error": torch.zeros_like(p)} if group["error_feedback"] else {})

    def _move(self, p: Tensor, group: dict[str, Any]) -> None:
        state, lr, nu = self.state[p], float(group["lr"]), group["nu"]
        if PROJECTION not in state:
            super()._move(p, {**group, "nu": 1.0})
            return
        assert p.grad is not None
        (b1, b2), basis = group["betas"], _local(state[PROJECTION])
        theta, g, m, v = map(_local, (p, p.grad, state["exp_avg"], state["exp_avg_sq"]))
        state["step"] += 1
        first, second = (1 - b ** float(state["step"]) for b in (b1, b2))
        if "error" in state:
            error = _local(state["error"]).add_(g)
            low = error @ basis
            error.sub_(low @ basis.T)
        else:
            low = g @ basis
        m.lerp_(low, 1 - b1)
        v.mul_(b2).addcmul_(low, low, value=1 - b2)
        theta.mul_(1 - lr * group["weight_decay"])
        step = m.div(first).div_(v.div(second).sqrt_().add_(group["eps"]))
        theta.addmm_(step, basis.T, alpha=-lr * nu)
        scale = v.mean(1, keepdim=True).div_(second).sqrt_().add_(group["eps"])
        theta.addcdiv_(g, scale, value=-lr * (1 - nu))

    @torch.no_grad()
    def remake(self, p: Tensor, change: Tensor) -> None:
        """Take the projection of matrix `p` from its change in a round (this rank's rows). All
        ranks of the island call it together, and get equal bits from their sum.
        """
        basis, owners = _local(self.state[p][PROJECTION]), _owners(p)
        for _ in range(ITERATIONS):
            found = change.T @ (change @ basis)
            if owners is not None:
                dist.all_reduce(found, group=owners)
            found.div_(torch.linalg.vector_norm(found).clamp_min(1e-30)).add_(basis, alpha=RIDGE)
            basis = _orthonormal(found)
        self.turn(p, basis)

    @torch.no_grad()
    def turn(self, p: Tensor, basis: Tensor) -> None:
        """Let `basis` [columns, rank] be the projection of `p`, and turn its moments into it."""
        old, m, v = (_local(self.state[p][n]) for n in (PROJECTION, "exp_avg", "exp_avg_sq"))
        turn = old.T @ basis
        m.copy_(m @ turn)
        kept = turn.square()  # of v; what is new has the mean of the row
        v.copy_(v @ kept + v.mean(1, keepdim=True) * (1 - kept.sum(0)).clamp_min(0))
        old.copy_(basis)


def moment_shape(name: str, shape: Sequence[int], rank: int) -> tuple[int, ...]:
    """The shape of the moments of a parameter, by its name, at this rank."""
    low = len(shape) == 2 and 0 < rank < shape[1] and not matches(name, EMBEDDINGS)
    return (shape[0], rank) if low else tuple(shape)


@functools.lru_cache(4)  # matrices of a model have few widths
def _first(columns: int, rank: int) -> Tensor:
    """A random orthonormal basis [columns, rank], alike everywhere: fp64, rounded to fp32."""
    seed = torch.Generator(device="cpu").manual_seed(columns)
    normal = torch.randn(columns, rank, generator=seed, dtype=torch.float64, device="cpu")
    return _orthonormal(normal).float()


def _orthonormal(t: Tensor) -> Tensor:
    """The basis of the columns that Gram and Schmidt's method gives, which moves as they move."""
    made, upper = torch.linalg.qr(t)
    return (made * torch.where(upper.diagonal() < 0, -1.0, 1.0)).contiguous()


def _owners(p: Any) -> Any:
    """The process group whose ranks hold rows of `p`; None: it is whole; "other": cut otherwise."""
    cut = [i for i, q in enumerate(getattr(p, "placements", ())) if not q.is_replicate()]
    if len(cut) > 1 or any(str(p.placements[i]) != "S(0)" for i in cut):
        return "other"
    return p.device_mesh.get_group(cut[0]) if cut else None


def _like(p: Any, local: Tensor, cut: bool) -> Tensor:
    """A state [rows, columns]: `local` of its rows, `cut` as `p`; or whole, as checkpoints know."""
    if not hasattr(p, "placements"):
        return local
    from torch.distributed.tensor import DTensor, Replicate

    where = p.placements if cut else [Replicate()] * p.device_mesh.ndim
    shape = torch.Size((p.shape[0] if cut else local.shape[0], local.shape[1]))
    more: dict[str, Any] = {"run_check": False, "shape": shape, "stride": (shape[1], 1)}
    return DTensor.from_local(local, p.device_mesh, where, **more)


def _local(t: Tensor) -> Tensor:
    """This rank's part of a DTensor, a view; else the tensor."""
    local: Tensor = t.to_local() if hasattr(t, "to_local") else t
    return local
