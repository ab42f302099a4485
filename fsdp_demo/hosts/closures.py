"""What an optimizer's step does with a closure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def evaluated(closure: Callable[[], float | Tensor] | None) -> Any:
    """The loss that the closure of a step returns, with gradients; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
