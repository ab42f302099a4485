"""What is recommended where."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdp_demo import ExchangeConfig, Link, preset
from fsdp_demo.tools.planner import Situation, choose, load, plan_rows
from fsdp_demo.tools.planner.choosing import LADDERS, ROUNDS, SHORT_RUN, rising
from fsdp_demo.tools.planner.gaps import SMALL

LLAMA = Situation(load("llama-3.2-1b"), 4, Link(1e9, 0.04), 0.8, shards=8)


def taken(situation: Situation, keep: str | None = None) -> tuple[str, ExchangeConfig, str, bool]:
    choice = choose(plan_rows(situation, keep_inner=keep), situation, keep)
    assert choice.config == choice.row.config
    return choice.row.name, choice.config, choice.reason, choice.reached


def test_planner_choice_fast_link() -> None:
    """A fast link needs no compression."""
    tiny = Situation(load("tiny"), 2, Link(1e9), 1.0, device="cpu")
    rows = [r for r in plan_rows(tiny) if r.name != "hsdp"]
    choice = choose(rows, tiny)
    assert choice.row.name == "full" and choice.reached and "nothing is lost" in choice.reason
    assert choice.config.channels[0].codec.value_dtype == "bf16"


def test_planner_choice_hsdp_reaches() -> None:
    """The reason says where HSDP itself reaches the target."""
    _, _, reason, reached = taken(replace(LLAMA, link=Link(1e13, 1e-5)))
    assert reached and reason.startswith("HSDP itself keeps 9")


def test_planner_choice_slower_link_fewer_bytes() -> None:
    """A slower link gets a method with fewer bytes."""
    sent = []
    for rate in (1e12, 1e10, 1e8):
        situation = replace(LLAMA, link=Link(rate, 0.02))
        choice = choose(plan_rows(situation), situation)
        assert choice.reached and choice.row.compute_utilisation >= situation.target
        sent.append(choice.row.bytes_per_step)
    assert sent == sorted(sent, reverse=True)


def test_planner_choice_first_of_ladder() -> None:
    """The first setting of a ladder that reaches the target is taken."""
    rows = {r.name: r for r in plan_rows(LLAMA) if r.chosen}
    assert set(rows) == set(LADDERS)
    for name, row in rows.items():
        steps = [plan_rows(LLAMA, [preset(name, **c)])[0] for c in LADDERS[name]]
        reach = [r.config for r in steps if r.compute_utilisation >= LLAMA.target]
        best = max(steps, key=lambda r: r.compute_utilisation).compute_utilisation
        assert row.config == (reach[0] if reach else row.config)
        assert row.compute_utilisation == pytest.approx(best) or reach


def test_planner_choice_nothing_reaches() -> None:
    """The reason says that no method reaches the target."""
    name, _, reason, reached = taken(replace(LLAMA, link=Link(1e6, 0.1)))
    assert not reached and reason.startswith("nothing keeps 95% on a link of 1Mbit,100ms")
    assert name in reason


def test_planner_choice_memory_limit() -> None:
    """The memory of the device limits the choice."""
    held = [r.device_bytes for r in plan_rows(LLAMA) if r.chosen]
    whole, least = max(held), min(held)
    situation = replace(LLAMA, memory_bytes=(whole + least) / 2)
    choice = choose(plan_rows(situation), situation)
    assert choice.reached and choice.row.device_bytes <= (whole + least) / 2
    _, _, reason, reached = taken(replace(LLAMA, memory_bytes=1e6))
    assert not reached and reason.startswith("nothing fits into 0.001 GB: random")


def test_planner_choice_keeps_inner_optimizer() -> None:
    """The inner optimizer stays if it must."""
    for link in (Link(1e9, 0.04), Link(1e8, 0.02)):
        situation = replace(LLAMA, link=link)
        rows = plan_rows(situation, keep_inner="adamw")
        for row in rows:
            if row.chosen:
                assert row.config is not None
                assert {"adamw", "any"} & set(row.config.inner_optimizers)
        choice = choose(rows, situation, "adamw")
        assert {"adamw", "any"} & set(choice.config.inner_optimizers)
    with pytest.raises(ValueError, match="no setting keeps the inner optimizer 'adamw'"):
        choose(plan_rows(LLAMA, ["random"]), LLAMA, "adamw")


def test_planner_choice_no_costly_gather() -> None:
    """A gather that sends more than an all-reduce is not taken."""
    situation = replace(LLAMA, islands=400, target=0.5, link=Link(1e11, 0.0))
    rows = plan_rows(situation, [preset("sparse_loco", period=250), preset("diloco", period=500)])
    assert rows[0].bytes_per_exchange > 2 * 2 * situation.parameters
    assert choose(rows, situation).row.name == "diloco"


def test_planner_choice_costly_gather_reason() -> None:
    """The reason says that every gather sends more than an all-reduce."""
    slow = preset("sparse_loco", topk=4096, value_dtype="fp32")
    situation = Situation(load("tiny"), 8, Link(1e11), 10.0)
    choice = choose(plan_rows(situation, [slow]), situation)
    assert choice.row.compute_utilisation >= situation.target and choice.reached
    assert "nothing keeps" not in choice.reason
    assert "sends more than an all-reduce of every value" in choice.reason
    beside = choose(plan_rows(situation, [slow, preset("diloco")]), situation)
    assert beside.row.name == "diloco" and "sends more" not in beside.reason


def test_planner_choice_of_given_rows() -> None:
    """The choice among given rows is one of them."""
    rows = plan_rows(LLAMA, ["hsdp", "demo", "diloco", "sparse_loco"])
    choice = choose(rows, LLAMA)
    assert choice.row in rows and choice.row.name == "sparse_loco" and "of these" in choice.reason


def test_planner_choice_model_without_layers() -> None:
    """A model without layers has no fragments."""
    situation = Situation([("weight", (64, 64)), ("bias", (64,))], 2, Link(1e6), 0.1, device="cpu")
    rows = plan_rows(situation)
    assert "streaming_diloco" not in {r.name for r in rows} and "diloco" in {r.name for r in rows}
    assert choose(rows, situation).reached


def test_planner_choice_names_sufficient_rate() -> None:
    """The reason says on which rate the method would reach the target."""
    slow = replace(LLAMA, link=Link(1e7, 0.04))
    rows = plan_rows(slow, [preset("decoupled_momentum", period=256)])
    reason = choose(rows, slow).reason
    assert "; it would keep 95% on " in reason
    rate = float(reason.rpartition(" on ")[2].removesuffix(" Mbit/s")) * 1.01e6
    (row,) = plan_rows(replace(slow, link=Link(rate, 0.04)), [rows[0].config or ""])
    assert row.compute_utilisation >= 0.95


def test_planner_choice_long_periods_first() -> None:
    """A method that exchanges every step comes after those with long periods."""
    rows = plan_rows(replace(LLAMA, islands=2), [preset("sparse_loco", period=60), "demo"])
    fast = [replace(r, compute_utilisation=0.99) for r in rows]
    assert choose(fast, LLAMA).row.name == "sparse_loco"
    reason = choose(fast[1:], LLAMA).reason
    assert reason.endswith("its inner optimizer is SGD (fsdp_demo.base_optimizer)")


def test_planner_choice_muon() -> None:
    """Muon stays with the method that is made for it."""
    rows = plan_rows(LLAMA, ["sparse_loco", "muloco"])
    fast = [replace(r, compute_utilisation=0.99) for r in rows]
    assert choose(fast, LLAMA, "muon").row.name == "muloco"
    assert choose(fast, LLAMA, "adamw").row.name == "sparse_loco"


def test_planner_choice_muon_small_model() -> None:
    """A short run of a small model with Muon gets the method that led our study."""
    small = replace(TINY, link=Link(1e9, 0.04), steps=480)
    rows = plan_rows(small, None, keep_inner="muon")
    choice = choose([row for row in rows if row.name != "full"], small, "muon")
    assert choice.config == preset("sign_muloco", period=5, beta=0.6)
    slow = replace(small, link=Link(2e6, 0.04), steps=SHORT_RUN["sign_muloco"])
    choice = choose(plan_rows(slow, None, keep_inner="muon"), slow, "muon")
    assert choice.config == preset("sign_muloco")
    assert choice.row.expected_gap is not None and choice.row.expected_gap["period"] is None
    assert choice.row.expected_gap["percent"] < -1
    longer = replace(small, steps=SHORT_RUN["sign_muloco"] + 1)
    rows = plan_rows(longer, None, keep_inner="muon")
    assert choose([r for r in rows if r.name != "full"], longer, "muon").row.name == "muloco"
    assert "sign_muloco" not in {r.name for r in rows if r.chosen}


def test_planner_choice_little_memory_left() -> None:
    """The reason says where little memory is left for activations."""
    (row,) = plan_rows(LLAMA, ["sparse_loco"])
    for share, tight in ((0.9, True), (0.5, False)):
        reason = choose([row], replace(LLAMA, memory_bytes=row.device_bytes / share)).reason
        assert ("are left for activations" in reason) is tight


TINY = Situation(load("tiny"), 2, Link(2e7, 0.04), 0.8, device="cpu")
MEDIUM = Situation([(f"layers.{i}.w", (1024, 1024)) for i in range(12)], 2, Link(2e8, 0.04), 1.0)


def test_planner_choice_small_models() -> None:
    """The method that won among small models is recommended for small models."""
    short = replace(TINY, steps=SHORT_RUN["sign_loco"])
    name, config, _, reached = taken(short)
    assert TINY.parameters < SMALL and reached and name == "sign_loco"
    assert config == preset("sign_loco", period=5, switch=0.0)
    assert taken(short, "sgd")[0] != "sign_loco"
    fast = replace(short, link=Link(1e12))
    rows = [r for r in plan_rows(fast) if r.name != "hsdp"]
    assert choose(rows, fast).row.name == "full"


@pytest.mark.parametrize(("islands", "topk"), [(2, 90), (4, 90), (8, 45), (16, 22)])
def test_planner_choice_more_islands_fewer_values(islands: int, topk: int) -> None:
    """More islands send fewer values each."""
    short = replace(TINY, islands=islands, steps=SHORT_RUN["sign_loco"])
    name, config, _, _ = taken(short)
    assert name == "sign_loco" and config.channels[0].codec.topk == topk


def test_planner_choice_sign_loco_limits() -> None:
    """`sign_loco` is recommended neither for long runs nor for large models."""
    for steps in (None, SHORT_RUN["sign_loco"] + 1):
        assert taken(replace(TINY, steps=steps))[0] != "sign_loco"
    assert MEDIUM.parameters >= SMALL
    assert "sign_loco" not in {r.name for r in plan_rows(MEDIUM) if r.chosen}
    assert taken(MEDIUM)[0] == "diloco"


@pytest.mark.parametrize("steps", [None, 200, 1000, 100_000])
def test_planner_choice_short_run_period(steps: int | None) -> None:
    """A short run gets a period of which it has many rounds."""
    name, config, reason, reached = taken(replace(MEDIUM, steps=steps))
    period = max(c.schedule.sync_every for c in config.channels)
    assert reached and name == "diloco"
    assert period * ROUNDS <= (steps or 600) and "which is few" not in reason
    assert (period >= 30) == (steps is None or steps >= 600)
    assert steps != 200 or period == 10  # the longest with enough rounds


def test_planner_choice_steps_from_tokens() -> None:
    """The length of a run follows from its tokens."""
    assert TINY.length is None and replace(TINY, steps=7, tokens=1e6).length == 7
    assert replace(TINY, tokens=1e6, tokens_per_step=1000).length == 500


def test_planner_choice_enough_rounds() -> None:
    """The choice between two methods that reach is the one with enough rounds."""
    given = [preset("diloco", period=100), preset("sparse_loco", period=30)]
    short = replace(TINY, steps=700)
    assert choose(plan_rows(TINY, given), TINY).row.name == "sparse_loco"  # parity
    assert choose(plan_rows(short, given[:1]), short).reason.endswith(
        "7 rounds of it, which is few"
    )
    given[1] = preset("sparse_loco", period=60)
    assert choose(plan_rows(TINY, given), TINY).row.name == "diloco"
    assert choose(plan_rows(short, given), short).row.name == "sparse_loco"


def test_planner_choice_momentum_warmup() -> None:
    """The outer momentum rises over half of a short run."""
    _, config, _, _ = taken(replace(TINY, steps=200))
    assert config == preset("sign_loco", period=5, switch=0.0, momentum_warmup=20)
    assert taken(replace(TINY, steps=SHORT_RUN["sign_loco"]))[1] == preset("sign_loco", switch=0.0)
    (channel,) = rising(preset("sign_loco"), 7).channels
    assert channel.applier.momentum_warmup == 1  # 0 would be a constant one
    assert rising(preset("diloco"), 12) == preset("diloco")
