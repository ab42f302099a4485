"""`fsdp_demo.net.link`: rates and delays as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_demo.net.link import Link, parse_rate, parse_rtt


@pytest.mark.parametrize(
    ("text", "bits_per_second"),
    [
        ("100Mbit", 1e8),
        ("1Gbit", 1e9),
        ("20mbit/s", 2e7),
        ("56 kbit", 5.6e4),
        ("1.5Gbit/s", 1.5e9),
        ("5Mbps", 5e6),
        ("7bit", 7.0),
    ],
)
def test_link_rate_is_read(text: str, bits_per_second: float) -> None:
    """`parse_rate` reads bits, with any prefix and case."""
    assert parse_rate(text) == bits_per_second


@pytest.mark.parametrize(
    "text",
    [
        "",
        "100",
        "fast",
        "0Mbit",
        "-1Mbit",
        "1e999Mbit",
        "10MB/s",
        "10MBps",
        "10Mb",
        "10M",
        "40ms",
        "1 0Mbit",
    ],
)
def test_link_rate_wrong_says_what_is_allowed(text: str) -> None:
    """A wrong rate is refused with an example."""
    with pytest.raises(ValueError, match="link rate .* for example 100Mbit"):
        parse_rate(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("40ms", 0.04), ("0.04s", 0.04), ("500us", 0.0005), ("0", 0.0), ("0ms", 0.0), ("1 S", 1.0)],
)
def test_link_rtt_is_read(text: str, seconds: float) -> None:
    """`parse_rtt` reads seconds, milliseconds and microseconds."""
    assert parse_rtt(text) == seconds


@pytest.mark.parametrize("text", ["", "40", "-40ms", "40min", "100Mbit", "nan", "1e999s"])
def test_link_rtt_wrong_says_what_is_allowed(text: str) -> None:
    """A wrong round trip is refused with an example."""
    with pytest.raises(ValueError, match="round trip .* for example 40ms"):
        parse_rtt(text)


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("100Mbit,40ms", Link(1e8, 0.04)),
        (" 100Mbit , 40ms ", Link(1e8, 0.04)),
        ("100Mbit", Link(1e8, 0.0)),
        ("40ms", Link(None, 0.04)),
        ("none,40ms", Link(None, 0.04)),
        ("none", Link()),
    ],
)
def test_link_parse(text: str, link: Link) -> None:
    """`Link.parse` reads a rate, a round trip, or both."""
    assert Link.parse(text) == link


@pytest.mark.parametrize("text", ["", ",", "100Mbit,", "40ms,100Mbit", "100Mbit,40ms,1%"])
def test_link_parse_refuses(text: str) -> None:
    """Text that is no rate and round trip is refused."""
    with pytest.raises(ValueError, match="link"):
        Link.parse(text)


@given(st.none() | st.floats(1e-3, 1e15), st.floats(0, 1e3))
def test_link_text_reads_back(bits_per_second: float | None, rtt: float) -> None:
    """A link reads back from its text."""
    link = Link(bits_per_second, rtt)
    assert Link.parse(str(link)) == link


def test_link_text_is_short() -> None:
    """The text of a link is what a user would write."""
    assert str(Link(1e8, 0.04)) == "100Mbit,40ms"
    assert str(Link(None, 0.0005)) == "none,0.5ms"


def test_link_numbers_are_checked() -> None:
    """Rates that are not positive and finite, and negative round trips, are refused."""
    for wrong in ((0.0, 0.0), (-1.0, 0.0), (float("inf"), 0.0), (None, -1.0), (None, float("nan"))):
        with pytest.raises(ValueError, match="must be"):
            Link(*wrong)


def test_link_from_env() -> None:
    """`Link.from_env` reads ISLAND_LINK, and names it in its errors."""
    assert Link.from_env({}) is None
    assert Link.from_env({"ISLAND_LINK": " "}) is None
    assert Link.from_env({"ISLAND_LINK": "1Gbit,2ms"}) == Link(1e9, 0.002)
    with pytest.raises(ValueError, match="ISLAND_LINK: link rate 'slow'"):
        Link.from_env({"ISLAND_LINK": "slow"})


def test_link_without_limits_is_false() -> None:
    """A link that slows nothing is false."""
    assert not Link()
    assert Link(1e8) and Link(None, 0.04)
