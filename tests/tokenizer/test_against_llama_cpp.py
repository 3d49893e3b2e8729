"""Ids equal to llama.cpp's: the default base, every pre-tokenizer rule, and SentencePiece-style scores."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest

from graftune.tokenizer import Tokenizer, from_gguf
from graftune.tokenizer.pretokenize import RAW_RULES, RULES
from tests.support.thorough import THOROUGH
from tests.tokenizer.llama_cpp import LlamaCpp, write_model
from tests.tokenizer.texts import random_texts
from tests.tokenizer.vocabularies import boundaries, sentencepiece, visible_blanks

MARKS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<mark>", "<end_of_turn>")
NUMBERS = ("12345", "1234567", "x1234", "77b", "123_", "IMGIMGABZ", "<sentinel:12>", "\u200c", "\f")
# Any two rules that ever cut a text differently cut one of these differently: so found among 1,500 random ones.
TELLING = (
    "a\u4e2d\u6587\n\nx1234e\u0301\u200c\u4e2d\u6587<'re\u0939\u093f\u0928\u094d\u0926\u0940don't're<end_of_turn>",
    "\u2028's8423463509\u2028\r\n \n    IMGIMGABZ\n\n77014   hello97672//\n",
    "#\r\n//\n'LL<0x0A> I'Ve<<end_of_turn>\u017f's\u3002\uff0c",
    "_x...123_\n<sentinel:12>\xa0...</s>\u2028  ",
    "{1\u3000\n\n55333673657741928080  30061\n52211>\r\nLhello\u3000Y",
    "</s>\u3000don't'LL'LLdon'ta  'LL",
    "   2<|endoftext|>\x0c59413\u3000;\r\nF45969>19049_x<|endoftext|>  <mark>",
)
CORRECTED = (
    *("<|eot_id|>", "<|eom_id|>", "[EOS]", "<eos>", "<turn|>", "[e~[", "<|ifm|im_end|>", "<end_of_utterance>"),
    *("<|fim_prefix|>", "<fim-suffix>", "<MID>", "<|fim_pad|>", "<|file_sep|>"),
    *("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>", "<|end|>"),
)


def _agree(ours: Tokenizer, judge: LlamaCpp, texts: list[str], *, special: bool) -> None:
    wrong = [text for text in texts if ours.encode(text, special=special) != judge.encode(text, special=special)]
    assert not wrong, f"{len(wrong)} of {len(texts)} differ, e.g. {wrong[0]!a}"


@pytest.fixture(scope="module")
def judge(smollm2: Path) -> LlamaCpp:
    return LlamaCpp(smollm2)


@pytest.mark.few(1)
@pytest.mark.parametrize("special", [True, False])
def test_default_base(smollm: Tokenizer, judge: LlamaCpp, special: bool) -> None:
    texts = random_texts(1000 if THOROUGH else 120, seed=11 + special, extra=(*MARKS, "\x1d", "\x00"))
    _agree(smollm, judge, texts, special=special)


def test_default_base_chat(smollm: Tokenizer, judge: LlamaCpp) -> None:
    assert smollm.template is not None
    text = smollm.template.render([{"role": "user", "content": "What is the capital of France?"}])
    ids = smollm.encode(text)
    assert ids == judge.encode(text)
    assert ids[0] == smollm.bos_id and smollm.eos_id in ids
    plain = smollm.encode(text, special=False)
    assert plain == judge.encode(text, special=False) and not {1, 2} & set(plain)


@pytest.fixture(scope="module")
def by_rule(
    smollm_metadata: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Tokenizer, LlamaCpp]]:
    """Ours and llama.cpp's over one vocabulary with the rule of that name. The file is written once, and the name in it
    replaced; a text behind the name keeps the length of both together."""
    length, metadata = 40, boundaries(smollm_metadata)
    longest = {"tokenizer.ggml.pre": "p" * length, "tokenizer.filler": "f"}
    path = write_model(tmp_path_factory.mktemp("rules") / "model.gguf", longest | metadata)
    written = path.read_bytes()

    def fields(pre: str) -> bytes:
        values = {"tokenizer.ggml.pre": pre, "tokenizer.filler": "f" * (length + 1 - len(pre))}
        texts = [(key.encode(), value.encode()) for key, value in values.items()]
        return b"".join(
            struct.pack("<Q", len(key)) + key + struct.pack("<IQ", gguf.GGUFValueType.STRING, len(value)) + value
            for key, value in texts
        )

    assert written.count(fields("p" * length)) == 1

    def get(name: str) -> tuple[Tokenizer, LlamaCpp]:
        path.write_bytes(written.replace(fields("p" * length), fields(name)))
        return from_gguf(metadata | {"tokenizer.ggml.pre": name}), LlamaCpp(path)

    return get


@pytest.fixture(scope="module")
def rule_texts() -> list[str]:
    """One by itself, all others with a control token between them: text is cut there first."""
    texts = random_texts(144 if THOROUGH else 48, seed=3, extra=MARKS + NUMBERS)
    return [*(TELLING if THOROUGH else TELLING[:1]), MARKS[0].join([*TELLING, *texts])]


@pytest.mark.few(9)
@pytest.mark.parametrize("name", RULES)
def test_pre_tokenizers(name: str, by_rule: Callable[[str], tuple[Tokenizer, LlamaCpp]], rule_texts: list[str]) -> None:
    ours, judge = by_rule(name)
    _agree(ours, judge, rule_texts, special=True)
    assert ours.encode("Hi", add_special=True) == judge.encode("Hi", add_special=True)


@pytest.mark.parametrize("name", RAW_RULES)
def test_merges_of_text_with_visible_blanks(name: str, tmp_path: Path) -> None:
    metadata = visible_blanks(name)
    judge = LlamaCpp(write_model(tmp_path / "model.gguf", metadata))
    ours = from_gguf(metadata)
    texts = random_texts(
        400 if THOROUGH else 150,
        seed=4,
        extra=("<mark>", "the quick ", "\n\n", "\n" * 7, " " * 9, "remembers", "\nthe"),
    )
    # A typed U+2581 beside a blank: llama.cpp joins the two into a text that is no token, and falls back to bytes.
    _agree(ours, judge, [text for text in texts if "\u2581" not in text], special=True)
    assert ours.encode("Hi", add_special=True) == judge.encode("Hi", add_special=True)
    assert ours.decode(ours.encode("the dog\n\n and  한 \u05d0")) == "the dog\n\n and  한 \u05d0"


def test_tokens_whose_kind_llama_cpp_corrects(smollm_metadata: dict[str, Any], tmp_path: Path) -> None:
    """Turn ends and fill-in-the-middle tokens are control tokens, Harmony's are not, whatever the file says."""
    for names in (CORRECTED, ("<|end|>", "<|call|>", "<|return|>", "<|fim_prefix|>"), ("</s>", "<|tool_response>")):
        metadata = boundaries(smollm_metadata) | {"tokenizer.ggml.pre": "gpt-2"}
        for kind in (1, 3, 4):
            tokens = [*metadata["tokenizer.ggml.tokens"], *names, "<plain>"]
            types = [*metadata["tokenizer.ggml.token_type"], *[kind] * (len(names) + 1)]
            full = metadata | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
            if kind == 4:
                full["tokenizer.ggml.fim_pre_token_id"] = tokens.index("<plain>")
            judge = LlamaCpp(write_model(tmp_path / "model.gguf", full))
            for special in (True, False):
                _agree(from_gguf(full), judge, [f"a {name} b" for name in (*names, "<plain>")], special=special)


@pytest.mark.parametrize("prefix", [True, False])
def test_scores(prefix: bool, tmp_path: Path) -> None:
    metadata = sentencepiece(prefix=prefix)
    judge = LlamaCpp(write_model(tmp_path / "model.gguf", metadata))
    ours = from_gguf(metadata)
    words = ("the quick ", "remembers", " there", "dog,", "naïve", "한국")
    for special in (True, False):
        texts = random_texts(300 if THOROUGH else 120, seed=5, extra=MARKS + words)
        _agree(ours, judge, texts, special=special)
    assert ours.encode("the fox", add_special=True) == judge.encode("the fox", add_special=True)
    assert ours.encode("", add_special=True) == judge.encode("", add_special=True)
