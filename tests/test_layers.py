"""Imports point down only, and inside a folder there are no cycles. docs/walkthrough.md shows the rows; imports inside
functions count, those under `if TYPE_CHECKING` do not."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from tests.support.parsed import nodes_of, tree_of

ROOT = Path(__file__).resolve().parents[1] / "src" / "graftune"
ROWS = [
    ["errors", "ranks", "arithmetic", "private", "io", "settings", "batch", "runtime", "spans", "graph"],
    ["kernels", "observe", "tokenizer", "ledger"],
    ["model", "data"],
    ["weights", "dist", "losses"],
    ["infer", "step"],
    ["session"],
    ["plan", "run_folder"],
    ["exporting", "training"],
    ["rl"],
    ["api", "dashboard"],
    ["cli"],
]
ROW = {name: number for number, row in enumerate(ROWS) for name in row}
TOP = {"__init__", "__main__"}  # the package's entry points may import everything
ROOT_MODULES = 15  # at most


def allowed(unit: str, other: str) -> bool:
    if unit == other or ROW[other] < ROW[unit]:
        return True
    return ROW[unit] == ROW[other] == 0 and ROWS[0].index(other) < ROWS[0].index(unit)


@cache
def module_files() -> dict[str, Path]:
    """Every module of the package by its dotted name; a folder's __init__.py has the folder's name."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


class Imports(ast.NodeVisitor):
    """The modules that a source imports, those under `if TYPE_CHECKING` aside."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def visit_Expr(self, node: ast.Expr) -> None:
        """Expressions, which are most of a file, import nothing."""

    visit_Assign = visit_AnnAssign = visit_Return = visit_Expr  # type: ignore[assignment]

    def visit_If(self, node: ast.If) -> None:
        if getattr(node.test, "id", getattr(node.test, "attr", "")) != "TYPE_CHECKING":
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        self.names.update(alias.name for alias in node.names)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        assert node.level == 0, "relative imports hide the layer"
        self.names.update(f"{node.module}.{alias.name}" for alias in node.names)
        self.names.add(str(node.module))


def imported(source: ast.Module, known: set[str]) -> set[str]:
    """The modules of `known` that a source imports: `from folder import module` is an import of that module only."""
    found = Imports()
    found.visit(source)
    wanted = found.names & known
    return {name for name in wanted if not any(other.startswith(f"{name}.") for other in wanted)}


def on_a_cycle(edges: dict[str, set[str]]) -> list[str]:
    """The modules from which imports lead back to themselves."""

    def reached(start: str) -> set[str]:
        seen, left = set[str](), [start]
        while left:
            more = edges[left.pop()] - seen
            seen |= more
            left += more
        return seen

    return sorted(name for name in edges if name in reached(name))


@cache
def edges() -> dict[str, set[str]]:
    """Every module of the package with those that it imports."""
    files = module_files()
    return {name: imported(tree_of(path), set(files)) - {name} for name, path in files.items()}


def unit(module: str) -> str:
    """The folder or top-level module of graftune that a module belongs to."""
    return [*module.split("."), "__init__"][1]


def test_every_unit_has_a_row():
    assert set(map(unit, module_files())) <= set(ROW) | TOP


def test_imports_point_down():
    below = {name: found for name, found in edges().items() if unit(name) not in TOP}
    bad = [f"{name} imports {other}" for name, found in below.items() for other in found
           if other != "graftune" and not allowed(unit(name), unit(other))]  # fmt: skip
    assert not bad, "\n".join(bad)


def test_the_root_of_the_package_is_small():
    assert len(list(ROOT.glob("*.py"))) <= ROOT_MODULES


def test_no_import_cycles():
    """In the whole package. Imports point down between folders, so a cycle would lie inside of one."""
    cycle = on_a_cycle(edges())
    assert not cycle, "\n".join(f"{name} imports {', '.join(sorted(edges()[name] & set(cycle)))}" for name in cycle)


def test_the_check_itself_sees_a_cycle():
    assert on_a_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == ["b", "c"]
    source = "if TYPE_CHECKING:\n    import x.a\ndef f():\n    from x import b, g\n    from x.c import h\n"
    assert imported(ast.parse(source), {"x", "x.a", "x.b", "x.c"}) == {"x.b", "x.c"}


def test_the_check_itself_knows_up_from_down():
    assert not allowed("kernels", "training") and not allowed("model", "data") and allowed("runtime", "errors")
    assert not allowed("errors", "runtime")


# Where each part of a session is made: nowhere else, so that a benchmark runs what a run does.
MADE_IN = {
    "Step": "session/parts.py",
    "Loader": "session/parts.py",
    "pipeline_for": "session/parts.py",
    "Decoder": "weights/load.py",
}


def test_the_parts_of_a_session_are_made_in_one_place():
    found = set()
    for path in [*ROOT.rglob("*.py"), *(ROOT.parents[1] / "benchmarks").glob("*.py")]:
        calls = (node.func for node in nodes_of(path) if isinstance(node, ast.Call))
        made = {call.id for call in calls if isinstance(call, ast.Name)} & set(MADE_IN)
        found |= {(name, str(path.relative_to(ROOT.parents[1]))) for name in made}
    assert found == {(name, f"src/graftune/{place}") for name, place in MADE_IN.items()}


def test_the_page_needs_no_torch():
    """Its server stays small, and opens folders where there is no torch."""
    import subprocess
    import sys

    names = "graftune.dashboard.serving, graftune.cli.watch, graftune.cli.runs"
    code = f"import sys; sys.modules['torch'] = None; import {names}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
