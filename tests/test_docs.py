"""The documents are true: generated parts are current, links lead somewhere, every command line and YAML block is one
that the code accepts. Nothing is trained and no model is opened."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path

import pytest

from graftune.config import leaves

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
readme = importlib.import_module("readme")
fit = importlib.import_module("fit")

README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md", ROOT / "AGENTS.md"]
PAGES += sorted((ROOT / "examples").glob("*.md"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.S | re.M)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", readme.documents(), ids=name_of)
def test_generated_parts_are_current(path: Path):
    text = path.read_text()
    assert readme.rewritten(text) == text, "run `python tools/readme.py`"


def test_every_part_is_shown_somewhere():
    text = "".join(path.read_text() for path in readme.documents())
    assert [name for name in readme.PARTS if text.count(f"<!-- {name} -->\n") != 1] == []
    assert all(f"| `{leaf.name}` |" in text for leaf in leaves())


def test_the_readme_is_short_and_in_order():
    assert 120 <= len(README.read_text().splitlines()) <= 150
    headings = ["Two commands", "Install", "Your own data", "Will it fit?", "Use it elsewhere", "From Python"]
    headings += ["What is supported", "Speed", "Documents"]
    assert re.findall(r"^## (.*)$", README.read_text(), re.M) == headings


def anchors(path: Path) -> set[str]:
    """As GitHub names them."""
    found = re.findall(r"^#+ (.*)$", FENCE.sub("", path.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_links_lead_somewhere(path: Path):
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", path.read_text())):
        if "://" in link:
            continue
        target, _, anchor = link.partition("#")
        place = (path.parent / target) if target else path
        assert place.exists(), link
        assert not anchor or anchor in anchors(place), link


def test_json_blocks_are_json():
    blocks = [(path, body) for path in PAGES for kind, body in FENCE.findall(path.read_text()) if kind == "json"]
    for path, body in blocks:
        for line in body.splitlines():
            assert json.loads(line), name_of(path)


def test_the_memory_table_is_current():
    """One cell planned again: a change of what a run takes has to be told by `python tools/fit.py`."""
    name, way = next(iter(fit.MODELS)), ("nf4", "full")
    planned = fit.row(name, [way])[" ".join(way)]
    assert json.loads(fit.PATH.read_text())["rows"][name][" ".join(way)] == pytest.approx(planned, rel=0.01)
