"""Private names of other projects are there in the installed versions, and only private.py reaches for them."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from graftune import private
from graftune.errors import GraftuneError
from tests.support.parsed import nodes_of

ROOT = Path(__file__).resolve().parents[1] / "src" / "graftune"
PUBLIC = {"_replace", "_asdict", "_fields", "_exit"}  # public in spite of their names (the last is os._exit)


@pytest.mark.parametrize("name", private.NAMES)
def test_every_name_is_there(name: str) -> None:
    try:
        assert private.find(name) is not None
    except GraftuneError as error:
        pytest.fail(f"{error}. See what has taken its place, and write the new name and versions into private.py")


@pytest.mark.parametrize("name", ["torch._gone.function", "torch.ops.aten._gone", "no_such_project.thing"])
def test_a_missing_name_ends_in_a_sentence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(private.NAMES, name, "some versions")
    with pytest.raises(GraftuneError, match=rf"{name}, a private name .*install .* some versions"):
        private.find(name)


def private_uses(source: str | Iterable[ast.AST], own: set[str]) -> list[str]:
    """Names that a module takes from another project although they begin with an underscore."""
    found = []
    for node in ast.walk(ast.parse(source)) if isinstance(source, str) else source:
        if isinstance(node, ast.ImportFrom) and not str(node.module).startswith(("graftune", "__future__")):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [name for name in names if any(part.startswith("_") for part in name.split("."))]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if "._" in alias.name]
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            if node.attr in own or node.attr in PUBLIC:
                continue
            path = ast.unparse(node)
            if f"torch.ops.{path}" not in private.NAMES:  # an operator that the plan has a rule for
                found.append(path)
    return found


def own_names(nodes: Sequence[ast.AST]) -> set[str]:
    """What a module defines: functions, classes, variables and attributes."""
    found = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    found |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return found | {n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}


def test_nobody_else_reaches_for_one() -> None:
    sources = {path.relative_to(ROOT): nodes_of(path) for path in ROOT.rglob("*.py")}
    own = set().union(*(own_names(source) for source in sources.values()))
    elsewhere = {p: s for p, s in sources.items() if p.name != "private.py"}
    found = [f"{path}: {use}" for path, source in elsewhere.items() for use in private_uses(source, own)]
    assert not found, "\n".join(found)


def test_the_check_itself() -> None:
    assert private_uses("from re import _parser", set()) == ["re._parser"]
    assert private_uses("import a._b", set()) == ["a._b"]
    assert private_uses("torch.ops.aten.mm(x)\nx.storage()._cdata\nself._mine\n", {"_mine"}) == ["x.storage()._cdata"]
    assert not private_uses("from graftune.a import _b\nt._replace(x=1)\nx.__dict__\n", set())
