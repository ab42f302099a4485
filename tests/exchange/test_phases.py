"""Phases of a channel (`Channel.later`): where they begin, what is refused, and a run that goes on.
Their mathematics is tested against the oracle of `sign_loco`
(`tests/channels/test_sign_loco.py`)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

import fsdp_demo
from fsdp_demo import Accumulator, ExchangeConfig, automatic, preset
from fsdp_demo.exchange import summary
from fsdp_demo.exchange.plan import plan_memory
from fsdp_demo.tools.inspect import settings

from ..support import two_layers
from ..support.inside import in_ranks, in_threads
from ..support.threaded import islands, values


def test_phase_begin_share_of_run() -> None:
    """The begin of a phase, given as a share of the run, becomes a step when the number of steps is
    known.
    """
    config = preset("sign_loco")
    assert config.waits_for_steps and ExchangeConfig.from_yaml(config.to_yaml()) == config
    fixed = config.fixed(1000)
    assert fixed.begins == [0, 250] and not fixed.waits_for_steps
    assert fixed.digest() != config.fixed(2000).digest()
    # as another island reads it
    assert fixed.digest() == ExchangeConfig.from_dict(fixed.to_dict()).digest()
    assert config.fixed(None).at(10**6) == preset("sign_loco", switch=0.0)
    assert fixed.at(249) == preset("sign_loco", switch=0.0)
    late = fixed.at(250).channels[0]
    parts = (late.accumulator.beta, late.feedback, late.reducer.mean_over)
    assert parts == (1.0, "subtract", "replicas")
    assert (late.applier.lr, late.applier.momentum, late.codec.topk) == (1.5, 0.0, 90)


@pytest.mark.parametrize(("later", "said"), [
    ([{"begin": 0}], "later.begin=0.0 is out of range"),
    ([{"begin": 1.5}], "later.begin=1.5 is out of range"),
    ([{"begin": 20}, {"begin": 10}], "give phases in their order"),
    ([{"begin": 20, "codec": {"select": "dense"}}], "codec.select='dense'"),
    ([{"begin": 20, "feedback": "subtract"}], "from 20 on: feedback='subtract' needs an acc"),
    ([{"begin": 20, "applier": {"acts_as": "outer_step", "mix": 0.5}}], "it must stay what it is"),
    ([{"begin": 20, "lr": 1}], "unknown key channels"),
    ([{"begin": float("inf")}], "later.begin=inf is out of range"),
    ([{"begin": float("nan")}], "later.begin=nan is out of range"),
    ([{"begin": -3}], "later.begin=-3.0 is out of range .`switch`"),
])  # fmt: skip
def test_phase_settings_refused(later: list[dict[str, Any]], said: str) -> None:
    """Phases that cannot work are refused."""
    data = preset("sign_loco").to_dict()
    own = data["channels"][0]
    form = {"codec": own["codec"], "applier": own["applier"]}
    own["later"] += [{**form, **phase} for phase in later]
    with pytest.raises(ValueError, match=said):
        ExchangeConfig.from_dict(data)


def test_phase_follows_what_it_shares() -> None:
    """A dotted change reaches a phase where the phase has the channel's value, and not where it has
    one of its own.
    """
    changes = {"codec.topk": 16, "codec.value_dtype": "int4", "applier.lr": 0.5}
    changes |= {"delta.reducer.weight": "tokens", "accumulator.beta": 0.6}
    (channel,) = preset("sign_loco", **{**changes, "delta.feedback": "subtract"}).channels
    (phase,) = channel.later
    assert channel.codec == phase.codec and phase.codec.topk == 16
    assert channel.reducer.weight == phase.reducer.weight == "tokens"
    assert (channel.applier.lr, phase.applier.lr) == (0.5, 1.5)
    assert (channel.accumulator, phase.accumulator) == (Accumulator(beta=0.6), Accumulator(beta=1))
    own = preset("sign_loco", late_topk=45, **{"codec.topk": 16}).channels[0].later[0]
    assert own.codec.topk == 45


@pytest.mark.parametrize(("given", "said"), [
    (5, "delta.later=5 must be a list"),
    ({"begin": 4}, "must be a list"),
    ([4], r"delta.later\[0\]=4 must be a mapping"),
])  # fmt: skip
def test_phase_of_wrong_form_beside_other_changes(given: Any, said: str) -> None:
    """Phases of a wrong form are refused as such, whatever else is changed with them."""
    with pytest.raises(ValueError, match=said):
        preset("diloco", **{"delta.later": given, "codec.value_dtype": "bf16"})


def test_phase_follows_changes_beside_it() -> None:
    """A phase that leaves a key out has its default there, and follows a change of the channel
    where the channel has that value, too, in whatever order both are given.
    """
    late = [{"begin": 10, "applier": {"acts_as": "outer_step", "lr": 0.3}}]
    changes = {"delta.later": late, "codec.value_dtype": "bf16"}
    one = preset("diloco", **changes)
    assert one == preset("diloco", **dict(reversed(changes.items())))
    assert [p.codec.value_dtype for p in one.channels[0].phases] == ["bf16", "bf16"]
    assert one.channels[0].later[0].applier.momentum == 0.0


def test_phase_uses_settings() -> None:
    """A setting that only a phase uses is not refused as one without effect."""
    codec = {"select": "random", "topk": 8, "value_dtype": "1bit"}
    warmup = preset("diloco").channels[0].applier.momentum_warmup
    applier = {"acts_as": "outer_step", "momentum": 0.5, "momentum_warmup": warmup}
    late = {"begin": 100, "codec": codec, "applier": applier}
    late |= {"accumulator": {"beta": 1.0}, "feedback": "subtract"}
    sparse = {"codec.select": "topk", "codec.value_dtype": "1bit", "momentum": 0.0}
    changes = {"delta.later": [late], **sparse, "seed": 3, "applier.momentum_warmup": 7}
    phase = preset("diloco", **changes).channels[0].later[0]
    assert phase.applier.momentum_warmup == 7
    for without, why in (({}, "no channel draws positions"), ({"seed": 0}, "no momentum")):
        with pytest.raises(ValueError, match=why):
            preset("diloco", **{**changes, "delta.later": [], **without})
    with pytest.raises(ValueError, match="has no effect"):
        preset("sign_loco", **{"accumulator.alpha": 0.5})  # the phase keeps its own


def test_phase_with_accumulator_clips_each_gradient() -> None:
    """Where a phase has an accumulator or takes signs, no phase clips the mean gradient."""
    for parts in ({"accumulator": {"beta": 0.9}}, {"applier": {"sign": True}}):
        config = preset("full", clip=1.0, **{"gradient.later": [{"begin": 9, **parts}]})
        assert preset("full", clip=1.0).clips_mean and not config.clips_mean


def test_phase_described() -> None:
    """The line of a method names its phases, those at a share of the run, too."""
    assert "; after 0.25 of the run delta every 5" in preset("sign_loco").describe()
    assert "; after 250 steps delta every 5" in preset("sign_loco").fixed(1000).describe()


def test_phase_settings_shown() -> None:
    """`fsdp-demo inspect` shows what is changed in a phase, not all of it."""
    assert settings(preset("sign_loco").fixed(1000)) == {"delta.later.0.begin": 250}
    assert settings(preset("sign_loco", switch=0)) == {"delta.later": []}


def other_phases(switch: float, change: Callable[[list[Any]], Any], **changes: Any) -> Any:
    """The preset with a change of its list of phases."""
    data = preset("sign_loco", switch=switch, **changes).to_dict()
    change(data["channels"][0]["later"])
    return ExchangeConfig.from_dict(data)


def without_accumulator(later: list[Any]) -> None:
    later[0] |= {"accumulator": None, "feedback": "none"}


def one_more(later: list[Any]) -> None:
    later.append({**later[0], "begin": 20})


@pytest.mark.parametrize(("make", "said"), [
    (lambda: preset("sign_loco", late_topk=0), "topk=0 is out of range"),
    (lambda: other_phases(10, without_accumulator, beta=0.6), "what is in it would be lost"),
    (lambda: preset("sign_loco", switch=0.25).begun_as(other_phases(10, one_more)),
        "2 phases, here it has 1"),
])  # fmt: skip
def test_phase_change_refused(make: Callable[[], Any], said: str) -> None:
    """No values, a phase without the accumulator of the one before, and another number of phases
    than at the first start are refused.
    """
    with pytest.raises(ValueError, match=said):
        make()


def train(exchange: Any, model: torch.nn.Module, optimizer: Any, island: int, until: int) -> None:
    def loss(t: int) -> torch.Tensor:
        return model(torch.full((2, 64), float(island + 1) + t)).square().mean()

    two_layers.train(optimizer, loss, exchange.step, until)


def begun(topology: Any, steps: Any, state: Any = None, weights: Any = None, **changes: Any) -> Any:
    """A run of so many steps; it may go on from an exchange's state, and with weights."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 128)
    if weights is not None:
        model.load_state_dict(weights)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    config = preset("sign_loco", switch=0.5, period=2, inner_optimizers="as_is", **changes)
    facts = {} if steps is None else {"steps": steps}
    given = {"topology": topology, "must_match": facts, "state": state}
    return fsdp_demo.attach(optimizer, config, model=model, **given), model, optimizer


