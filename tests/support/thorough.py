"""Whether tests look at as many cases as they can, or at as many as a quick run allows.

`make test` compares every family with transformers and PEFT and runs the other tests on a few cases each.
`make test-all` (GRAFTUNE_EXAMPLES=1000) and a machine with a GPU run all: every combination of parameters, every family
in every test, and what is marked `thorough`. Few cases are enough to notice a mistake; the full numbers are for the
figures that documents quote. A test that is named on the command line by its whole name is always run.
"""

from __future__ import annotations

import os
import random

import pytest
import torch

from tests.support import tiny

THOROUGH = int(os.environ.get("GRAFTUNE_EXAMPLES", "15")) >= 1000

# Folders and files whose products of parameters are thinned.
THINNED = (
    *("tests/model/test_attention_options.py", "tests/data/test_long_conversations.py"),
    *("tests/parity/test_moe.py", "tests/parity/test_gguf_dequant.py", "tests/weights/test_gguf_quant.py"),
)
MANY = 6  # cases of one test; fewer are all run
MOST = 4  # of a test of kernels, which runs through an interpreter here, and with all its cases on a GPU
# Families whose layers, names and files differ most from one another: they stand for all others wherever a test goes
# over families, other than in the one file that compares each of them with transformers and PEFT.
KINDS = {
    *("llama", "llama-untied", "qwen2", "gemma3", "phi3-far", "phi3-long", "granite"),
    *("lfm2", "qwen3_5", "muse_glimmer", "gemma4"),
}
DRAWN = 3  # of these, each test draws so many, and another test others
EVERY_FAMILY = "tests/parity/test_transformers.py"


def thinned(items: list[pytest.Item], named: bool) -> list[pytest.Item]:
    """The tests and cases that are run here, always the same ones. `named`: the command line names single tests."""
    if THOROUGH or named or torch.cuda.is_available():
        return items
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        groups.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = {item for name, group in groups.items() for item in _some(name, group)}
    return [item for item in items if item in kept]


def _some(name: str, group: list[pytest.Item]) -> list[pytest.Item]:
    """Of one test's cases those that are run."""
    if group[0].get_closest_marker("thorough"):
        return []
    few = group[0].get_closest_marker("few")
    if few and few.args[0] < len(group):
        return random.Random(name).sample(group, few.args[0])
    if len(group) < MANY:
        return group
    if not name.startswith(EVERY_FAMILY):
        group = _some_kinds(name, [item for item in group if not _stood_for(item)] or group)
    if name.startswith("tests/kernels/"):
        return random.Random(name).sample(group, min(MOST, len(group)))
    return _each_value(name, group) if name.startswith(THINNED) else group


def _stood_for(item: pytest.Item) -> bool:
    """Whether another family's case stands for this one."""
    named = _families(item)
    return bool(named) and not named & KINDS


def _some_kinds(name: str, group: list[pytest.Item]) -> list[pytest.Item]:
    """The cases of a few families, and those that name none."""
    named = sorted({family for item in group for family in _families(item)})
    drawn = set(random.Random(name).sample(named, min(DRAWN, len(named))))
    return [item for item in group if _families(item) <= drawn]


def _families(item: pytest.Item) -> set[str]:
    """The families and variants that a case's parameters name."""
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return {value for value in values if isinstance(value, str) and value.partition("-")[0] in tiny.FAMILIES}


def _each_value(name: str, group: list[pytest.Item]) -> list[pytest.Item]:
    """Every value of every axis at least once."""
    draw, met, kept = random.Random(name), set[tuple[str, ...]](), []
    for item in draw.sample(group, len(group)):
        values = _values(item)
        if not values <= met:
            kept.append(item)
        met |= values
    return kept


def _values(item: pytest.Item) -> set[tuple[str, ...]]:
    """A case's value of each axis. Names that one `parametrize` gives values to are one axis together."""
    params: dict[str, object] = item.callspec.params  # type: ignore[attr-defined]
    given = [mark.args[0] for mark in item.iter_markers("parametrize")]
    axes = [names.replace(" ", "").split(",") if isinstance(names, str) else list(names) for names in given]
    axes += [[name] for name in params if not any(name in axis for axis in axes)]
    return {(*axis, *(repr(params[name]) for name in axis)) for axis in axes}
