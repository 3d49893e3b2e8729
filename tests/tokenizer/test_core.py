"""What a Tokenizer promises, whatever file it came from: round trips, offsets, new tokens, saving."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from graftune.errors import GraftuneError
from graftune.tokenizer import Tokenizer, from_folder, from_gguf
from tests.support.counting import Calls
from tests.tokenizer.texts import random_texts
from tests.tokenizer.vocabularies import sentencepiece, small_byte_level

TEXT = st.text(st.characters(exclude_categories=["Cs", "Cn", "Co"]), max_size=60)
MIXED = st.lists(
    st.one_of(TEXT, st.sampled_from(["<|im_start|>", "<|im_end|>", "</s>", "<mark>", "  ", "\n\n", "👩‍💻", "é"])),
    max_size=8,
).map("".join)
CHAT = [{"role": "user", "content": "Hi <b> é"}, {"role": "assistant", "content": "Hello"}]
ANY = pytest.mark.parametrize("source", ["byte-level", "sentencepiece", "sentencepiece without prefix", "folder"])
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="session")
def made(small: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("trimming")
    small.save(folder)
    # The kind of post-processor that cuts blanks off the offsets, and one that adds tokens.
    data = json.loads((folder / "tokenizer.json").read_text())
    data["post_processor"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    data["normalizer"] = {"type": "NFC"}
    data["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(data))
    return {
        "byte-level": small,
        "sentencepiece": from_gguf(sentencepiece()),
        "sentencepiece without prefix": from_gguf(sentencepiece(prefix=False)),
        "folder": from_folder(folder),
    }


@QUICK
@given(text=TEXT)
def test_round_trip_byte_level(smollm: Tokenizer, text: str) -> None:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    known = all(smollm.backend.token_to_id(b) is not None for w, _ in byte_level.pre_tokenize_str(text) for b in w)
    assume(known)  # SmolLM2 lacks a few control codes, which any tokenizer drops
    assert smollm.decode(smollm.encode(text, special=False)) == text


@QUICK
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁<"), max_size=60))
def test_round_trip_scores(spm: Tokenizer, text: str) -> None:
    assume("  " not in text)  # a token of its own there, with a prefix blank after it
    assert spm.decode(spm.encode(text, special=False)) == text


@pytest.mark.few(2)
@ANY
@QUICK
@given(text=MIXED)
def test_offsets_cover_the_text_in_order(made: dict[str, Tokenizer], source: str, text: str) -> None:
    tokenizer = made[source]
    ids, offsets = tokenizer.encode_with_offsets(text)
    assert ids == tokenizer.encode(text) and len(ids) == len(offsets)
    reached = 0
    for start, end in offsets:
        assert start <= reached <= end, "a gap, or a step back"
        reached = end
    assert reached == len(text) or not ids
    if ids:
        assert offsets[0][0] == 0


@pytest.mark.few(2)
@ANY
@QUICK
@given(texts=st.lists(st.one_of(MIXED, st.text("ab <>|_/sé\n", max_size=30)), max_size=5), data=st.data())
def test_a_batch_is_its_texts_one_by_one(
    made: dict[str, Tokenizer], source: str, texts: list[str], data: st.DataObject
) -> None:
    tokenizer = made[source]
    for text, (ids, offsets) in zip(texts, tokenizer.encode_batch(texts), strict=True):
        alone, pairs = tokenizer.encode_with_offsets(text)
        place = data.draw(st.integers(0, len(text)))
        border = offsets.border(place)
        if border is not None:  # the answer without the list is the list's own
            assert border == sum(end <= place for _, end in pairs) == sum(start < place for start, _ in pairs)
        assert ids == alone and list(offsets) == pairs and len(offsets) == len(ids)
        assert offsets[1:] == pairs[1:], "a place or a slice is the list's"


def test_offsets_of_split_characters_and_special_tokens(smollm: Tokenizer) -> None:
    text = "<|im_start|>a 𓀀!"
    ids, offsets = smollm.encode_with_offsets(text)
    assert text[slice(*offsets[0])] == "<|im_start|>" and ids[0] == 1
    parts = [span for span in offsets if span[1] > 14 and span[0] < 15]
    assert len(parts) > 1, "the hieroglyph is several byte tokens"
    assert all(text[start:end] in ("𓀀", " 𓀀") for start, end in parts)


def test_offsets_keep_blanks_when_a_post_processor_trims(made: dict[str, Tokenizer]) -> None:
    _, offsets = made["folder"].encode_with_offsets("one two  three four five six")
    assert offsets[1] == (3, 7) and offsets[-1][1] == 28, "blank kept, nothing truncated"


def test_special_tokens_only_on_request(smollm: Tokenizer, spm: Tokenizer) -> None:
    assert smollm.encode("<|im_end|>") == [2]
    assert 2 not in smollm.encode("<|im_end|>", special=False)
    assert smollm.encode("<|im_end|>") == [2], "asking for plain text changes nothing for others"
    # <mark> is user-defined: always one token.
    assert spm.encode("<mark>", special=False) == spm.encode("<mark>")
    assert spm.encode("<end_of_turn>") != spm.encode("<end_of_turn>", special=False)


@ANY
def test_new_tokens(made: dict[str, Tokenizer], source: str) -> None:
    old = made[source]
    new = old.with_tokens(["<tool>", "<|done|>"])
    assert new.vocab_size == old.vocab_size + 2
    assert new.encode("a<tool>b<|done|>")[-1] == old.vocab_size + 1
    assert new.encode("plain text") == old.encode("plain text")
    assert new.decode(new.encode("<tool>"), skip_special=True).strip() == ""
    assert old.backend.token_to_id("<tool>") is None


@pytest.mark.parametrize("bad", [["<|im_end|>"], ["hello", ""], [" "], ["<x>", "<x>"], ["\ud800"], ["the"]])
def test_bad_new_tokens(small: Tokenizer, bad: list[str]) -> None:
    with pytest.raises(GraftuneError):
        small.with_tokens(bad)


def test_bad_arguments(smollm: Tokenizer) -> None:
    for call in (
        lambda: smollm.encode("a\ud800"),
        lambda: smollm.encode_with_offsets("\udfff"),
        lambda: smollm.encode(3),  # type: ignore[arg-type]
        lambda: smollm.token(-1),
        lambda: smollm.token(49152),
        lambda: smollm.decode([-1]),
    ):
        with pytest.raises(GraftuneError):
            call()
    assert smollm.decode([10**6]) == ""


def test_a_new_token_may_end_turns_and_a_file_is_no_folder(small: Tokenizer, tmp_path: Path) -> None:
    assert small.with_tokens(["<|eot_id|>"]).stop_ids == (0, 2, small.vocab_size)
    (tmp_path / "file").write_text("")
    with pytest.raises(GraftuneError, match="cannot be saved"):
        small.save(tmp_path / "file")


def _facts(one: Tokenizer) -> tuple[Any, ...]:
    template = None if one.template is None else (one.template.source, one.template.bos_token, one.template.eos_token)
    return (one.bos_id, one.eos_id, one.pad_id, one.add_bos, one.add_eos, one.stop_ids, one.vocab_size, template)


@ANY
def test_saved_is_restored_and_agrees_with_transformers(
    made: dict[str, Tokenizer], source: str, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = made[source].with_tokens(["<tool>"])
    paths = tokenizer.save(tmp_path)
    assert [path.name for path in paths] == ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
    again, theirs = from_folder(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert _facts(again) == _facts(tokenizer)
    assert again.backend.to_str() == tokenizer.backend.to_str()
    assert (theirs.bos_token, theirs.eos_token, len(theirs)) == (
        tokenizer.bos_token,
        tokenizer.eos_token,
        tokenizer.vocab_size,
    )
    for text in [*random_texts(60, seed=9, extra=("<tool>", "<|im_end|>", "</s>")), ""]:
        ids = tokenizer.encode(text, add_special=True)
        assert again.encode(text, add_special=True) == ids
        assert theirs(text)["input_ids"] == ids
        assert theirs.decode(ids) == tokenizer.decode(ids)
    assert tokenizer.template is not None
    for prompt in (True, False):
        text = tokenizer.template.render(CHAT, add_generation_prompt=prompt)
        assert theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=prompt) == text
        assert again.template is not None and again.template.render(CHAT, add_generation_prompt=prompt) == text


def test_gaps_in_the_vocabulary_are_not_filled_by_new_tokens() -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 2}, []))
    with pytest.raises(GraftuneError, match="gaps"):
        Tokenizer(backend).with_tokens(["<x>"])


def test_end_of_turn_ids_of_a_gguf_survive_saving(smollm_metadata: dict[str, Any], tmp_path: Path) -> None:
    metadata = small_byte_level(smollm_metadata)
    metadata |= {"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.add_eos_token": True}
    tokenizer = from_gguf(metadata)
    tokenizer.save(tmp_path)
    assert 5 in tokenizer.stop_ids and _facts(from_folder(tmp_path)) == _facts(tokenizer)
    assert tokenizer.template is None and tokenizer.encode("a", add_special=True)[-1] == tokenizer.eos_id


@ANY
def test_a_long_text_takes_calls_in_proportion(source: str, made: dict[str, Tokenizer]) -> None:
    line = "The quick brown fox (aged 12) doesn't jump over 3 lazy dogs; naïve, isn't it? 日本語も少し。\n"
    text = line * (60_000 // len(line.encode()))
    with Calls(most=len(text)):
        ids = made[source].encode(text)
    assert made[source].decode(ids) == text
