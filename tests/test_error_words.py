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
from .support.inside import in_ranks
from .support.refused import refusal


@in_ranks(2, 1)
def test_trainer_errors_use_its_words(me):
    """Errors in a Trainer script name the Trainer's own options: `base_optimizer` is not in the
    hands of who writes --optim.
    """

    def trained(name, callback, more=None, **settings):
        given = {"callbacks": [callback], **(more or {})}
        return script.trainer(me.folder / name, given, max_steps=2, **settings)

    def refused(*args, **settings):
        return refusal(lambda: trained(*args, **settings).train())

    trained("as_is", ExchangeCallback("diloco", inner_optimizers="as_is"), optim="sgd").train()
    wrong = {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9})}
    handed = refused("handed", ExchangeCallback("demo"), wrong)
    assert "found SGD (the script's own)" in handed and 'exchange_optimizer("demo"' in handed
    assert "base_optimizer" not in handed
    insist = "or insist with ExchangeCallback(..., inner_optimizers='as_is')"
    for optim, name in (("adafactor", "Adafactor"), ("sgd", "SGD")):
        text = refused(f"island{me.island}", ExchangeCallback("diloco"), optim=optim)
        assert f"found {name} (--optim {optim}): take --optim adamw_torch, {insist}" in text
        assert "base_optimizer" not in text
    # of no parameter of the model: it is refused before that matters
    pair = (torch.optim.RMSprop([nn.Parameter(torch.ones(1))]), None)
    own = refused("pair", ExchangeCallback("diloco"), {"optimizers": pair})
    assert "found RMSprop (the script's own): leave it out, with --optim adamw_torch" in own
    assert exchange_optimizer("demo")[1]["lr"] == 4e-4


def test_trainer_log_level(capfd) -> None:
    """Information is logged under the Trainer unless it was told to be quiet."""

    def talks(rank):
        args = SimpleNamespace(process_index=rank)
        talk(SimpleNamespace(args=args), fsdp_demo.Topology())  # type: ignore[arg-type]

    usual = hf_logging.get_verbosity()
    for rank, level, heard in ((0, "WARNING", True), (1, "WARNING", False), (0, "ERROR", False)):
        with silence():
            hf_logging.set_verbosity(getattr(logging, level))
            try:
                talks(rank)
            finally:
                hf_logging.set_verbosity(usual)
            LOG.info("output_dir is out/island0")
            assert bool(said(capfd)) == heard
    with silence():
        LOG.addHandler(logging.NullHandler())
        talks(0)
        assert LOG.level == usual and not said(capfd)


@pytest.mark.parametrize(("named", "cure"), [
    (True, "the model has none to cut between"), (False, "pass model= to attach"),
])  # fmt: skip
def test_fragments_without_layers_error_names_the_cure(monkeypatch, named, cure) -> None:
    """The error of fragments without layers names the cure for what was given to attach."""
    monkeypatch.delenv("ISLAND_COUNT", raising=False)
    model = nn.Linear(4, 4)
    options = {"model": model} if named else {}
    with pytest.raises(ValueError, match=f"{cure}.* do without fragments: layers=0"):
        fsdp_demo.attach(torch.optim.AdamW(model.parameters()), "streaming_diloco", **options)
    optimizer = torch.optim.AdamW(model.parameters())
    fsdp_demo.attach(optimizer, "streaming_diloco", layers=0, **options).detach()


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
