"""recipes/pretrain_deepspeed.py and recipes/deepspeed/*.json, run on a CPU."""

import json
import logging
import os
import re
import signal
import sys
from pathlib import Path

import datasets
import deepspeed_parts
import pretrain_deepspeed
import pytest
import report
import torch
from transformers import TrainingArguments

from ..support import zero  # noqa: F401 (no compiler; imported before the first fork)
from ..support.inside import in_ranks

RECIPES = Path(__file__).parents[2] / "recipes"
COMMON = (
    "--sequence-length 16 --batch-size 2 --eval-every 0 --eval-batches 3 --log-every 1 "
    "--warmup-steps 1 --lr 0.004"
).split()


@pytest.fixture
def source(tmp_path, everywhere):
    """Model and rows, as options of the recipes."""
    config = json.loads((RECIPES / "models" / "tiny.json").read_text())
    config |= dict(
        hidden_size=64, intermediate_size=96, num_attention_heads=2, num_key_value_heads=1
    )
    (tmp_path / "model.json").write_text(json.dumps(config))
    # 4 held out
    rows = [[i % 256, i // 256, *((7 * i + 3 * j) % 250 for j in range(14))] for i in range(84)]
    everywhere.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.Dataset.from_dict({"input_ids": rows}).to_parquet(str(tmp_path / "rows.parquet"))
    return ["--model", str(tmp_path / "model.json"), "--data", str(tmp_path / "rows.parquet")]


def main_of(rank, script, *options):
    """A run of a recipe in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report.Report, "draw", lambda *_: None)
        patch.setattr(sys, "argv", [f"{script.__name__}.py", *COMMON, *map(str, options)])
        script.main()


def json_of(stage):
    return RECIPES / "deepspeed" / f"zero{stage}.json"


def told(folder, island=0):
    """Summary and lines of an island."""
    home = folder / f"island{island}"
    lines = (home / "metrics.jsonl").read_text().splitlines()
    return json.loads((home / "summary.json").read_text()), [json.loads(line) for line in lines]


def losses(folder, island):
    return [line["loss"] for line in told(folder, island)[1]]


SAME = ("bytes_sent_per_island", "islands", "procs", "tokens", "exchanges", "digests_equal")


def player(run_ranks, *words):
    """`play(script, folder, *more)`: the script on two islands of two ranks, with these words."""

    def play(script, folder, *more, **options):
        args = (script, *words, *more, "--output", folder)
        run_ranks(main_of, args=args, timeout=120, **options)

    return play


@in_ranks(1, 2)
def test_zero_recipe_counters_as_json(me):
    """Counters of unlike lengths travel as JSON, to the last bit."""
    world = object.__new__(deepspeed_parts.World)
    world.num_processes, world.device = me.procs, torch.device("cpu")
    every = [dict(rank=n, losses=[1e-300, float("inf")] * n, name="é" * 3 * n) for n in range(2)]
    assert world.listed(every[me.proc]) == every


# -- pretrain_deepspeed.py -----------------------------------------------------------------------


@pytest.mark.parametrize("stage", [2, 3])
def test_zero_recipe_mesh(run_ranks, tmp_path, source, stage):
    """The recipe on a mesh keeps ZeRO inside the node. One world of two nodes with two ranks: the
    rows of all are shared, nothing but payloads is counted.
    """
    words = f"--exchange demo --steps 4 --save-every 4 --deepspeed {json_of(stage)}".split()
    play = player(run_ranks, *source, *words)
    world = dict(islands=1, procs=4, env={"ISLAND_COUNT": "", "LOCAL_WORLD_SIZE": "2"})
    play(pretrain_deepspeed, tmp_path / "mesh", "--mesh", 2, **world)
    play(pretrain_deepspeed, tmp_path / "islands")
    summary = json.loads((tmp_path / "mesh" / "summary.json").read_text())
    expected = told(tmp_path / "islands")[0]
    for key in SAME:
        assert summary[key] == expected[key], key
    assert summary["digests_equal"] is True
    assert summary["loss_start"] == pytest.approx(expected["loss_start"], rel=1e-6)
    for n in range(2):
        assert (tmp_path / "mesh" / f"island{n}" / "latest").read_text() == "global_step4"


def test_zero_recipe_stop_saves_and_resumes(run_ranks, tmp_path, source):
    """A run of the recipe that is told to stop saves and goes on. SIGTERM to all ranks in their
    third step.
    """
    words = f"--exchange demo --steps 6 --schedule constant --deepspeed {json_of(1)}".split()
    play = player(run_ranks, *source, *words)

    def stopped(rank):
        steps = report.Report.optimizer_step

        def count(self, lr):
            steps(self, lr)
            if self.step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

        report.Report.optimizer_step = count
        main_of(rank, pretrain_deepspeed, *source, *words, "--output", tmp_path / "out")

    outcomes = run_ranks(stopped, check=False, timeout=120)
    assert [o.status for o in outcomes] == [75] * 4, [(o.error, o.log) for o in outcomes]
    tags = {(tmp_path / "out" / f"island{n}" / "latest").read_text() for n in range(2)}
    assert tags == {"global_step3"}
    play(pretrain_deepspeed, tmp_path / "out", "--resume")
    play(pretrain_deepspeed, tmp_path / "whole")
    for island in range(2):
        assert losses(tmp_path / "out", island) == losses(tmp_path / "whole", island)
        out, whole = (told(tmp_path / name, island)[0]["validation"] for name in ("out", "whole"))
        assert out == whole


def test_zero_recipe_log_above_progress_bar(run_ranks, tmp_path, source):
    """The lines of the log stand above the progress bar."""
    words = (*source, "--steps", 2, "--output", tmp_path / "run", "--deepspeed", json_of(1))

    def trained(rank):
        # pytest's handlers would keep what a script's own handler writes
        logging.basicConfig(format="%(message)s", force=True)
        main_of(rank, pretrain_deepspeed, *words)

    found, _ = run_ranks(trained, islands=1, procs=2, timeout=120, check=False)
    assert found.status == 0, (found.error, found.log)
    (line,) = [t for t in re.split("[\r\n]", found.log) if "finished at step" in t]
    assert line.startswith("island0: finished at step 2"), found.log


def test_zero_recipe_auto_values(tmp_path):
    """ "auto" in the JSON becomes this run's number or DeepSpeed's default."""
    from deepspeed.runtime.config import DeepSpeedConfig

    file = tmp_path / "c.json"
    args = deepspeed_parts.Arguments(batch_size=3, accumulation=2, deepspeed=str(file))
    sharding = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    given = {
        "train_batch_size": "auto",
        "gradient_clipping": 0.5,
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {**sharding, "reduce_bucket_size": "auto"},
    }
    file.write_text(json.dumps(given))
    for device, enabled in (("cpu", False), ("cuda", True)):
        config = deepspeed_parts.engine_config(args, torch.device(device))
        assert config.pop("steps_per_print") > 10**9
        assert config == {
            "train_micro_batch_size_per_gpu": 3,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 0.5,
            "bf16": {"enabled": enabled},
            "zero_optimization": sharding,
        }
    file.write_text(json.dumps(given | {"bf16": {"enabled": False}}))
    assert deepspeed_parts.engine_config(args, torch.device("cuda"))["bf16"] == {"enabled": False}
    made = DeepSpeedConfig(config | {"train_batch_size": 6})
    assert made.zero_config.reduce_bucket_size == 5e8 and made.gradient_clipping == 0.5


def test_zero_recipe_stream_refused():
    """A stream and too few rows are refused."""
    from data import Data, Rows

    args = deepspeed_parts.Arguments(batch_size=4, data="somewhere")
    rows = Rows(torch.zeros(7, 4, dtype=torch.int32).numpy())
    with pytest.raises(ValueError, match="no full batch"):
        next(deepspeed_parts.batches(Data(rows, rows, 0), args, 0, 0, 2, 0))
    with pytest.raises(ValueError, match="somewhere is a stream: prepare it first"):
        next(deepspeed_parts.batches(Data(iter(()), rows, 0), args, 0, 0, 2, 0))


# -- deepspeed/*.json and accelerate/zero*.yaml under the Trainer --------------------------------


@pytest.mark.parametrize("stage", [1, 2, 3])
@in_ranks(1, 1, group=True)
def test_zero_recipe_json_for_trainer(me, stage):
    """The Trainer takes the JSON files of the recipe."""
    numbers = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}
    file = str(json_of(stage))
    args = TrainingArguments("unused", use_cpu=True, bf16=True, deepspeed=file, **numbers)
    args.hf_deepspeed_config.trainer_config_process(args)
    config = args.hf_deepspeed_config.config
    assert "auto" not in json.dumps(config)
    wanted = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}
    wanted |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    assert config | wanted == config
    assert config["gradient_clipping"] == args.max_grad_norm == 1.0
    assert config["bf16"]["enabled"] is True and config["zero_optimization"]["stage"] == stage
