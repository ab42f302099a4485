"""Flags of a Trainer script, and what a Trainer may switch on beside an exchange."""

import logging
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("datasets")

from transformers import HfArgumentParser, Trainer, TrainerCallback, TrainingArguments  # noqa: E402

import fsdp_demo  # noqa: E402
from fsdp_demo import Topology  # noqa: E402
from fsdp_demo.integrations.arguments import ExchangeArguments  # noqa: E402
from fsdp_demo.integrations.data import split_dataset_by_island  # noqa: E402
from fsdp_demo.integrations.trainer import ExchangeCallback, exchange_optimizer  # noqa: E402

from ..support import trainer_script as script  # noqa: E402
from .test_trainer import history, one_line  # noqa: E402


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
    assert (
        set(ExchangeArguments("diloco").trainer()) == {"callbacks"}
        and ExchangeArguments().trainer() == {}
    )
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


@pytest.mark.parametrize(
    "preset, settings",
    [
        (
            "full",
            {
                "max_grad_norm": 0.3,
                "max_steps": -1,
                "num_train_epochs": 1,
                "eval_strategy": "epoch",
            },
        ),
        ("muloco", {"bf16": True}),
        (
            "decoupled_momentum",
            {
                "gradient_accumulation_steps": 2,
                "activation_checkpointing": True,
                "eval_on_start": True,
            },
        ),
        ("streaming_diloco", {"torch_compile": True, "torch_compile_backend": "eager"}),
        ("desloc", {"eval_strategy": "epoch", "save_strategy": "epoch"}),
    ],
)
def test_trainer_features_beside_exchange(run_ranks, preset, settings):
    """Features of the Trainer work beside an exchange."""

    def run(rank):
        changes = {
            "streaming_diloco": {"period": 4, "delay": 1},
            "desloc": {"period": 2},
            "full": {},
        }.get(preset, {"period": 2})
        extra = one_line(preset, **changes)
        if preset == "muloco":
            extra["optimizer_cls_and_kwargs"] = exchange_optimizer(preset, lr=5e-3, **changes)
        seen = Epochs()
        trained = script.trainer(
            rank.folder / "out",
            extra,
            fsdp=preset != "streaming_diloco",
            callbacks=[seen],
            **settings,
        )
        trained.train()
        exchange = script.exchange_of(trained)
        args = trained.args
        equal = exchange.digests_equal()
        return (
            exchange.step,
            trained.state.max_steps,
            equal,
            seen.clip[0],
            args.max_grad_norm,
            history(trained, "eval_loss"),
            exchange.clips,
        )

    out = run_ranks(run, islands=2, procs=1 if preset == "streaming_diloco" else 2, timeout=120)
    for step, steps, equal, within, after, losses, clips in out:
        assert step == steps and equal is True and losses == out[0][5] and losses
        assert (within, after) == ((0.0, 0.3) if preset == "full" else (1.0, 1.0))
        assert ("0.3 clips the mean gradient" in clips) == (preset == "full")


def test_trainer_only_island_0_pushes(run_ranks):
    """Island 0 alone pushes to the hub."""

    def run(rank):
        records = []
        handler = logging.Handler()
        handler.emit = lambda record: records.append(record.getMessage())
        logging.getLogger("fsdp_demo").addHandler(handler)
        logging.getLogger("fsdp_demo").setLevel(logging.INFO)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("transformers.Trainer.init_hf_repo", lambda self, token=None: None)
            patch.setattr("transformers.Trainer.push_to_hub", lambda self, **keywords: "pushed")
            trained = script.trainer(rank.folder / "out", one_line("diloco"), push_to_hub=True)
            return (
                trained.args.push_to_hub,
                trained.push_to_hub(),
                [text for text in records if "does not push" in text],
            )

    first, second = run_ranks(run, islands=2, procs=1)
    assert first == (True, "pushed", []) and second[:2] == (False, None)
    assert second[2] == ["island1 does not push to the hub: island 0 does"]


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
def test_trainer_plain_module_saves_and_resumes(run_ranks, config):
    """A plain torch module trains, saves and resumes."""

    def run(rank):
        script.fresh_state()
        torch.manual_seed(rank.island)
        rows = [{"x": torch.randn(8)} for _ in range(32)]

        def train(steps, resume=None):
            os.environ["ISLAND_RUN"] += f"-{steps}"
            args = TrainingArguments(
                str(rank.folder / "out"),
                max_steps=steps,
                per_device_train_batch_size=4,
                lr_scheduler_type="constant",
                save_steps=2,
                report_to=[],
                use_cpu=True,
                disable_tqdm=True,
            )
            line = one_line("diloco", period=2)
            trained = Trainer(Plain(config), args, train_dataset=rows, **line)
            trained.train(resume_from_checkpoint=resume)
            return trained

        train(4)
        return script.parameters(train(6, True))

    first, second = run_ranks(run, islands=2, procs=1)
    assert torch.equal(first, second)