@in_ranks(1, 1)
def test_phase_resume_longer_run(me: Any) -> None:
    """A run of 8 steps switches at 4. It goes on to step 40: its phases begin where they began."""

    def first(island: int, topology: Any) -> Any:
        exchange, model, optimizer = begun(topology, steps=8)
        train(exchange, model, optimizer, island, 6)
        state = exchange.state_dict()
        exchange.detach()
        return state

    states = values(islands(first))

    def second(island: int, topology: Any) -> Any:
        exchange, *_ = begun(topology, steps=40, state=states[island])
        found = exchange.config.begins, exchange.channels[0].channel.applier.lr
        exchange.detach()
        return found

    assert values(islands(second)) == [([0, 4], 1.5)] * 2


@pytest.mark.parametrize(
    ("steps", "begins"), [(8, [0, 4]), (8.0, [0, 4]), (8.5, [0]), (float("inf"), [0]), (True, [0])]
)
def test_phase_kinds_of_steps(steps: Any, begins: list[int]) -> None:
    """The steps of the run may be given as a whole number of any type."""
    exchange, *_ = begun(None, steps=steps)
    exchange.detach()
    assert exchange.config.begins == begins


def test_phase_moved_over_the_step_of_a_state() -> None:
    """A state that lies in another phase than the configuration says is refused, with the cure."""
    exchange, model, optimizer = begun(None, steps=8)
    train(exchange, model, optimizer, 0, 6)
    state = exchange.state_dict()
    exchange.detach()
    config = preset("sign_loco", switch=7, period=2, inner_optimizers="as_is")
    with pytest.raises(ValueError, match=r"and with its phases \(later, switch\)"):
        fsdp_demo.attach(optimizer, config, model=model, state=state)


