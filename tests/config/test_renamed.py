"""Keys and values of a configuration that had another name before: who writes the old one is told
the new one.
"""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_demo import ExchangeConfig, load_config, preset, presets
from fsdp_demo.config.renamed import KEYS, KEYWORDS, VALUES, translated
from fsdp_demo.config.schema import NORM_LIMIT
from fsdp_demo.errors import see

TOP = ("inner", "outer_state", "clip_over")


def refused(call: Any, new: str) -> str:
    with pytest.raises(ValueError) as error:
        call()
    text = str(error.value)
    assert f"is called {new} now" in text and text.endswith(see("unknown-key")), text
    assert "0.2" not in text  # no version of that number exists
    return text


def nested(path: str, value: Any) -> dict[str, Any]:
    """A path as nested dicts."""
    head, _, rest = path.partition(".")
    return {head: nested(rest, value) if rest else value}


@pytest.mark.parametrize(("old", "new"), KEYS.items())
def test_an_old_key_names_the_new_one(old: str, new: str) -> None:
    whole = old if old in TOP else f"delta.{old}"
    assert refused(lambda: preset("diloco").changed({whole: 1}), new).startswith(f"{old} is called")
    if "." in old or old in TOP:
        refused(lambda: load_config("diloco", [f"{old}=1"]), new)
        refused(lambda: preset("diloco", **{old: 1}), new)


@pytest.mark.parametrize(("old", "new"), KEYS.items())
def test_an_old_key_in_a_whole_yaml_file(old: str, new: str, tmp_path: Any) -> None:
    data = preset("diloco").to_dict()
    if old in TOP:
        data[old] = 1
    elif "." in old:
        part, _, leaf = old.partition(".")
        data["channels"][0][KEYS.get(part, part)][leaf] = 1
        if part in KEYS:  # the part has another name, too: that is said first
            data["channels"][0] = {
                (part if k == KEYS[part] else k): v for k, v in data["channels"][0].items()
            }
            new = KEYS[part]
    else:
        data["channels"][0][old] = 1
    where = "" if old in TOP else "channels[0]."
    refused(lambda: ExchangeConfig.from_dict(data), f"{where}{new}")


def test_an_old_key_in_a_short_yaml_file(tmp_path: Any) -> None:
    file = tmp_path / "short.yaml"
    for text, new in (
        ("clock: {period: 4}", "schedule.sync_every"),
        ("delta:\n  clock: {delay: 1}", "schedule.delay"),
        ("codec: {code: bf16}", "codec.value_dtype"),
        ("clip_over: islands", "clip_scope"),
    ):
        file.write_text(f"preset: diloco\n{text}\n")
        refused(lambda: load_config(str(file)), new)


@pytest.mark.parametrize(
    ("path", "old", "new"),
    [(path, old, new) for path, row in VALUES.items() for old, new in row.items()],
)
def test_an_old_value_names_the_new_one(path: str, old: str, new: Any) -> None:
    word = str(new).lower() if isinstance(new, bool) else repr(new)
    whole = f"delta.{path}" if path == "feedback" else path
    assert f"{path}={old!r}" in refused(lambda: preset("diloco", **{whole: old}), f"{path}={word}")
    top, data = path == "offload_outer_state", preset("diloco").to_dict()
    node, inside = (data, path) if top else (data["channels"][0], path)
    *parents, leaf = inside.split(".")
    for key in parents:
        node = node[key]
    node[leaf] = old
    refused(lambda: ExchangeConfig.from_dict(data), f"{'' if top else 'channels[0].'}{path}={word}")


def test_an_old_key_with_an_old_value_says_both() -> None:
    assert "'sign' is true there" in refused(
        lambda: preset("demo", **{"applier.phi": "sign"}), "applier.sign"
    )
    assert "'outer' is 'outer_step' there" in refused(
        lambda: preset("diloco", **{"applier.kind": "outer"}), "applier.acts_as"
    )


def test_keywords_of_presets() -> None:
    assert set(KEYWORDS) == {"code", "inner"}
    for name in presets():
        refused(lambda name=name: preset(name, code="bf16"), "value_dtype")
        form = "inner_optimizer" if name in ("demo", "random", "stride") else "inner_optimizers"
        refused(lambda name=name: preset(name, inner="adamw"), form)
        refused(lambda name=name: preset(name, inner="as_is"), "inner_optimizers")


def test_sync_every_is_the_period(tmp_path: Any) -> None:
    assert (
        preset("diloco", sync_every=7)
        == preset("diloco", period=7)
        == load_config("diloco", ["sync_every=7"])
    )
    with pytest.raises(ValueError, match="period and sync_every are the same: give one of them"):
        preset("diloco", sync_every=7, period=7)
    file = tmp_path / "short.yaml"
    file.write_text("preset: diloco\nperiod: 9\n")
    # a change goes before the file
    assert load_config(str(file), ["sync_every=7"]) == preset("diloco", period=7)
    with pytest.raises(ValueError, match="preset 'demo' has no setting 'sync_every'"):
        preset("demo", sync_every=7)


def before(config: ExchangeConfig) -> dict[str, Any]:
    """The dict form under the names that an earlier release gave it."""
    old_value = {(path, repr(new)): old for path, row in VALUES.items() for old, new in row.items()}
    old_key = {new: old for old, new in KEYS.items()}

    def back(node: Any, path: str) -> Any:
        if isinstance(node, dict):
            below = {f"{path}.{k}" if path else k: v for k, v in node.items()}
            return {old_key.get(p, p).rpartition(".")[2]: back(v, p) for p, v in below.items()}
        if isinstance(node, list):
            return [back(v, "" if path == "channels" else path) for v in node]
        return old_value.get((path, repr(node)), node)

    found: dict[str, Any] = back(config.to_dict(), "")
    return found


@pytest.mark.parametrize("name", sorted(presets()))
def test_what_an_earlier_release_has_saved_is_translated(name: str) -> None:
    config = preset(name)
    old = before(config)
    (first, *_) = old["channels"]
    assert {"clock", "residual", "plain", "dense"} <= set(first) and {"kind", "phi"} <= set(
        first["applier"]
    )
    assert (
        first["codec"].keys() >= {"code", "products"}
        and first["applier"]["phi"] in ("identity", "sign")
        and "inner" in old
    )
    assert ExchangeConfig.from_dict(translated(old)) == config
    assert translated(config.to_dict()) == config.to_dict()
    assert old["norm_limit"] == NORM_LIMIT
