"""Only the files of model/families/ know the names of families: no other code compares against one."""

from __future__ import annotations

import ast
from pathlib import Path

from graftune.model.families import FAMILIES
from tests.support.parsed import nodes_of

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "graftune"
NAMES = {name for family in FAMILIES.values() for name in (family.name, family.hf_type, family.arch)}
# Values of file formats: kinds of vocabularies and pre-tokenizers in a GGUF, and names in its metadata.
EXEMPT = {
    "exporting/gguf_vocab.py": {"llama", "qwen2", "qwen35"},
    "tokenizer/gguf_vocab.py": {"gemma4", "llama"},
    "tokenizer/pretokenize.py": {"gemma4", "qwen35"},
    "tokenizer/token_kinds.py": {"phi3"},
}


def found(path: Path) -> set[str]:
    """The names of families that the code of a file has as strings, and its comparisons of a spec's family."""
    names = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Constant) and node.value in NAMES:
            names.add(node.value)
        if isinstance(node, ast.Compare):
            sides = [side for side in (node.left, *node.comparators) if isinstance(side, ast.Attribute)]
            names |= {"a comparison of .family" for side in sides if side.attr == "family"}
    return names


def test_no_other_code_knows_a_family() -> None:
    knowing = {path.relative_to(PACKAGE).as_posix(): found(path) for path in PACKAGE.rglob("*.py")}
    others = {name: names for name, names in knowing.items() if not name.startswith("model/families/")}
    assert {name: names for name, names in others.items() if names} == EXEMPT


def test_it_would_be_seen(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text('if spec.family == other or name in ("gemma2", "x"):\n    pass\n')
    assert found(tmp_path / "x.py") == {"a comparison of .family", "gemma2"}
