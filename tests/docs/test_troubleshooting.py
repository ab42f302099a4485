"""The page of errors and the messages that refer to it say the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fsdp_demo.errors import PAGE, see

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / PAGE).read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^### .*?\{#([\w-]+)\}\n(.*?)(?=^##|\Z)", TEXT, re.M | re.S))
ANCHORS = list(SECTIONS)
SOURCES = {
    f: f.read_text(encoding="utf-8")
    for top in ("fsdp_demo", "deepspeed_ext")
    for f in sorted((ROOT / top).rglob("*.py"))
}
CALL = re.compile(r"""\bsee\(\s*["']([\w-]+)["']\s*\)""")


def test_troubleshooting_anchors_have_sections() -> None:
    """Each anchor of the page has a section, in the order of the page."""
    assert re.findall(r"\{#([\w-]+)\}", TEXT) == ANCHORS and len(ANCHORS) >= 25


def test_troubleshooting_anchors_are_all_used() -> None:
    """Each anchor is used by a message, and no other."""
    texts = [text for file, text in SOURCES.items() if file.name != "errors.py"]
    assert set(CALL.findall("\n".join(texts))) == set(ANCHORS)
    whole = "".join(SOURCES.values())
    assert not re.search(r"troubleshooting\.md#(?!no-store\))", whole), "write see(ANCHOR) instead"
    assert see("no-store") == " (docs/troubleshooting.md#no-store)"


@pytest.mark.parametrize("anchor", ANCHORS)
def test_troubleshooting_section_quotes_message_cause_and_cure(anchor: str) -> None:
    """A section quotes its message and names cause and cure: what a user copies from the terminal
    is found on the page, as the quoted words are those of the sources.
    """
    section = SECTIONS[anchor]
    quoted = re.findall(r"^\* \*\*Message.*?:\*\* (.*)", section, re.M)
    assert quoted and "**Cause" in section and "**Cure" in section
    code = " ".join(re.sub(r"""["']\s*\n\s*f?["']""", "", text) for text in SOURCES.values())
    for line in quoted:
        for words in [w for part in re.findall(r"`([^`]+)`", line) for w in part.split("...")]:
            wanted = words.strip()
            assert len(wanted) < 6 or wanted in code, wanted


def test_troubleshooting_links_lead_to_sections() -> None:
    """Pages and messages refer to sections that are there."""
    others = (ROOT / name for name in ("README.md", "AGENTS.md", "recipes/README.md"))
    files = [f for f in (*(ROOT / "docs").rglob("*.md"), *others) if f.exists()]
    text = "\n".join(f.read_text(encoding="utf-8") for f in files)
    named = set(re.findall(r"troubleshooting\.md#([\w-]+)", text))
    assert named <= {*ANCHORS, "ANCHOR"}, named - set(ANCHORS)


@pytest.mark.parametrize("words", ["no store answers", "is no key of the configuration"])
def test_troubleshooting_message_ends_with_its_section(words: str) -> None:
    """A message ends with the address of its section."""
    from fsdp_demo import load_config
    from fsdp_demo.store.client import connect

    with pytest.raises((ValueError, RuntimeError), match=words) as error:
        connect("127.0.0.1:1", 0.2, 1.0, 1.0) if "store" in words else load_config(
            "diloco", ["channels.nothing=1"]
        )
    assert str(error.value).endswith(see("no-store" if "store" in words else "unknown-key"))
