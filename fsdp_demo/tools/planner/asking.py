"""The arguments of `fsdp-demo plan` as a `Situation`: texts with units, lists, ranges, and a guess
of the step where nothing says it.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...config.load import load_config
from ...config.schema import ExchangeConfig
from ...errors import see
from ...files import read_json
from ...net.link import Link, parse_rate, parse_rtt
from ..doctor import reading
from .line import SIMULATED, System
from .mix import Machine
from .models import Tensors, equal_layers, load, numel
from .rows import HSDP
from .situation import DEVICES, Situation, check_shards, device, guessed_step

_NUMBER = re.compile(r"([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([a-z/]*)", re.IGNORECASE)
LARGEST = 1e30
"""No number of a plan is larger. It also keeps infinity out."""

TOKENS_PER_RANK = 8192
"""Tokens of a step on each rank where nothing says how many."""

_UNITS: dict[str, tuple[dict[str, float], str]] = {
    "number": (
        {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12},
        "perhaps with k, M, B or T, as in 1.3B",
    ),
    "size": (
        {"mb": 1e6, "gb": 1e9, "tb": 1e12, "mib": 2.0**20, "gib": 2.0**30, "g": 1e9},
        "with MB, GB, GiB or TB, as in 80GB",
    ),
    "time": (
        {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "min": 60.0},
        "perhaps with s, ms, us or ns, as in 0.8s",
    ),
}
"""Kind of quantity -> factor of each unit, and the units in words with an example."""


@dataclass(frozen=True)
class Step:
    """Seconds of a step without an exchange, tokens of it on one island (None: unknown), and where
    they are from.
    """

    seconds: float
    tokens: float | None
    source: str


def quantity(text: str, flag: str, kind: str) -> float:
    """A number above 0 with a unit, as in `1.3B`, `80GB` or `350ms`.

    Args:
        flag: flag of the command, for errors.
        kind: "number", "size" (in bytes) or "time" (in seconds).

    Raises:
        ValueError: no such quantity above 0.
    """
    units, words = _UNITS[kind]
    found = _NUMBER.fullmatch(text.strip())
    factor = units.get(found[2].lower()) if found else None
    if found is None or factor is None or not 0 < float(found[1]) < LARGEST:
        raise ValueError(
            f"{flag} {text!r}: expected a {kind} above 0 (and below {LARGEST:g}), {words}"
        )
    return float(found[1]) * factor


def links(texts: Sequence[str], rtt: str | None) -> list[Link]:
    """`["1Gbit"]`, `["100Mbit,1Gbit"]`, `["1Gbit,40ms"]`: rates, and one round trip for all. A file
    is what doctor has measured; its round trip counts unless `rtt` is given. Raises ValueError:
    what is no rate above 0, no time and no doctor.json; several round trips.
    """
    rates: list[float | None] = []
    trips = [parse_rtt(rtt)] if rtt is not None else []
    # also "1Gbit 10Gbit", but "1 Gbit" is one rate
    words = (w for text in texts for w in re.split(r",|\s+(?=[0-9.])", text.rstrip(",")))
    for word in map(str.strip, words):
        if word.endswith(".json"):
            measured = reading.load(word).link
            rates.append(measured.bits_per_second)
            trips += [measured.rtt] if rtt is None else []
        elif re.fullmatch(r"[0-9.e+-]+\s*(us|ms|s)", word, re.IGNORECASE):
            trips.append(parse_rtt(word))
        else:
            rates.append(None if word.lower() == "none" else parse_rate(word))
    if len(set(trips)) > 1:
        raise ValueError(
            f"--link/--rtt name {len(set(trips))} round trips: give one, which is that of all rates"
        )
    return [Link(rate, trips[0] if trips else 0.0) for rate in rates or [None]]


def step_of_doctor(texts: Sequence[str]) -> Step | None:
    """The step of the slowest island from the first doctor.json of `--link`, if it has one."""
    for word in (w.strip() for text in texts for w in text.split(",")):
        if word.endswith(".json") and (took := reading.load(word).steps):
            return Step(
                max(took),
                None,
                f"{word}, the slowest island; doctor --model times one row of 512 tokens: give "
                "--step-time if your steps are larger",
            )
    return None


def islands(text: str) -> list[int]:
    """`4`, `2,4,8`, or `2:64`, which doubles from 2 up to 64. Raises ValueError: none of them."""
    return list(dict.fromkeys(n for word in text.split(",") for n in _doubled(text, word.strip())))


def _doubled(text: str, word: str) -> list[int]:
    low, colon, high = word.partition(":")
    if not low.isdecimal() or (colon and not high.isdecimal()):
        raise ValueError(
            f"--islands {text!r}: expected a number, a list or a range, as in 4 or 2,4,8 or 2:64"
        )
    first, last = int(low), int(high or low)
    if first < 2:
        raise ValueError(
            f"--islands {text!r}: fewer than two islands exchange nothing, so there is nothing to "
            "plan: give 2 or more"
        )
    if last < first:
        raise ValueError(f"--islands {text!r}: expected the lower end first, as in {last}:{first}")
    out = [first]
    while out[-1] < last:
        out.append(min(2 * out[-1], last))
    return out


def targets(texts: Sequence[str]) -> list[float]:
    """`["0.5,0.8"]`, `["95%"]` as shares. Raises ValueError: no share between 0 and 1."""
    out = []
    for word in (w.strip() for text in texts for w in text.split(",")):
        try:
            share = float(word.removesuffix("%")) / (100 if word.endswith("%") else 1)
        except ValueError:
            share = 0.0
        if not 0 < share < 1:
            raise ValueError(
                f"--target-utilisation {word!r}: expected a share between 0 and 1, as in 0.9"
            )
        out.append(share)
    return out


def exchanges(names: Sequence[str], changes: Sequence[str]) -> list[ExchangeConfig | str] | None:
    """The exchanges that `--exchange` and `--set` name; None for all presets.

    A change counts for each of the exchanges that know it, one that reads NAME:PATH=VALUE for that
    one alone.

    Raises:
        ValueError: unknown names, keys and values; a change that no exchange knows.
    """
    wanted = [n.strip() for text in names for n in text.split(",") if n.strip()]
    if not wanted:
        if changes:
            raise ValueError("--set changes an exchange: give --exchange NAME|YAML, too")
        return None
    used: set[str] = set()
    out: list[ExchangeConfig | str] = []
    for name in wanted:
        mine = []
        for text in changes if name != HSDP else ():
            owner, colon, rest = text.partition(":")
            plain = not colon or "=" in owner
            if plain and len(wanted) > 1 and _lacks(name, text):
                continue
            if plain or owner == name:
                mine.append(text if plain else rest)
                used.add(text)
        out.append(name if name == HSDP else load_config(name, mine))
    left = [text for text in changes if text not in used]
    if left:
        raise ValueError(f"--set {left[0]}: none of {', '.join(wanted)} has such a setting")
    return out


def _lacks(name: str, change: str) -> bool:
    """Whether an exchange has no such setting, or none that acts. A wrong value is raised: in
    silence the plan would be of the old one.
    """
    try:
        load_config(name, [change])
    except ValueError as error:
        if see("unknown-key") in str(error) or "has no effect" in str(error):
            return True
        raise ValueError(
            f"--set {change}, {name}: {error} (--set NAME:PATH=VALUE changes one exchange alone)"
        ) from None
    return False


def step_from(path: str) -> tuple[Step, dict[str, Any]]:
    """The step of a run of a recipe, from its summary.json, without what it waited for the link;
    and the summary. Raises ValueError: the file is no such summary.
    """
    try:
        found = read_json(Path(path))
        steps = found["steps"] - found.get("since", 0)
        whole = found["tokens"] / found["tokens_per_second"]
        step = (whole - found["wait_share"] * found["seconds"]) / steps
        tokens = found["tokens"] / found["islands"] / steps
    except OSError as error:
        raise ValueError(f"--step-from {path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise ValueError(
            f"--step-from {path}: this is no summary.json of a recipe ({error!r:.80})"
        ) from None
    if not step > 0:
        raise ValueError(f"--step-from {path}: its steps took {step:g} s, more than 0 is needed")
    return Step(step, tokens, f"{path}, without its waiting"), found


MIX = re.compile(r"(?:(\d+)\*)?(?:(\d+)x)?([a-z0-9-]+)@([^=@]+)(?:=(.+))?", re.IGNORECASE)


def machines(
    text: str, rtt: str | None, tensors: Tensors, tokens: float | None, name: str
) -> tuple[Machine, ...]:
    """`8xA100@1Gbit,2*4x4090@200Mbit=1.2s`: unlike islands, each with its ranks, their device, its
    link, and the seconds of a step, which are guessed where they are not given; twice `2*`. Or the
    islands of a doctor.json.

    Args:
        tokens: of a step on each island; None: as many on each rank. name: device of doctor's.

    Raises:
        ValueError: none of these, or fewer than two.
    """
    if text.endswith(".json"):
        measured = reading.load(text)
        if not (measured.steps and measured.lines):
            raise ValueError(
                f"--mix {text}: it lacks steps or links of an island: run `fsdp-demo doctor "
                "--model NAME --json` on all islands"
            )
        pairs = zip(measured.steps, measured.lines, strict=True)
        return tuple(Machine(took, link=link, device=name) for took, link in pairs)
    trip, found = parse_rtt(rtt) if rtt else 0.0, list[Machine]()
    for word in map(str.strip, text.split(",")):
        read = MIX.fullmatch(word)
        times, ranks = (int(n or 1) for n in (read[1], read[2])) if read else (0, 0)
        if read is None or not times or not ranks:
            raise ValueError(
                f"--mix {word!r}: expected the ranks, device and link of an island, perhaps with "
                "its number and the time of a step, as in 8xA100@1Gbit or 2*4x4090@200Mbit=1.2s"
            )
        known = [d for d in DEVICES if read[3].lower() in (d, d.removeprefix("rtx-"))]
        kind = known[0] if known else read[3]
        of, each = device(kind), tokens or float(TOKENS_PER_RANK * ranks)
        took = quantity(read[5], "--mix", "time") if read[5] else None
        took = took or guessed_step(numel(tensors), each, ranks, of)
        link = Link(None if read[4].lower() == "none" else parse_rate(read[4]), trip)
        found += [Machine(took, each, link, kind, ranks)] * times
    if len(found) < 2:
        raise ValueError(f"--mix {text!r}: one island exchanges nothing: name two or more")
    return tuple(found)


def guess(tensors: Tensors, shards: int, name: str, tokens: float | None) -> Step:
    """A step's time from FLOPs, where nobody has measured it."""
    of = device(name)
    per_step = tokens or float(TOKENS_PER_RANK * shards)
    took = guessed_step(numel(tensors), per_step, shards, of)
    said = (
        f"a guess: 6 FLOPs per parameter and token, {per_step:,.0f} tokens per island and step, "
        f"{shards} x {name} at {of.flops / 1e12:.3g} TFLOP/s and {of.mfu:.0%} MFU"
    )
    return Step(took, per_step, said)


