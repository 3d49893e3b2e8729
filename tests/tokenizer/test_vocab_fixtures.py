"""llama.cpp's own tokenizer cases. Not shipped: the vocabularies carry their models' licences."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from graftune.tokenizer import from_gguf
from graftune.weights.gguf_io import read_gguf
from tests.tokenizer.llama_cpp import LlamaCpp, write_model

FOLDER = os.environ.get("GRAFTUNE_VOCAB_FIXTURES")
HOW = (
    "set GRAFTUNE_VOCAB_FIXTURES to a folder with llama.cpp's models/ggml-vocab-NAME.gguf, .gguf.inp and .gguf.out "
    "(phi-3, gpt-2, starcoder, llama-spm) to run this"
)


@pytest.mark.skipif(FOLDER is None, reason=HOW)
@pytest.mark.parametrize("name", ["phi-3", "gpt-2", "starcoder", "llama-spm"])
def test_every_case(name: str) -> None:
    path = Path(FOLDER or "") / f"ggml-vocab-{name}.gguf"
    tokenizer = from_gguf(read_gguf(path).metadata)
    with open(f"{path}.inp", encoding="utf-8", newline="") as file:
        texts = file.read().split("\n__ggml_vocab_test__\n")
    with open(f"{path}.out", encoding="utf-8") as file:
        expected = [[int(id) for id in line.split()] for line in file.read().split("\n")]
    assert len(texts) == len(expected) == 47
    # The cases were made without BOS and with special tokens left as text.
    wrong = [text for text, ids in zip(texts, expected, strict=True) if tokenizer.encode(text, special=False) != ids]
    assert not wrong, f"{len(wrong)} of {len(texts)} differ, e.g. {wrong[0]!a}"


@pytest.mark.skipif(FOLDER is None, reason=HOW)
def test_runs_of_blanks_whose_tokens_score_alike(tmp_path: Path) -> None:
    metadata = read_gguf(Path(FOLDER or "") / "ggml-vocab-llama-spm.gguf").metadata
    judge, ours = LlamaCpp(write_model(tmp_path / "model.gguf", metadata)), from_gguf(metadata)
    for count in range(70):
        for text in (" " * count, f"a{' ' * count}b", f"\n{' ' * count}if"):
            assert ours.encode(text) == judge.encode(text)
