"""The configuration: what is refused, what an error says, and that yaml, `--set` and the digest
lose nothing.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import fsdp_demo
from fsdp_demo import (
    Accumulator,
    Applier,
    Channel,
    Codec,
    ExchangeConfig,
    Fragments,
    Reducer,
    SyncSchedule,
    load_config,
    preset,
    presets,
)
from fsdp_demo.config.channel import CHANGING
from fsdp_demo.config.names import FORMATS
from fsdp_demo.config.parts import BLOCK

from ..support.refused import refusal

PRESETS = sorted(presets())
PAIRED = ("noloco", "saps")
quick = settings(max_examples=25, deadline=None)


# ---- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(("changes", "parts"), [
    ({"perid": 4}, ["'perid'", "did you mean 'period'"]),
    ({"schedule.sync_evry": 4}, ["schedule.sync_evry", "did you mean 'schedule.sync_every'"]),
    ({"codec.topkk": 4}, ["codec.topkk", "did you mean 'codec.topk'"]),
    ({"delta.codec.value_dtyp": "fp32"}, ["did you mean 'delta.codec.value_dtype'"]),
    ({"accumulator.bta": 0.5}, ["bta", "did you mean 'beta'"]),
    ({"codec.topk.more": 1}, ["codec.topk.more"]),
    ({"other.codec.topk": 8}, ["other.codec.topk"]),
    ({"cliip": 1.0}, ["cliip", "did you mean 'clip'"]),
    ({"": 1}, ["''"]),
    # words
    ({"codec.transform": "dtc"}, ["codec.transform='dtc'", "none, dct", "did you mean 'dct'"]),
    ({"codec.value_dtype": "int3"},
        ["codec.value_dtype='int3'", ", ".join(FORMATS), "did you mean 'int8'"]),
    ({"codec.select": "top-k"}, ["codec.select='top-k'", "did you mean 'topk'"]),
    ({"reducer": "sender"}, ["reducer.mean_over='sender'", "did you mean 'senders'"]),
    ({"reducer.weight": "token"}, ["did you mean 'tokens'"]),
    ({"delta.feedback": "subtrakt"}, ["did you mean 'subtract'"]),
    ({"delta.source": "gradients"}, ["did you mean 'gradient'"]),
    ({"applier.acts_as": "outr_step"}, ["did you mean 'outer_step'"]),
    ({"applier.sign": "sgn"}, ["applier.sign", "true or false"]),
    ({"rule": "consensu"}, ["did you mean 'consensus'"]),
    # numbers out of range
    ({"topk": BLOCK + 1}, [f"codec.topk={BLOCK + 1}", f"1 <= topk <= {BLOCK}"]),
    ({"topk": 0}, ["codec.topk=0"]),
    ({"period": 0}, ["schedule.sync_every=0", "schedule.sync_every >= 1"]),
    ({"period": -3}, ["schedule.sync_every=-3"]),
    ({"schedule.offset": 128}, ["schedule.offset=128", "127"]),
    ({"schedule.offset": -1}, ["schedule.offset=-1"]),
    ({"schedule.delay": -1}, ["schedule.delay=-1"]),
    ({"beta": 1.5}, ["accumulator.beta=1.5"]),
    ({"beta": float("nan")}, ["accumulator.beta=nan"]),
    ({"accumulator.alpha": -0.1}, ["accumulator.alpha=-0.1"]),
    ({"accumulator.gain": 0.0}, ["accumulator.gain=0.0"]),
    ({"lr": -1.0}, ["applier.lr=-1.0"]),
    ({"lr": float("nan")}, ["applier.lr=nan"]),
    ({"applier.momentum": 1.0}, ["applier.momentum=1.0", "momentum < 1"]),
    ({"applier.mix": 1.01}, ["applier.mix=1.01"]),
    ({"applier.own_share": -0.1}, ["applier.own_share=-0.1"]),
    ({"applier.dampening": 1.0}, ["applier.dampening=1.0", "dampening < 1"]),
    ({"applier.dampening": 0.5}, ["applier.dampening=0.5 has no effect", "no momentum"]),
    ({"applier.own_step": True}, ["applier.own_step=True", "1/R", "own_share=1"]),
    ({"clip": 0.0}, ["clip=0.0", "null"]),
    ({"clip": -1.0}, ["clip=-1.0"]),
    ({"clip": float("nan")}, ["clip=nan"]),
    ({"max_in_flight": 0}, ["max_in_flight=0"]),
    ({"inner_optimizers": ()}, ["inner_optimizers"]),
])  # fmt: skip
def test_config_wrong_setting_says_allowed(changes: dict[str, Any], parts: list[str]) -> None:
    """An unknown key or word is refused with the nearest one, a number with the range that is
    allowed.
    """
    refusal(lambda: preset("decoupled_momentum", **changes), *parts)


def test_config_unknown_preset_offers_nearest() -> None:
    """An unknown preset is refused, and the error offers the nearest one."""
    refusal(lambda: preset("dilocco"), "preset='dilocco'", "did you mean 'diloco'", *PRESETS)


@pytest.mark.parametrize(("change", "parts"), [
    (lambda data: data["channels"][0]["codec"].update(topq=3),
        ["channels[0].codec.topq", "did you mean 'topk'"]),
    (lambda data: data.update(clipp=3), ["clipp", "did you mean 'clip'"]),
    (lambda data: data.pop("channels"), ["lacks channels"]),
    (lambda data: data.update(channels=["demo"]), ["channels[0]='demo' must be a mapping"]),
    (lambda data: data.update(channels="demo"), ["channels='demo' must be a list"]),
])  # fmt: skip
def test_config_yaml_unknown_key_names_place(change: Any, parts: list[str]) -> None:
    """The error of an unknown key in a yaml file names its place."""
    data = preset("demo").to_dict()
    change(data)
    refusal(lambda: ExchangeConfig.from_dict(data), *parts)


@pytest.mark.parametrize("text", ["- 1", ""])
def test_config_yaml_must_be_a_mapping(text: str) -> None:
    """Text that is no mapping is refused."""
    refusal(lambda: ExchangeConfig.from_yaml(text), "must be a mapping")


def test_config_too_much_in_flight() -> None:
    """The error of too much in flight says how much is allowed."""
    says = "17 payloads", "max_in_flight=16", "schedule.delay=16", "shorten the delay"
    refusal(lambda: preset("full", **{"schedule.delay": 16}), *says)
    assert preset("full", **{"schedule.delay": 15}).channels[0].schedule.in_flight == 16
    assert preset("full", max_in_flight=17, **{"schedule.delay": 16}).max_in_flight == 17


def lone(*args: Any, **options: Any) -> ExchangeConfig:
    return ExchangeConfig("lone", (Channel(*args, **options),))


@pytest.mark.parametrize("build", [
    lambda: lone("c", "gradient", applier=Applier("outer_step")),
    lambda: lone("c", "delta", applier=Applier("gradient")),
    lambda: lone("c", "parameter", applier=Applier("outer_step")),
    lambda: lone("c", "gradient", feedback="subtract"),  # nothing to subtract from
    # gradients between exchanges would be lost
    lambda: lone("c", "gradient", SyncSchedule(sync_every=2)),
    lambda: lone("c", "gradient", reducer=Reducer("senders")),  # everybody sends
    lambda: lone("c", "delta", applier=Applier("outer_step", sign=True)),
    lambda: lone("c", "delta", applier=Applier("outer_step", local_delta=True)),
    lambda: preset("local_sgd", **{"applier.keep_steps": True}),
    lambda: preset("diloco", **{"applier.keep_steps": True, "applier.mix": 0.5}),
    lambda: preset("diloco", period=4, **{"applier.own_share": 0.5, "schedule.delay": 3}),
    lambda: preset("diloco", period=4, **{"applier.own_share": 0.5, "schedule.delay": 8}),
    lambda: lone("c", "gradient", SyncSchedule(), Accumulator(0.9), Codec("none", "topk"),
        "put_back"),
    lambda: lone("c", "delta", SyncSchedule(), Accumulator(0.9), feedback="put_back",
        applier=Applier("outer_step")),  # would count twice
    lambda: lone("c", "state:exp_avg", applier=Applier("replace", mix=0.5)),
    # everybody sends
    lambda: lone("c", "gradient", codec=Codec("none", "random"), reducer=Reducer("senders")),
    lambda: lone("c", "gradient", codec=Codec("none", "stride"),
        reducer=Reducer(clip="median_norm")),
    lambda: lone("c", "parameter", applier=Applier("replace"), after="c"),
    lambda: lone("c", "parameter", codec=Codec(value_dtype="int8"), applier=Applier("replace")),
    lambda: lone("c", "parameter", codec=Codec("none", "topk"), applier=Applier("replace")),
    lambda: lone("c", "state:exp_avg", accumulator=Accumulator(), applier=Applier("replace")),
    lambda: Codec("dct", "dense"),
    lambda: Applier("outer_step", nesterov=True),
    lambda: preset("diloco", momentum_warmup=-1),
    lambda: preset("demo", version=3),
    lambda: preset("demo", inner_optimizer="adagrad"),
    # consensus replicas are equal anyway
    lambda: preset("decoupled_momentum", average_every=2),
    lambda: preset("desloc", states={"exp_avg": 0}),
    lambda: Fragments(layers=0),
    lambda: Fragments(order="random"),
    lambda: preset("diloco", offload_outer_state="disk"),
    lambda: preset("diloco", clip_scope="world"),
    lambda: two(average()),  # both write the parameters after every tenth step
    lambda: two(average(after="nobody")),
    # no anchor can be set under what is in flight
    lambda: two(average(after="delta"), delay=1),
    # each would undo the other
    lambda: two(delta(name="again")),
    lambda: two(delta(name="again", include=("layers.*",))),
    lambda: ExchangeConfig("none", ()),
    lambda: ExchangeConfig("twice", (Channel("c", "gradient"), Channel("c", "gradient"))),
])  # fmt: skip
def test_config_channels_without_meaning_refused(build: Any) -> None:
    """Channels that have no meaning are refused."""
    text = refusal(build)
    assert len(text) > 40 and any(mark in text for mark in (":", "allowed", "needs", "found")), text


def average(**options: Any) -> Channel:
    schedule = SyncSchedule(options.pop("period", 10), options.pop("offset", 0))
    return Channel("average", "parameter", schedule, applier=Applier("replace"), **options)


def delta(period: int = 10, name: str = "delta", delay: int = 0, **options: Any) -> Channel:
    schedule = SyncSchedule(period, delay=delay)
    return Channel(name, "delta", schedule, applier=Applier("outer_step"), **options)


def two(second: Channel, **schedule: int) -> ExchangeConfig:
    """A delta channel of period 10 over all parameters, and another one."""
    return ExchangeConfig("two", (delta(**schedule), second))


def test_config_channel_combinations_allowed() -> None:
    """Channels that can work together are allowed."""
    two(average(after="delta"))
    two(average(offset=1))  # they never meet
    two(average(period=5, offset=2))
    two(Channel("moments", "state:exp_avg", SyncSchedule(30), applier=Applier("replace")))
    two(Channel("gradient", "gradient"))  # acts before the step, the delta after it
    embeddings = delta(30, "embeddings", include=("*embed*",))
    ExchangeConfig("embeddings apart", (delta(exclude=("*embed*",)), embeddings))
    delta(2, delay=5)
    Channel("c", "gradient", SyncSchedule(sync_every=2), Accumulator(0.9))
    Channel("c", "state:exp_avg", applier=Applier("replace"))
    preset("decoupled_momentum", rule="released", reducer="senders")
    preset("demo", topk=BLOCK, value_dtype="fp32")


# ---- types -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "texts", "read"), [
    ("demo", ["lr=1e-3"], lambda c: c.lr == 1e-3),
    # a keyword of the preset: the outer rate
    ("diloco", ["lr=1e-1"], lambda c: c.channels[0].applier.lr == 0.1),
    ("diloco", ["applier.lr=5e-1"], lambda c: c.channels[0].applier.lr == 0.5),
    ("diloco", ["momentum=0"],
        lambda c: c.channels[0].applier.momentum == 0.0 and not c.channels[0].applier.nesterov),
    ("diloco", ["clip=null"], lambda c: c.clip is None),
    ("diloco", ["clip=2"], lambda c: c.clip == 2.0),
    ("demo", ["codec.topk=16", "codec.value_dtype=bf16"],
        lambda c: (c.channels[0].codec.topk, c.channels[0].codec.value_dtype) == (16, "bf16")),
    ("demo", ["momentum.codec.topk = 16"], lambda c: c.channels[0].codec.topk == 16),
    ("demo", ["sign=false"], lambda c: c.channels[0].applier.sign is False),
    ("demo", ["exclude=[a*, b]"], None),
    ("demo", ["momentum.exclude=[a*, b]"], lambda c: c.channels[0].exclude == ("a*", "b")),
    ("demo", ["inner_optimizers=as_is"], lambda c: c.inner_optimizers == ("as_is",)),
    ("demo", ["inner_optimizers=[sgd, muon]"], lambda c: c.inner_optimizers == ("sgd", "muon")),
    ("full", ["accumulator.beta=0.9", "schedule.sync_every=3"],
        lambda c: c.channels[0].accumulator == Accumulator(beta=0.9)),
    ("decoupled_momentum", ["lr=null"], lambda c: c.channels[0].applier.lr == 1.0),
])  # fmt: skip
def test_config_set_texts(name: str, texts: list[str], read: Any) -> None:
    """Texts of `--set` are read as keys and values."""
    if read is None:
        refusal(lambda: load_config(name, texts), "exclude")
    else:
        assert read(load_config(name, texts))


@pytest.mark.parametrize(("name", "text", "parts"), [
    ("diloco", "period=true", ["period", "a whole number", "true or false"]),
    ("diloco", "schedule.sync_every=true", ["schedule.sync_every", "true or false"]),
    ("diloco", "period=4.5", ["period", "4.5", "a whole number"]),
    ("diloco", "period=2.5e0", ["period", "2.5e0", "a whole number"]),
    ("diloco", "period=often", ["period", "often", "a whole number"]),
    ("diloco", "lr=fast", ["lr", "fast", "a number"]),
    ("diloco", "lr=true", ["lr", "a number", "true or false"]),
    ("diloco", "applier.lr=true", ["applier.lr", "a number", "true or false"]),
    ("diloco", "applier.nesterov=1", ["nesterov", "true or false", "a whole number"]),
    ("demo", "sign=1", ["sign", "true or false", "a whole number"]),
    ("demo", "codec.topk=null", ["codec.topk", "a whole number"]),
    ("demo", "codec.value_dtype=8", ["value_dtype", "a text"]),
    ("demo", "momentum.exclude=lm_head", ["exclude", "list"]),
    ("demo", "topk", ["path=value"]),
    ("diloco", "clip=[1]", ["clip", "a number, or null"]),
])  # fmt: skip
def test_config_set_texts_wrong_type(name: str, text: str, parts: list[str]) -> None:
    """Texts of `--set` with a wrong type are refused."""
    refusal(lambda: load_config(name, [text]), *parts)


# ---- yaml --------------------------------------------------------------------------------------


def changes_of(name: str) -> st.SearchStrategy[dict[str, Any]]:
    """Changes that are allowed for a preset, as `preset(name, **changes)` takes them."""
    number = st.floats(1e-8, 1e8)
    delays = (
        {} if name in ("streaming_diloco", "sel_sync") else {"schedule.delay": st.integers(0, 3)}
    )
    if name in PAIRED:
        delays = {}
    options: dict[str, Any] = {
        **delays,
        "clip": st.none() | number,
        "max_in_flight": st.integers(16, 100),
        "lr": number,
        "inner_optimizers": st.lists(
            st.sampled_from(["sgd", "adamw", "muon", "any"]), min_size=1, max_size=3, unique=True
        ).map(tuple),
        "reducer.weight": st.sampled_from(["equal", "tokens"]),
        "include": st.lists(st.text(max_size=8), max_size=3).map(tuple),
        "exclude": st.lists(
            st.sampled_from(["*", "yes", "1e5", "null", "~", "a: b", "#c", "é"]), max_size=3
        ).map(tuple),
    }
    if name == "demo":
        options |= {"beta": st.floats(0, 1), "topk": st.integers(1, BLOCK), "sign": st.booleans()}
        options |= {"value_dtype": st.sampled_from(["fp32", "bf16", "int8"])}
    if name in ("decoupled_momentum", "sparse_loco", "sign_loco"):
        options["applier.dense_lr"] = number
    if name in ("diloco", "decoupled_momentum"):
        options |= {"period": st.integers(4, 10**6)}
    if name == "decoupled_momentum":
        options |= {
            "rule": st.sampled_from(["consensus", "released"]),
            "reducer": st.sampled_from(["replicas", "senders"]),
        }
    return st.fixed_dictionaries({}, optional=options)


def build(name: str, changes: dict[str, Any]) -> ExchangeConfig:
    channel = presets()[name]().channels[0].name
    return preset(
        name,
        **{f"{channel}.{k}" if k in ("include", "exclude") else k: v for k, v in changes.items()},
    )


@quick
@given(st.data())
def test_config_yaml_round_trip(data: st.DataObject) -> None:
    """A configuration comes back from yaml unchanged."""
    name = data.draw(st.sampled_from(PRESETS))
    config = build(name, data.draw(changes_of(name)))
    again = ExchangeConfig.from_yaml(config.to_yaml())
    assert again == config and again.digest() == config.digest()
    assert type(again.channels) is tuple
    assert all(
        type(p) is tuple
        for c in again.channels
        for p in (c.include, c.exclude, c.uncompressed, c.no_transform)
    )


@quick
@given(st.data())
def test_config_digest_changes_with_any_change(data: st.DataObject) -> None:
    """The digest changes with any change of a configuration."""
    name = data.draw(st.sampled_from(PRESETS))
    a, b = (build(name, data.draw(changes_of(name))) for _ in range(2))
    assert (a.digest() == b.digest()) == (a == b)
    assert 0 <= a.digest() < 2**64


def leaves(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(node, dict):
        return [leaf for k, v in node.items() for leaf in leaves(v, (*path, k))]
    if isinstance(node, list) and node and isinstance(node[0], dict):
        return [leaf for i, v in enumerate(node) for leaf in leaves(v, (*path, i))]
    return [path]


def others(value: Any) -> list[Any]:
    """Values of the same kind, some of which the checks will refuse."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, (int, float)):
        return [value + 1, value / 2 if isinstance(value, float) else value + 2]
    if isinstance(value, str):
        return ["equal", "tokens", "senders", "replicas", "bf16", "none", value + "x"]
    return [["x"], 0.5, 3, {}] if value is None else [[*value, "x"]]