# ---- all arguments together --------------------------------------------------------------------


def situation(args: argparse.Namespace) -> Situation:
    """The situation that the arguments describe, of two islands on a link without limit. Raises
    ValueError: two models or none, two steps, and what its parts refuse.
    """
    device(args.device)
    if args.shards is not None and args.shards < 1:
        raise ValueError(f"--shards {args.shards}: an island has 1 shard or more")
    tensors, model = _model(args)
    known = (_of_mix if args.mix else _alike)(args, tensors)
    tokens = _given(args, "tokens", "number")
    if tokens and not known["tokens_per_step"]:
        raise ValueError(
            "--tokens is the length of the run: give --tokens-per-step, too, the tokens of one "
            "island's step"
        )
    return Situation(tensors, tokens=tokens, model=model, **known, **_other(args))


def _given(args: argparse.Namespace, name: str, kind: str) -> float | None:
    """The quantity of an option; None where it is not given."""
    text = getattr(args, name)
    return quantity(text, f"--{name.replace('_', '-')}", kind) if text else None


def _other(args: argparse.Namespace) -> dict[str, Any]:
    """What a situation has of the arguments about the system, memory and compression."""
    system, size = System(), args.as_simulated
    if size is not None:
        if not 0 <= size <= 8:
            raise ValueError(f"--as-simulated {size:g}: a value takes more than 0 and at most 8")
        system = replace(SIMULATED, bytes_per_parameter=size or None)
    return {
        "system": system,
        "compression": _given(args, "compression_time", "time"),
        "memory_bytes": _given(args, "memory", "size"),
    }