def test_trainer_streams_and_epoch_logs(run_ranks):
    """Streams train, and logs may come by epoch."""

    def run(rank):
        trained = script.trainer(
            rank.folder / "stream", one_line("diloco", period=2), split=False, logging_steps=1
        )
        trained.train_dataset = split_dataset_by_island(trained.train_dataset.to_iterable_dataset())
        trained.train()
        whole = script.parameters(trained)
        settings = {"max_steps": -1, "num_train_epochs": 1, "logging_strategy": "epoch"}
        trained = script.trainer(rank.folder / "epoch", one_line("diloco", period=3), **settings)
        trained.train()
        return whole, history(trained, "exchange/exchanges"), trained.state.global_step

    out = run_ranks(run, islands=2, procs=1)
    assert torch.equal(out[0][0], out[1][0])
    assert [o[1:] for o in out] == [([3], 8), ([3], 8)]  # two of their own clock, and the last


def test_trainer_unlike_rates_refused(run_ranks):
    """Islands with unlike learning rates are refused."""

    def run(rank):
        extra = one_line("demo") | {
            "optimizer_cls_and_kwargs": exchange_optimizer("demo", lr=1e-3 * (1 + rank.island))
        }
        with pytest.raises(
            ValueError, match=r"optimizer0.group0.initial_lr: 0\.00[12] here, 0\.00[12] there"
        ):
            script.trainer(rank.folder / "out", extra).train()

    run_ranks(run, islands=2, procs=1)


def test_trainer_resume_by_one_flag(run_ranks):
    """One flag resumes all islands."""

    def run(rank):
        def train(where, resume=None, **settings):
            trained = script.trainer(
                rank.folder / where, one_line("diloco", period=2), save_steps=2, **settings
            )
            trained.train(resume_from_checkpoint=resume)
            return script.parameters(trained)

        whole = train("out")
        out = [
            train("out", resume=value)
            for value in ("auto", str(rank.folder / "out" / "checkpoint-4"))
        ]
        out.append(train("out", resume=str(rank.folder / "out" / "island0" / "checkpoint-6")))
        foreign = rank.folder / "elsewhere" / "checkpoint-6"
        if rank.island == 0:
            foreign.parent.mkdir()
            (rank.folder / "out" / "island0" / "checkpoint-6").rename(foreign)
        else:
            while not foreign.exists():
                pass
        takes_over = train("other", resume=str(foreign))  # island 1 has lost its own
        return [torch.equal(whole, again) for again in out], takes_over

    first, second = run_ranks(run, islands=2, procs=1, timeout=120)
    assert first[0] == second[0] == [True] * 3 and torch.equal(first[1], second[1])


def test_trainer_last_exchange_after_evaluation(run_ranks):
    """The last exchange reaches the model after an evaluation. A forward without a backward leaves
    FSDP2's root unsharded, and what is written into the shards then would not be seen.
    """
    from torch.distributed.fsdp import fully_shard

    from fsdp_demo.hosts.torch_params import reshard

    def run(rank):
        model, rows = (
            script.model(),
            torch.randint(0, 20, (2, 12), generator=torch.Generator().manual_seed(rank.rank)),
        )
        for layer in model.model.layers:
            fully_shard(layer, mesh=rank.mesh())
        fully_shard(model, mesh=rank.mesh())
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
        return before != after == loss()

    assert run_ranks(run, islands=2, procs=2) == [True] * 4


def test_trainer_second_exchange_refused(run_ranks):
    """A second exchange on one optimizer is refused."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    exchange = fsdp_demo.attach(optimizer, "diloco")
    with pytest.raises(ValueError, match="has an exchange already"):
        fsdp_demo.attach(optimizer, "demo", inner_optimizer="adamw")
    exchange.finish()
    exchange.detach()
    fsdp_demo.attach(optimizer, "diloco").detach()

    def run(rank):
        with pytest.raises(ValueError, match="two ExchangeCallbacks"):
            script.trainer(
                rank.folder / "out",
                {"callbacks": [ExchangeCallback("diloco"), ExchangeCallback("diloco")]},
            )
        with pytest.raises(ValueError, match=r"ISLAND_NAME='../up' names folders"):
            Topology.from_env({"ISLAND_NAME": "../up"})

    run_ranks(run, islands=2, procs=1)


@pytest.mark.parametrize("preset", ["diloco", "stride"])
def test_trainer_recipe_saves_and_resumes(run_ranks, monkeypatch, preset):
    """recipes/pretrain_trainer.py as it is launched, FSDP2 inside the islands; the folder it saves
    loads with `from_pretrained`.
    """
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "recipes"))
    import pretrain_trainer
    from transformers import AutoModelForCausalLM

    def run(rank):
        folder = script.recipe_resumed(pretrain_trainer.main, rank, preset)
        saved = AutoModelForCausalLM.from_pretrained(folder)
        total = torch.cat([p.detach().flatten() for p in saved.parameters()]).sum()
        return total, len(list(folder.parent.iterdir()))

    out = run_ranks(run, islands=2, procs=2, timeout=180)
    assert len({float(total) for total, _ in out}) == 1 and out[0][1] == 2
