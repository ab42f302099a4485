"""What the planner is asked, from what was measured, and what it chooses."""

from __future__ import annotations

import math

import torch

from ..comm.link import Link
from ..config.auto import AutoChoice
from ..config.schema import ExchangeConfig
from ..exchange.assembly import check
from ..exchange.exchange import Exchange
from ..hosts.base import TrainingHost
from ..hosts.optimizers import keeps_momentum
from ..planner import Choice, Situation, choose, plan_rows
from ..planner.situation import DEVICES

DIGITS = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
"""Leading digits to which rates and times are rounded: two measurements of one link mostly end in
the same step.
"""


SLOWEST_LAST = sorted(DEVICES, key=lambda name: (DEVICES[name].transformed, name))
"""Islands may have unlike devices, and choose for the slowest one."""


def coarse(value: float) -> float:
    """The nearest number that begins with one of `DIGITS`, by ratio; 0 stays 0.

    >>> coarse(94e6), coarse(0.0402)
    (100000000.0, 0.05)
    """
    if value <= 0:
        return 0.0
    decade = 10.0 ** math.floor(math.log10(value))
    nearest = min((*DIGITS, 10.0), key=lambda digit: abs(math.log(digit * decade / value)))
    return rounded(nearest * decade)


def rounded(value: float) -> float:
    """Three digits, as a person would write them: 0.3, not 0.30000000000000004."""
    return float(f"{value:.3g}")


def situation_of(exchange: Exchange, planned: AutoChoice) -> Situation:
    host, placed = exchange.host, exchange.channels[0].position
    return Situation(
        tensors(host),
        exchange.topology.islands,
        Link.parse(planned.link),
        planned.step_seconds,
        shards=placed.num_shards,
        device=device_name(host.device),
        steps=planned.steps,
    )


def tensors(host: TrainingHost) -> list[tuple[str, tuple[int, ...]]]:
    """Names and whole shapes of what is trained, each once."""
    return list({p.name: (p.name, p.global_shape) for p in host.params if not p.frozen}.values())


def chosen(situation: Situation, host: TrainingHost) -> Choice:
    """The planner's choice among the settings that keep the user's optimizer as it is.

    Raises:
        ValueError: there is none.
    """
    kept = {name.lower() for name in host.optimizer_names}
    inner = kept.pop() if len(kept) == 1 else "muonadamw"
    rows = plan_rows(situation, None, keep_inner=inner)
    fitting = [r for r in rows if r.config is None or (r.chosen and _fits(r.config, host))]
    return choose(fitting, situation, keep_inner=inner)


def _fits(config: ExchangeConfig, host: TrainingHost) -> bool:
    """Whether the method is defined for these optimizers, without a warning."""
    doubled = keeps_momentum(config) and any(
        group.get("betas", (0.0,))[0] for o in host.optimizers for group in o.param_groups
    )
    if doubled:
        return False
    try:
        check(config, host)
    except ValueError:
        return False
    return True


def device_name(device: torch.device) -> str:
    """The planner's name of a device; an unknown GPU counts as an H100."""
    if device.type != "cuda":
        return "cpu"
    name = torch.cuda.get_device_name(device).lower().replace("geforce ", "").replace(" ", "-")
    return next((known for known in DEVICES if known in name), "h100")


def free_bytes(device: torch.device) -> float:
    """Of a GPU: what is left for parameters, states and the exchange beside activations, at their
    largest in the measured steps. 0: not known.
    """
    if device.type != "cuda":
        return 0.0
    whole = torch.cuda.get_device_properties(device).total_memory
    activations = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    return 0.95 * whole - activations
