"""Whether tests look at as many cases as they can, or at as many as a quick run allows.

GRAFTUNE_EXAMPLES=1000 looks further. Few cases are enough to notice a mistake; the full numbers are for the figures
that documents and comments quote.
"""

from __future__ import annotations

import os
import random

import pytest
import torch

THOROUGH = int(os.environ.get("GRAFTUNE_EXAMPLES", "25")) >= 1000

# Folders and files whose products of parameters are thinned.
THINNED = (
    *("tests/kernels/", "tests/model/test_attention_options.py", "tests/data/test_long_conversations.py"),
    *("tests/parity/test_moe.py", "tests/parity/test_gguf_dequant.py", "tests/weights/test_gguf_quant.py"),
)
MANY = 9  # cases of one test; fewer are all run
MORE = 0.15  # of the cases that no axis needs, the share that is run all the same


def thinned(items: list[pytest.Item]) -> list[pytest.Item]:
    """Of a test with many combinations of parameters those that are run here: every value of every axis at least once,
    and some more combinations, the same ones every time. All of them with GRAFTUNE_EXAMPLES=1000 and on a GPU."""
    if THOROUGH or torch.cuda.is_available():
        return items
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.nodeid.startswith(THINNED) and hasattr(item, "callspec"):
            groups.setdefault(item.nodeid.partition("[")[0], []).append(item)
    dropped: set[pytest.Item] = set()
    for name, group in groups.items():
        if len(group) < MANY:
            continue
        draw, met = random.Random(name), set()
        for item in draw.sample(group, len(group)):
            values = _values(item)
            if values <= met and draw.random() > MORE:
                dropped.add(item)
            met |= values
    return [item for item in items if item not in dropped]


def _values(item: pytest.Item) -> set[tuple[str, ...]]:
    """A case's value of each axis. Names that one `parametrize` gives values to are one axis together."""
    params: dict[str, object] = item.callspec.params  # type: ignore[attr-defined]
    given = [mark.args[0] for mark in item.iter_markers("parametrize")]
    axes = [names.replace(" ", "").split(",") if isinstance(names, str) else list(names) for names in given]
    axes += [[name] for name in params if not any(name in axis for axis in axes)]
    return {(*axis, *(repr(params[name]) for name in axis)) for axis in axes}
