"""Joins the scripts and styles of the page (dashboard/static) into one file each.

They are written as many small modules. Loading them one by one would take a browser twenty requests, and report.html
cannot load anything. The modules import each other by name and their top-level names do not clash (with a clash the
joined script would not run, and the page's tests would fail). So a bundler would only sort the modules by their imports
and remove the words `import` and `export`, which this file does.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

STATIC = Path(__file__).resolve().parents[1] / "dashboard" / "static"
STYLES = ("uPlot.min.css", "page.css", "views.css")
IMPORT = re.compile(r'^import \{ (?:\w+, )*\w+ \} from "\./(\w+)\.js";\n', re.M)


def asset(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


@cache
def joined_script(main: str) -> str:
    """The module `main` and all that it imports, as one plain script."""
    parts = []
    for name in _order(main, ()):
        text = IMPORT.sub("", asset(f"{name}.js"))
        assert not re.search(r"^import\b|\bimport\(", text, re.M), f"{name}.js: cannot be joined"
        parts.append(re.sub(r"^export ", "", text, flags=re.M))
    return f'(function () {{\n"use strict";\n{"".join(parts)}}})();\n'


@cache
def joined_style() -> str:
    return "".join(map(asset, STYLES))


def _order(name: str, above: tuple[str, ...]) -> list[str]:
    assert name not in above, f"modules of the page import each other: {' '.join((*above, name))}"
    found: list[str] = []
    for needed in IMPORT.findall(asset(f"{name}.js")):
        found += [each for each in _order(needed, (*above, name)) if each not in found]
    return [*found, name]
