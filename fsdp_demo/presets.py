"""Published methods, each a short function that returns an `ExchangeConfig`. A new paper is a new function here.

Keywords of a function are the numbers its paper talks about; everything else is reached by dotted paths, as in
`preset("demo", **{"codec.code": "bf16"})`, `--set codec.code=bf16` or a yaml file with `preset: demo`.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_type_hints

import yaml

from .config import Accumulator, Applier, Channel, Clock, Codec, ExchangeConfig, Reducer
from .plain import nearest, one_of, typed

EMBEDDINGS = ("*embed*", "*wte*", "*wpe*", "*lm_head*")
"""Embeddings and heads: rows of unseen tokens are zero and a transform over them spreads what top-k wants concentrated."""


def full(code: str = "fp32") -> ExchangeConfig:
    """Mean gradient of all replicas at every step (what HSDP does): the baseline, and the oracle of the rest.

    Any inner optimizer; its learning rate is the one of the global batch. `code` "bf16" sends what HSDP does with a bf16 reduce dtype
    (the sum is in fp32 here).
    """
    return ExchangeConfig("full", (Channel("gradient", "gradient", codec=Codec(code=code)),))


def demo(topk: int = 32, beta: float = 0.999, code: str = "int8", sign: bool = True, transform: bool = True) -> ExchangeConfig:
    """DeMo, "Decoupled Momentum Optimization" (Peng, Quesnelle, Kingma; arXiv 2411.19870), with FlexDeMo's sharding.

    Every step the gradient joins a momentum of decay `beta`; the `topk` largest DCT coefficients of each 64 x 64 block are
    sent and leave the momentum; the sign of the decoded mean is the gradient of plain SGD. Published: lr 4e-4 at 300M to 1B,
    beta 0.999, k = 32, no weight decay. The sum needs no learning rate inside the momentum: under sign it cancels.
    """
    channel = Channel(
        "momentum",
        "gradient",
        accumulator=Accumulator(beta=beta),
        codec=Codec("dct" if transform else "none", "topk", topk, code),
        residual="subtract",
        reducer=Reducer("senders"),
        applier=Applier("gradient", phi="sign" if sign else "identity"),
        plain=EMBEDDINGS,
    )
    return ExchangeConfig("demo", (channel,), inner=("sgd",), lr=4e-4, clip=1.0)


def diloco(period: int = 500, lr: float = 0.7, momentum: float = 0.9, code: str = "fp32") -> ExchangeConfig:
    """DiLoCo (Douillard et al., arXiv 2311.08105): every `period` steps a Nesterov step on the mean pseudo-gradient.

    Published: inner AdamW 4e-4, weight decay 0.1; outer 0.7 / 0.9; period 500. The outer gain lr (1 + momentum / (1 - momentum))
    has to fit the number of rounds: with fewer than some 50 of them lower `momentum`.
    """
    outer = Applier("outer", lr=lr, momentum=momentum, nesterov=momentum > 0)
    channel = Channel("delta", "delta", Clock(period), codec=Codec(code=code), applier=outer)
    return ExchangeConfig("diloco", (channel,), inner=("adamw", "adam", "muon"), lr=4e-4, clip=1.0)


def decoupled_momentum(
    rule: str = "consensus",
    period: int = 128,
    topk: int = 32,
    beta: float = 0.95,
    lr: float | None = None,
    reducer: str | None = None,
    code: str = "int8",
    transform: bool = True,
) -> ExchangeConfig:
    """Decoupled momentum (Nedelkoski et al., arXiv 2510.03371): the outer momentum travels as its largest DCT coefficients.

    rule "consensus" (default): what is sent is averaged (over senders) and applied to the anchor with lr 1, what is not sent stays
    in the local momentum; replicas are equal after every exchange. rule "released", as in the authors' code: each replica applies
    its own delta plus beta times the momentum, into which the mean went back, with lr 0.7; replicas drift. Its reducer "replicas"
    (default) conserves the sum of the momenta, "senders" (as released) inflates it by up to R / |senders| at each exchange.
    Published: inner AdamW 4e-4, betas 0.9 / 0.95, period 128, k = 32 of 4096, beta 0.95.
    """
    one_of("rule", rule, ("consensus", "released"))
    released = rule == "released"
    rate = lr if lr is not None else (0.7 if released else 1.0)
    channel = Channel(
        "delta",
        "delta",
        Clock(period),
        Accumulator(beta=beta),
        Codec("dct" if transform else "none", "topk", topk, code),
        residual="put_back" if released else "subtract",
        reducer=Reducer(reducer or ("replicas" if released else "senders")),
        applier=Applier("outer", lr=rate, dense_lr=0.7 if released else 1.0, local_delta=released),
        plain=EMBEDDINGS,
    )
    return ExchangeConfig("decoupled_momentum", (channel,), inner=("adamw", "adam", "muon"), lr=4e-4, clip=1.0)


_PRESETS: tuple[Callable[..., ExchangeConfig], ...] = (full, demo, diloco, decoupled_momentum)


def presets() -> dict[str, Callable[..., ExchangeConfig]]:
    """Name -> function of every preset; the first line of its docstring says what it is.

    Example:
        >>> from fsdp_demo import presets
        >>> "demo" in presets()
        True
    """
    return {f.__name__: f for f in _PRESETS}


def preset(name: str, **changes: Any) -> ExchangeConfig:
    """The configuration of a published method, with changes.

    Args:
        name: one of `presets()`.
        changes: keywords of the preset's function, top-level fields (`clip`, `inner`, `max_in_flight`, and `lr`, the inner rate, where
            the function has no `lr` of its own), or dotted paths.

    Raises:
        ValueError: for an unknown name, key, or value; it says what is allowed and the nearest right name.

    Example:
        >>> from fsdp_demo import preset
        >>> preset("diloco", period=100).channels[0].clock.period
        100
        >>> preset("demo", **{"codec.topk": 16}).channels[0].codec.topk
        16
    """
    known = presets()
    one_of("preset", name, tuple(known))
    takes = inspect.signature(known[name]).parameters
    hints = get_type_hints(known[name])
    own = {k: typed(hints[k], v, k) for k, v in changes.items() if k in takes}
    rest = {k: v for k, v in changes.items() if k not in takes}
    for key in rest:
        if "." not in key and key not in ("clip", "inner", "max_in_flight", "lr"):
            options = [*takes, "clip", "inner", "max_in_flight"]
            allowed = f"{', '.join(options)}, or a dotted path such as clock.period"
            raise ValueError(f"preset {name!r} has no setting {key!r}{nearest(key, options)} (allowed: {allowed})")
    return known[name](**own).changed(rest)


def load_config(source: str, overrides: Iterable[str] | Mapping[str, Any] = ()) -> ExchangeConfig:
    """Read what `--exchange` and `--set` say.

    Args:
        source: a preset name, or the path of a yaml file: a whole configuration (`ExchangeConfig.to_yaml`), or `preset: NAME` with
            keywords and dotted paths beside it.
        overrides: texts `path=value`, values read as yaml, or a mapping of changes as `preset` takes them.

    Raises:
        ValueError: for unknown names, keys or values; FileNotFoundError for a yaml path that is not there.

    Example:
        >>> from fsdp_demo import load_config
        >>> load_config("demo", ["codec.topk=16"]).channels[0].codec.topk
        16
    """
    changes: dict[str, Any] = dict(overrides) if isinstance(overrides, Mapping) else {}
    for text in () if isinstance(overrides, Mapping) else overrides:
        path, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"override {text!r} must read path=value, as in clock.period=50")
        changes[path.strip()] = yaml.safe_load(value)
    if not source.endswith((".yaml", ".yml")) and not os.path.isfile(source):
        return preset(source, **changes)
    with open(source, encoding="utf-8") as file:
        data = yaml.safe_load(file)
    if not isinstance(data, dict) or "preset" not in data:
        raise ValueError(f"{source} must be a mapping with the key 'preset'; `fsdp-demo presets NAME --yaml` prints one to start from")
    if "channels" in data:
        return ExchangeConfig.from_dict(data).changed(changes)
    name = data.pop("preset")
    return preset(name, **{**_flatten(data), **changes})


def _flatten(node: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in node.items():
        out.update(_flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + str(key): value})
    return out