def _of_mix(args: argparse.Namespace, tensors: Tensors) -> dict[str, Any]:
    """What a situation has of unlike islands. Raises ValueError: what `machines` refuses, shards
    that do not divide the ranks of each.
    """
    measured, tokens = args.mix.endswith(".json"), _given(args, "tokens_per_step", "number")
    found = machines(args.mix, args.rtt, tensors, tokens, args.device)
    shards = args.shards or math.gcd(*(m.ranks for m in found))
    if not measured and (odd := [m for m in found if m.ranks % shards]):
        raise ValueError(
            f"--shards {shards} does not divide the {odd[0].ranks} ranks of an island: all islands "
            "have as many shards, and a larger one more copies of each (HSDP inside)"
        )
    check_shards(tensors, shards)
    return {
        "islands": len(found),
        "machines": found,
        "link": min((m.link for m in found), key=lambda x: x.bits_per_second or math.inf),
        "step_seconds": min(m.step_seconds for m in found),
        "shards": shards,
        "device": min((m.device for m in found), key=lambda d: -device(d).transformed),
        "tokens_per_step": tokens if measured else sum(m.tokens for m in found) / len(found),
        "step_source": "of the fastest island; steps of all: "
        + ", ".join(f"{m.step_seconds:.3g} s" for m in found),
    }


