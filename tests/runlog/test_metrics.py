"""Metrics have one name each, in the table of docs/metrics.md."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import fsdp_demo
from fsdp_demo.runlog.record import PREFIX, tracked

from ..support import threaded
from ..support.inside import in_a_process
from ..support.pages import metric, metrics_table

TABLE = metrics_table()


@in_a_process
def test_metrics_names_are_in_the_table() -> None:
    """Every metric of an exchange is in the table of docs/metrics.md. Two islands, one of which has
    a gradient that is not finite, and a mean at the end.
    """

    def island(i: int, topology: fsdp_demo.Topology) -> Any:
        weight = nn.Parameter(torch.zeros(64, 64))
        config = fsdp_demo.preset("demo")
        optimizer = fsdp_demo.base_optimizer(config, [("weight", weight)], lr=1e-3)
        exchange = fsdp_demo.attach(optimizer, config, topology=topology)
        exchange.watch_energy()
        for t in range(3):
            weight.grad = torch.full((64, 64), float("nan") if i == t == 1 else 1.0 + t)
            exchange.report(tokens=10, loss=2.0 + i)
            optimizer.step()
        found = exchange.metrics(), exchange.totals(), tracked(exchange)
        exchange.finish()
        return found

    for rank, totals, names in threaded.values(threaded.islands(island)):
        of = {name: TABLE[name][1] for name in {**rank, **totals}}
        assert all(of[name] != "island" for name in rank if name not in ("drift",))
        assert all(of[name] != "rank" for name in totals)
        assert set(names) == {f"{PREFIX}{n}" for n in totals} | {"exchange/kept_energy/momentum"}
        assert all(metric(name) in TABLE for name in names)
        assert names["exchange/tokens"] == 30 and names["exchange/global_tokens"] == 60
        assert names["exchange/loss"] == 2.5
        assert names["exchange/not_finite"] == 1 and rank["bytes_sent"] == totals["bytes_sent"]
        always = {n: of for n, (_, of, _, when) in TABLE.items() if when == "always"}
        assert {n for n, of in always.items() if of != "rank"} <= set(totals)
        assert {n for n, of in always.items() if of != "island"} <= set(rank)
