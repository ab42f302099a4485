"""AdamW with a slow momentum that only a part of each step follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..config.parsing import in_range
from .closures import evaluated


class QHAdamW(torch.optim.Optimizer):
    """AdamW whose step mixes the gradient g with its first moment m: quasi-hyperbolic momentum.

    m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2; theta -= lr weight_decay theta; theta -= lr
    [(1 - nu) g + nu m'] / (sqrt(v') + eps), with m' and v' corrected for their start at zero as in
    AdamW. With `nu` 1 it is AdamW. With a large b1 the steps of islands agree over a round of local
    steps, and g still acts at once. Source: MT-DAO (arXiv 2510.05361), whose `vs` is `nu`; QHAdam
    (arXiv 1810.06801) with nu2 = 1.

    State per parameter, in its shape and dtype: `exp_avg`, `exp_avg_sq`; a count `step`. Every
    operation is elementwise, so shards (FSDP2, ZeRO) train as whole tensors do. Keep parameters in
    fp32: bf16 loses what a b1 of 0.999 adds to m.

    Args:
        params: parameters, named parameters or groups of them.
        lr: learning rate.
        betas: b1 and b2; MT-DAO has b1 from 0.99 to 0.999. With a smaller b2 than b1 m outlives v,
            and steps grow where gradients shrink.
        nu: share of m in a step, 0 to 1; MT-DAO has 0.7 to 0.9.
        eps: added to the root of the second moment.
        weight_decay: decoupled, as AdamW's.

    Raises:
        ValueError: a number out of its range.

    Example:
        >>> import torch, fsdp_demo
        >>> optimizer = fsdp_demo.QHAdamW(torch.nn.Linear(4, 4).parameters(), betas=(0.999, 0.9999))
        >>> exchange = fsdp_demo.attach(optimizer, "diloco", inner_optimizer="qhadamw")
        >>> exchange.finish()
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.99, 0.999),
        nu: float = 0.7,
        eps: float = 1e-8,
        weight_decay: float = 0.1,
    ):
        for name, value in {"lr": lr, "eps": eps, "weight_decay": weight_decay}.items():
            in_range(name, float(value), 0.0)
        in_range("nu", nu, 0.0, 1.0)
        if not all(0.0 <= b < 1.0 for b in betas):
            raise ValueError(f"betas={betas} is out of range: allowed is 0 <= beta < 1 for both")
        numbers = {"lr": lr, "betas": betas, "nu": nu, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, numbers)

    @torch.no_grad()
    def step(self, closure: Callable[[], float | Tensor] | None = None) -> Any:
        """One step; returns the closure's loss, if there is one."""
        loss = evaluated(closure)
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                self.state[p] = self.state[p] or self.fresh(group, p)
                self._move(p, group)
        return loss

    def fresh(self, group: dict[str, Any], p: Tensor) -> dict[str, Tensor]:
        """The state of parameter `p` of `group` before its first step. The count lies on the host,
        as AdamW's.
        """
        count = torch.zeros((), dtype=torch.float32, device="cpu")
        names = ("exp_avg", "exp_avg_sq")
        return {"step": count, **{n: torch.zeros_like(p, requires_grad=False) for n in names}}

    def _move(self, p: Tensor, group: dict[str, Any]) -> None:
        state, gradient, lr = self.state[p], p.grad, float(group["lr"])
        assert gradient is not None
        (b1, b2), m, v = group["betas"], state["exp_avg"], state["exp_avg_sq"]
        state["step"] += 1
        count = float(state["step"])
        m.lerp_(gradient, 1 - b1)
        v.mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
        p.mul_(1 - lr * group["weight_decay"])
        scale = v.sqrt().div_((1 - b2**count) ** 0.5).add_(group["eps"])
        p.addcdiv_(torch.lerp(gradient, m / (1 - b1**count), group["nu"]), scale, value=-lr)
