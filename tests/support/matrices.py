"""Large matrices of cases: which of them every run takes. The others are slow: `FSDP_DEMO_SLOW=1 bash tests/run.sh` takes them all.

A row stays where it is the only one of its kind: each preset, each stage, each form of island is in some case that stays.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import pytest

KEPT = {
    # file::test: expression found in the ids of the cases that stay; "" for a test that is slow as a whole
    "channels/test_presets_oracle.py::test_follows_the_oracle": r"-2x2$|unsharded|^(full|demo|diloco|random)-4x1",
    "channels/test_presets_oracle.py::test_coded_values_follow_the_oracle": r"-(2x1|2x2|3x1)$",
    "channels/test_presets_oracle.py::test_computing_in_bf16": r"-2x2$",
    "channels/test_presets_oracle.py::test_muloco_on_measured_updates": r"^2x2",
    "checkpoint/test_cut_off.py::test_what_was_cut_off_is_made_up_for_bit_for_bit": r"-1$|^(demo|diloco)-0$",
    "checkpoint/test_resharding_runs.py::test_the_loss_goes_on": r"^(demo|diloco)$",
    "deepspeed/test_zero_accelerate.py::test_islands": r"zero2-attach0|zero3-attach1",
    "deepspeed/test_zero_launch.py::test_the_accelerate_file_shards_a_trainer_script": "",
    "deepspeed/test_zero_mesh.py::test_from_pretrained_loads_every_replica_and_cuts_inside_the_node": r"^bf16",
    "deepspeed/test_zero_mesh.py::test_the_trainer_is_confined_by_one_line": r"^zero3",
    "deepspeed/test_zero_oracle.py::test_an_offloaded_optimizer_follows_the_oracle": r"full-zero2|demo-zero3|desloc-zero2",
    "deepspeed/test_zero_oracle.py::test_bf16_groups_accumulation_and_clipping_follow_the_oracle": r"^full|zero3-parts",
    "deepspeed/test_zero_oracle.py::test_follows_the_oracle": r"zero3-parts|^(full|demo)-|^diloco-zero1$|^streaming_diloco-zero2$",
    "deepspeed/test_zero_recipes.py::test_every_stage_learns_what_fsdp2_learns": "",
    "deepspeed/test_zero_recipes.py::test_mesh_keeps_zero_inside_the_node": r"^3$",
    "deepspeed/test_zero_shards.py::test_every_preset_counts_the_bytes_it_planned_and_ends_with_one_model": r"zero3-parts",
    "deepspeed/test_zero_take_over.py::test_both_end_equal": r"^1-|zero3-parts",
    "deepspeed/test_zero_trainer_resume.py::test_resume_goes_on_bit_for_bit": r"zero1|zero3, sub|in flight",
    "deepspeed/test_zero_trainer_resume.py::test_the_recipe_trains_saves_and_resumes": r"zero3",
    "exchange/test_exchange_oracle.py::test_islands_with_different_numbers_of_copies": r"procs0|^demo",
    "exchange/test_plan.py::test_the_plan_is_what_the_meter_counts": r"^2-1",
    "integrations/test_accelerate_features.py::test_compiled_model_trains_as_the_eager_one": r"regional",
    "integrations/test_trainer_mesh.py::test_a_mesh_resumes_bit_for_bit": r"^(diloco|decoupled)",
    "integrations/test_trainer_parts.py::test_the_recipe_trains_saves_and_resumes": r"diloco",
    "integrations/test_trainer_resume.py::test_every_preset_goes_on_bit_for_bit": r"flight|fsdp2|released|^(sparse_loco|muloco)$",
    "integrations/test_trainer_resume.py::test_an_island_more_or_fewer": r"3-|1-diloco",
    "integrations/test_trainer_take_over.py::test_a_gradient_preset_goes_on_as_if_nothing_had_been_lost": r"auto|checkpoint",
    "integrations/test_trainer_take_over.py::test_both_end_equal": r"fsdp2",
    "launch/test_cli.py::test_rehearse_by_accelerate_runs_every_rank_of_every_island": "",
    "recipes/test_launch_recipes.py::test_slurm_islands_on_two_nodes": "",
    "recipes/test_pretrain_resume.py::test_a_resumed_run_is_the_uninterrupted_one": r"-2$",
    "recipes/test_pretrain_resume.py::test_a_run_that_was_told_to_stop_goes_on": r"^2$",
    "recipes/test_pretrain_resume.py::test_other_numbers_go_on_without_a_jump": r"^(3-2|1-2)$",
    "recipes/test_quickstart.py::test_an_interrupted_run_goes_on_bit_for_bit": r"^diloco$",
}


def thin(items: Iterable[pytest.Item]) -> None:
    """Mark the cases that not every run takes as slow."""
    for item in items:
        path, _, name = item.nodeid.partition("::")
        kept = KEPT.get(f"{path.removeprefix('tests/')}::{name.partition('[')[0]}")
        if kept is not None and (not kept or not re.search(kept, name.partition("[")[2].removesuffix("]"))):
            item.add_marker("slow")
