"""Owners of blocks in a sparse exchange: a trial of the study.

The library gathers sparse payloads: R - 1 of them leave each of R replicas, so bytes grow with R.
Here each block has an owner, a replica that gets what all others have sent of it. It adds these
values, and sends back the largest of each 4096 sums, in the code of the payloads. The rest it may
keep and add next time. So (R - 1) / R of a payload leave each replica twice, however many there
are.

The library has no such form. A replica of the study gets all payloads, so it can do here what the
owners would do, with the same result. The bytes are counted by the form, not by the meter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fsdp_demo import Applier, ExchangeConfig
from fsdp_demo.channels import appliers, apply
from fsdp_demo.channels.decode import DecodedMean, SparseMean
from fsdp_demo.channels.state import LocalChannel
from fsdp_demo.compression import formats
from fsdp_demo.compression.selection import top_k
from fsdp_demo.compression.windows import Window
from fsdp_demo.config.parts import BLOCK
from fsdp_demo.exchange.plan import plan_model
from study.gain import TrialConfig


@dataclass(frozen=True)
class Owned(Applier):
    """An outer step on what owners send back.

    Attributes:
        back: values of each 4096 that an owner sends back.
        kept: weight that the sums which an owner did not send back have in the next round.
        left: these sums, a workspace, from the first round on.
    """

    back: int = 90
    kept: float = 0.0
    left: list[Tensor] = field(default_factory=list, compare=False)


class OwnersMean(DecodedMean):
    """What owners make of the payloads; to be read once, window by window."""

    def __init__(self, gathered: SparseMean, applier: Owned):
        self.layout, self.device = gathered.layout, gathered.device
        self._gathered, self._applier = gathered, applier
        if applier.kept and not applier.left:
            applier.left.append(self.layout.new(str(self.device)).zero_())

    def fill(self, window: Window, out: Tensor) -> Tensor:
        """See `DecodedMean.fill`."""
        if window.group is None:
            return self._gathered.fill(window, out)
        places, values = self._gathered._decoded(window)
        left = window.of(self._applier.left[0]) if self._applier.kept else None
        k = window.group.k(self._applier.back)
        before = None if left is None else left.view(-1, BLOCK).mul_(self._applier.kept)
        chosen, sent, sums = sent_back(places, values, k, self._gathered.codec.value_dtype, before)
        if before is not None:
            before.copy_(sums)
        out.zero_().view(-1, BLOCK).scatter_(1, chosen, sent)
        return out


def sent_back(
    places: Tensor, values: Tensor, k: int, code: str, left: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """What owners send of n blocks.

    Args:
        places, values: of all replicas, int64 and fp32 [n, m]; a place may come more than once.
        k: how many are sent of each block. left: sums of before, fp32 [n, 4096].

    Returns:
        Places int64 [n, k] of the largest sums; there the sum over the number of replicas that sent
        the place, in `code`, fp32 [n, k]; and the sums that stay, fp32 [n, 4096].
    """
    sums = torch.zeros(len(values), BLOCK) if left is None else left.clone()
    sums.scatter_add_(1, places, values)
    senders = torch.zeros(len(values), BLOCK).scatter_add_(1, places, (values != 0).float())
    chosen = top_k(sums, k)
    count = senders.gather(1, chosen).clamp_min_(1.0)
    mean = sums.gather(1, chosen) / count
    sent = formats.decode(code, formats.encode(code, mean), *mean.shape)
    return chosen, sent, sums.scatter_add_(1, chosen, -sent * count)


def owned(config: ExchangeConfig, back: int, kept: float) -> ExchangeConfig:
    """A configuration of one sparse channel with an outer step, by owners."""
    appliers.APPLIERS["outer_step"] = _outer
    (channel,) = config.channels
    plain = {f.name: getattr(channel.applier, f.name) for f in dataclasses.fields(channel.applier)}
    applier = Owned(**plain, back=back, kept=kept)
    channels = (dataclasses.replace(channel, applier=applier),)
    return TrialConfig(**{**vars(config), "channels": channels})


def _outer(
    c: LocalChannel, mean: DecodedMean | None, arrival: apply.Arrival
) -> tuple[float, float] | None:
    applier = c.channel.applier
    if isinstance(applier, Owned) and isinstance(mean, SparseMean):
        mean = OwnersMean(mean, applier)
    return apply.outer(c, mean, arrival)


def recounted(
    result: dict[str, Any], config: ExchangeConfig, replicas: int, model: torch.nn.Module
) -> dict[str, Any]:
    """The result of a cell with owners, with their bytes in place of those of the gather."""
    shapes = [(name, p.shape) for name, p in model.named_parameters()]
    share = share_of_gather(config, shapes, replicas)
    curve = {**result["curve"], "bytes": [v * share for v in result["curve"]["bytes"]]}
    sent = round(result["bytes_sent"] * share)
    return {**result, "bytes_gathered": result["bytes_sent"], "bytes_sent": sent, "curve": curve}


def share_of_gather(
    config: ExchangeConfig, shapes: Sequence[tuple[str, Sequence[int]]], replicas: int
) -> float:
    """Bytes that leave a replica with owners, over those that leave it with a gather: (R - 1) / R
    of a payload there and of one back, over R - 1 payloads.
    """
    (channel,) = config.channels
    assert isinstance(channel.applier, Owned)
    codec = dataclasses.replace(channel.codec, topk=channel.applier.back)
    there, back = (
        plan_model(dataclasses.replace(config, channels=(c,)), shapes, 2)[0].most().bytes_sent
        for c in (channel, dataclasses.replace(channel, codec=codec))
    )
    return (1 + back / there) / replicas
