"""recipes/pretrain_deepspeed.py and recipes/deepspeed/*.json, run on a CPU."""

import json
import logging
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest

pytest.importorskip("deepspeed")
pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")

RECIPES = Path(__file__).parents[2] / "recipes"
sys.path.insert(0, str(RECIPES))

import deepspeed_parts  # noqa: E402
import pretrain  # noqa: E402
import pretrain_deepspeed  # noqa: E402
import report  # noqa: E402
import torch  # noqa: E402

from ..support import zero  # noqa: E402, F401 (no compiler; imported before the first fork)

COMMON = (
    "--sequence-length 16 --batch-size 2 --eval-every 0 --eval-batches 3 --log-every 1 "
    "--warmup-steps 1 --lr 0.004"
).split()


@pytest.fixture
def source(tmp_path, everywhere):
    """Model and rows, as options of the recipes."""
    config = json.loads((RECIPES / "models" / "tiny.json").read_text())
    config |= {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
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
    lines = (folder / f"island{island}" / "metrics.jsonl").read_text().splitlines()
    return json.loads((folder / f"island{island}" / "summary.json").read_text()), [
        json.loads(line) for line in lines
    ]


def losses(folder, island):
    return [line["loss"] for line in told(folder, island)[1]]


def listed(rank):
    """What a rank hears from both."""
    world = object.__new__(deepspeed_parts.World)
    world.num_processes, world.device = rank.procs, torch.device("cpu")
    return world.listed(
        {
            "rank": rank.proc,
            "losses": [1e-300, float("inf")] * rank.proc,
            "name": "é" * 3 * rank.proc,
        }
    )


def test_zero_recipe_counters_as_json(run_ranks):
    """Counters of unlike lengths travel as JSON, to the last bit."""
    told_by = [
        {"rank": 0, "losses": [], "name": ""},
        {"rank": 1, "losses": [1e-300, float("inf")], "name": "ééé"},
    ]
    assert run_ranks(listed, islands=1, procs=2) == [told_by] * 2


# -- pretrain_deepspeed.py -----------------------------------------------------------------------


@pytest.mark.timeout(300)
def test_zero_recipe_learns_like_fsdp2(run_ranks, tmp_path, source):
    """Every ZeRO stage learns what FSDP2 learns. The same rows in the same order, the same clipping
    and schedule: two epochs of diloco, whose channels see single elements.
    """
    options = [
        *source,
        "--exchange",
        "diloco",
        "--set",
        "period=3",
        "--steps",
        9,
        "--accumulation",
        2,
    ]
    run_ranks(main_of, args=(pretrain, *options, "--output", tmp_path / "fsdp2"), timeout=120)
    expected, _ = told(tmp_path / "fsdp2")
    assert (
        expected["validation"][-1][1] < expected["validation"][0][1] - 0.3
        and expected["digests_equal"] is True
    )
    for stage in (1, 2, 3):
        out = tmp_path / f"zero{stage}"
        more = ("--deepspeed", json_of(stage), "--output", out)
        run_ranks(main_of, args=(pretrain_deepspeed, *options, *more), timeout=120)
        for island in range(2):
            assert losses(out, island) == pytest.approx(
                losses(tmp_path / "fsdp2", island), rel=1e-5
            )
        summary, _ = told(out)
        assert [v[1] for v in summary["validation"]] == pytest.approx(
            [v[1] for v in expected["validation"]], rel=1e-5
        )
        same = (
            "bytes_sent_per_island",
            "islands",
            "procs",
            "tokens",
            "exchanges",
            "parameters",
            "digests_equal",
            "lr",
        )
        assert {key: summary[key] for key in same} == {key: expected[key] for key in same}
        assert summary["zero"] == stage and not summary["bf16"]


@pytest.mark.parametrize(("stage", "preset", "bf16"), [(2, "demo", False), (3, "demo", True)])
def test_zero_recipe_resume_bit_for_bit(run_ranks, tmp_path, source, stage, preset, bf16):
    """A resumed run of the recipe is the uninterrupted one."""
    options = [
        *source,
        "--exchange",
        preset,
        "--steps",
        6,
        "--deepspeed",
        json_of(stage),
        "--save-every",
        2,
        *(["--bf16"] * bf16),
    ]
    run_ranks(
        main_of, args=(pretrain_deepspeed, *options, "--output", tmp_path / "whole"), timeout=120
    )
    for island in range(2):
        assert (tmp_path / "whole" / f"island{island}" / "latest").read_text() == "global_step6"
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    for island in range(2):  # as if the machines had gone down after step 5
        shutil.rmtree(tmp_path / "cut" / f"island{island}" / "global_step6")
        (tmp_path / "cut" / f"island{island}" / "latest").write_text("global_step4")
        (tmp_path / "cut" / f"island{island}" / "summary.json").unlink()
        with open(tmp_path / "cut" / f"island{island}" / "metrics.jsonl", "r+") as file:
            lines = file.read().splitlines(keepends=True)
            file.seek(0)
            file.truncate()
            file.write("".join(lines[:5]) + lines[5][:20])
    run_ranks(
        main_of,
        args=(pretrain_deepspeed, *options, "--resume", "--output", tmp_path / "cut"),
        timeout=120,
    )
    for island in range(2):
        (whole, lines), (resumed, others) = (
            told(tmp_path / "whole", island),
            told(tmp_path / "cut", island),
        )
        for key in ("step", "lr", "loss", "global_loss", "tokens", "bytes_sent"):
            assert [line[key] for line in others] == [line[key] for line in lines], key
        assert resumed["validation"] == whole["validation"] and resumed["digests_equal"] is True
        assert (
            resumed["bytes_sent_per_island"] == whole["bytes_sent_per_island"] > 0
            and resumed["bf16"] is bf16
        )


@pytest.mark.parametrize("stage", [2, 3])
def test_zero_recipe_mesh(run_ranks, tmp_path, source, stage):
    """The recipe on a mesh keeps ZeRO inside the node. One world of two nodes with two ranks: the
    rows of all are shared, nothing but payloads is counted.
    """
    options = [
        *source,
        "--exchange",
        "demo",
        "--steps",
        4,
        "--deepspeed",
        json_of(stage),
        "--save-every",
        4,
    ]
    env = {"ISLAND_COUNT": "", "LOCAL_WORLD_SIZE": "2"}
    args = (pretrain_deepspeed, *options, "--mesh", 2, "--output", tmp_path / "mesh")
    run_ranks(main_of, islands=1, procs=4, env=env, args=args, timeout=120)
    run_ranks(
        main_of, args=(pretrain_deepspeed, *options, "--output", tmp_path / "islands"), timeout=120
    )
    summary, expected = (
        json.loads((tmp_path / "mesh" / "summary.json").read_text()),
        told(tmp_path / "islands")[0],
    )
    same = ("bytes_sent_per_island", "islands", "procs", "tokens", "exchanges", "digests_equal")
    assert {key: summary[key] for key in same} == {key: expected[key] for key in same}
    assert summary["digests_equal"] is True and summary["loss_start"] == pytest.approx(
        expected["loss_start"], rel=1e-6
    )
    assert all(
        (tmp_path / "mesh" / f"island{n}" / "latest").read_text() == "global_step4"
        for n in range(2)
    )


def test_zero_recipe_stop_saves_and_resumes(run_ranks, tmp_path, source):
    """A run of the recipe that is told to stop saves and goes on. SIGTERM to all ranks in their
    third step.
    """
    options = [
        *source,
        "--exchange",
        "demo",
        "--steps",
        6,
        "--deepspeed",
        json_of(1),
        "--schedule",
        "constant",
    ]

    def stopped(rank):
        steps = report.Report.optimizer_step

        def count(self, lr):
            steps(self, lr)
            if self.step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

        report.Report.optimizer_step = count
        main_of(rank, pretrain_deepspeed, *options, "--output", tmp_path / "out")

    outcomes = run_ranks(stopped, check=False, timeout=120)
    assert [outcome.status for outcome in outcomes] == [75] * 4, "\n".join(
        f"{outcome.error} {outcome.log}" for outcome in outcomes
    )
    tags = {(tmp_path / "out" / f"island{n}" / "latest").read_text() for n in range(2)}
    assert tags == {"global_step3"}
    run_ranks(
        main_of,
        args=(pretrain_deepspeed, *options, "--resume", "--output", tmp_path / "out"),
        timeout=120,
    )
    run_ranks(
        main_of, args=(pretrain_deepspeed, *options, "--output", tmp_path / "whole"), timeout=120
    )
    for island in range(2):
        assert losses(tmp_path / "out", island) == losses(tmp_path / "whole", island)
        assert (
            told(tmp_path / "out", island)[0]["validation"]
            == told(tmp_path / "whole", island)[0]["validation"]
        )


def test_zero_recipe_log_above_progress_bar(run_ranks, tmp_path, source):
    """The lines of the log stand above the progress bar."""

    def trained(rank):
        # pytest's handlers would keep what a script's own handler writes
        logging.basicConfig(format="%(message)s", force=True)
        main_of(
            rank,
            pretrain_deepspeed,
            *source,
            *("--steps", 2, "--output", tmp_path / "run", "--deepspeed", json_of(1)),
        )

    found, _ = run_ranks(trained, islands=1, procs=2, timeout=120, check=False)
    assert found.status == 0, (found.error, found.log)
    (line,) = [t for t in re.split("[\r\n]", found.log) if "finished at step" in t]
    assert line.startswith("island0: finished at step 2"), found.log


def test_zero_recipe_auto_values(tmp_path):
    """ "auto" in the JSON becomes this run's number or DeepSpeed's default."""
    from deepspeed.runtime.config import DeepSpeedConfig

    args = deepspeed_parts.Arguments(
        batch_size=3, accumulation=2, deepspeed=str(tmp_path / "c.json")
    )
    given = {
        "train_batch_size": "auto",
        "gradient_clipping": 0.5,
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW"},
    }
    given |= {
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": "auto",
            "offload_optimizer": {"device": "cpu"},
        }
    }
    (tmp_path / "c.json").write_text(json.dumps(given))
    for device, enabled in (("cpu", False), ("cuda", True)):
        config = deepspeed_parts.engine_config(args, torch.device(device))
        assert config.pop("steps_per_print") > 10**9
        assert config == {
            "train_micro_batch_size_per_gpu": 3,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 0.5,
            "bf16": {"enabled": enabled},
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        }
    (tmp_path / "c.json").write_text(json.dumps(given | {"bf16": {"enabled": False}}))
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
def test_zero_recipe_json_for_trainer(run_ranks, stage):
    """The Trainer takes the JSON files of the recipe."""

    def filled():
        from transformers import TrainingArguments

        numbers = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}
        args = TrainingArguments(
            output_dir="unused", use_cpu=True, bf16=True, deepspeed=str(json_of(stage)), **numbers
        )
        args.hf_deepspeed_config.trainer_config_process(args)
        return args.hf_deepspeed_config.config, args.max_grad_norm

    ((config, norm),) = run_ranks(filled, islands=1, procs=1, group=True)
    assert "auto" not in json.dumps(config)
    assert (config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]) == (
        3,
        2,
    )
    assert config["gradient_clipping"] == norm == 1.0 and config["bf16"]["enabled"] is True
    assert config["zero_optimization"]["stage"] == stage
    assert (
        config["zero_allow_untested_optimizer"] is True
        and config["zero_force_ds_cpu_optimizer"] is False
    )