@pytest.mark.parametrize("name", PRESETS)
def test_config_digest_holds_every_field(name: str) -> None:
    """Every field is in the digest."""
    config, changed = preset(name), set()
    plain, digest = config.to_dict(), config.digest()
    for *parents, leaf in leaves(plain):
        here = functools.reduce(lambda node, key: node[key], parents, plain)
        phase = [{"begin": 7, **{key: here[key] for key in CHANGING}}] if leaf == "later" else None
        for value in [phase] if phase else others(here[leaf]):
            data = copy.deepcopy(plain)
            functools.reduce(lambda node, key: node[key], parents, data)[leaf] = value
            try:
                other = ExchangeConfig.from_dict(data)
            except ValueError:
                continue
            assert (other.digest() == digest) == (other == config), (parents, leaf, value)
            if other != config:
                changed.add((*parents, leaf))
    unmoved = {path[-1] for path in set(map(tuple, leaves(plain))) - changed}
    # What cannot change alone: other values of these are refused without a change elsewhere.
    words = "source transform select feedback mean_over acts_as value_dtype sign order clip rate "
    words += "clip_scope after offload_outer_state transform_precision nesterov local_delta mix "
    words += "accumulator offset sync_every momentum keep_steps own_share own_step dampening "
    words += "fragments local_steps backup_islands inner_rank "
    words += "weight when " if any(c.later for c in config.channels) else "when "
    words += "delay at_most " if config.checks else ""
    words += "delay clip_scope norm_limit by bandwidth drop" if config.pairs else "pairs"
    assert unmoved <= set(words.split())


