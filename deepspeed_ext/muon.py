"""DeepSpeed's own Muon (`MuonWithAuxAdam`): what of the exchange goes with it.

ZeRO orthogonalises while it fills the gradients of its partitions, ahead of the step of the inner
optimizer. What a master's gradient holds there is an update, which is neither averaged nor clipped
as a gradient is. `BF16_Optimizer` alone clips before it; all others clip the update. A missing
gradient is taken for zeros, so that no step can be held back.

Source of the facts: deepspeed 0.19.8, `runtime/zero/stage_1_and_2.py` (`get_flat_partition`,
`step`), `runtime/zero/stage3.py` (`step`), `runtime/bf16_optimizer.py` (`step`),
`runtime/zero/muon/muon_optimizer.py`, `runtime/engine.py` (`_muon_param_groups`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fsdp_demo import ExchangeConfig
from fsdp_demo.config.channel import EMBEDDINGS, matches
from fsdp_demo.hosts.base import plain_name

NAME = "MuonWithAuxAdam"
LINE = '"optimizer": {"type": "Muon", "params": {"muon_lr": ..., "adam_lr": ...}}'
"""What asks for it in DeepSpeed's configuration. One `lr` would be that of both halves."""


def is_muon(optimizer: Any) -> bool:
    """Whether it is DeepSpeed's Muon. Told by the name: its module compiles kernels when it is
    imported.
    """
    return any(c.__name__ == NAME for c in type(optimizer).__mro__)


def refusals(engine: Any, config: ExchangeConfig) -> Iterator[str]:
    """What DeepSpeed's Muon does not go with: what was found, and what to do."""
    zero = engine.optimizer
    if not is_muon(getattr(zero, "optimizer", None)):
        return
    norm = engine.gradient_clipping()
    if norm > 0 and type(zero).__name__ != "BF16_Optimizer":
        yield (
            f"{NAME} with gradient_clipping={norm:g} (1.0 where the configuration is silent): "
            f"{type(zero).__name__} clips the update of Muon, not the gradient, and training "
            'hardly moves. Set "gradient_clipping": 0.0 (under the Trainer max_grad_norm=0, too). '
            "To clip gradients take bf16 at ZeRO stage 1 with "
            '"data_types": {"grad_accum_dtype": "fp32"}'
        )
    early = [c.name for c in config.channels if c.before_step]
    if early:
        yield (
            f"{NAME} under {config.preset!r}, with {_channels(early)} of gradients: ZeRO has "
            "made Muon's update of them by then. Take a preset that exchanges after the step "
            "(muloco), AdamW inside, or train without DeepSpeed"
        )
    elif config.clip_scope == "islands":
        yield (
            f"{NAME} with clip_scope='islands', which would clip Muon's update, not the gradient: "
            "take clip_scope='replica', AdamW inside, or train without DeepSpeed"
        )
    kept = [c.name for c in config.channels if c.state_name]
    if kept:
        yield (
            f"{NAME} under {config.preset!r}, with {_channels(kept)} of optimizer states: "
            "DeepSpeed makes those of Muon at its first step and keeps some elsewhere. Take a "
            "preset that exchanges none (muloco, diloco), or AdamW inside"
        )


def unusual(engine: Any) -> list[str]:
    """Names of the embeddings and heads, in this package's sense, that DeepSpeed's Muon steps."""
    if not is_muon(engine.optimizer.optimizer):
        return []
    named = [
        plain_name(n)
        for n, p in engine.module.named_parameters()
        if p.requires_grad and getattr(p, "use_muon", False)
    ]
    return [name for name in named if matches(name, EMBEDDINGS)]


def _channels(names: list[str]) -> str:
    return f"channel {names[0]!r}" if len(names) == 1 else f"channels {', '.join(names)}"
