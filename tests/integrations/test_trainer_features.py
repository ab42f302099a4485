"""Flags of a Trainer script, and what a Trainer may switch on beside an exchange."""

import logging
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    HfArgumentParser,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import fsdp_demo
from fsdp_demo import Topology
from fsdp_demo.integrations.arguments import ExchangeArguments
from fsdp_demo.integrations.data import split_dataset_by_island
from fsdp_demo.integrations.trainer import ExchangeCallback

from ..support import trainer_script as script
from ..support.heard import heard
from ..support.inside import in_ranks
from ..support.trainer_script import history, one_line


def test_trainer_flags(tmp_path):
    """The flags of a Trainer script give the configuration, the callback and the optimizer."""
    parser = HfArgumentParser((ExchangeArguments, TrainingArguments))
    common = ["--output_dir", str(tmp_path), "--use_cpu"]
    exchange, args = parser.parse_args_into_dataclasses(
        [*common, "--exchange", "demo", "--set", "codec.topk=16", "clip=3"]
    )
    twice = [*common, "--exchange", "demo", "--set", "codec.topk=16", "--set", "clip=3"]
    assert parser.parse_args_into_dataclasses(twice)[0] == exchange
    keywords = exchange.trainer(lr=args.learning_rate)
    assert keywords["callbacks"][0].config == fsdp_demo.load_config(
        "demo", ["codec.topk=16", "clip=3"]
    )
    assert keywords["optimizer_cls_and_kwargs"][1]["lr"] == 5e-5
    assert set(ExchangeArguments("diloco").trainer()) == {"callbacks"}
    assert ExchangeArguments().trainer() == {}
    with pytest.raises(ValueError, match="--set clip=3 changes an exchange, but there is none"):
        ExchangeArguments(set=["clip=3"]).config()
    path = tmp_path / "mine.yaml"
    path.write_text("preset: diloco\nschedule:\n  sync_every: 7\n")
    assert ExchangeCallback(str(path)).config.channels[0].schedule.sync_every == 7
    whole = fsdp_demo.preset("diloco", period=9)
    assert ExchangeCallback(whole).config == whole


class Epochs(TrainerCallback):
    """What a user's own callback sees, in order."""

    def __init__(self):
        self.clip = []

    def on_step_end(self, args, state, control, **kwargs):
        self.clip.append(args.max_grad_norm)


@pytest.mark.parametrize("preset, procs, settings", [
    ("full", 2,
        {"max_grad_norm": 0.3, "max_steps": -1, "num_train_epochs": 1, "eval_strategy": "epoch"}),
    ("muloco", 2, {"bf16": True}),
    ("decoupled_momentum", 2, {"gradient_accumulation_steps": 2, "activation_checkpointing": True,
        "eval_on_start": True}),
    ("streaming_diloco", 1, {"torch_compile": True, "torch_compile_backend": "eager"}),
    ("desloc", 2, {"eval_strategy": "epoch", "save_strategy": "epoch"}),
])  # fmt: skip
@in_ranks(2, timeout=120)
def test_trainer_features_beside_exchange(me, preset, procs, settings):
    """Features of the Trainer work beside an exchange."""
    odd = {"streaming_diloco": {"period": 4, "delay": 1}, "full": {}}
    line, seen = one_line(preset, **odd.get(preset, {"period": 2})), Epochs()
    options = {"fsdp": procs > 1, "callbacks": [seen], **settings}
    trained = script.trained(me.folder / "out", line, **options)
    exchange, losses = script.exchange_of(trained), history(trained, "eval_loss")
    assert exchange.step == trained.state.max_steps and exchange.digests_equal() is True
    clipped = (0.0, 0.3) if preset == "full" else (1.0, 1.0)
    assert (seen.clip[0], trained.args.max_grad_norm) == clipped
    assert ("0.3 clips the mean gradient" in exchange.clips) == (preset == "full")
    assert losses
    return losses


@in_ranks(2, 1)
def test_trainer_only_island_0_pushes(me):
    """Island 0 alone pushes to the hub."""
    records, patch = heard(logging.INFO), pytest.MonkeyPatch()  # of a rank, which ends with it
    patch.setattr("transformers.Trainer.init_hf_repo", lambda self, token=None: None)
    patch.setattr("transformers.Trainer.push_to_hub", lambda self, **keywords: "pushed")
    trained = script.trainer(me.folder / "out", one_line("diloco"), push_to_hub=True)
    pushed = trained.args.push_to_hub, trained.push_to_hub()
    assert pushed == ((False, None) if me.island else (True, "pushed"))
    said = [text for text in records if "does not push" in text]
    assert said == ["island1 does not push to the hub: island 0 does"] * me.island


class Plain(torch.nn.Module):
    """Not of transformers: `config` is missing, or of the user's own kind."""

    def __init__(self, config):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(8, 8)
        if config is not None:
            self.config = config

    def forward(self, x):
        return {"loss": self.layer(x).square().mean()}