def test_config_yaml_short_or_whole(tmp_path: Any) -> None:
    """A yaml file may be short (a preset and changes) or whole."""
    short, whole = tmp_path / "short.yaml", tmp_path / "whole.yml"
    text = "preset: demo\ntopk: 16\nclip: null\ncodec:\n  value_dtype: bf16\n"
    short.write_text(f"{text}momentum:\n  schedule: {{delay: 2}}\n")
    config = load_config(str(short), ["codec.topk=8"])
    changes = {"codec.topk": 8, "schedule.delay": 2}
    assert config == preset("demo", clip=None, value_dtype="bf16", **changes)
    whole.write_text(config.to_yaml())
    assert load_config(str(whole)) == config
    assert load_config(str(whole), ["max_in_flight=20"]).max_in_flight == 20
    assert load_config(str(whole), ["inner_optimizers=as_is"]).inner_optimizers == ("as_is",)
    refusal(lambda: load_config(str(whole), ["codec.top=8"]), "did you mean 'codec.topk'")
    (tmp_path / "list.yaml").write_text("- demo\n")
    refusal(lambda: load_config(str(tmp_path / "list.yaml")), "list.yaml", "preset")


def test_config_yaml_is_readable() -> None:
    """The yaml of a configuration is readable."""
    data = yaml.safe_load(preset("demo").to_yaml())
    assert list(data)[:2] == ["preset", "channels"] and data["channels"][0]["codec"]["topk"] == 32


