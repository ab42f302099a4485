"""What follows from a channel's fields: said once, in `config`, and asked there by everybody
else.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fsdp_demo import Accumulator, Applier, Channel, Codec, ExchangeConfig, SyncSchedule, preset

PACKAGE = Path(__file__).parents[2] / "fsdp_demo"
REPLACE, OUTER = Applier("replace"), Applier("outer_step", lr=0.7)
KEEPING = Applier("outer_step", keep_steps=True)


def facts(c: Channel) -> dict[str, Any]:
    return {
        n: getattr(c, n)
        for n in (
            "target",
            "writes_parameters",
            "state_name",
            "queues",
            "corrects",
            "keeps_steps",
            "needs_own",
            "taken",
        )
    }


@pytest.mark.parametrize(("channel", "differs"), [
    (Channel("a", "gradient"), {"target": "gradient", "writes_parameters": False}),
    (Channel("a", "gradient", SyncSchedule(2, delay=5), Accumulator(0.9)),
        {"target": "gradient", "writes_parameters": False}),
    (Channel("a", "parameter", applier=REPLACE), {}),
    (Channel("a", "parameter", SyncSchedule(8, delay=1), applier=REPLACE),
        {"corrects": True, "needs_own": True}),
    (Channel("a", "delta", SyncSchedule(8, delay=7), applier=OUTER), {}),
    (Channel("a", "delta", SyncSchedule(8, delay=8), applier=OUTER),
        {"queues": True, "needs_own": True}),
    (Channel("a", "delta", SyncSchedule(8, delay=1), applier=KEEPING),
        {"keeps_steps": True, "needs_own": True}),
    (Channel("a", "delta", SyncSchedule(8), applier=KEEPING), {}),
    (Channel("a", "state:exp_avg", SyncSchedule(8, delay=9), applier=REPLACE),
        {"target": "state:exp_avg", "writes_parameters": False, "state_name": "exp_avg"}),
    (Channel("a", "delta", accumulator=Accumulator(0.9, alpha=0.25), applier=OUTER), {}),
    (Channel("a", "delta", accumulator=Accumulator(0.9, alpha=0.25), feedback="subtract",
        applier=OUTER), {"taken": 0.25}),
    (Channel(*("a", "delta", SyncSchedule(4), Accumulator(0.9, alpha=0.25), Codec(select="topk")),
        feedback="put_back", applier=Applier("outer_step", local_delta=True)),
        {"taken": 1.0, "needs_own": True}),
])  # fmt: skip
def test_derived_facts_of_a_channel(channel: Channel, differs: dict[str, Any]) -> None:
    """The derived properties of a channel follow from its fields."""
    usual = {
        "target": "parameter",
        "writes_parameters": True,
        "state_name": "",
        "queues": False,
        "corrects": False,
        "keeps_steps": False,
        "needs_own": False,
    }
    assert facts(channel) == {**usual, "taken": 0.0, **differs}


def test_derived_state_source_needs_name() -> None:
    """A channel of optimizer states without the name of a state is refused."""
    with pytest.raises(ValueError, match="source='state:' is not known"):
        Channel("a", "state:", applier=REPLACE)


@pytest.mark.parametrize(("name", "changes", "alone", "many"), [
    ("full", {}, "parameters", "parameters"),
    ("demo", {}, "parameters", "parameters"),
    ("local_sgd", {}, "parameters", "mean"),
    ("desloc", {}, "parameters", "mean"),
    ("diloco", {}, "anchor", "anchor"),
    ("streaming_diloco", {}, "anchor", "anchor"),
    ("decoupled_momentum", {}, "anchor", "anchor"),
    ("decoupled_momentum", {"rule": "released"}, "mean", "mean"),
    ("decoupled_momentum", {"rule": "released", "average_every": 2}, "mean", "mean"),
])  # fmt: skip
def test_derived_result_of_a_method(name, changes: dict[str, Any], alone: str, many: str) -> None:
    """A method names which tensors are its model: parameters, anchor or mean."""
    config = preset(name, **changes)
    assert (config.result(1), config.result(2), config.result(9)) == (alone, many, many)


def test_derived_state_channel_alone() -> None:
    """A channel of optimizer states alone makes no replicas equal."""
    config = ExchangeConfig("moments", (Channel("m", "state:exp_avg", applier=REPLACE),))
    assert not config.equal_after_exchange
    assert not config.equal_at_end
    assert config.result(2) == "parameters"


def test_derived_properties_not_repeated() -> None:
    """No other file repeats the expressions that these properties stand for."""
    anew = re.compile(
        r"""source (?:not )?in \(|"parameter" if .*source|startswith\("state:"""
        r"""|schedule\.delay >= \S*schedule\.sync_every|residual == "put_back" else|source == "parameter" and \S*schedule\.delay"""  # noqa: E501
    )
    found = [
        f"{f.relative_to(PACKAGE)}:{n}: {line.strip()}"
        for f in sorted(PACKAGE.rglob("*.py"))
        if f.name != "channel.py" or f.parent.name != "config"
        for n, line in enumerate(f.read_text(encoding="utf-8").splitlines(), 1)
        if anew.search(line)
    ]
    assert found == []
