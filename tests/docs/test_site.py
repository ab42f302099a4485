"""The pages of docs/ build as a site without a warning, and its pictures are those that their
script makes.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
NEEDED = ("mkdocs", "material", "mkdocstrings", "mkdocstrings_handlers")
ABSENT = [name for name in NEEDED if importlib.util.find_spec(name) is None]


def make() -> ModuleType:
    """docs/pictures/make.py as a module."""
    file = ROOT / "docs" / "pictures" / "make.py"
    spec = importlib.util.spec_from_file_location("pictures_make", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(
    bool(ABSENT), reason=f"{', '.join(ABSENT)} not installed: pip install -e '.[docs]'"
)
def test_site_builds_without_a_warning(tmp_path: Path) -> None:
    """mkdocs builds the site without a warning."""
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"]
    command = [str(word) for word in words]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    docs, site = ROOT / "docs", tmp_path / "site"
    pages = {p.relative_to(docs).with_suffix("") for p in docs.rglob("*.md")}
    assert pages <= {p.relative_to(site).with_suffix("") for p in site.rglob("*.html")}
    texts = {p.name: p.read_text(encoding="utf-8") for p in site.rglob("*.html")}
    fonts = [name for name, text in texts.items() if "fonts.googleapis.com" in text]
    assert not fonts, f"pages that load fonts from elsewhere: {fonts}"


@pytest.mark.parametrize("name", ["islands.svg", "step.svg", "step-delay.svg"])
def test_site_picture_is_what_its_script_makes(name: str) -> None:
    """A picture is what docs/pictures/make.py makes, and nothing in it lies outside."""
    pictures = make().PICTURES
    assert name in pictures
    text = (ROOT / "docs" / "pictures" / name).read_text(encoding="utf-8")
    assert text == pictures[name](), "run python docs/pictures/make.py"
    tree = ElementTree.fromstring(text)
    left, top, width, height = map(float, tree.attrib["viewBox"].split())
    for element in tree.iter():
        if element.tag.endswith("rect"):
            x, y, w, h = (float(element.attrib[key]) for key in ("x", "y", "width", "height"))
            assert left <= x and x + w <= width and top <= y and y + h <= height, element.attrib


def test_site_every_picture_has_a_script() -> None:
    """Each picture has a script."""
    drawn = {p.name for p in (ROOT / "docs" / "pictures").glob("*.svg")}
    # study.py --keep, and trace_exchange.py of benchmarks/, on the day that the page says
    measured = {"study-main-bytes.svg", "trace.svg"}
    assert drawn - measured == set(make().PICTURES)