# ---- schedule, what is equal when, sentences ---------------------------------------------------


@quick
@given(st.integers(1, 9), st.data())
def test_schedule_due_steps(period: int, data: st.DataObject) -> None:
    """A schedule is due once per period, from its offset on."""
    offset = data.draw(st.integers(0, period - 1))
    schedule = SyncSchedule(period, offset)
    due = [t for t in range(5 * period) if schedule.due(t)]
    assert due == [t for t in range(5 * period) if t >= offset and (t + 1 - offset) % period == 0]
    assert all(b - a == period for a, b in zip(due, due[1:], strict=False))


def test_config_equal_after_exchange_and_end() -> None:
    """The presets with equal replicas after an exchange, and at the end, follow from their
    channels.
    """
    unequal = [name for name in PRESETS if not preset(name).equal_after_exchange]
    assert unequal == ["noloco", "saps", "streaming_diloco"]  # local steps are mixed in
    assert [name for name in PRESETS if not preset(name).equal_at_end] == list(PAIRED)
    assert not preset("decoupled_momentum", rule="released").equal_at_end
    assert not preset("diloco", period=4, **{"schedule.delay": 4}).equal_after_exchange
    assert preset("diloco", period=4, **{"schedule.delay": 3}).equal_after_exchange
    assert not preset("local_sgd", **{"schedule.delay": 1}).equal_after_exchange
    assert not preset("decoupled_momentum", rule="released").equal_after_exchange
    assert not preset("diloco", **{"applier.mix": 0.5}).equal_after_exchange


