"""What the log says when an exchange starts: what runs, on how much, for how many bytes, and what a user should know about it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from .meter import ring_all_reduce_bytes
from .plan import Plan

if TYPE_CHECKING:
    from .config import ExchangeConfig
    from .exchange import Exchange
    from .island import Island
    from .shards import Shards

log = logging.getLogger("fsdp_demo")


def announce(exchange: Exchange, island: Island, lanes: int, batch: Sequence[int]) -> None:
    """Log one line about the run, and warnings; on the first rank of each island."""
    sent, worst = _bytes(exchange, island)
    if exchange.topology.rank:
        return
    config, topology, place = exchange.config, exchange.topology, island.position
    inner = "inner " + ", ".join(type(o).__name__ for o in exchange.optimizers)
    shape = f"{topology.islands} islands, {place.shards} shards x {place.copies} copies ({lanes} lanes)"
    per = f"{sent[0]:.0f} B per exchange and island at most, {sent[1]:.0f} B per step on average"
    log.info("%s: %s", topology.name, "; ".join([config.describe(), inner, _batch(exchange, batch), per, shape, exchange.clips]))
    for b in exchange._flow.buffers:
        n, every = sum(s.numel() for s in b.tensors("parameter") if s is not None), b.channel.clock.period
        log.info("%s: %d buffers (%d numbers) are averaged every %d steps and at the end", topology.name, len(b.covered), n, every)
    for c in [c.channel for c in exchange.channels]:
        dropped = c.clock.delay % c.clock.period
        if c.source == "delta" and dropped and not c.applier.mix:
            log.warning("channel %r: at each exchange the last %d local steps are dropped, since applier.mix=0", c.name, dropped)
    low = [s.name for s in exchange.shards.shards if s.dtype != torch.float32 and not s.frozen]
    if low:
        cure = "load the model with dtype=torch.float32 and compute in bf16 (MixedPrecisionPolicy, mixed_precision='bf16')"
        log.warning("%d parameters are not fp32 (%s ...): small updates are lost in rounding; %s", len(low), low[0], cure)
    for name, gathered, dense in worst:
        log.warning(
            "channel %r: gathering its top-k sends %.3g MB per exchange, an all-reduce of everything in bf16 %.3g MB, since a gather grows "
            "with the number of islands (%d): keep fewer coefficients, or take select='random', which is reduced",
            name,
            gathered / 1e6,
            dense / 1e6,
            topology.islands,
        )


def clips(config: ExchangeConfig, shards: Shards) -> str:
    """See `Exchange.clips`."""
    if config.clip is None:
        return shards.clips or "the exchange clips no gradients"
    where = "the mean gradient over the islands" if config.clips_mean else "each replica's own gradient before the step"
    if config.clip_over == "islands" and not config.clips_mean:
        where = "the gradients by one norm over the islands (one round trip per step)"
    return f"norm {config.clip:g} clips {where}"


def _batch(exchange: Exchange, batch: Sequence[int]) -> str:
    if len(batch) != 2:
        return "batch not told (attach(batch=(rows, accumulation)))"
    world, islands = exchange.topology.world, exchange.topology.islands
    total = batch[0] * batch[1] * world * islands
    return f"effective batch {total} rows = {batch[0]} x {batch[1]} accumulation x {world} ranks x {islands} islands"


def _bytes(exchange: Exchange, island: Island) -> tuple[list[float], list[tuple[str, float, float]]]:
    """(most bytes of one exchange, mean per step) of this island, and the top-k channels (name, bytes, bytes of a dense all-reduce) for
    which a reduce of everything would send less. A collective inside the island."""
    sections = [(c.channel, c.section, len(c.present)) for c in exchange.channels if c.section is not None]
    plan = Plan(sections, exchange.topology.islands, exchange.topology.island)
    totals = [float(plan.most().bytes_sent), plan.per_step()]
    rows: list[tuple[str, float, float]] = []
    for channel, section, _ in sections:
        if channel.codec.indexed:
            elements = sum(g.r * g.s * g.count for g in section.layout.groups) + section.layout.num_dense
            totals += [(plan.size - 1) * section.num_bytes, ring_all_reduce_bytes(plan.size, 2 * elements)]
    indexed = [c.channel.name for c in exchange.channels if c.channel.codec.indexed]
    totals += [0.0] * (2 + 2 * len(indexed) - len(totals))  # a copy beyond the lanes has no sections
    totals = island.total(*totals)
    for i, name in enumerate(indexed):
        if totals[2 + 2 * i] > totals[3 + 2 * i] > 0:
            rows.append((name, totals[2 + 2 * i], totals[3 + 2 * i]))
    return totals[:2], rows