def test_phase_engine_loads_after_attach() -> None:
    """An engine that loads its state after attach takes the phases of the first start."""
    first, *_ = begun(None, steps=8)
    told = {"config": first.config.to_dict()}
    first.detach()
    exchange, model, optimizer = begun(None, steps=40)
    assert exchange.config.begins == [0, 20]
    automatic.go_on(exchange, told, model)
    assert exchange.config.begins == [0, 4]
    train(exchange, model, optimizer, 0, 6)
    assert exchange.channels[0].channel.applier.lr == 1.5
    exchange.detach()
    fewer = {"config": preset("sign_loco").to_dict()}
    exchange, model, _ = begun(None, steps=40)
    automatic.go_on(exchange, fewer, model)  # its steps were not known then
    assert exchange.config.begins == [0]
    exchange.detach()


def test_phase_unknown_number_of_steps(caplog: Any) -> None:
    """Without the number of steps the first phase stays, also after a resume."""
    exchange, *_ = begun(None, steps=None)
    assert exchange.config.begins == [0]
    assert "not known from its first start" in caplog.text and "must_match" in caplog.text
    state = exchange.state_dict()
    exchange.detach()
    caplog.clear()
    again, *_ = begun(None, steps=40, state=state)  # what a run has begun with stays
    assert again.config.begins == [0] and "not known from its first start" in caplog.text
    again.detach()


def test_phase_shares_and_steps_begin_as_before() -> None:
    """Of phases at shares and at steps the first go on as they began: they were left out where the
    steps of the run were not known. Those at steps stay as they are given.
    """
    data = preset("sign_loco", switch=0.25).to_dict()
    data["channels"][0]["later"] += [{**data["channels"][0]["later"][0], "begin": 900}]
    config = ExchangeConfig.from_dict(data)
    for steps, begins in ((None, [0, 900]), (1000, [0, 250, 900])):
        assert config.begun_as(config.fixed(steps)).begins == begins
    data["channels"][0]["later"][1]["begin"] = 800
    assert ExchangeConfig.from_dict(data).begun_as(config.fixed(1000)).begins == [0, 250, 800]


@pytest.mark.parametrize("beta", [0.0, 0.6])
def test_phase_taken_back(beta: float) -> None:
    """`load_state_dict` takes a run back over a switch, bit for bit."""
    exchange, model, optimizer = begun(None, steps=8, beta=beta)
    train(exchange, model, optimizer, 0, 3)
    before = copy.deepcopy((exchange.state_dict(), model.state_dict()))
    ends = []
    for _ in range(2):
        train(exchange, model, optimizer, 0, 10)
        ends.append(model.weight.detach().clone())
        exchange.load_state_dict(copy.deepcopy(before[0]))
        model.load_state_dict(before[1])
        exchange.accept_parameters()
    exchange.detach()
    assert torch.equal(*ends)


