"""Where a store is: host:port."""

from __future__ import annotations

import pytest

from fsdp_demo import Topology
from fsdp_demo.net.address import Endpoint, route_to, split_endpoint

ISLANDS = {"ISLAND_COUNT": "2", "ISLAND_RANK": "0"}


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("10.0.0.5:29500", Endpoint("10.0.0.5", 29500)),
        ("[fd00::1]:1", Endpoint("fd00::1", 1)),
        ("a.host:65535", Endpoint("a.host", 65535)),
    ],
)
def test_endpoint_reads_back(text: str, place: Endpoint) -> None:
    """An endpoint reads back from its text, with and without zmq://."""
    assert split_endpoint(text) == split_endpoint(f"zmq://{text}") == place and str(place) == text


@pytest.mark.parametrize(
    "text",
    [
        "tcp://host:1",
        "://host:1",
        "host",
        "zmq://",
        "zmq://:1",
        "host:0",
        "host:1/2",
        "redis://host:1",
    ],
)
def test_endpoint_wrong_is_refused(text: str) -> None:
    """A wrong ISLAND_ENDPOINT is refused with its value and the form it must have."""
    with pytest.raises(ValueError) as error:
        Topology.from_env({**ISLANDS, "ISLAND_ENDPOINT": text})
    assert str(error.value).startswith(f"ISLAND_ENDPOINT={text!r} must be host:port of the store")


def test_route_to_every_form_of_endpoint() -> None:
    """`route_to` finds the own address towards an endpoint in each form of it."""
    assert {route_to(text) for text in ("127.0.0.1:1", "zmq://127.0.0.1:1")} == {"127.0.0.1"}
