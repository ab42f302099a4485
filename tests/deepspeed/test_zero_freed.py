"""An engine is freed when its exchange has ended."""

from __future__ import annotations

from typing import Any

import pytest

import deepspeed_ext

from ..support import zero
from ..support.freed import left, references
from ..support.inside import in_ranks


@in_ranks(2, 1, group=True)
def test_zero_frees_the_engine(me: Any) -> None:
    """Behind `finish` and `destroy` nothing is left of engine, model, optimizer and exchange, and
    an error behind the meeting of the islands leaves the engine free for another one.
    """

    def life(me: Any) -> dict[str, Any]:
        made = zero.engine(zero.settings("zero2"))
        step, clip = made.step, made.optimizer.clip_grad
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("deepspeed_ext.attaching.warn", lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                deepspeed_ext.attach(made, "diloco", period=2)
        assert made.step == step and made.optimizer.clip_grad == clip
        exchange = deepspeed_ext.attach(made, "diloco", period=2)
        zero.train(made, range(3), me.rank)
        exchange.finish()
        made.destroy()
        inner = made.optimizer.optimizer
        return references(engine=made, model=made.module, optimizer=inner, exchange=exchange)

    zero.engine(zero.settings("zero2")).destroy()  # DeepSpeed's own groups stay
    found = left(life, me)
    assert not found
