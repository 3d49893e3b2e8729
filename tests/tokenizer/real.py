"""The real tokenizers of five models, for those who have them: their licences forbid shipping them here."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from graftune.tokenizer import Tokenizer, from_folder, from_gguf
from tests.tokenizer.converted import metadata

FOLDER = Path(os.environ.get("GRAFTUNE_REAL_TOKENIZERS", ""))
needed = pytest.mark.skipif(
    "GRAFTUNE_REAL_TOKENIZERS" not in os.environ,
    reason="set GRAFTUNE_REAL_TOKENIZERS to a folder with qwen2_5, qwen3, llama3_2, gemma3 and gpt2, each holding the "
    "model's tokenizer.json and tokenizer_config.json, to run this",
)
# The name that llama.cpp's converter gives each pre-tokenizer; None where the vocabulary has scores instead.
PRE = {"qwen2_5": "qwen2", "qwen3": "qwen2", "llama3_2": "llama-bpe", "gpt2": "gpt-2", "gemma3": None}


def two_roads(name: str) -> tuple[Tokenizer, Tokenizer]:
    """The tokenizer from its tokenizer.json, and from the GGUF metadata that says the same."""
    return from_folder(FOLDER / name), from_gguf(metadata(FOLDER / name, pre=PRE[name]))
