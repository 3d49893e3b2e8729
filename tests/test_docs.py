"""The documents are true: generated parts are current, links lead somewhere, every command line and YAML block is one
that the code accepts. Nothing is trained and no model is opened."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import yaml

from graftune.cli.app import app
from graftune.cli.settings import given
from graftune.exporting.gguf_mix import TYPES
from graftune.settings.config import Config, leaves
from graftune.settings.other_tools import answer, plain
from graftune.settings.targets import TARGET_SHORTHANDS

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
readme = importlib.import_module("readme")
fit = importlib.import_module("fit")

README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md", ROOT / "AGENTS.md", ROOT / "llms.txt"]
PAGES += sorted((ROOT / "examples").glob("*.md"))
COMMENTED = sorted((ROOT / "examples").glob("*.yaml"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.S | re.M)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", readme.documents(), ids=name_of)
def test_generated_parts_are_current(path: Path):
    text = path.read_text()
    assert readme.rewritten(text) == text, "run `python tools/readme.py`"


def test_the_keywords_of_the_api_are_current():
    written = readme.api_docs.settings_file()
    assert readme.api_docs.SETTINGS.read_text() == written, "run `python tools/readme.py`"


def test_every_part_is_shown_somewhere():
    text = "".join(path.read_text() for path in readme.documents())
    assert [name for name in readme.PARTS if text.count(f"<!-- {name} -->\n") != 1] == []
    assert all(f"| `{leaf.name}` |" in text for leaf in leaves())


def test_the_readme_is_short_and_in_order():
    assert 120 <= len(README.read_text().splitlines()) <= 170
    headings = ["Two commands", "Install", "Your own data", "Will it fit?", "Use it elsewhere", "From Python"]
    headings += ["What is supported", "Speed", "Documents"]
    assert re.findall(r"^## (.*)$", README.read_text(), re.M) == headings


def anchors(path: Path) -> set[str]:
    """As GitHub names them."""
    found = re.findall(r"^#+ (.*)$", FENCE.sub("", path.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_links_lead_somewhere(path: Path):
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", path.read_text())):
        if "://" in link:
            continue
        target, _, anchor = link.partition("#")
        place = (path.parent / target) if target else path
        assert place.exists(), link
        assert not anchor or anchor in anchors(place), link


def commands(path: Path) -> list[str]:
    """Every `graftune ...` line: in shell blocks and manifests, in inline code, in the comments of a YAML file."""
    text = path.read_text()
    if path.suffix == ".yaml":
        return [line[1:].strip() for line in text.splitlines() if re.match(r"#\s+graftune \w", line)]
    blocks = [body for kind, body in FENCE.findall(text) if kind in ("sh", "yml")]
    lines = [line for body in blocks for line in body.replace("\\\n", " ").splitlines()]
    inline = re.findall(r"`(graftune [^`]+)`", FENCE.sub("", text))
    return [found for line in (*lines, *inline) if (found := _ours(line)) and "..." not in found]


def _ours(line: str) -> str:
    match = re.search(r"(?:^|[|&;]\s*|\s)(graftune [a-z-].*)", line.split(" #")[0])
    return re.split(r"\s[|>&;]", match[1])[0].strip() if match and not line.lstrip().startswith("#") else ""


CASES = [(path, command) for path in (*PAGES, *COMMENTED) for command in dict.fromkeys(commands(path))]


@pytest.mark.parametrize(
    ("path", "command"), CASES, ids=lambda value: value if isinstance(value, str) else name_of(value)
)
def test_commands_are_understood(path: Path, command: str):
    """Parsed by the real command line, values checked, nothing run."""
    tokens = shlex.split(command)[1:]
    if len(tokens) == 1:  # a command, or a flag of the program, that is only mentioned
        assert tokens[0] in [*app, "--help", "--version"]
    else:
        understood(tokens)


def understood(tokens: list[str]) -> None:
    _, bound, _ = app.parse_args(tokens, exit_on_error=False, print_error=False)
    given(bound.arguments.get("settings"))


def test_there_are_commands_to_check():
    assert len(CASES) > 25
    assert {shlex.split(command)[1] for _, command in CASES} >= {"train", "data", "plan", "chat", "eval", "export"}


def settings_blocks() -> list[tuple[Path, str]]:
    return [(path, body) for path in PAGES for kind, body in FENCE.findall(path.read_text()) if kind == "yaml"]


@pytest.mark.parametrize(
    ("path", "body"), settings_blocks(), ids=lambda value: name_of(value) if isinstance(value, Path) else ""
)
def test_yaml_blocks_are_settings(path: Path, body: str):
    Config.of(yaml.safe_load(body), where=name_of(path))


WORDS = {"auto", "dora", "dpo", "export", "keep", "kto", "oft", "ppo", "pt", "rm", "type"}  # of the text, no settings


def answers() -> list[str]:
    """Code in the right columns of docs/coming-from.md: settings, flags and values of ours."""
    rows = re.findall(r"^\|[^|]*\|([^|]*)\|$", (ROOT / "docs" / "coming-from.md").read_text(), re.M)
    return sorted({span for row in rows for span in re.findall(r"`([^`]+)`", row)})


@pytest.mark.parametrize("span", answers())
def test_what_other_tools_users_are_told_exists(span: str):
    known = {leaf.name: leaf for leaf in leaves()}
    if span.startswith("--"):
        flag, *value = shlex.split(span.replace("FILE", "a.jinja"))
        understood(["train", flag, *(value or ([] if flag == "--rslora" else ["8"]))])
    elif match := re.fullmatch(r"(\w+): (.+)", span):
        assert match[1] in known, "no such setting"
        Config.of({match[1]: yaml.safe_load(match[2])})
    elif re.fullmatch(r"[a-z_0-9]+", span):
        values = {str(v) for leaf in known.values() for v in getattr(leaf.type, "__args__", ())}
        assert span in known or span in values | WORDS | set(TARGET_SHORTHANDS) | {"freeze", "text"}, "no such setting"


def questions() -> list[str]:
    """Plain names in the left columns of docs/coming-from.md: options of other tools."""
    rows = re.findall(r"^\|([^|]*)\|[^|]*\|$", (ROOT / "docs" / "coming-from.md").read_text(), re.M)
    spans = {span.split(":")[0].split(" ")[0] for row in rows for span in re.findall(r"`([^`]+)`", row)}
    return sorted(span for span in spans if re.fullmatch(r"(--)?[a-z][a-z_0-9-]+", span))


@pytest.mark.parametrize("name", questions())
def test_what_other_tools_users_ask_is_answered(name: str):
    """By the command line too: with one of our settings, or with what to do instead."""
    values = {"adamw_8bit", "full", "kto", "orpo"}  # of options that stand before them
    known = {leaf.name for leaf in leaves()} | values | {plain(flag) for flag in ("--save-every",)}
    assert plain(name) in known or answer(name, flags=True), "other_tools.py does not know it"


@pytest.mark.parametrize("path", [README, ROOT / "docs" / "serving.md"], ids=name_of)
def test_every_type_of_gguf_is_named(path: Path):
    assert [kind for kind in TYPES if not re.search(rf"\b{kind}\b", path.read_text())] == []


def test_json_blocks_are_json():
    blocks = [(path, body) for path in PAGES for kind, body in FENCE.findall(path.read_text()) if kind == "json"]
    for path, body in blocks:
        for line in body.splitlines():
            assert json.loads(line), name_of(path)


def test_the_memory_table_is_current():
    """One cell planned again: after a change of what a run takes, run `python tools/fit.py`."""
    name, way = next(iter(fit.MODELS)), ("nf4", "full")
    planned = fit.row(name, [way])[" ".join(way)]
    assert json.loads(fit.PATH.read_text())["rows"][name][" ".join(way)] == pytest.approx(planned, rel=0.01)
