"""The files of recipes/accelerate, as Accelerate's own loader reads them, as far as a machine
without a GPU allows.
"""

import os
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env

from fsdp_demo.launch.processes import reserve_port

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"

YAMLS = sorted(path.name for path in (RECIPES / "accelerate").glob("*.yaml"))


def exported(name, *options):
    """The environment that `accelerate launch --config_file name` gives the script. The port of a
    mesh file is fixed, and another process may hold it.
    """
    options += ("--main_process_port", str(reserve_port()), "script.py")
    words = ["--config_file", str(RECIPES / "accelerate" / name), *options]
    args, *_ = _validate_launch_command(launch_command_parser().parse_args(words))
    return prepare_multi_gpu_env(args)


@pytest.mark.parametrize("name", YAMLS)
def test_accelerate_file_is_read_by_accelerate(name):
    """Accelerate reads each file: its loader refuses unknown keys of the top level; those of a
    section are looked up among the launcher's own options.
    """
    config = load_config_from_file(str(RECIPES / "accelerate" / name))
    options = vars(launch_command_parser().parse_args(["script.py"]))
    for section in ("fsdp_config", "deepspeed_config", "parallelism_config"):
        unknown = set(getattr(config, section)) - set(options)
        assert not unknown, f"keys of {section} that Accelerate does not know"
    assert config.mixed_precision == ("no" if name.startswith("cpu") else "bf16")
    assert config.num_machines == (2 if "mesh" in name else 1)
    if name.startswith("zero"):
        assert config.deepspeed_config["zero_stage"] == int(name[4])
        assert config.deepspeed_config["gradient_clipping"] == 1.0


@pytest.mark.parametrize("name", ["fsdp2-island.yaml", "fsdp2-mesh.yaml"])
def test_accelerate_file_gives_the_fsdp2_plugin(name, monkeypatch):
    """A Trainer script or a plain `Accelerator()` finds the same FSDP2 that
    `fsdp_demo.integrations.accelerate` asks for.
    """
    from accelerate.utils import FullyShardedDataParallelPlugin

    from fsdp_demo.integrations import accelerate as ours

    made = ours._plugin("bf16", True, None)
    for key, value in exported(name).items():
        if key.startswith(("FSDP_", "ACCELERATE_", "PARALLELISM_")):
            monkeypatch.setenv(key, value)
    plugin = FullyShardedDataParallelPlugin()
    fields = "fsdp_version reshard_after_forward state_dict_type cpu_ram_efficient_loading "
    for field in [*fields.split(), "activation_checkpointing"]:
        assert getattr(plugin, field) == getattr(made, field), field
    assert plugin.transformer_cls_names_to_wrap is None
    assert plugin.auto_wrap_policy is made.auto_wrap_policy
    assert type(plugin.cpu_offload) is type(made.cpu_offload)
    assert os.environ["ACCELERATE_MIXED_PRECISION"] == "bf16"


def test_accelerate_mesh_file_gives_the_sizes(monkeypatch):
    """The sizes of the mesh file reach the exchange."""
    from fsdp_demo.integrations.mesh import ExchangeParallelismConfig

    assert "PARALLELISM_CONFIG_DP_SHARD_SIZE" not in exported("fsdp2-island.yaml")
    axes = {"replicate": "4", "shard": "2"}
    sizes = ["--num_machines", "4", "--num_processes", "8"]
    sizes += [w for n, v in axes.items() for w in (f"--parallelism_config_dp_{n}_size", v)]
    for options, expected in (([], (2, 8)), (sizes, (4, 2))):
        for key, value in exported("fsdp2-mesh.yaml", "--machine_rank", "1", *options).items():
            if key.startswith("PARALLELISM_CONFIG_"):
                monkeypatch.setenv(key, value)
        config = ExchangeParallelismConfig()
        assert (config.dp_replicate_size, config.dp_shard_size) == expected
        assert config.fsdp_dim_names == ["dp_shard"]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_accelerate_zero_file_gives_the_deepspeed_plugin(stage):
    """The ZeRO files pass their settings on, as far as a machine without DeepSpeed goes; the plugin
    itself is made where DeepSpeed is installed. With an exchange: test_zero_recipes.py.
    """
    words = ["--config_file", str(RECIPES / "accelerate" / f"zero{stage}.yaml"), "script.py"]
    args, *_ = _validate_launch_command(launch_command_parser().parse_args(words))
    assert args.use_deepspeed and not args.use_fsdp and int(args.zero_stage) == stage
    assert float(args.gradient_clipping) == 1.0 and args.mixed_precision == "bf16"
    assert args.num_machines == 1
    pytest.importorskip("deepspeed")
    from accelerate.utils import DeepSpeedPlugin

    clipping = args.gradient_clipping
    plugin = DeepSpeedPlugin(
        zero_stage=args.zero_stage, gradient_clipping=clipping, gradient_accumulation_steps=1
    )
    assert plugin.deepspeed_config["zero_optimization"]["stage"] == stage
