"""The variables ISLAND_* that a user sets for an island: read, checked and named in one place.

A function that reads one raises ValueError where it cannot be used; the message names the variable,
what it holds and what is allowed.
"""

from __future__ import annotations

import logging
import math
import os
import re
import shlex
import signal
from collections.abc import Mapping

from ..errors import see
from ..net.address import ENDPOINT, Endpoint, check, is_public, split_endpoint

log = logging.getLogger("fsdp_demo")

LONGEST = 10_000_000
"""Longest timeout in seconds: torch counts milliseconds in a 64-bit number and adds to it."""

VARIABLES = {
    "ISLAND_RANK": "which island this is, from 0",
    "ISLAND_COUNT": "number of islands that are expected at the start",
    "ISLAND_SLOTS": "islands that there may be at most, and parts of the data; default "
    "ISLAND_COUNT",
    "ISLAND_ENDPOINT": "host:port of the store",
    "ISLAND_RUN": "run id",
    "ISLAND_NAME": "name for logs and paths",
    "ISLAND_ADDRESS": "address at which the other islands reach this one",
    "ISLAND_TIMEOUT": "seconds to wait for the others at the start, and in a mesh of silence after "
    "which a node counts as lost",
    "ISLAND_MIN": "islands that suffice to begin after ISLAND_TIMEOUT, and that must be left to "
    "train on when others are lost",
    "ISLAND_DEAD": "seconds of silence after which an island is lost and the others go on",
    "ISLAND_STALL": "seconds that an island which still sends heartbeats may stand while the "
    "others wait for it; default ISLAND_TIMEOUT",
    "ISLAND_STOP": "seconds from SIGTERM to the end of an island, its save included",
    "ISLAND_STOP_SIGNALS": "signals that say the same as SIGTERM, as USR1,XCPU",
    "ISLAND_TOKEN": "the run's secret, the same on all islands and at the store",
    "ISLAND_LINK": "rate and round trip of a rehearsal",
    "ISLAND_STATUS": "folder for the exit statuses of the ranks (set by launchers)",
    "ISLAND_ATTEMPT": "how often the launcher has restarted this island",
    "ISLAND_EXCHANGE": "preset or yaml file, for every Trainer of transformers or Lightning below "
    "a launcher",
    "ISLAND_EXCHANGE_SET": "changes to it, key=value, in words as a shell splits them",
    "ISLAND_RESUME": "auto: these Trainers resume from the newest checkpoint, at the first start, "
    "too",
    "ISLAND_REMOTE": "address of a store of objects (s3://bucket/run) that gets a copy of every "
    "checkpoint",
    "ISLAND_FUSED": "1: compression on a GPU by fused kernels, see docs/performance.md",
    "ISLAND_LAUNCHED": "when the launch began, in seconds since the epoch (set by launchers)",
}
"""All variables of this package, and what they say."""


def patience(env: Mapping[str, str] | None = None) -> float:
    """ISLAND_TIMEOUT in seconds, default 600."""
    return seconds(os.environ if env is None else env, "ISLAND_TIMEOUT", 600.0)


def islands(env: Mapping[str, str]) -> tuple[int, int, int]:
    """How many islands are expected (ISLAND_COUNT), how many there may be (ISLAND_SLOTS), and which
    of them this one is (ISLAND_RANK).
    """
    count = whole(env, "ISLAND_COUNT", 1)
    slots, island = whole(env, "ISLAND_SLOTS", count), whole(env, "ISLAND_RANK", 0)
    if slots != count and not env.get("ISLAND_COUNT", "").strip():
        raise ValueError(
            f"ISLAND_SLOTS={slots} without ISLAND_COUNT: set ISLAND_COUNT, the number of islands "
            "that begin, on all islands"
        )
    if slots < count:
        raise ValueError(
            f"ISLAND_SLOTS={slots} with ISLAND_COUNT={count}: allowed are ISLAND_COUNT or more, "
            "one slot for each island"
        )
    if count < 1 or not 0 <= island < slots:
        name, most = ("ISLAND_COUNT", count) if slots == count else ("ISLAND_SLOTS", slots)
        raise ValueError(
            f"ISLAND_RANK={island} with {name}={most}: allowed is 0 <= ISLAND_RANK < {name}"
            + ("; to join a run later, set ISLAND_SLOTS on all" if island >= count == slots else "")
        )
    return count, slots, island


def least(env: Mapping[str, str], count: int) -> int:
    """ISLAND_MIN, 0 where it is not set."""
    value = whole(env, "ISLAND_MIN", 0)
    if env.get("ISLAND_MIN", "").strip() and not 1 <= value <= count:
        raise ValueError(
            f"ISLAND_MIN={value} with ISLAND_COUNT={count}: allowed are 1 to ISLAND_COUNT; "
            "unset it to wait for all islands at the start"
        )
    return value


def name(env: Mapping[str, str], default: str) -> str:
    """ISLAND_NAME, which names folders."""
    text = env.get("ISLAND_NAME") or default
    if not re.fullmatch(r"\w[\w.-]*", text, re.ASCII):
        raise ValueError(
            f"ISLAND_NAME={text!r} names folders: allowed are letters, digits, '_', '-' and '.', "
            "not first a '-' or '.'"
        )
    return text


def endpoint(env: Mapping[str, str]) -> Endpoint:
    """ISLAND_ENDPOINT, where the store is."""
    text = env.get("ISLAND_ENDPOINT", "").strip()
    if not text:
        raise ValueError(
            f"ISLAND_ENDPOINT is not set, but ISLAND_COUNT={env['ISLAND_COUNT']}: it must be "
            f"{ENDPOINT}"
        )
    try:
        return split_endpoint(text)
    except ValueError as error:
        raise ValueError(f"ISLAND_ENDPOINT={error}") from None


