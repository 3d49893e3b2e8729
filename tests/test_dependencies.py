"""Everything that is installed with graftune may be used by everybody, and what is asked for directly is explained."""

from __future__ import annotations

import importlib
import re
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))
dependencies = importlib.import_module("dependencies")


def test_licences_allow_everything() -> None:
    found = {package: dependencies.licence(package) for package in dependencies.brought()}
    assert {"torch", "filelock", "markupsafe"} <= set(found), "those that others bring are looked at, too"
    assert {name: words for name, words in found.items() if not dependencies.is_accepted(words)} == {}


@pytest.mark.parametrize("words", ["GPL-3.0-only", "AGPL-3.0", "MIT AND LGPL-2.1", "says nothing", "Proprietary MIT"])
def test_other_licences_are_noticed(words: str) -> None:
    assert not dependencies.is_accepted(words)


def test_every_direct_dependency_is_explained() -> None:
    text = (ROOT / "docs" / "dependencies.md").read_text()
    explained = set(re.findall(r"^\| \[?`([\w.-]+)`", text, re.MULTILINE))
    asked = {Requirement(line) for line in requires("graftune") or []}
    optional = re.compile(r'extra == "(test|page-test|all)"')  # for those who work on graftune, and a sum of others
    named = {one.name for one in asked if not optional.search(str(one.marker or ""))}
    assert named == explained
