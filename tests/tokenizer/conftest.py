from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from graftune.tokenizer import Tokenizer, from_gguf
from graftune.weights.gguf_io import read_gguf
from tests.tokenizer.vocabularies import sentencepiece, small_byte_level


@pytest.fixture(scope="session")
def smollm_metadata(smollm2: Path) -> dict[str, Any]:
    return read_gguf(smollm2).metadata


@pytest.fixture(scope="session")
def smollm(smollm_metadata: dict[str, Any]) -> Tokenizer:
    return from_gguf(smollm_metadata)


@pytest.fixture(scope="session")
def small_metadata(smollm_metadata: dict[str, Any]) -> dict[str, Any]:
    """A byte-level vocabulary of real pieces that is read and written in no time, with SmolLM2's template."""
    template = {"tokenizer.chat_template": smollm_metadata["tokenizer.chat_template"]}
    return small_byte_level(smollm_metadata, merges=1000) | template


@pytest.fixture(scope="session")
def small(small_metadata: dict[str, Any]) -> Tokenizer:
    return from_gguf(small_metadata)


@pytest.fixture(scope="session")
def spm() -> Tokenizer:
    return from_gguf(sentencepiece())