@pytest.mark.parametrize("name", PRESETS)
def test_config_describe_one_line(name: str) -> None:
    """`describe` is one line with the numbers of a preset."""
    config = preset(name)
    text = config.describe()
    assert "\n" not in text and name in text
    for c in config.channels:
        assert c.source in text
        assert f"every {c.schedule.sync_every}" in text
        assert c.reducer.mean_over in text
        assert c.codec.value_dtype in text
        assert (f"top-{c.codec.topk}" in text) == c.codec.indexed
        assert (f"{c.codec.select} {c.codec.topk}" in text) == c.codec.seeded


# ---- the inner optimizer -----------------------------------------------------------------------


def single(monkeypatch: pytest.MonkeyPatch) -> torch.nn.Module:
    monkeypatch.delenv("ISLAND_COUNT", raising=False)
    return torch.nn.Linear(3, 3)


@pytest.mark.parametrize(("name", "make", "found"), [
    ("demo", lambda p: torch.optim.AdamW(p), "AdamW"),
    ("demo", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "SGD with momentum 0.9"),
    ("diloco", lambda p: torch.optim.SGD(p, lr=0.1), "SGD"),
    ("decoupled_momentum", lambda p: torch.optim.RMSprop(p), "RMSprop"),
])  # fmt: skip
def test_config_wrong_inner_optimizer_refused(monkeypatch, name, make, found) -> None:
    """A wrong inner optimizer is refused with the cure."""
    model = single(monkeypatch)
    says = f"found {found}", "fsdp_demo.base_optimizer(", "='as_is'"
    refusal(lambda: fsdp_demo.attach(make(model.parameters()), name), *says)
    for config, changes in (
        (name, {"inner_optimizers": "as_is"}),
        (preset(name), {"inner_optimizers": "as_is"}),
        (preset(name, inner_optimizers="as_is"), {}),
    ):
        fsdp_demo.attach(make(model.parameters()), config, **changes).detach()


