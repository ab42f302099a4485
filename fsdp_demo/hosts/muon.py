"""Muon for matrices and AdamW for the rest behind one optimizer, for trainers that take one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ..config.channel import EMBEDDINGS, matches
from ..config.parsing import one_of
from .closures import evaluated

PUBLISHED = 0.0224  # Muon's rate in the released configurations of MuLoCo
RELEASED: dict[str, Any] = {
    "nesterov": False,
    "adjust": "sqrt_out_in",
    "betas": (0.9, 0.99),
}
"""What differs from the defaults here in MuLoCo's released code: `base_optimizer(config, named,
**RELEASED)`."""
ADJUST = ("original", "match_rms_adamw", "sqrt_out_in")


class MuonAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` for 2-D parameters, `torch.optim.AdamW` for embeddings, heads and
    everything that is no matrix.

    One `param_groups` (schedulers act on both parts), one `state`, one state dict. On FSDP2 shards
    each matrix is gathered once inside the island (`sharded_muon.py`).

    Args:
        params: named parameters (`model.named_parameters()`).
        lr: Muon's rate; default the published one of MuLoCo (arXiv 2505.23725).
        adamw_lr: rate of the AdamW part; by default Muon's, as in MuLoCo's released code.
        momentum, nesterov, weight_decay: of Muon; weight decay holds for both parts.
        betas: of AdamW.
        adjust: factor of Muon's rate for a matrix [out, in]: "original" sqrt(max(1, out / in)),
            "match_rms_adamw" 0.2 sqrt(max(out, in)), both torch's; "sqrt_out_in" sqrt(out / in),
            MuLoCo's, for which matrices wider than high stand in groups of their own. Weight decay
            goes with the rate before the factor.
        adamw: shell patterns of the names of matrices that AdamW takes.

    Raises:
        ValueError: parameters without names, from which embeddings could not be told; an unknown
            `adjust`.

    Example:
        >>> import torch, fsdp_demo
        >>> model = torch.nn.Linear(4, 4)
        >>> optimizer = fsdp_demo.MuonAdamW(model.named_parameters(), lr=0.02)
        >>> [type(part).__name__ for part in optimizer.parts]
        ['ShardedMuon', 'AdamW']
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = PUBLISHED,
        adamw_lr: float | None = None,
        momentum: float = 0.9,
        nesterov: bool = True,
        weight_decay: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        adamw: tuple[str, ...] = EMBEDDINGS,
        adjust: str = "original",
    ):
        from .sharded_muon import ShardedMuon  # imports FSDP2, which takes a second

        one_of("adjust", adjust, ADJUST)
        matrices, rest = split(list(params), adamw, "MuonAdamW")
        rate = adamw_lr if adamw_lr is not None else lr
        parts: list[torch.optim.Optimizer] = []
        if matrices:
            options: dict[str, Any] = {"momentum": momentum, "nesterov": nesterov}
            groups: list[dict[str, Any]] = [{"params": matrices}]
            if adjust == "sqrt_out_in":
                groups = _by_shape(matrices, lr, weight_decay)
            else:
                options["adjust_lr_fn"] = adjust
            parts.append(ShardedMuon(groups, lr=lr, weight_decay=weight_decay, **options))
        if rest:
            parts.append(torch.optim.AdamW(rest, lr=rate, betas=betas, weight_decay=weight_decay))
        self._counts = [len(part.param_groups) for part in parts]
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._parts = parts

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: torch's keeps groups and state alone."""
        return {**super().__getstate__(), "_parts": self._parts, "_counts": self._counts}

    @property
    def parts(self) -> list[torch.optim.Optimizer]:
        """The parts, on this optimizer's groups and state as they are now: there is one of each."""
        at = 0
        for part, count in zip(self._parts, self._counts, strict=True):
            part.param_groups, part.state = self.param_groups[at : at + count], self.state
            at += count
        return self._parts

    @torch.no_grad()
    def step(self, closure: Callable[[], float | Tensor] | None = None) -> Any:
        """One step of both parts; returns the closure's loss, if there is one."""
        loss = evaluated(closure)
        for part in self.parts:
            part.step()
        return loss


def split(named: list[Any], adamw: tuple[str, ...], who: str) -> tuple[list[Any], list[Any]]:
    """The (name, parameter) of the matrices that are for optimizer `who` itself, and of the rest,
    which is for AdamW. Raises ValueError: parameters without names.
    """
    if not all(isinstance(e, tuple) and len(e) == 2 and isinstance(e[0], str) for e in named):
        raise ValueError(
            f"{who} tells matrices from embeddings by their names: pass model.named_parameters()"
        )
    by_adamw = [p.ndim != 2 or matches(n, adamw) for n, p in named]
    return (
        [entry for entry, rest in zip(named, by_adamw, strict=True) if not rest],
        [entry for entry, rest in zip(named, by_adamw, strict=True) if rest],
    )


def _by_shape(
    matrices: list[tuple[str, Tensor]], lr: float, weight_decay: float
) -> list[dict[str, Any]]:
    """Groups in which torch's factor comes to sqrt(out / in), lr weight_decay as elsewhere."""
    groups: dict[float, list[tuple[str, Tensor]]] = {}
    for name, p in matrices:
        factor = min(1.0, p.shape[0] / max(p.shape[1], 1)) ** 0.5 or 1.0
        groups.setdefault(factor, []).append((name, p))
    return [
        {"params": part, "lr": lr * f, "weight_decay": weight_decay / f}
        for f, part in groups.items()
    ]
