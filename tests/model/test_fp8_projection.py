"""FP8 lives in files of its own: only these may import it."""

from __future__ import annotations

import re
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[2] / "src" / "graftune"
# The weight, its projection and its entry in the table of formats: loader and plan import none of them.
KNOW = {f"model/{name}.py" for name in ("fp8_projection", "frozen/fp8", "frozen/formats/fp8")}


def test_no_other_file_imports_it() -> None:
    names = re.compile(r"kernels\.fp8|kernels import [^\n]*\bfp8\b|frozen\.fp8|fp8_projection|formats[.]fp8|\bFp8\b")
    files = {path.relative_to(SOURCES).as_posix(): path.read_text() for path in SOURCES.rglob("*.py")}
    found = {name for name, text in files.items() if not name.startswith("kernels/fp8/") and _imports(text, names)}
    assert found == KNOW


def _imports(text: str, names: re.Pattern[str]) -> bool:
    return any(names.search(line) for line in text.splitlines() if re.match(r"\s*(from|import) ", line))