@pytest.mark.parametrize("name", PRESETS)
def test_base_optimizer_fits_attach(monkeypatch, name) -> None:
    """`base_optimizer` makes an optimizer that `attach` takes."""
    model, config = single(monkeypatch), preset(name)
    if config.lr is None:
        refusal(lambda: fsdp_demo.base_optimizer(config, model.parameters()), "lr=")
    optimizer = fsdp_demo.base_optimizer(
        config, model.named_parameters(), lr=None if config.lr else 1e-3, weight_decay=0.25
    )
    assert {g["weight_decay"] for g in optimizer.param_groups} == {0.25}
    assert optimizer.param_groups[0]["lr"] == (config.lr or 1e-3)
    if config.channels[0].fragments is None:
        fsdp_demo.attach(optimizer, config, model=model).detach()
    else:
        says = "no parameter name holds a layer number", "weight, bias"
        refusal(lambda: fsdp_demo.attach(optimizer, config, model=model), *says)

    def unnamed() -> torch.optim.Optimizer:
        return fsdp_demo.base_optimizer(config, model.parameters(), lr=0.5)

    if name in ("muloco", "sign_muloco"):
        refusal(unnamed, "model.named_parameters()")
    else:
        assert unnamed().param_groups[0]["lr"] == 0.5


def test_preset_published_rates() -> None:
    """The learning rates of the presets are those of the papers (DESIGN.md 3, algorithms.md);
    `sign_loco` and `sign_muloco` have none.
    """
    assert {n: preset(n).lr for n in PRESETS if preset(n).lr != 4e-4} == dict(
        full=None, local_sgd=None, sel_sync=None, noloco=None, saps=None, muloco=0.0224,
        sign_loco=8e-3, sign_muloco=3.2e-2,
    )  # fmt: skip
    assert preset("demo", inner_optimizer="adamw").lr == 1e-3
    outer = preset("diloco").channels[0].applier
    assert (outer.lr, outer.momentum, outer.nesterov) == (0.7, 0.9, True)
    assert preset("decoupled_momentum", rule="released").channels[0].applier.lr == 0.7
    assert preset("decoupled_momentum").channels[0].applier.lr == 1.0
    assert preset("demo").channels[0].accumulator == Accumulator(0.999)


