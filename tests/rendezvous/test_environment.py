"""The variables ISLAND_*: all are known by name, and one that is not is noticed."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from fsdp_demo import Topology
from fsdp_demo.errors import StoreSilent
from fsdp_demo.rendezvous import environment
from fsdp_demo.rendezvous.position import ShardPosition

from ..support.refused import refusal

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_said", set())


@pytest.mark.parametrize("name", ["ISLAND_WORLD", "ISLANDS_RANK", "ISLAND_ADRESS"])
def test_environment_unknown_variable_is_warned_of_once(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An unknown ISLAND_ variable is warned of once, with the known names."""
    for _ in range(2):
        Topology.from_env({name: "2", "ISLAND_COUNT": "1"})
    (record,) = [r for r in caplog.records if name in r.getMessage()]
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(
        f"{name} is no variable of fsdp_demo (known: ISLAND_RANK, ISLAND_COUNT, "
    )


def test_environment_one_replica_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """One replica is a warning unless ISLAND_COUNT=1 says that it is meant."""
    caplog.set_level(logging.INFO)
    for variables in ({"ISLAND_COUNT": "1"}, {"ISLANDS_RANK": "0"}, {}):
        Topology.from_env(variables).join(ShardPosition())
    said = [(r.levelno, r.getMessage()) for r in caplog.records if "one replica" in r.getMessage()]
    assert [level for level, _ in said] == [logging.INFO, logging.WARNING]
    assert "ISLAND_COUNT is not set" in said[1][1]


def test_environment_mesh_is_not_called_one_replica(caplog: pytest.LogCaptureFixture) -> None:
    """A process that looks for islands first and then trains in a mesh, as the Trainer's listener
    does, is told nothing.
    """
    caplog.set_level(logging.INFO)
    assert Topology.from_env({}).kind == "single"
    assert not caplog.records


def test_environment_every_variable_is_known() -> None:
    """Every variable that the package or a recipe uses is in `VARIABLES`, or users are warned of
    it.
    """
    folders = [ROOT / name for name in ("fsdp_demo", "deepspeed_ext", "recipes")]
    files = [f for folder in folders for f in folder.rglob("*")]
    found = {
        name
        for f in files
        if f.suffix in (".py", ".sh", ".sbatch")
        for name in re.findall(r"\bISLAND_[A-Z_]*[A-Z]\b", f.read_text(encoding="utf-8"))
    }
    assert found == set(environment.VARIABLES)


