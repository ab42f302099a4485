"""One view of DeepSpeed's three ZeRO wrappers: flat fp32 masters, what lies in them, and the inner
step.

| wrapper | stages | a master is | the inner optimizer steps |
|---|---|---|---|
| `DeepSpeedZeroOptimizer` | 1, 2 | a rank's part of a parameter group | once per group |
| `DeepSpeedZeroOptimizer_Stage3` | 3 | a rank's parts of a sub-group's tensors | once per sub-group |
| `BF16_Optimizer` | 1, bf16 with fp32 accumulation | a rank's part of a parameter group | once |

The first two make the gradient of one master, step it and free it before they turn to the next. A
gradient channel that sent one message per master would pay a round trip for each; so the steps of
all but the last are held back until the last one's gradient is there. The cost is that all fp32
gradients of this rank exist at once: 4 bytes per element it holds instead of those of the largest
master.

Source of the names: deepspeed 0.19.8, `runtime/zero/stage_1_and_2.py`, `runtime/zero/stage3.py`,
`runtime/bf16_optimizer.py`. They are private; `wrappers.adapter` refuses wrappers that lack them.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed import __version__ as VERSION
from torch import Tensor

from .all_ranks import replica

__all__ = ["Fragment", "Partitions"]


@dataclass(frozen=True)
class Fragment:
    """What a master holds of one parameter: elements start..start + numel of the flattened tensor,
    at `offset` of the master.

    numel is 0 where this rank holds nothing of it.
    """

    master: int
    name: str
    shape: tuple[int, ...]
    start: int
    offset: int
    numel: int


class Partitions:
    """The ZeRO wrapper of one engine; `wrappers.adapter(engine)` makes the right kind.

    Args:
        engine: what `deepspeed.initialize` returned.

    Attributes:
        zero: the wrapper, `engine.optimizer`. inner: the optimizer that it steps.
        flat, tensors: what the wrapper calls the masters, and the parameters of each.
        needs: what else it must have.
    """

    flat = tensors = ""
    needs: tuple[str, ...] = ()

    def __init__(self, engine: Any):
        self.engine, self.zero = engine, engine.optimizer
        self._held: list[Tensor | None] = []
        grads = [m.grad for m in self.masters()] if self.offloads else []
        self._buffers = [g for g in grads if g is not None]

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The optimizer that steps the masters."""
        inner: torch.optim.Optimizer = self.zero.optimizer
        return inner

    def masters(self) -> list[Tensor]:
        """The flat fp32 partitions of this rank [numel with padding], as the wrapper has them."""
        return list(getattr(self.zero, self.flat))

    def group_of(self, index: int) -> dict[str, Any]:
        """The parameter group of the inner optimizer that holds a master."""
        group: dict[str, Any] = self.inner.param_groups[index]
        return group

    def fragments(self) -> list[Fragment]:
        """The parts of all trained parameters in the masters, empty ones too, in their order."""
        raise NotImplementedError

    def computed_with(self, fragment: Fragment, parameter: Any) -> Tensor:
        """A fragment of the parameter that the model computes with: [numel], in its dtype."""
        raise NotImplementedError

    def check(self) -> None:
        """Compare the masters with the parameters that the model computes with, to see whether
        DeepSpeed lays partitions out as is assumed here. All ranks of the island call it together.

        Raises:
            RuntimeError: on all of them, if they are not, or if somebody has changed one and not
                the other.
        """
        masters, parameters = self.masters(), dict(self.engine.module.named_parameters())
        wrong = []
        for f in self.fragments():
            low = self.computed_with(f, parameters[f.name])
            part = masters[f.master].detach()[f.offset : f.offset + f.numel]
            if not torch.equal(part.to(low), low):
                wrong.append(f"of {f.name}, from element {f.start} on,")
        if replica(self.engine).any(bool(wrong)):
            where = wrong[0] if wrong else "of a parameter on another rank"
            raise RuntimeError(
                f"the fp32 master {where} is not what the model computes with: load weights "
                "before deepspeed.initialize or through engine.load_checkpoint, take a step after "
                f"safe_set_full_fp32_param; else deepspeed {VERSION} lays partitions out in a way "
                "that is not known here (tried: 0.19.8)"
            )

    def push(self) -> None:
        """Copy the masters to the model's parameters; all ranks of the island call it together."""
        raise NotImplementedError

    def step(self) -> None:
        """Step every master on the gradient that it has; one without a gradient stays as it is."""
        for i in range(len(self.masters())):
            self._step_one(i)
        self.free_gradients()

    def _step_one(self, index: int) -> None:
        type(self.zero)._optimizer_step(self.zero, index)

    def step_on_zeros(self) -> None:
        """Step every master on a gradient of zeros, one at a time."""
        for i in range(len(self.masters())):
            self.zero_gradient(i)
            self._step_one(i)
            self.free_gradients()

    def zero_gradient(self, index: int) -> Tensor:
        """Give a master a gradient of zeros, in the wrapper's own buffer where it keeps one."""
        master = self.masters()[index]
        master.grad = self._buffers[index].zero_() if self._buffers else torch.zeros_like(master)
        return master.grad

    def free_gradients(self) -> None:
        """After a step, remove the gradients of the masters, or zero the buffers that the wrapper
        keeps for them: a backward writes only some, and what the exchange has left in the others
        would be taken for gradients.
        """
        for i, master in enumerate(self.masters()):
            master.grad = self._buffers[i].zero_() if self._buffers else None

    def drop_gradients(self) -> None:
        """Forget the gradients since the last step, as the wrapper does when it skips one."""
        raise NotImplementedError

    def clip_again(self) -> None:
        """Let the engine clip by the norm of its configuration."""
        self.zero.clip_grad = self.engine.gradient_clipping()

    def intercept(self, before: Callable[[], None], together: Callable[[], bool]) -> None:
        """Run `before` once in every step of the wrapper, ahead of the inner optimizer.

        Args:
            together: whether it wants the gradients of all masters at once, asked in every step.
        """
        self._before, self._together = before, together
        self.zero._optimizer_step = self._intercepted

    def release(self) -> bool:
        """Undo `intercept`; returns whether there was something to undo."""
        mine = self.zero.__dict__.get("_optimizer_step") == self._intercepted
        if mine:
            del self.zero._optimizer_step
        return mine

    def _intercepted(self, index: int) -> None:
        """Replacement of the wrapper's `_optimizer_step`: hold back all but the last master."""
        masters = self.masters()
        last = len(masters) - 1
        if not self._together():
            if index == 0:
                self._before()
            self._step_one(index)
            return
        if index == 0:
            self._held.clear()  # of a step that failed
        self._held.append(masters[index].grad)
        if index < last:
            return
        for master, grad in zip(masters, self._held, strict=True):
            master.grad = grad
        self._held.clear()
        self._before()
        for i in range(len(masters)):
            self._step_one(i)
            if i < last:
                self._publish(i)
        self.free_gradients()

    def _publish(self, index: int) -> None:
        """Copy a master to this rank's low-precision part. The wrapper has done so before the step
        of a master that was held back.
        """
        raise NotImplementedError

    @property
    def offloads(self) -> bool:
        """Whether masters live in host memory, with gradient buffers that the wrapper keeps."""
        return False