def test_attach_without_optimizer_refused(monkeypatch) -> None:
    """`attach` refuses an object that is no optimizer."""
    model = single(monkeypatch)
    refusal(lambda: fsdp_demo.attach(model, "demo"), "torch.optim.Optimizer", "Linear")
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    refusal(lambda: fsdp_demo.attach([sgd, 3], "demo"), "int")


def test_base_optimizer_adamw_without_first_moment(monkeypatch, caplog) -> None:
    """AdamW has no first moment on a momentum of gradients. Where the exchange keeps one; the
    feedback of a delta is none.
    """
    model = single(monkeypatch)

    def betas(name: str, **changes: Any) -> tuple[float, float]:
        config = preset(name, **changes)
        return fsdp_demo.base_optimizer(config, model.parameters(), 1.0).defaults["betas"]

    assert betas("demo", inner_optimizer="adamw") == (0.0, 0.95)
    assert betas("full") == betas("sparse_loco") == betas("diloco") == (0.9, 0.95)
    for first, said in ((0.0, False), (0.9, True)):
        optimizer = torch.optim.AdamW(model.parameters(), betas=(first, 0.95))
        caplog.clear()
        fsdp_demo.attach(optimizer, preset("demo", inner_optimizer="adamw"), model=model).detach()
        assert ("betas[0]=0.9" in caplog.text) is said
