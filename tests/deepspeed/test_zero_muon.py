"""DeepSpeed's own Muon, whose update stands where a gradient is expected."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import deepspeed_ext
import fsdp_demo
from deepspeed_ext import refusals

from ..support import zero
from ..support.inside import in_ranks


def engine(stage: str, clip: float = 0.0, **names: Any) -> Any:
    torch.manual_seed(7)
    model = zero.Model()
    settings = zero.settings(stage, clip=clip)
    settings["zero_optimization"]["reduce_scatter"] = False  # at stage 3 DeepSpeed asks for it
    return zero.engine(settings, lambda _: zero.muon(model, **names), model=model)


def refused(stage: str, preset: str, clip: float = 0.0, **changes: Any) -> str:
    with pytest.raises(ValueError) as error:
        deepspeed_ext.attach(engine(stage, clip), preset, **changes)
    return str(error.value)


@in_ranks(1, 1, group=True)
def test_zero_muon_clipping_refused(me: Any) -> None:
    """Clipping that takes the update of Muon for a gradient is refused."""

    texts = {stage: refused(stage, "muloco", 1.0) for stage in ("zero1", "zero2", "zero3")}
    for stage, text in texts.items():
        kind = "DeepSpeedZeroOptimizer" + "_Stage3" * (stage == "zero3")
        assert "MuonWithAuxAdam with gradient_clipping=1 (1.0 where" in text
        assert f"{kind} clips the update of Muon" in text
        assert 'Set "gradient_clipping": 0.0' in text
        assert '"data_types": {"grad_accum_dtype": "fp32"}' in text


@pytest.mark.slow  # DeepSpeed compiles the products
@in_ranks(1, 1, group=True, timeout=120)
def test_zero_muon_update_not_clipped(me: Any) -> None:
    """The update of Muon is not clipped where clipping is allowed. Six steps move a matrix as far
    with a norm of 1 as without.
    """

    def moved(me: Any, stage: str, clip: float) -> float:
        made = engine(stage, clip)
        start = zero.whole(made)["layers.0.weight"]
        with zero.another_run():
            exchange = deepspeed_ext.attach(made, "muloco", period=2, checkpoints=False)
        zero.train(made, range(6), me.rank)
        exchange.finish()
        return float((zero.whole(made)["layers.0.weight"] - start).norm())

    warned = zero.warnings()
    moves = moved(me, "zero2", 0.0), moved(me, "wrapper", 1.0)
    assert not [line for line in warned if "DeepSpeed's Muon" in line]
    free, clipped_before = moves
    assert clipped_before == pytest.approx(free, rel=0.2)


class Held:
    """An engine as far as `refusals` looks."""

    def __init__(self, wrapper: str, optimizer: Any):
        self.optimizer = type(wrapper, (), {"optimizer": optimizer})()

    def gradient_clipping(self) -> float:
        return 0.0


EARLY = "of gradients: ZeRO has made Muon's update of them by then"
UNFIT = {
    ("full", ""): f"MuonWithAuxAdam under 'full', with channel 'gradient' {EARLY}",
    ("auto", ""): f"MuonWithAuxAdam under 'auto', with channel 'gradient' {EARLY}",
    ("muloco", "islands"): "MuonWithAuxAdam with clip_scope='islands', which would clip Muon's",
    ("desloc", ""): "'desloc', with channels exp_avg, exp_avg_sq of optimizer states",
}


@pytest.mark.parametrize("wrapper", ["BF16_Optimizer", "DeepSpeedZeroOptimizer"])
@pytest.mark.parametrize("preset, scope", UNFIT)
def test_zero_muon_presets_refused(wrapper: str, preset: str, scope: str) -> None:
    """Presets that take the update of Muon for a gradient are refused."""
    config = fsdp_demo.preset(preset, **({"clip_scope": scope} if scope else {}))
    found = list(refusals._of_muon(Held(wrapper, zero.muon(zero.Model())), config))
    assert len(found) == 1 and UNFIT[preset, scope] in found[0] and "AdamW inside" in found[0]
    assert not list(refusals._of_muon(Held(wrapper, zero.adamw(zero.Model().parameters())), config))


@in_ranks(1, 1, group=True, timeout=120)
def test_zero_muon_gradient_channels_refused(me: Any) -> None:
    """Gradient channels on Muon are refused at attach."""

    texts = [refused(stage, "full") for stage in ("zero2", "wrapper")]
    assert all(EARLY in text for text in texts)


@in_ranks(1, 1, group=True, timeout=120)
def test_zero_muon_head_named(me: Any) -> None:
    """A warning names a head that Muon steps. DeepSpeed knows heads by `lm_head` only."""
    warned = zero.warnings()
    exchange = deepspeed_ext.attach(engine("zero2", outside=("embed", "lm_head")), "muloco")
    exchange.detach()
    found = [line for line in warned if "DeepSpeed's Muon at head.weight, which" in line]
    assert len(found) == 1 and "'embed' or 'lm_head'" in found[0]
