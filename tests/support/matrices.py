"""Large matrices of cases: which of them every run takes. The others are slow: `FSDP_DEMO_SLOW=1
bash tests/run.sh` takes them all.

A row stays where it is the only one of its kind: each preset, each stage, each form of island is in
some case that stays.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import pytest

KEPT = {
    # file: {test: expression found in the ids of the cases that stay; "" for a test that is slow as
    # a whole}
    "channels/test_delays_oracle.py": {
        "test_delay_follows_oracle": r"^delta-3-m|^delta-6$|eager-k|consensus-4|2bit|int4|streaming-8|parameter-9|state-4|gradient-4|demo-3|od-2",  # noqa: E501
    },
    "channels/test_presets_oracle.py": {
        "test_preset_value_codes_follow_oracle": r"-(2x2|3x1)$",
        "test_preset_bf16_compute": r"^(full|streaming_diloco)-2x2$",
        "test_preset_follows_oracle": r"^(?!local_sgd)[a-z_]+-2x2$|^(demo-[av]|released-a).*2x2$|^demo-2x2-un|^demo-4x1",  # noqa: E501
        "test_preset_muloco_measured_updates": r"^2x2",
        "test_preset_with_schedule_clip_and_decay": r"^(full|stream\w+|demo|consensus|sparse\w+)$",
    },
    "channels/test_sign_loco.py": {
        "test_sign_loco_follows_rule": r"^feedback-2x2$|^none-3x1|^late-2x2|^constant",
    },
    "checkpoint/test_cut_off.py": {
        "test_cut_off_resume_bit_for_bit": r"^diloco-0|^(full|demo|demo, "
        r"l.*|.*queue|stream.*|.*aged|muloco)-1",
        "test_cut_off_stop_at_unlike_steps": r"^(released|sparse_loco|local_sgd)$|^diloco, late",
    },
    "checkpoint/test_resharding_runs.py": dict(test_resharding_run_loss_goes_on=r"^diloco$"),
    "checkpoint/test_run_state_returning.py": {
        "test_returning_island_keeps_own_moments": r"diloco|late",
    },
    "membership/test_explorer.py": {
        # OwnView-gather-1 is another end of the same mutant
        "test_explorer_finds_mutants": r"^(?!OwnView-gather-2)",
        "test_explorer_one_late_message_two_peer_groups": r"gather",
        "test_explorer_two_messages_one_peer_group": r"kinds0",
    },
    "deepspeed/test_zero_accelerate.py": {
        "test_zero_accelerate_islands": r"zero2-attach0|zero3-attach1",
    },
    "deepspeed/test_zero_launch.py": dict(test_zero_launch_accelerate_file=""),
    "deepspeed/test_zero_mesh.py": {
        "test_zero_mesh_from_pretrained": r"^bf16",
        "test_zero_mesh_exchange_replicas_equal": r"zero1-fp32|parts-fp32|optimizer",
        "test_zero_mesh_collectives_inside_node": r"zero[23]-bf16|optimizer",
        "test_zero_mesh_unconfined_engine_refused": r"zero2|zero3|optimizer",
    },
    "deepspeed/test_zero_oracle.py": {
        "test_zero_preset_offloaded_optimizer": r"demo-zero3|desloc-zero2",
        "test_zero_preset_bf16_accumulation_and_clip": r"zero3-parts",
        "test_zero_preset_follows_oracle": r"full-zero1|demo-zero3-p|^diloco-zero1|desloc-zero3-p|streaming_diloco-zero2|sign_loco-zero3-p",  # noqa: E501
    },
    "deepspeed/test_zero_recipes.py": {
        "test_zero_recipe_mesh": r"^3$",
    },
    "deepspeed/test_zero_shards.py": {
        "test_zero_skip_by_one_replica": r"^full-(zero1|wrapper)$|^diloco-zero3$",  # noqa: E501
        "test_zero_skip_by_loop_equals_engine": r"zero1-full|zero2-diloco|parts-demo|offload",  # noqa: E501
        "test_zero_shards_preset_bytes_planned": r"^(local_adam|stride|sparse_loco)-zero3-parts",
        "test_zero_shards_zero3_equals_fsdp2": r"^demo",
        "test_zero_attach_again_after_finish": r"parts|wrapper",
        "test_zero_shards_make_up_parameters": r"False-(zero[13]|wrapper|zero2-)|True-z.*parts",
        "test_zero_shards_start_of_island_0": r"^zero1$|parts",
        "test_zero_outer_parameters_and_finish": r"changes0-zero2|changes1-zero3-parts",
    },
    "deepspeed/test_zero_take_over.py": {
        "test_zero_take_over_ends_equal": r"^0-zero3-parts|^1-zero2-demo-True|^1-.*oco-False",
        "test_zero_take_over_trainer": r"zero3",
    },
    "deepspeed/test_zero_wrong_uses.py": {
        "test_zero_lost_steps_and_switched_parameters": r"parts|wrapper",
        "test_zero_write_behind_an_exchange_is_named": r"zero1|parts",
    },
    "deepspeed/test_zero_trainer.py": {
        "test_zero_trainer_islands_train_one_model": r"zero3-parts-demo",
    },
    "deepspeed/test_zero_trainer_resume.py": {
        "test_zero_trainer_resume_bit_for_bit": r"sub",
        "test_zero_trainer_sigterm_saves_and_resumes": r"zero2-demo",
        "test_zero_trainer_recipe_saves_and_resumes": r"zero3",
    },
    "exchange/test_exchange_oracle.py": {
        "test_resume_equals_uninterrupted_run": r"^(demo|diloco-queue|streaming_diloco)$",  # noqa: E501
        "test_copies_differ_between_islands": r"^demo|^diloco-procs0",
        "test_sharding_elementwise_presets_equal": r"diloco",
    },
    "exchange/test_memory.py": {
        "test_memory_plan_equals_held": r"^(full|desloc|diloco|streaming_diloco|demo|random|muloco|local_sgd)-2|late|queued|averaged",  # noqa: E501
    },
    "exchange/test_norm_limit.py": {
        "test_norm_limit_leaves_out_contribution": r"^(demo late|diloco queue|streaming_diloco|s\w+_loco)-3$|^demo-2$",  # noqa: E501
        "test_norm_limit_healthy_run_unchanged": r"^demo late|int8|^(full|streaming_diloco|sign_loco)$",  # noqa: E501
        "test_norm_limit_nan_in_accumulator": r"^demo|decoupled_momentum-12|sparse_loco-1$",
    },
    "exchange/test_plan.py": dict(test_bytes_plan_equals_meter=r"^2-1"),
    "integrations/test_accelerate_features.py": {
        "test_accelerate_compile_equals_eager": r"regional",
        "test_accelerate_bf16_exchanges_fp32": r"demo",
    },
    "integrations/test_export.py": {
        "test_export_of_trainer_mesh": r"diloco",
        "test_export_has_evaluated_loss": r"whole-diloco|fsdp2-streaming",
    },
    "integrations/test_trainer.py": {
        "test_trainer_presets_with_own_optimizer": r"muloco",
        "test_trainer_sigterm_saves_and_resumes": r"^decoupled|^streaming",
    },
    "integrations/test_trainer_mesh.py": {
        "test_trainer_mesh_resume_bit_for_bit": r"^decoupled",
        "test_trainer_mesh_sends_payloads_only": r"demo",
    },
    "integrations/test_trainer_features.py": {
        "test_trainer_recipe_saves_and_resumes": r"diloco",
        "test_trainer_features_beside_exchange": r"^streaming_diloco",
    },
    "integrations/test_trainer_resume.py": {
        "test_trainer_resume_after_lost_island": r"fsdp2",
        "test_trainer_resume_other_number_of_islands": r"3-demo|1-diloco",
        "test_trainer_resume_bit_for_bit": r"diloco, in flight",
    },
    "integrations/test_trainer_saves.py": {
        "test_trainer_save_full_disk_third_failure": r"^False-model$|^True-",
    },
    "integrations/test_trainer_take_over.py": {
        "test_trainer_take_over_gradient_preset": r"auto|checkpoint",
        "test_trainer_take_over_ends_equal": r"fsdp2-diloco",
    },
    "launch/test_rehearse.py": {
        "test_rehearse_by_accelerate_runs_every_rank": "",
        "test_rehearse_by_torchrun_runs_every_rank": "",
        "test_rehearse_has_a_store_with_a_file": "",
    },
    "recipes/test_launch_files.py": dict(
        test_launch_file_restarts_a_lost_island=r"slurm", test_slurm_islands_on_two_nodes=""
    ),
    "recipes/test_pretrain_resume.py": {
        "test_pretrain_resume_equals_the_uninterrupted_run": r"^sources-2$",
        "test_pretrain_resume_after_a_stop": r"^2$",
        "test_pretrain_resume_with_other_numbers": r"^3-2$",
        "test_pretrain_resume_with_a_message_under_way": "",
        "test_pretrain_save_async_writes_the_same": "",
    },
    "deepspeed/test_zero_reset.py": dict(test_zero_reset=r"^zero3-parts$"),
    "deepspeed/test_zero_resume.py": {
        "test_zero_resume_bit_for_bit": r"zero1-demo|zero2|parts-diloco",
        "test_zero_resume_weights_alone": r"options1",
    },
    "deepspeed/test_zero_fresh_state.py": dict(test_zero_fresh_state_one_replica=r"zero1|zero3"),
    "deepspeed/test_zero_trainer_mesh.py": {
        "test_zero_trainer_mesh_resume_bit_for_bit": r"zero3",
        "test_zero_trainer_mesh_sends_payloads_only": r"zero1|zero3",
    },
    "exchange/test_elastic_join.py": {
        "test_elastic_third_island_joins": r"^full-2$",
        "test_elastic_newcomer_changes_donor": r"^full-1-snapshot|^diloco-1-message|^full-2",
    },
    "exchange/test_guard.py": {
        "test_peer_loss_saves_and_exits_75": r"killed inside|payload|2x2, one rank",
    },
    "exchange/test_survivors.py": dict(test_survivors_train_on=r"^(demo|streaming_diloco)$"),
    "elastic/test_lost_islands.py": {
        "test_lost_island_second_killed_in_the_change": r"False-Freeze|True-Adopted",
        "test_lost_island_killed_at_each_piece": r"some",
        "test_lost_island_two_at_once": r"^4$",
        "test_lost_island_killed_within_a_long_message": r"some",
        "test_lost_island_one_rank_then_its_sibling": r"1",
    },
    "peers/test_dead_connection.py": {
        "test_connection_dead_among_living_ones_is_noticed": r"^for (messages|words)$",
    },
    "deepspeed/test_zero_newcomer.py": dict(test_zero_newcomer_equals_other_engines=r"zero3|zero2"),
    "exchange/test_newcomer.py": {
        "test_newcomer_state_equals_others": (
            r"^demo(-(adamw|late|rates))?$|^(diloco|released|streaming.*|sign_loco)$"
        ),
        "test_newcomer_copies_of_a_shard": r"(adamw|late)-two|queue-one",
    },
    "elastic/test_lossy_links.py": dict(
        test_lossy_link_who_goes_on=r"^one of three (is cut|is silent|hears nobody)$|two of four"
    ),
    "exchange/test_not_finite.py": {
        "test_nan_one_shard_leaves_out_island": r"gradient-(demo|diloco)|parameter-(full|decoupled)",  # noqa: E501
        "test_nan_one_gradient_element": r"^demo late|queue|norm|^(full clipped|demo|diloco|streaming_diloco|released|sparse_loco|local_adam)$",  # noqa: E501
        "test_nan_parameters_healed_by_others": r"late|^(released|streaming_diloco)$",
    },
    "channels/test_buffers.py": {
        "test_buffers_equal_at_end": r"^(full|diloco late|decoupled_momentum|released|local_sgd|streaming_diloco)$",  # noqa: E501
        "test_buffers_mask_not_averaged": r"^-inf-demo$|^-3.*-diloco$",
    },
    "channels/test_device_path.py": {
        "test_device_no_wait_and_same_bits": r"^(full|demo|random int8|stride|streaming_diloco|.*dct|sparse_loco|desloc|muloco)$|[24]bi|int4|late|host|demo, b",  # noqa: E501
        "test_device_exchange_steps_never_wait": r"^(demo late|full|diloco)-",
    },
    "elastic/test_early_part.py": dict(test_early_part_of_a_leaver_counts=r"2-True|3|4-False"),
    "exchange/test_copies.py": dict(test_copies_unsharded_root_warned=r"True-diloco|False-demo"),
    "exchange/test_digest.py": {
        "test_digest_flipped_bit_names_island": r"^(diloco|streaming_diloco)-3$|^demo",
        "test_same_rows_warned_once": r"^(demo|full|diloco)$",
    },
    "exchange/test_finish.py": {
        "test_finish_inside_round_oracle": r"^(diloco|sparse_loco|streaming.*queue)-18|^(diloco|.*kept|streaming-13)-20|^delta-4-19",  # noqa: E501
    },
    "exchange/test_frozen_parameters.py": {
        "test_frozen_parameters_moved_named_once": r"full-True|diloco-False",
    },
    "exchange/test_ledger.py": {
        "test_ledger_rows_hold_all_bytes": r"^2-|^3-streaming",
    },
    "exchange/test_load_state_dict.py": {
        "test_load_state_dict_all_islands": r"^(full|demo|diloco), in|^consensus$",
    },
    "exchange/test_out_of_step.py": {
        "test_out_of_step_early_finish": r"late|^(full|diloco|streaming_diloco|local_sgd)$",
    },
    "exchange/test_reset.py": {
        "test_reset_presets": r"^(demo-late|desloc|streaming_diloco|sparse_loco|diloco, bf16)$",
        "test_reset_while_island_joins": r"^streaming_diloco$",
        "test_reset_relora": r"^(diloco|full-late)$",
        "test_reset_resume": r"^streaming_diloco$",
        "test_reset_island_lost": r"^after$",
    },
    "exchange/test_resume.py": {
        "test_resume_beside_fresh_island": r"flight",
        "test_resume_through_file_bit_for_bit": r"flight|^(demo|consensus)$",
    },
    "exchange/test_stop_together.py": {
        "test_stop_resume_equals_uninterrupted_run": r"^\{0: 9|demo",
    },
    "hosts/test_foreign_tensors.py": {
        "test_foreign_tensor_is_left_alone": r"True-full|False-diloco",
    },
    "integrations/test_accelerate.py": {
        "test_accelerate_gradient_mean_over_island": r"^True-bf16|^True-no-True|^False-no",
    },
}


def thin(items: Iterable[pytest.Item]) -> None:
    """Mark the cases that not every run takes as slow."""
    for item in items:
        path, _, name = item.nodeid.partition("::")
        name, _, case = name.removesuffix("]").partition("[")
        kept = KEPT.get(path.removeprefix("tests/"), {}).get(name)
        if kept and not case:
            raise pytest.UsageError(
                f"{name} has no cases: its row in tests/support/matrices.py goes"
            )
        if kept is not None and not (kept and re.search(kept, case)):
            item.add_marker("slow")
