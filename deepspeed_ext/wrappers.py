"""The three ZeRO wrappers of DeepSpeed as `Partitions`: what each calls its masters, where it puts
things, how it copies them.

Source of the names: deepspeed 0.19.8, `runtime/zero/stage_1_and_2.py`, `runtime/zero/stage3.py`,
`runtime/bf16_optimizer.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

from deepspeed import __version__ as VERSION
from deepspeed import comm
from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID
from torch import Tensor

from .partitions import Fragment, Partitions


class _ByParameter(dict[Any, str]):
    def __missing__(self, p: Any) -> str:
        raise ValueError(
            f"the optimizer steps a parameter of shape {tuple(getattr(p, 'ds_shape', p.shape))} "
            "that is not in the model of the engine: put it into the module that "
            "deepspeed.initialize gets, or take it out of the optimizer"
        )


def _names(engine: Any) -> dict[Any, str]:
    """The names of the parameters of the model; a ValueError for any other key."""
    return _ByParameter({p: n for n, p in engine.module.named_parameters()})


class FlatPartitions(Partitions):
    """Masters of stages 1 and 2 and of BF16_Optimizer: the tensors of a parameter group one after
    the other, cut into one equal part per rank.
    """

    def _offsets(self, index: int) -> dict[int, int]:
        """Where each parameter of a group (by id) begins in its flat tensor, in elements."""
        raise NotImplementedError

    def fragments(self) -> list[Fragment]:
        names, out, groups = _names(self.engine), [], getattr(self.zero, self.tensors)
        for i, (group, master) in enumerate(zip(groups, self.masters(), strict=True)):
            lo = comm.get_rank(group=self.zero.real_dp_process_group[i]) * master.numel()
            offsets = self._offsets(i)
            for p in group:
                begin = offsets[id(p)]
                first, last = max(begin, lo), min(begin + p.numel(), lo + master.numel())
                start, offset, numel = (
                    (first - begin, first - lo, last - first) if first < last else (0, 0, 0)
                )
                out.append(Fragment(i, names[p], tuple(p.shape), start, offset, numel))
        return out

    def computed_with(self, fragment: Fragment, parameter: Any) -> Tensor:
        whole: Tensor = parameter.detach()
        return whole.reshape(-1)[fragment.start : fragment.start + fragment.numel]

    def push(self) -> None:
        self.zero.update_lp_params()


class Zero12Partitions(FlatPartitions):
    """The masters of `DeepSpeedZeroOptimizer`: ZeRO-1 and ZeRO-2."""

    flat, tensors = "single_partition_of_fp32_groups", "bit16_groups"
    needs = (
        "_optimizer_step",
        "parallel_partitioned_bit16_groups",
        "round_robin_bit16_groups",
        "round_robin_bit16_offsets",
        "update_lp_params",
    )

    def _offsets(self, index: int) -> dict[int, int]:
        """With round_robin_gradients the order is not that of the group. DeepSpeed's `_hp_mapping`
        does not know it.
        """
        group = self.zero.round_robin_bit16_groups[index]
        offsets = self.zero.round_robin_bit16_offsets[index]
        return {id(p): int(offset) for p, offset in zip(group, offsets, strict=True)}

    @property
    def offloads(self) -> bool:
        return bool(self.zero.cpu_offload)

    def drop_gradients(self) -> None:
        self.zero.zero_grad(set_to_none=True)
        self.zero.micro_step_id = INITIAL_MICRO_STEP_ID
        if self.offloads:
            self.zero._offload_accumulated_param_ids = set()
            self.zero.reset_cpu_buffers()
        for i in self.zero.averaged_gradients:
            self.zero.averaged_gradients[i] = self.zero.all_grad_tensors[i] = None

    def _publish(self, index: int) -> None:
        place = comm.get_rank(group=self.zero.real_dp_process_group[index])
        part = self.zero.parallel_partitioned_bit16_groups[index][place]
        part.data.copy_(self.masters()[index].data)


class Zero3Partitions(Partitions):
    """The masters of `DeepSpeedZeroOptimizer_Stage3`, ZeRO-3: every tensor of a sub-group is cut
    into equal parts of its elements.
    """

    flat, tensors = "fp32_partitioned_groups_flat", "fp16_groups"
    needs = (
        "_optimizer_step",
        "sub_group_to_group_id",
        "_reassign_or_swap_out_partitioned_parameters",
    )

    def group_of(self, index: int) -> dict[str, Any]:
        group: dict[str, Any] = self.inner.param_groups[self.zero.sub_group_to_group_id[index]]
        return group

    def fragments(self) -> list[Fragment]:
        names, out = _names(self.engine), []
        for i, group in enumerate(self.zero.fp16_groups):
            offset = 0
            for p in group:
                part = p.partition_numel()
                start = self.zero._get_param_partition_rank(p) * part
                # the last ranks' parts may be padding
                valid = max(0, min(part, p.ds_numel - start))
                first, place = (start, offset) if valid else (0, 0)
                out.append(Fragment(i, names[p], tuple(p.ds_shape), first, place, valid))
                offset += part
        return out

    def computed_with(self, fragment: Fragment, parameter: Any) -> Tensor:
        part: Tensor = parameter.ds_tensor
        return part.detach()[: fragment.numel]

    def push(self) -> None:
        # small ones that stay gathered would not be gathered again
        self.zero._partition_all_parameters()
        for i in range(len(self.zero.fp16_groups)):
            self._publish(i)
        if self.zero.persistent_parameters:
            self.zero.persistent_parameters[0].all_gather(self.zero.persistent_parameters)
        self.zero.invalidate_secondary_tensor()

    @property
    def offloads(self) -> bool:
        return bool(self.zero.offload_optimizer)

    def drop_gradients(self) -> None:
        self.zero._overflow_clean_up(self.zero.loss_scale)

    def _publish(self, index: int) -> None:
        self.zero._reassign_or_swap_out_partitioned_parameters(index)


class Bf16Partitions(FlatPartitions):
    """The masters of `BF16_Optimizer`, ZeRO-1 in bf16, which steps its inner optimizer once."""

    _hook: Any = None

    flat, tensors, needs = "fp32_groups_flat_partition", "bf16_groups", ("update_lp_params",)

    def _offsets(self, index: int) -> dict[int, int]:
        group = self.zero.bf16_groups[index]
        offsets = accumulate([0, *(p.numel() for p in group[:-1])])
        return {id(p): offset for p, offset in zip(group, offsets, strict=True)}

    def drop_gradients(self) -> None:
        self.zero.clear_hp_grads()
        self.zero.clear_lp_grads()

    def step(self) -> None:
        self._alone = True
        try:
            self.inner.step()
        finally:
            self._alone = False
        self.free_gradients()

    def step_on_zeros(self) -> None:
        for i in range(len(self.masters())):
            self.zero_gradient(i)
        self.inner.step()
        self.free_gradients()

    def intercept(self, before: Callable[[], None], together: Callable[[], bool]) -> None:
        self._alone = False
        self._hook = self.inner.register_step_pre_hook(lambda *_: None if self._alone else before())

    def release(self) -> bool:
        hook, self._hook = self._hook, None
        if hook is not None:
            hook.remove()
        return hook is not None


KINDS: dict[str, type[Partitions]] = {
    "BF16_Optimizer": Bf16Partitions,
    "DeepSpeedZeroOptimizer": Zero12Partitions,
    "DeepSpeedZeroOptimizer_Stage3": Zero3Partitions,
}
"""By the name of DeepSpeed's class."""


def adapter(engine: Any) -> Partitions:
    """The view (`Partitions`) of an engine's ZeRO wrapper. Raises ValueError: the engine shards
    nothing, or has a wrapper that is not known here; RuntimeError: a wrapper without the names this
    was written for.
    """
    zero = engine.optimizer
    kind = next((KINDS[c.__name__] for c in type(zero).__mro__ if c.__name__ in KINDS), None)
    if kind is None:
        raise ValueError(
            f"this engine's optimizer is {type(zero).__name__}, without ZeRO: set "
            "zero_optimization.stage to 1, 2 or 3 in DeepSpeed's "
            "configuration, or train without DeepSpeed and call fsdp_demo.attach(optimizer, ...)"
        )
    wanted = (kind.flat, kind.tensors, *kind.needs, "optimizer", "clip_grad")
    lacking = [name for name in wanted if not hasattr(zero, name)]
    if lacking:
        raise RuntimeError(
            f"{type(zero).__name__} of deepspeed {VERSION} has no {', '.join(lacking)}, which "
            "deepspeed_ext needs: take deepspeed>=0.19,<0.20 (tried: 0.19.8)"
        )
    return kind(engine)
