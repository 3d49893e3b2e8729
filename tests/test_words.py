"""The code is written in plain English: the words of the field, and none of the package's own earlier idioms.

The pairs are those of the style guide. Names are compared as a whole, since `writes_to` is fine where `writes` was a
riddle. Wordings are searched in messages, docstrings and comments.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from graftune.settings.config import leaves
from tests.support.parsed import nodes_of, text_of

TESTS = Path(__file__).resolve().parent
PACKAGE = TESTS.parent / "src" / "graftune"
NAMES = {
    "_bent", "out_apart", "reduce_apart", "settle", "learns_below", "mend", "mends", "Heard", "heard", "SAID", "Flat",
    "Steps", "Everything", "alien", "meant", "Way", "lying", "Alone", "Together", "crew", "_launched_in_vain",
    "outlive_readers", "unsound",
}  # fmt: skip
# Ordinary words, which are odd only as names of these parts of the package.
NAMES_IN = {
    "model": {"said", "light", "complete", "again", "home", "writes", "Inputs"},
    "kernels": {"deep", "high", "wide", "far", "mine", "said"},
}
FILES = {
    "every", "live", "typed", "closing", "watched", "kept", "unread", "thin", "places", "glance", "way", "remembered",
}  # fmt: skip
# Each with a text that is part of it: where that does not occur, nothing has to be searched.
WORDINGS_WITH = {
    "mend": r"\bmend(s|ed|ing)?\b(?! not)", "body": r"(?<!/)\b(no|some)body('s)?\b(?!/)", "foretold": r"\bforetold\b",
    "in vain": r"\bin vain\b", "nothing at all": r"\bof nothing at all\b", "is the start": r"\bnow is the start\b",
    "at once, in": r"\beverything at once, in order\b", "of its place": r"\bis a function of its place\b",
    "came of it": r"\bwhat came of it\b", "is none": r"\bone is none\b", "has to say": r"\bhas to say\b",
    "not named": r"\bhanded on, not named\b", "goes by the": r"\bthat goes by the\b", "a clock": r"\bhang on a clock\b",
    "to be told": r"\bto be told\b", "is not saved": r"\bit is not saved\b", "is no step": r"\bis no step's\b",
    "before it, or": r"\bgo before it, or\b", "the fifth on": r"\bfrom the fifth on\b",
    "as it was": r"\bconversation is as it was\b", "trained are": r"\btrained are\b",
    "bend ": r"\bbend (their|its|the) logits\b", "second start": r"\bare a second start's\b",
    "is to": r"\bwhat (a|an|the) [\w-]+ is to\b",
}  # fmt: skip
WORDINGS = {part: re.compile(wording, re.IGNORECASE) for part, wording in WORDINGS_WITH.items()}
# Of messages only: a comment may well say that something is made once a step.
MESSAGES = re.compile(
    r"\bone a (layer|line|value|row|step)\b|object an answer|what auto came to|\bby (itself|themselves)\b"
    r"|(?<!\bthere )\bis no (?!longer\b|more\b)|\bforbids to\b|\bmade with other\b",
    re.IGNORECASE,
)


WORDS = re.compile(r"\w+")
SPLIT = re.compile(r"""["']\s*\n\s*[rbf]{0,2}["']""")  # a literal that goes on in the next line


def sources(*roots: Path) -> list[Path]:
    own = Path(__file__).resolve()
    return sorted(path for root in roots for path in root.rglob("*.py") if path != own)


def shown(path: Path) -> str:
    return str(path.relative_to(TESTS.parent))


def names(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Variables, attributes, arguments, functions and classes, where they are named or used."""
    for node in nodes:
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                yield node.lineno, name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Messages, docstrings and comments."""
    for node in nodes_of(path):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
    for number, line in enumerate(text_of(path).splitlines(), 1):
        if "#" in line:  # a comment, or one in a string, which is a message anyway
            yield number, line[line.index("#") :]


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """String constants. Docstrings are left out, except those of commands: they are help texts."""
    nodes = nodes_of(path)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    bodies = [node.body[0] for node in nodes if isinstance(node, documented) and node.body]
    own = {id(first.value) for first in bodies if isinstance(first, ast.Expr)} if path.parent.name != "cli" else set()
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in own:
            yield node.lineno, node.value


def odd_names(path: Path) -> list[str]:
    inside = str(path.relative_to(PACKAGE).parent) if PACKAGE in path.parents else ""
    avoided = NAMES.union(*(words for folder, words in NAMES_IN.items() if inside.startswith(folder)))
    found = []
    if avoided.intersection(WORDS.findall(text_of(path))):  # in most files none is, which is quick
        found = [f"{shown(path)}:{line}: {name}" for line, name in names(nodes_of(path)) if name in avoided]
    return found + ([f"{shown(path)}: a file is named after what is inside"] if path.stem in FILES else [])


def odd_wording(text: str) -> str:
    """The first of the wordings that a text has, or nothing."""
    small = text.lower()
    found = [match for part, wording in WORDINGS.items() if part in small and (match := wording.search(text))]
    return found[0][0] if found else ""


def test_names_explain_themselves() -> None:
    found = [line for path in sources(PACKAGE, TESTS) for line in odd_names(path)]
    assert not found, "\n".join(found)


def test_sentences_are_plain() -> None:
    found = [
        f"{shown(path)}:{line}: {wording}"
        for path in sources(PACKAGE, TESTS)
        if odd_wording(SPLIT.sub("", text_of(path)))  # in most files nothing is found, and they need no parsing
        for line, text in texts(path)
        if (wording := odd_wording(text))
    ]
    assert not found, "\n".join(found)


def test_a_class_name_has_one_meaning() -> None:
    classes: dict[str, list[str]] = {}
    for path in sources(PACKAGE):
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, []).append(shown(path))
    twice = {name: places for name, places in classes.items() if len(places) > 1}
    assert not twice, "\n".join(f"{name}: {', '.join(places)}" for name, places in sorted(twice.items()))


def test_messages_use_the_words_of_the_field() -> None:
    found = [
        f"{shown(path)}:{line}: {text[:80]}"
        for path in sources(PACKAGE)
        for line, text in messages(path)
        if MESSAGES.search(text) or re.search(r"\bmend(s|ed|ing)?\b", text, re.IGNORECASE)
    ]
    assert not found, "\n".join(found)


def test_the_checks_find_what_they_search_for() -> None:
    sample = "class A:\n    def f(self, b, c=1):\n        d.e(g=b)\n"
    found = Counter(name for _, name in names(ast.walk(ast.parse(sample))))
    assert set(found) == {"A", "f", "self", "b", "c", "d", "e", "g"}
    assert SPLIT.sub("", 'x = ("it is not "\n     f"saved")') == 'x = ("it is not saved")'
    assert odd_wording("Nobody owns what follows.") == "Nobody" and not odd_wording("Close the span.")
    assert all(part in re.sub(r"\\b|[?()]", "", wording) for part, wording in WORDINGS_WITH.items())
    assert "way" in FILES and any(text.startswith("# Ordinary") for _, text in texts(Path(__file__)))


def test_help_texts_are_short() -> None:
    """190 characters are about three lines of a terminal of 100 columns."""
    long = {leaf.name: len(leaf.help) for leaf in leaves() if len(leaf.help) > 190}
    assert not long
