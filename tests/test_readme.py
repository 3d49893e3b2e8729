"""The README is true: generated parts are current, linked files exist, the tree names real rooms."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
readme = importlib.import_module("readme")

TEXT = (ROOT / "README.md").read_text()


def test_generated_parts_are_current():
    assert readme.rewritten(TEXT) == TEXT, "run `python tools/readme.py`"
    assert "`tokens_per_step` | `4096`" in TEXT


def test_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#:]+)\)", TEXT)
    assert len(links) >= 10
    missing = [link for link in links if not (ROOT / link).exists()]
    assert not missing