@pytest.mark.parametrize("config", [None, SimpleNamespace(layers=1)], ids=["none", "own"])
@in_ranks(2, 1)
def test_trainer_plain_module_saves_and_resumes(me, config):
    """A plain torch module trains, saves and resumes."""
    script.fresh_state()
    torch.manual_seed(me.island)
    rows = [{"x": torch.randn(8)} for _ in range(32)]

    def train(steps, resume=None):
        os.environ["ISLAND_RUN"] += f"-{steps}"
        args = TrainingArguments(
            str(me.folder / "out"), max_steps=steps, per_device_train_batch_size=4,
            lr_scheduler_type="constant", save_steps=2, report_to=[], use_cpu=True,
            disable_tqdm=True,
        )  # fmt: skip
        trained = Trainer(Plain(config), args, train_dataset=rows, **one_line("diloco", period=2))
        trained.train(resume_from_checkpoint=resume)
        return trained

    train(4)
    return script.parameters(train(6, True))


@in_ranks(2, 1)
def test_trainer_streams_and_epoch_logs(me):
    """Streams train, and logs may come by epoch."""
    line = one_line("diloco", period=2)
    trained = script.trainer(me.folder / "stream", line, split=False, logging_steps=1)
    trained.train_dataset = split_dataset_by_island(trained.train_dataset.to_iterable_dataset())
    trained.train()
    epoch = {"max_steps": -1, "num_train_epochs": 1, "logging_strategy": "epoch"}
    other = script.trained(me.folder / "epoch", one_line("diloco", period=3), **epoch)
    # two of their own clock, and the last
    assert history(other, "exchange/exchanges") == [3] and other.state.global_step == 8
    return script.parameters(trained)


@in_ranks(2, 1)
def test_trainer_unlike_rates_refused(me):
    """Islands with unlike learning rates are refused."""
    said = r"optimizer0.group0.initial_lr: 0\.00[12] here, 0\.00[12] there"
    with pytest.raises(ValueError, match=said):
        script.trained(me.folder / "out", one_line("demo", lr=1e-3 * (1 + me.island)))


@in_ranks(2, 1, timeout=120)
def test_trainer_resume_by_one_flag(me):
    """One flag resumes all islands."""

    def train(where, resume=None):
        line = one_line("diloco", period=2)
        trained = script.trained(me.folder / where, line, resume=resume, save_steps=2)
        return script.parameters(trained)

    whole, out = train("out"), me.folder / "out"
    for flag in ("auto", str(out / "checkpoint-4"), str(out / "island0" / "checkpoint-6")):
        assert torch.equal(whole, train("out", flag)), flag
    foreign = me.folder / "elsewhere" / "checkpoint-6"
    if me.island == 0:
        foreign.parent.mkdir()
        (out / "island0" / "checkpoint-6").rename(foreign)
    else:
        while not foreign.exists():
            pass
    return train("other", str(foreign))  # island 1 has lost its own


@in_ranks()
def test_trainer_last_exchange_after_evaluation(me):
    """The last exchange reaches the model after an evaluation. A forward without a backward leaves
    FSDP2's root unsharded, and what is written into the shards then would not be seen.
    """
    from torch.distributed.fsdp import fully_shard

    from fsdp_demo.hosts.torch_params import reshard

    model = script.model()
    rows = torch.randint(0, 20, (2, 12), generator=torch.Generator().manual_seed(me.rank))
    for layer in model.model.layers:
        fully_shard(layer, mesh=me.mesh())
    fully_shard(model, mesh=me.mesh())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    exchange = fsdp_demo.attach(optimizer, "diloco", model=model, period=3)
    for _ in range(4):
        model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    @torch.no_grad()
    def loss():
        return float(model(input_ids=rows, labels=rows).loss)

    before = loss()
    exchange.finish()
    after = loss()
    reshard(model)
    assert before != after == loss()


def test_trainer_second_exchange_refused(tmp_path):
    """Two callbacks of one Trainer are refused, and a name of an island that is no folder's."""
    line = one_line("diloco")
    with pytest.raises(ValueError, match="two ExchangeCallbacks"):
        script.trainer(tmp_path, {"callbacks": [*line["callbacks"], ExchangeCallback("diloco")]})
    with pytest.raises(ValueError, match=r"ISLAND_NAME='../up' names folders"):
        Topology.from_env({"ISLAND_NAME": "../up"})


@pytest.mark.parametrize("preset", ["diloco", "stride"])
@in_ranks(timeout=180)
def test_trainer_recipe_saves_and_resumes(me, preset):
    """recipes/pretrain_trainer.py as it is launched, FSDP2 inside the islands; the folder it saves
    loads with `from_pretrained`.
    """
    sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
    import pretrain_trainer

    folder = script.recipe_resumed(pretrain_trainer.main, me, preset)
    assert {p.name for p in folder.parent.iterdir()} <= {"island0", "island1"}
    saved = AutoModelForCausalLM.from_pretrained(folder)
    return torch.cat([p.detach().flatten() for p in saved.parameters()])