@in_ranks(1, 1)
def test_phase_resume_on_both_sides_of_switch(me: Any) -> None:
    """An island whose checkpoint is of before a switch goes on with one that is past it."""

    def first(island: int, topology: Any) -> Any:
        exchange, model, optimizer = begun(topology, steps=8)
        train(exchange, model, optimizer, island, 3 + 3 * island)
        kept = copy.deepcopy((exchange.state_dict(), model.state_dict()))
        train(exchange, model, optimizer, island, 6)
        exchange.detach()
        return kept

    kept = values(islands(first))

    def second(island: int, topology: Any) -> Any:
        exchange, model, optimizer = begun(topology, 8, *kept[island])
        found = exchange.step, exchange.channels[0].channel.applier.lr
        train(exchange, model, optimizer, island, 10)
        exchange.finish()
        return *found, exchange.digests_equal()

    assert values(islands(second)) == [(6, 1.5, True)] * 2


@pytest.mark.parametrize("delay", [0, 1])
def test_phase_loss_at_switch(delay: int) -> None:
    """The state of a run whose last exchange before a switch was cut off can be resumed from."""
    late = {"schedule.delay": delay}
    exchange, model, optimizer = begun(None, steps=8, **late)
    train(exchange, model, optimizer, 0, 12)
    end = model.weight.detach().clone()
    exchange.detach()
    exchange, model, optimizer = begun(None, steps=8, **late)
    train(exchange, model, optimizer, 0, 3 + delay)

    def cut(channels: Any, *args: Any, **kwargs: Any) -> Any:
        if channels:
            exchange._queue.broken = True
            raise fsdp_demo.PeerLost("cut off")
        return iter(())

    cut_off = pytest.raises(fsdp_demo.PeerLost, match="cut off")
    with mock.patch.object(exchange._queue, "receive", cut), cut_off:
        train(exchange, model, optimizer, 0, 4 + delay)
    state, weights = copy.deepcopy((exchange.state_dict(), model.state_dict()))
    exchange.detach()
    exchange, model, optimizer = begun(None, 8, state, weights, **late)
    train(exchange, model, optimizer, 0, 12)
    exchange.detach()
    assert torch.equal(model.weight, end)


@in_threads()
def test_phase_bytes_announced(topology: Any) -> None:
    """The bytes that are announced are those of the phase that sends most."""
    exchange, *_ = begun(topology, steps=8, late_topk=2048)
    found = summary._bytes_of_island(exchange._runtime)[0]
    exchange.choose(exchange.config.at(4), None)
    assert found == summary._bytes_of_island(exchange._runtime)[0] and found[0] > 128
    exchange.detach()


def test_phase_behind_the_end(caplog: Any) -> None:
    """A phase that the run does not come to is told of."""
    for switch in (7, 8):
        model = torch.nn.Linear(4, 4)
        optimizer, facts = torch.optim.AdamW(model.parameters()), {"steps": 8}
        config = preset("sign_loco", switch=switch)
        fsdp_demo.attach(optimizer, config, model=model, must_match=facts).detach()
        said = "a run of 8 steps has no phase that begins after 8 steps" in caplog.text
        assert said == (switch == 8)


def test_phase_memory_of_larger_one() -> None:
    """The planned memory is that of the larger phase."""
    shape = [("layers.0.weight", (1024, 1024))]
    feedback = preset("sign_loco", beta=0.5, momentum=0.0, momentum_warmup=0)
    # the first: an anchor and an outer momentum
    for config in (preset("sign_loco"), feedback, preset("sign_loco", switch=100)):
        assert plan_memory(config, shape, islands=2).per_parameter("device_state") == 8.0
    delayed = preset("sign_loco", switch=100, **{"schedule.delay": 2})
    assert plan_memory(delayed, shape, islands=2).per_parameter("device_state") == 12.0


@in_ranks(2, 1)
def test_phase_positions_by_seed(me: Any) -> None:
    """From top-k to positions that a seed chooses: of all values both send the same."""
    trained = []
    for select in ("topk", "random"):
        codec = {"select": select, "topk": 4096, "value_dtype": "fp32"}
        late = {"begin": 4, "codec": codec, "accumulator": {"beta": 1.0}}
        late |= {"feedback": "subtract", "applier": {"acts_as": "outer_step", "lr": 1.5}}
        exchange, model, optimizer = begun(None, steps=None, **{"delta.later": [late]})
        train(exchange, model, optimizer, me.island, 9)
        assert exchange.channels[0].channel.codec.select == select
        exchange.detach()
        trained.append(model.weight.detach())
    chosen, seeded = torch.stack(trained)
    assert torch.equal(chosen, seeded)