def stop_signals(env: Mapping[str, str]) -> list[signal.Signals]:
    """The signals that tell an island to end: SIGTERM, and those in ISLAND_STOP_SIGNALS."""
    text = env.get("ISLAND_STOP_SIGNALS", "")
    names = [word.strip().upper().removeprefix("SIG") for word in text.split(",") if word.strip()]
    allowed = ("TERM", "INT", "HUP", "QUIT", "USR1", "USR2", "XCPU")
    if wrong := [name for name in names if name not in allowed]:
        raise ValueError(
            f"ISLAND_STOP_SIGNALS={text!r}: {wrong[0]} is none of {', '.join(allowed)}, which are "
            "allowed, with commas between them"
        )
    return [signal.Signals[f"SIG{name}"] for name in dict.fromkeys(["TERM", *names])]


def token(env: Mapping[str, str]) -> str:
    """ISLAND_TOKEN, "" where it is not set."""
    text = env.get("ISLAND_TOKEN", "")
    return check(text) if text else ""


def exchange(env: Mapping[str, str]) -> tuple[str, list[str]]:
    """ISLAND_EXCHANGE ("" where it is not set) and the changes in ISLAND_EXCHANGE_SET."""
    text = env.get("ISLAND_EXCHANGE_SET", "")
    try:
        return env.get("ISLAND_EXCHANGE", "").strip(), shlex.split(text)
    except ValueError as error:
        raise ValueError(
            f"ISLAND_EXCHANGE_SET={text!r}: {error}; it must be words key=value, quoted as in a "
            "shell"
        ) from None


def remote(env: Mapping[str, str]) -> str:
    """ISLAND_REMOTE, "" where it is not set."""
    text = env.get("ISLAND_REMOTE", "").strip()
    if text and not re.match(r"\w[\w+.-]*://.", text):
        raise ValueError(
            f"ISLAND_REMOTE={text!r}: it must be an address with ://, such as s3://bucket/run or "
            "file:///mnt/run"
        )
    return text


def resumes(env: Mapping[str, str]) -> bool:
    """Whether a Trainer below a launcher resumes by itself: ISLAND_RESUME says so, or this is not
    the island's first start (ISLAND_ATTEMPT, or torchrun's own count).
    """
    wish = env.get("ISLAND_RESUME", "").strip()
    if wish not in ("", "auto"):
        raise ValueError(f"ISLAND_RESUME={wish!r}: allowed is auto, or leave it out")
    starts = ("ISLAND_ATTEMPT", "TORCHELASTIC_RESTART_COUNT")
    return bool(wish) or any(whole(env, name, 0) > 0 for name in starts)


def fused(env: Mapping[str, str]) -> bool:
    """Whether ISLAND_FUSED asks for fused kernels."""
    wish = env.get("ISLAND_FUSED", "").strip()
    if wish not in ("", "0", "1"):
        raise ValueError(f"ISLAND_FUSED={wish!r}: allowed are 0 and 1")
    return wish == "1"


_said: set[str] = set()  # warnings that a process gives once


def warn_of_unknown(env: Mapping[str, str]) -> None:
    """Name every variable that looks like ours and is not."""
    for name in sorted(env):
        if re.match("ISLANDS?_", name) and name not in VARIABLES and name not in _said:
            _said.add(name)
            known = ", ".join(VARIABLES)
            log.warning("%s is no variable of fsdp_demo (known: %s)", name, known)


def warn_of_open(place: Endpoint, address: str, token: str) -> None:
    """Say once, loudly, where the run can be reached from the open internet and does not ask for a
    token. place: ISLAND_ENDPOINT. address: ISLAND_ADDRESS, "" where it is not set.
    """
    reached = {f"ISLAND_ENDPOINT={place}": place.host, f"ISLAND_ADDRESS={address}": address}
    public = [said for said, host in reached.items() if host and is_public(host)]
    if public and not token and "open" not in _said:
        _said.add("open")
        log.warning(
            "%s: a PUBLIC address, and ISLAND_TOKEN is not set: WHOEVER REACHES IT CAN READ, "
            "CHANGE AND END THE RUN. Set ISLAND_TOKEN on all islands and at the store (openssl "
            "rand -hex 32), or give private addresses (docs/wireguard.md)",
            " and ".join(public),
        )


def say_single(on_purpose: bool, rank: int) -> None:
    """Say once that no other island exists, as a warning where ISLAND_COUNT is not set."""
    if on_purpose:
        log.info("one replica, nobody to exchange with")
    elif "single" not in _said and rank == 0:
        _said.add("single")
        meant = "ISLAND_COUNT=1 says that this is meant" + see("one-replica")
        log.warning("one replica: ISLAND_COUNT is not set, so there is no other island: %s", meant)


def seconds(env: Mapping[str, str], name: str, default: float, least: float = 0.0) -> float:
    """A variable as a number of seconds; `default` where it is not set or empty."""
    value = _number(env, name, default)
    if value != default and not (0.0 < value <= LONGEST and value >= least):
        allowed = f"{least:g} to {LONGEST}" if least else f"more than 0 and at most {LONGEST}"
        raise ValueError(f"{name}={env[name]!r} must be a number of seconds, {allowed}")
    return value


def whole(env: Mapping[str, str], name: str, default: int) -> int:
    """A variable as a whole number; `default` where it is not set or empty."""
    value = _number(env, name, default)
    if not value.is_integer():
        raise ValueError(f"{name}={env[name]!r} must be a whole number")
    return int(value)


def _number(env: Mapping[str, str], name: str, default: float) -> float:
    """NaN where the variable holds something else."""
    text = env.get(name, "").strip()
    try:
        return float(text or default)
    except ValueError:
        return math.nan
