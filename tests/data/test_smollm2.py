"""The default base's own tokenizer and template over the bundled data: what the first run of every user trains on."""

from __future__ import annotations

from pathlib import Path

import pytest

from graftune.data.dataset import prepare, split
from graftune.data.sample import sample_for, score_all
from graftune.settings.sections import DataConfig
from graftune.tokenizer import Tokenizer, from_gguf
from graftune.weights.gguf_io import read_gguf


@pytest.fixture(scope="module")
def smol(smollm2: Path) -> Tokenizer:
    return from_gguf(read_gguf(smollm2).metadata)


def test_the_sample_is_short_and_masked_right(smol: Tokenizer) -> None:
    data = prepare(str(sample_for("answers")), smol, DataConfig(strict=True))
    summary = data.summary
    assert summary.examples == 600 and summary.notes == {}
    assert summary.tokens / 600 < 60 and 16 < summary.response_tokens / 600 < 24
    for example, prompt, reference in zip(data.examples, data.prompts, data.references, strict=True):
        size = sum(example.supervised)
        assert not any(example.supervised[:-size]) and smol.encode(prompt) == example.tokens[:-size]
        answer = smol.decode(example.tokens[-size:])
        assert answer == reference + "<|im_end|>"
        assert prompt.startswith("<|im_start|>system\nTo JSON.<|im_end|>\n<|im_start|>user\n")
        assert prompt.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert score_all(zip(data.references, data.references, strict=True))["exact"] == 1
    train, val = split(data, 0.2, 42)
    assert (len(train), len(val)) == (480, 120) and not set(train.prompts) & set(val.prompts)
