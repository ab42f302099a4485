"""The metrics of an exchange by name: the same in every tracker. docs/metrics.md has the table."""

from __future__ import annotations

from typing import Any

PREFIX = "exchange/"


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
