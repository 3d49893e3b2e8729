"""Masks over chat templates made up at random, each with some forty conversations, judged without the package.

The text before an answer must be the prompt that transformers renders, what is trained must be what the template's
description says (generated.py), a text that differs from the rendering must come with a note, and only what cannot be
known may be refused. `make test-templates` runs 10,000 templates; `tests/fuzz/public_templates.py` runs real ones.
"""

from __future__ import annotations

import os
import random

import pytest

from tests.data.generated import Spec, conversations
from tests.data.template_judge import encoder_of, judge

TEMPLATES = int(os.environ.get("GRAFTUNE_TEMPLATE_CASES", "32"))
PARTS = 4 if TEMPLATES < 1000 else 200  # so that workers share them


@pytest.mark.few(2)
@pytest.mark.parametrize("part", range(PARTS))
def test_generated_templates(part: int) -> None:
    for seed in range(part, TEMPLATES, PARTS):
        draw = random.Random(seed)
        spec = Spec.random(draw)
        encoder = encoder_of(spec)
        for name, messages, tools in conversations(draw, spec.tag):
            verdict = judge(spec, encoder, name, messages, tools)
            assert verdict.kind in ("right", "noted", "refused"), f"template {seed}, {name}: {verdict}\n{spec}"
