"""The metrics of an exchange by name: the same in every tracker. docs/metrics.md has the table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

PREFIX = "exchange/"


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        unit: as it stands in the table. of: whose number it is: a rank's in `Exchange.metrics()`,
            the island's in `Exchange.totals()` and in trackers. when: it is there.
    """

    unit: str
    of: str
    text: str
    when: str = "always"


RANK, ISLAND, BOTH, ALL = "rank", "island", "rank and island", "all islands"

METRICS: dict[str, Metric] = {
    "step": Metric("steps", RANK, "optimizer steps of the job so far"),
    "exchanges": Metric("count", BOTH, "steps at which something left, since `attach`"),
    "messages": Metric(
        "count", RANK, "rounds of sends: one for a gather, three for a reduce; 0 with one island"
    ),
    "bytes_sent": Metric("bytes", BOTH, "to the other islands since `attach`"),
    "bytes_received": Metric("bytes", BOTH, "from the other islands since `attach`"),
    "setup_bytes": Metric(
        "bytes", RANK, "sent before the first step and in comparisons; not part of `bytes_sent`"
    ),
    "seconds_exchanging": Metric("seconds", RANK, "for which messages were under way"),
    "seconds_waiting": Metric(
        "seconds",
        BOTH,
        "for which training waited for messages, not for its own GPU; of an island the longest",
    ),
    "tokens": Metric(
        "tokens", ISLAND, "counted by `report(tokens=...)` on all ranks of the island"
    ),
    "loss": Metric(
        "nats per token",
        ALL,
        "mean over the islands of the losses in the last headers",
        "after `report(loss=...)`",
    ),
    "drift": Metric(
        "fraction",
        ISLAND,
        "distance of this replica from the mean, over the norm of the mean",
        "after a mean of parameters",
    ),
    "not_finite": Metric("count", ALL, "contributions left out because of NaN or Inf", "once any"),
    "far": Metric(
        "count",
        ALL,
        "contributions left out because their norm was far from the others'",
        "once any",
    ),
    "alive": Metric("count", ALL, "islands that are members", "members may change"),
    "participating": Metric("count", ALL, "islands in the last message", "members may change"),
    "epoch": Metric("count", ALL, "changes of the members", "members may change"),
    "failed_saves": Metric("count", ISLAND, "checkpoints that could not be written", "Trainer"),
    "kept_energy/CHANNEL": Metric(
        "fraction",
        ISLAND,
        "share of the squared norm of what the channel encoded that was sent",
        "after `watch_energy()`",
    ),
}
"""By name, without the prefix. `metrics()` of a rank has `loss`, `drift`, `not_finite` and `far`
always: None or 0 where there is nothing."""


def tracked(exchange: Any) -> dict[str, float]:
    """The island's metrics as trackers get them: `exchange/NAME`. A collective of the island: all
    its ranks call it together.

    Example:
        >>> import torch, fsdp_demo
        >>> from fsdp_demo.report.metrics import tracked
        >>> model = torch.nn.Linear(4, 4)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> exchange = fsdp_demo.attach(optimizer, "diloco", model=model)
        >>> tracked(exchange)["exchange/bytes_sent"]
        0
    """
    found = {f"{PREFIX}{name}": value for name, value in exchange.totals().items()}
    for channel, share in exchange.kept_energy().items():
        found[f"{PREFIX}kept_energy/{channel}"] = share
    return found


def known(name: str) -> bool:
    """Whether a name, with its prefix, is in the table."""
    plain = name.removeprefix(PREFIX)
    return name.startswith(PREFIX) and (
        plain in METRICS or (plain.startswith("kept_energy/") and len(plain) > 12)
    )
