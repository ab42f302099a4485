"""What a replica that takes over needs of DeepSpeed: the engine's counters and scheduler at their
place, and the donor's `client_state`.
"""

from __future__ import annotations

from typing import Any

from fsdp_demo.checkpoint.taking_over import forward, small

OF_DEEPSPEED = {
    "buffer_names",
    "param_shapes",
    "frozen_param_shapes",
    "shared_params",
    "frozen_param_fragments",
    "ds_config",
    "ds_version",
}
OF_DEEPSPEED |= {
    "optimizer",
    "lr_scheduler",
    "sparse_tensor_module_names",
    "global_samples",
    "checkpoint_parallel_dimensions",
}
"""What deepspeed 0.19.8 leaves in the `client_state` that it returns, beside what the user has put
there.
"""


def advance(engine: Any, step: int) -> None:
    """Let an engine that has taken over go on from `step`: its counters and its own scheduler, as
    if it had taken the steps up to there.
    """
    taken = step - engine.global_steps
    if not taken:
        return
    engine.global_steps = step
    engine.global_samples += taken * engine.train_batch_size()
    if engine.lr_scheduler is not None:
        forward(engine.lr_scheduler, taken)


def of_users(client: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """What users have put into a `client_state`, as far as a note to another replica can hold it;
    and the names of the rest.
    """
    told = small({key: value for key, value in client.items() if key not in OF_DEEPSPEED})
    return told, sorted(str(key) for key in client if key not in told and key not in OF_DEEPSPEED)
