"""What a user reads is plain English: no word of ours that nobody else uses, and help texts of three lines at most."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from graftune.settings.config import leaves

ROOT = Path(__file__).resolve().parents[1] / "src" / "graftune"
AVOIDED = re.compile(
    r"\bmend(s|ed|ing)?\b|\bone a (layer|line|value|row|step)\b|object an answer|what auto came to"
    r"|\bby (itself|themselves)\b|(?<!\bthere )\bis no (?!longer\b|more\b)|\bforbids to\b|\bmade with other\b",
    re.IGNORECASE,
)


def texts(path: Path) -> list[tuple[int, str]]:
    """The string constants of a module, its docstrings aside (but a command's docstring is its help)."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    bodies = [node.body[0] for node in ast.walk(tree) if isinstance(node, documented) and node.body]
    own = {id(first.value) for first in bodies if isinstance(first, ast.Expr)} if path.parent.name != "cli" else set()
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in own]
    return [(node.lineno, node.value) for node in nodes if isinstance(node.value, str)]


def test_messages_use_the_words_of_the_field() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text[:80]}"
        for path in sorted(ROOT.rglob("*.py"))
        for line, text in texts(path)
        if AVOIDED.search(text)
    ]
    assert not found, "\n".join(found)


def test_help_texts_are_short() -> None:
    """190 characters are about three lines of a terminal of 100 columns."""
    long = {leaf.name: len(leaf.help) for leaf in leaves() if len(leaf.help) > 190}
    assert not long
