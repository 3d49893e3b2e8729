"""FP8 lives in files of its own: only these may import it."""

from __future__ import annotations

import re
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[2] / "src" / "graftune"
# FP8's own files, the reader of such checkpoints, and the list of the ways to hold a base: the loader and the plan know
# none of them.
KNOW = {f"model/{name}.py" for name in ("fp8_projection", "frozen/fp8")}
KNOW |= {f"weights/{name}.py" for name in ("fp8_way", "fp8_io", "placement")}


def test_nobody_else_imports_it() -> None:
    names = re.compile(r"kernels\.fp8|kernels import [^\n]*\bfp8\b|frozen\.fp8|fp8_projection|fp8_way|\bFp8\b")
    files = {path.relative_to(SOURCES).as_posix(): path.read_text() for path in SOURCES.rglob("*.py")}
    found = {name for name, text in files.items() if not name.startswith("kernels/fp8/") and _imports(text, names)}
    assert found == KNOW


def _imports(text: str, names: re.Pattern[str]) -> bool:
    return any(names.search(line) for line in text.splitlines() if re.match(r"\s*(from|import) ", line))
