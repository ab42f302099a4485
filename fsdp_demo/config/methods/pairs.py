"""Islands exchange in pairs, another one in each round: NoLoCo, and SAPS-PSGD."""

from __future__ import annotations

from ..channel import Channel
from ..parts import Applier, Codec, Pairs, SyncSchedule
from ..schema import ExchangeConfig
from .diloco import ADAPTIVE


def noloco(
    period: int = 50, lr: float = 0.7, momentum: float = 0.5, value_dtype: str = "fp32"
) -> ExchangeConfig:
    """NoLoCo (Kolehmainen et al., arXiv 2506.10911): every `period` steps an outer step from an
    anchor of one's own towards the mean of a random pair of islands.

    Published (code): period 50, `lr` (beta, and gamma alike) 0.7, `momentum` (alpha) 0.5. Ours:
    parameters travel, not the anchor and the delta, whose sum is all that the step needs.
    """
    outer, codec = Applier("pair_step", lr=lr, momentum=momentum), Codec(value_dtype=value_dtype)
    channel = Channel("delta", "delta", SyncSchedule(period), codec=codec, applier=outer)
    return ExchangeConfig("noloco", (channel,), ADAPTIVE, clip=1.0, norm_limit=None, pairs=Pairs())


def saps(period: int = 1, topk: int = 41, value_dtype: str = "fp32") -> ExchangeConfig:
    """SAPS-PSGD (Tang et al., arXiv 2002.09692): every `period` steps a pair of islands averages
    `topk` of 4096 parameters, at positions of a shared seed.

    Any inner optimizer (published: SGD); its state stays local. Published: every step, 1 % of the
    parameters, pairs by measured bandwidth (`pairs={by: bandwidth, bandwidth: MATRIX}`). Ours:
    random pairs without that, and small tensors go whole.
    """
    codec, mean = Codec("none", "random", topk, value_dtype), Applier("replace_sent")
    channel = Channel("parameter", "parameter", SyncSchedule(period), codec=codec, applier=mean)
    return ExchangeConfig("saps", (channel,), clip=1.0, norm_limit=None, pairs=Pairs())
