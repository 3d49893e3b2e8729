"""Writes the generated parts of README.md and docs/: the table of settings from the code, the benchmark and memory
tables from their records, and the image of the sweeps where it was drawn.

python tools/readme.py          rewrites the documents in place; a test checks that nothing is left to rewrite

A part stands between `<!-- name -->` and `<!-- end name -->`, in any document. What was to be reached on a GPU is
listed whether or not there is a record of it: what has none is `not measured yet`.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools import api_docs

from benchmarks import report
from graftune.settings.config import leaves

ROOT = Path(__file__).resolve().parents[1]


def settings() -> str:
    lines = ["| setting | default | what it does |", "|---|---|---|"]
    section = ""
    for leaf in leaves():
        if leaf.section != section:
            section = leaf.section
            lines.append(f"| **{section}** | | |")
        default = ", ".join(leaf.default) if isinstance(leaf.default, tuple) else leaf.default
        shown = f"`{default}`" if default not in ("", (), {}) else "(empty)"
        lines.append(f"| `{leaf.name}` | {shown} | {leaf.help} |")
    return "\n".join(lines)


def layers() -> str:
    """The rows that tests/test_layers.py enforces, the highest first."""
    rows = list(enumerate(importlib.import_module("tests.test_layers").ROWS))
    there = {path.name.removesuffix(".py") for path in (ROOT / "src" / "graftune").iterdir()}
    shown = [f"{number}  {'  '.join(name for name in row if name in there)}" for number, row in reversed(rows)]
    return "\n".join(["```", *shown, "```"])


PARTS: dict[str, Callable[[], str]] = {
    "api": api_docs.api,
    "layers": layers,
    "settings": settings,
    "cpu": report.cpu,
    "gpu": report.gpu,
    "sweeps": report.sweeps,
    "start": report.start,
    "speed": report.speed,
    "ranked": report.ranked,
    "scale": report.scale,
    "reliability": report.reliability,
    "fit": report.fit,
    "fit by policy": report.fit_by_policy,
}


def documents() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def rewritten(text: str) -> str:
    for name, make in PARTS.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end {name} -->"
        if begin not in text:
            continue
        made = make()
        whole = begin + (f"{made}\n" if made else "") + end
        text = re.sub(f"{begin}.*?{end}", lambda _, whole=whole: whole, text, count=1, flags=re.S)
    return text


if __name__ == "__main__":
    api_docs.SETTINGS.write_text(api_docs.settings_file())
    for path in documents():
        path.write_text(rewritten(path.read_text()))
