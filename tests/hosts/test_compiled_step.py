"""A step of the optimizer under torch.compile."""

from __future__ import annotations

import torch

from fsdp_demo.hosts.step_hooks import OptimizerStepHooks, TickCalls


def test_compiled_step_calls_hooks_untraced() -> None:
    """Hooks of a compiled step run untraced. Traced, the exchange was compiled with the step: that
    took some 20 s, and its bits were the compiler's.
    """
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[tuple[str, bool]] = []

    def before() -> bool:
        seen.append(("before", torch.compiler.is_compiling()))
        return False

    def after() -> None:
        seen.append(("after", torch.compiler.is_compiling()))

    hooks = OptimizerStepHooks(
        [optimizer], TickCalls(before, after, lambda: None, lambda: True), lambda _: None
    )
    hooks.start()
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        step()
    hooks.stop()
    assert seen == [("before", False), ("after", False)] * 2
