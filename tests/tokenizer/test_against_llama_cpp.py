"""Ids equal to llama.cpp's: the default base, every pre-tokenizer rule, and SentencePiece-style scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from graftune.tokenizer import Tokenizer, from_gguf
from graftune.tokenizer.pretokenize import RULES
from tests.tokenizer.llama_cpp import LlamaCpp, write_model
from tests.tokenizer.texts import random_texts
from tests.tokenizer.vocabularies import sentencepiece, small_byte_level

MARKS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<mark>", "<end_of_turn>")
# One name a rule: the others are aliases of it.
ONE_NAME_A_RULE = list({rule: name for name, rule in reversed(RULES.items())}.values())


def _agree(ours: Tokenizer, judge: LlamaCpp, texts: list[str], *, special: bool) -> None:
    wrong = [text for text in texts if ours.encode(text, special=special) != judge.encode(text, special=special)]
    assert not wrong, f"{len(wrong)} of {len(texts)} differ, e.g. {wrong[0]!a}"


@pytest.mark.parametrize("special", [True, False])
def test_default_base(smollm: Tokenizer, smollm_path: Path, special: bool) -> None:
    judge = LlamaCpp(smollm_path)
    _agree(smollm, judge, random_texts(1000, seed=11 + special, extra=(*MARKS, "\x1d", "\x00")), special=special)


def test_default_base_chat(smollm: Tokenizer, smollm_path: Path) -> None:
    judge = LlamaCpp(smollm_path)
    assert smollm.template is not None
    text = smollm.template.render([{"role": "user", "content": "What is the capital of France?"}])
    ids = smollm.encode(text)
    assert ids == judge.encode(text)
    assert ids[0] == smollm.bos_id and smollm.eos_id in ids
    plain = smollm.encode(text, special=False)
    assert plain == judge.encode(text, special=False) and not {1, 2} & set(plain)


@pytest.mark.parametrize("name", ONE_NAME_A_RULE)
def test_pre_tokenizers(name: str, smollm_metadata: dict[str, Any], tmp_path: Path) -> None:
    metadata = small_byte_level(smollm_metadata) | {"tokenizer.ggml.pre": name}
    judge = LlamaCpp(write_model(tmp_path / "model.gguf", metadata))
    ours = from_gguf(metadata)
    _agree(ours, judge, random_texts(200, seed=3, extra=MARKS), special=True)
    assert ours.encode("Hi", add_special=True) == judge.encode("Hi", add_special=True)


@pytest.mark.parametrize("prefix", [True, False])
def test_scores(prefix: bool, tmp_path: Path) -> None:
    metadata = sentencepiece(prefix=prefix)
    judge = LlamaCpp(write_model(tmp_path / "model.gguf", metadata))
    ours = from_gguf(metadata)
    words = ("the quick ", "remembers", " there", "dog,", "naïve", "한국")
    for special in (True, False):
        _agree(ours, judge, random_texts(300, seed=5, extra=MARKS + words), special=special)
    assert ours.encode("the fox", add_special=True) == judge.encode("the fox", add_special=True)
    assert ours.encode("", add_special=True) == judge.encode("", add_special=True)
