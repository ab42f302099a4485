"""Errors that name the cure in the words of the way of use: the Trainer, `attach` with and without
`model=`, several optimizers.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.utils import logging as hf_logging

import fsdp_demo
from fsdp_demo.integrations.trainer import ExchangeCallback, exchange_optimizer
from fsdp_demo.integrations.trainer.setup import talk

from .exchange.test_log import LOG, said, silence
from .support import trainer_script as script


def test_trainer_errors_use_its_words(run_ranks):
    """Errors in a Trainer script name the Trainer's own options: `base_optimizer` is not in the
    hands of who writes --optim.
    """

    def run(rank):
        def refused(callback, **settings):
            trained = script.trainer(
                rank.folder / f"island{rank.island}",
                {"callbacks": [callback]},
                max_steps=2,
                **settings,
            )
            with pytest.raises(ValueError) as error:
                trained.train()
            return str(error.value)

        wrong = {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9})}
        trained = script.trainer(
            rank.folder / "as_is",
            {"callbacks": [ExchangeCallback("diloco", inner_optimizers="as_is")]},
            max_steps=2,
            optim="sgd",
        )
        trained.train()
        with pytest.raises(ValueError) as error:
            script.trainer(
                rank.folder / "handed",
                {"callbacks": [ExchangeCallback("demo")], **wrong},
                max_steps=2,
            ).train()
        flags = [refused(ExchangeCallback("diloco"), optim=o) for o in ("adafactor", "sgd")]
        # of no parameter of the model: it is refused before that matters
        pair = (torch.optim.RMSprop([nn.Parameter(torch.ones(1))]), None)
        with pytest.raises(ValueError) as own:
            script.trainer(
                rank.folder / "pair",
                {"callbacks": [ExchangeCallback("diloco")], "optimizers": pair},
                max_steps=2,
            ).train()
        return flags, str(error.value), str(own.value)

    for (adafactor, sgd), handed, own in run_ranks(run, islands=2, procs=1):
        assert "found RMSprop (the script's own): leave it out, with --optim adamw_torch" in own
        for name, text in (
            ("Adafactor (--optim adafactor)", adafactor),
            ("SGD (--optim sgd)", sgd),
        ):
            assert (
                f"found {name}: take --optim adamw_torch, or insist with ExchangeCallback(..., "
                "inner_optimizers='as_is')"
            ) in text
        assert "found SGD (the script's own)" in handed and 'exchange_optimizer("demo"' in handed
        assert "base_optimizer" not in adafactor + sgd + handed
    assert exchange_optimizer("demo")[1]["lr"] == 4e-4


def test_trainer_log_level(capfd) -> None:
    """Information is logged under the Trainer unless it was told to be quiet."""
    usual = hf_logging.get_verbosity()
    for rank, level, heard in (
        (0, logging.WARNING, True),
        (1, logging.WARNING, False),
        (0, logging.ERROR, False),
    ):
        with silence():
            hf_logging.set_verbosity(level)
            try:
                talk(
                    SimpleNamespace(args=SimpleNamespace(process_index=rank)), fsdp_demo.Topology()
                )  # type: ignore[arg-type]
            finally:
                hf_logging.set_verbosity(usual)
            LOG.info("output_dir is out/island0")
            assert bool(said(capfd)) == heard
    with silence():
        LOG.addHandler(logging.NullHandler())
        talk(SimpleNamespace(args=SimpleNamespace(process_index=0)), fsdp_demo.Topology())  # type: ignore[arg-type]
        assert LOG.level == usual and not said(capfd)


@pytest.mark.parametrize(
    ("named", "cure"),
    [(True, "the model has none to cut between"), (False, "pass model= to attach")],
)
def test_fragments_without_layers_error_names_the_cure(monkeypatch, named, cure) -> None:
    """The error of fragments without layers names the cure for what was given to attach."""
    monkeypatch.delenv("ISLAND_COUNT", raising=False)
    model = nn.Linear(4, 4)
    options = {"model": model} if named else {}
    with pytest.raises(ValueError, match=f"{cure}.* do without fragments: layers=0"):
        fsdp_demo.attach(torch.optim.AdamW(model.parameters()), "streaming_diloco", **options)
    fsdp_demo.attach(
        torch.optim.AdamW(model.parameters()), "streaming_diloco", layers=0, **options
    ).detach()


def test_attach_error_asks_a_gan_for_two_exchanges(monkeypatch) -> None:
    """A GAN whose optimizers step apart is told to make two exchanges."""
    monkeypatch.delenv("ISLAND_COUNT", raising=False)
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    optimizers = [torch.optim.AdamW(m.parameters()) for m in models]
    exchange = fsdp_demo.attach(optimizers, "diloco", period=2)
    for m in models:
        m(torch.ones(1, 2)).sum().backward()
    optimizers[0].step()
    with pytest.raises(RuntimeError, match="stepped twice.*attach each alone: two exchanges"):
        optimizers[0].step()
    exchange.detach()
    both = [
        fsdp_demo.attach(o, "diloco", model=m, period=2)
        for o, m in zip(optimizers, models, strict=True)
    ]
    for o in (*optimizers[:1] * 2, optimizers[1]):
        o.step()
    assert [e.step for e in both] == [2, 1]
    for e in both:
        e.detach()
