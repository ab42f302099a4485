"""Where a store is: host:port, zmq://host:port, redis://:password@host:port/number."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_demo import Topology
from fsdp_demo.comm.address import Endpoint, route_to, split_endpoint

ISLANDS = {"ISLAND_COUNT": "2", "ISLAND_RANK": "0"}


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("10.0.0.5:29500", Endpoint("", "10.0.0.5", 29500)),
        ("[fd00::1]:29500", Endpoint("", "fd00::1", 29500)),
        ("zmq://host:1", Endpoint("zmq", "host", 1)),
        ("zmq://[fd00::1]:29500", Endpoint("zmq", "fd00::1", 29500)),
        ("redis://host:6379", Endpoint("redis", "host", 6379)),
        ("redis://host:6379/3", Endpoint("redis", "host", 6379, "", 3)),
        ("redis://:pass@word/@[::1]:6379/3", Endpoint("redis", "::1", 6379, "pass@word/", 3)),
    ],
)
def test_endpoints_are_read_and_written_without_the_password(text: str, place: Endpoint) -> None:
    assert split_endpoint(text) == place
    assert str(place) == text.replace(":pass@word/@", "") and split_endpoint(
        str(place)
    ) == place._replace(password="")


@pytest.mark.parametrize(
    "text",
    [
        "tcp://host:1",
        "://host:1",
        "zmq://host",
        "zmq://",
        "zmq://:1",
        "zmq://host:0",
        "zmq://host:1/2",
    ],
)
@pytest.mark.parametrize("transport", ["gloo", "zeromq"])
def test_wrong_endpoints_are_refused(text: str, transport: str) -> None:
    with pytest.raises(ValueError) as error:
        Topology.from_env({**ISLANDS, "ISLAND_ENDPOINT": text, "ISLAND_TRANSPORT": transport})
    assert str(error.value).startswith(
        f"ISLAND_ENDPOINT={text!r} must be host:port of the store, zmq://host:port or redis://"
    )


@pytest.mark.parametrize(
    "text",
    [
        "redis://secret@host:1",
        "redis://user:secret@host:1",
        "redis://:secret@host",
        "redis://:secret@host:1/x",
    ],
)
def test_no_password_is_told(text: str) -> None:
    with pytest.raises(ValueError) as error:
        Topology.from_env({**ISLANDS, "ISLAND_ENDPOINT": text, "ISLAND_TRANSPORT": "zeromq"})
    assert "secret" not in str(error.value) and "must be host:port" in str(error.value)
    topology = Topology.from_env(
        {**ISLANDS, "ISLAND_ENDPOINT": "redis://:secret@host:1", "ISLAND_TRANSPORT": "zeromq"}
    )
    assert "secret" not in repr(topology) + topology.endpoint and topology.password == "secret"


@pytest.mark.parametrize("scheme", ["zmq", "redis"])
def test_gloo_needs_torchs_store(scheme: str) -> None:
    env: dict[str, Any] = {
        **ISLANDS,
        "ISLAND_ENDPOINT": f"{scheme}://host:1",
        "ISLAND_TRANSPORT": "gloo",
    }
    with pytest.raises(
        ValueError,
        match=f"ISLAND_TRANSPORT=gloo cannot meet by ISLAND_ENDPOINT={scheme}://host:1: set "
        "ISLAND_TRANSPORT=",
    ):
        Topology.from_env(env)
    for transport in ("", "zeromq"):
        assert (
            Topology.from_env({**env, "ISLAND_TRANSPORT": transport}).endpoint
            == f"{scheme}://host:1"
        )


def test_the_way_to_an_endpoint_is_found_for_all_forms() -> None:
    assert {
        route_to(text) for text in ("127.0.0.1:1", "zmq://127.0.0.1:1", "redis://127.0.0.1:1/2")
    } == {"127.0.0.1"}