def _model(args: argparse.Namespace) -> tuple[Tensors, str]:
    """The tensors of the model, and what it is called."""
    if args.model is not None and args.params is not None:
        raise ValueError("two models: give --model NAME or --params N, not both")
    if args.model is None and args.params is None:
        raise ValueError("plan needs a model: give --model NAME or --params N")
    if args.model is not None:
        if args.layers is not None:
            raise ValueError(f"--layers {args.layers}: of --params alone; --model has its own")
        tensors = load(args.model)
        check_shards(tensors, args.shards or 1)
        return tensors, args.model
    layers = 24 if args.layers is None else args.layers
    parameters = round(quantity(args.params, "--params", "number"))
    return equal_layers(parameters, layers), f"{layers} equal layers"


def _alike(args: argparse.Namespace, tensors: Tensors) -> dict[str, Any]:
    """What a situation has of two islands that are alike: step, shards and device."""
    if args.step_time and args.step_from:
        raise ValueError("--step-time and --step-from both say how long a step takes: give one")
    tokens, shards = _given(args, "tokens_per_step", "number"), args.shards or 1
    if seconds := _given(args, "step_time", "time"):
        step = Step(seconds, tokens, "given")
    elif args.step_from:
        step, summary = step_from(args.step_from)
        step = replace(step, tokens=tokens or step.tokens)
        shards = args.shards or summary.get("procs", 1)
    elif (measured := step_of_doctor(args.link)) is not None:
        step = replace(measured, tokens=tokens)
    else:
        step = guess(tensors, shards, args.device, tokens)
    return {
        "islands": 2,
        "step_seconds": step.seconds,
        "shards": shards,
        "device": args.device,
        "tokens_per_step": step.tokens,
        "step_source": step.source,
    }