@pytest.mark.parametrize("text", ["soon", "0", "nan"])
def test_environment_timeout_is_checked_for_a_mesh(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ISLAND_TIMEOUT is checked where a mesh reads it, too."""
    pytest.importorskip("accelerate")
    from types import SimpleNamespace

    from fsdp_demo.integrations.mesh import ExchangeParallelismConfig, mesh_topology

    monkeypatch.setenv("ISLAND_TIMEOUT", text)
    axes = ExchangeParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    accelerator = SimpleNamespace(parallelism_config=axes, torch_device_mesh=None)
    says = f"ISLAND_TIMEOUT='{text}' must be a number of seconds, more than 0"
    refusal(lambda: mesh_topology(accelerator), says)


PUBLIC = "a PUBLIC address, and ISLAND_TOKEN is not set"
SECONDS = [
    *(("TIMEOUT", t) for t in ("0", "-3", "nan", "inf", "1e300", "long")),
    *((name, t) for name in ("DEAD", "STALL") for t in ("1", "nan", "soon")),
    *(("STOP", t) for t in ("-1", "0", "inf", "soon")),
]
ENDPOINTS = ("host", ":29500", "host:", "host:http", "host:99999", "host:0", "::1:29500")


@pytest.mark.parametrize(("variables", "says"), [
    ({"RANK": "2"}, "ISLAND_RANK=2 with ISLAND_COUNT=2"),
    ({"RANK": "2"}, "; to join a run later, set ISLAND_SLOTS on"),
    ({"RANK": "-1"}, "ISLAND_RANK=-1"),
    ({"RANK": "first"}, "'first' must be a whole number"),
    ({"RANK": "0.5"}, "'0.5' must be a whole number"),
    ({"COUNT": "", "RANK": "1"}, "ISLAND_COUNT=1"),
    ({"COUNT": "0"}, "ISLAND_COUNT=0"),
    ({"COUNT": "nan"}, "ISLAND_COUNT='nan'"),
    ({"COUNT": "inf"}, "ISLAND_COUNT='inf'"),
    ({"COUNT": "2.5"}, "ISLAND_COUNT='2.5' must be a whole number"),
    ({"COUNT": "3", "SLOTS": "2"}, "ISLAND_SLOTS=2 with ISLAND_COUNT=3: allowed are ISLAND_"),
    ({"SLOTS": "4", "RANK": "4"}, "ISLAND_RANK=4 with ISLAND_SLOTS=4: allowed is 0 <= ISLAND_RANK"),
    ({"SLOTS": "2.5"}, "ISLAND_SLOTS='2.5' must be a whole number"),
    ({"COUNT": "", "SLOTS": "2"}, "ISLAND_SLOTS=2 without ISLAND_COUNT"),
    *(({"MIN": n}, f"ISLAND_MIN={n} with ISLAND_COUNT=2: allowed are 1 to") for n in ("0", "3")),
    ({"ENDPOINT": ""}, "ISLAND_ENDPOINT is not set, but ISLAND_COUNT=2: it must be host:port"),
    *(({"ENDPOINT": t}, f"ISLAND_ENDPOINT='{t}'") for t in ENDPOINTS),
    *(({name: t}, f"ISLAND_{name}='{t}' must be a number of seconds, ") for name, t in SECONDS),
    # before anything is asked
    ({"TOKEN": "short"}, "ISLAND_TOKEN has 5 characters, allowed are 16 or more"),
    ({"TOKEN": "short", "ENDPOINT": "zmq://10.0.0.1:1"}, "ISLAND_TOKEN has 5 characters, allowed"),
])  # fmt: skip
def test_environment_wrong_variable_is_named(variables: dict[str, str], says: str) -> None:
    """A variable with a wrong value is named by the error, with the value."""
    env = {"COUNT": "2", "ENDPOINT": "host:1", **variables}
    refusal(lambda: Topology.from_env({f"ISLAND_{k}": v for k, v in env.items()}), says)


def test_environment_seconds_and_their_defaults() -> None:
    """Variables that are seconds have their documented defaults, and are read."""
    given = {"ISLAND_DEAD": "2", "ISLAND_STALL": "2", "ISLAND_STOP": "4"}
    for variables, found in ((given, (2.0, 2.0, 4.0)), ({}, (10.0, 0.0, 25.0))):
        t = Topology.from_env(variables)
        assert (t.dead, t.stall, t.stop_timeout) == found


def test_environment_slots_are_the_parts_of_the_data() -> None:
    """A topology has as many parts of the data as slots, or as islands where ISLAND_SLOTS is not
    set.
    """
    env = {"ISLAND_ENDPOINT": "host:1", "ISLAND_COUNT": "2", "ISLAND_RANK": "2"}
    t = Topology.from_env({**env, "ISLAND_SLOTS": "4"})
    assert (t.kind, t.island, t.islands, t.count, t.suffice) == ("islands", 2, 4, 2, 0)
    # without it as many as islands
    assert Topology.from_env({**env, "ISLAND_COUNT": "3"}).islands == 3
    alone = Topology.from_env({**env, "ISLAND_COUNT": "1", "ISLAND_SLOTS": "2", "ISLAND_RANK": "0"})
    assert (alone.kind, alone.islands, alone.count) == ("islands", 2, 1)
    assert Topology.from_env({**env, "ISLAND_MIN": "2"} | {"ISLAND_RANK": "0"}).suffice == 2


@pytest.mark.parametrize(("endpoint", "more", "says"), [
    ("zmq://8.8.8.8:1", {}, f"ISLAND_ENDPOINT=8.8.8.8:1: {PUBLIC}"),
    ("[2606:4700::1]:1", {}, "ISLAND_TOKEN is not set"),
    ("10.0.0.1:1", {"ISLAND_ADDRESS": "8.8.4.4"}, f"ISLAND_ADDRESS=8.8.4.4: {PUBLIC}"),
    ("8.8.8.8:1", {"ISLAND_TOKEN": "a secret of 16 and more"}, ""),
    ("10.0.0.1:1", {"ISLAND_ADDRESS": "192.168.1.5"}, ""),
    ("[fd00::1]:1", {}, ""),
    ("100.100.1.1:1", {}, ""),
])  # fmt: skip
def test_environment_public_address_without_token_is_warned_of(
    endpoint: str,
    more: dict[str, str],
    says: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A public address without a token is warned of once, before anything is sent there."""

    def silent(self: Topology, limit: float | None = None) -> None:
        raise StoreSilent("ISLAND_ENDPOINT= nobody answers")

    monkeypatch.setattr(Topology, "open_store", silent)
    env = {"ISLAND_COUNT": "2", "ISLAND_ENDPOINT": endpoint, **more}
    for _ in range(2):
        with pytest.raises(StoreSilent):
            Topology.from_env(env).join(ShardPosition())
    found = [r.getMessage() for r in caplog.records if "PUBLIC" in r.getMessage()]
    assert len(found) == bool(says), found
    assert all(says in text and "secret" not in text for text in found), found
