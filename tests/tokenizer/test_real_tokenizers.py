"""The real tokenizers of five models, two ways each: their tokenizer.json, and the GGUF metadata made from it.

Not shipped: the vocabularies carry their models' licences. The folder road has to equal the `tokenizers` library on the
file itself; the GGUF road has to equal llama.cpp, and tokenizer.json wherever llama.cpp does. Where it does not is
known: it never normalises to NFC (Qwen's tokenizer.json does), and it takes an ordinary `</s>` for a control token.
"""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import NamedTuple

import pytest
import tokenizers

from graftune.tokenizer import Tokenizer
from tests.support.counting import Calls
from tests.tokenizer import real
from tests.tokenizer.converted import metadata
from tests.tokenizer.llama_cpp import LlamaCpp, write_model
from tests.tokenizer.texts import random_texts

MARKS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "<unk>")
PIECES = (
    "  " * 20,
    "\t\t\t",
    "\n" * 40,
    "they'll I'VE we'd",
    "3.14159",
    "🏳️\u200d🌈🇨🇭",
    "漢字かな交じり文",
    "naïve café",
)

pytestmark = real.needed


class Model(NamedTuple):
    folder: Tokenizer
    gguf: Tokenizer
    file: tokenizers.Tokenizer
    texts: list[str]
    name: str


@pytest.fixture(scope="module", params=real.PRE)
def model(request: pytest.FixtureRequest) -> Model:
    file = tokenizers.Tokenizer.from_file(str(real.FOLDER / request.param / "tokenizer.json"))
    extra = tuple(token.content for token in list(file.get_added_tokens_decoder().values())[:40])
    texts = random_texts(5000, seed=2025, extra=(*extra, *MARKS, *PIECES))
    return Model(*real.two_roads(request.param), file, texts, request.param)


def _ids(model: Model, text: str) -> list[int]:
    return model.file.encode(text, add_special_tokens=False).ids


def test_folder_equals_tokenizer_json(model: Model) -> None:
    for text in model.texts:
        ids = _ids(model, text)
        assert model.folder.encode(text) == ids
        assert model.folder.encode_with_offsets(text)[0] == ids
        assert model.folder.decode(ids) == model.file.decode(ids, skip_special_tokens=False)
        assert model.folder.decode(ids, skip_special=True) == model.file.decode(ids)
        whole = model.file.encode(text).ids
        assert model.folder.encode(text, add_special=True) == whole


def test_gguf_equals_llama_cpp_and_tokenizer_json(model: Model, tmp_path: Path) -> None:
    made = metadata(real.FOLDER / model.name, pre=real.PRE[model.name])
    judge = LlamaCpp(write_model(tmp_path / "model.gguf", made))
    departures = 0
    for text in model.texts:
        ids, expected = model.gguf.encode(text), _ids(model, text)
        assert ids == judge.encode(text), ascii(text)
        assert model.gguf.decode(expected) == model.file.decode(expected, skip_special_tokens=False)
        if ids != expected:
            departures += 1
            assert _known_departure(model.name, text), ascii(text)
    for text in model.texts[::10]:
        assert model.gguf.encode(text, special=False) == judge.encode(text, special=False), ascii(text)
        assert model.gguf.encode(text, add_special=True) == judge.encode(text, add_special=True), ascii(text)
    print(f"{model.name}: {departures} of {len(model.texts)} differ from tokenizer.json, as llama.cpp does")


def _known_departure(name: str, text: str) -> bool:
    if name.startswith("qwen"):
        return "</s>" in text or not unicodedata.is_normalized("NFC", text)
    return name == "gemma3" and "\u2581" in text  # typed: GGUF has the runs of blanks as text, tokenizer.json as tokens


def test_facts_agree(model: Model) -> None:
    names = ("bos_id", "eos_id", "pad_id", "vocab_size")
    assert [getattr(model.gguf, name) for name in names] == [getattr(model.folder, name) for name in names]
    assert model.gguf.add_bos == model.folder.add_bos and model.gguf.add_eos == model.folder.add_eos
    assert set(model.folder.stop_ids) <= set(model.gguf.stop_ids)
    template = model.folder.template
    assert (template is None) == (model.name == "gpt2")
    if template is not None:
        assert model.gguf.template is not None and model.gguf.template.source == template.source


def test_a_long_text_takes_calls_in_proportion(model: Model) -> None:
    line = "The quick brown fox (aged 12) doesn't jump over 3 lazy dogs; naïve, isn't it? 日本語も少し。\n"
    text = line * (300_000 // len(line.encode()))
    for road in (model.folder, model.gguf):
        with Calls(most=len(text)):
            ids = road.encode(text)
        assert road.decode(ids) == text
