"""The files of recipes/exchange: each is its preset, and says where its numbers are from."""

from pathlib import Path

import pytest

import fsdp_demo
from fsdp_demo.config.methods import RECOMMENDED, UNPUBLISHED

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"

EXCHANGES = sorted(path.name for path in (RECIPES / "exchange").glob("*.yaml"))


@pytest.mark.parametrize("name", EXCHANGES)
def test_exchange_file_is_its_preset(name):
    """A file of recipes/exchange loads, and differs from the preset's defaults only where the file
    says why.
    """
    path = RECIPES / "exchange" / name
    config, default = fsdp_demo.load_config(str(path)), fsdp_demo.preset(path.stem)
    assert config.preset == path.stem
    if path.stem == "diloco":  # OpenDiLoCo's 16 bits
        default = fsdp_demo.preset("diloco", value_dtype="bf16")
    assert config == default
    text = path.read_text()
    source = "benchmarks/results/study" if path.stem in UNPUBLISHED else "arXiv"
    assert source in text and text.count("#") > 8


def test_exchange_file_for_every_recommended_preset():
    """Each recommended preset has a file in recipes/exchange."""
    assert {f"{name}.yaml" for name in (*RECOMMENDED, "streaming_diloco")} == set(EXCHANGES)
