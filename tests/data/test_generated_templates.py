"""Masks over chat templates made up at random, each with some forty conversations, judged without the package.

The text before an answer must be the prompt that transformers renders, what is trained must be what the template's
description says (generated.py), a text that differs from the rendering must come with a note, and only what cannot be
known may be refused. `make test-templates` runs 10,000 templates; `tests/fuzz/public_templates.py` runs real ones.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable

import pytest

from tests.data.generated import Spec, conversations
from tests.data.template_judge import encoder_of, judge

FIRST, _, LAST = os.environ.get("GRAFTUNE_TEMPLATE_CASES", "32").rpartition(":")
SEEDS = range(int(FIRST or 0), int(LAST))  # of templates: "10000" of all below it, "5000:10000" of those from 5000 on
REFUSED = {8801}  # of the first 10,000, without need: it opens a block behind a misspelt header
PARTS = 4 if len(SEEDS) < 1000 else 200  # so that workers share them


@pytest.mark.few(2 if PARTS == 4 else PARTS)  # a number that was asked for is run in full
@pytest.mark.parametrize("part", range(PARTS))
def test_generated_templates(part: int, record_property: Callable[[str, str], None]) -> None:
    counts, needless = Counter[str](), dict[int, str]()
    for seed in SEEDS[part::PARTS]:
        draw = random.Random(seed)
        spec = Spec.random(draw)
        encoder = encoder_of(spec)
        for name, messages, tools in conversations(draw, spec.tag):
            verdict = judge(spec, encoder, name, messages, tools)
            where = f"template {seed}, {name}: {verdict}\n{spec}"
            assert verdict.kind in ("right", "noted", "refused", "needless"), where
            counts[verdict.kind] += 1
            if verdict.kind == "needless":
                needless.setdefault(seed, where)
    assert needless.keys() <= REFUSED, "\n".join(needless.values())
    if PARTS > 4:
        record_property("said", f"templates {part:3}: {dict(counts)}")
