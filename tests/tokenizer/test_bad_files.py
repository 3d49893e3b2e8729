"""Malformed vocabularies: one sentence that says what and where, never another kind of error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from graftune.errors import GraftuneError
from graftune.tokenizer import Tokenizer, from_folder, from_gguf
from tests.tokenizer.vocabularies import sentencepiece

K = "tokenizer.ggml."
WRONG: list[tuple[str, Any]] = [
    ("model", None),
    ("model", "bert"),
    ("model", "t5"),
    ("model", "rwkv"),
    ("model", 7),
    ("tokens", None),
    ("tokens", []),
    ("tokens", [1, 2]),
    ("tokens", "abc"),
    ("tokens", ["a", "a"]),
    ("tokens", ["a", "\ud800"]),
    ("token_type", [1]),
    ("token_type", ["x"]),
    ("bos_token_id", 10**7),
    ("eos_token_id", -1),
    ("eos_token_id", "2"),
    ("eos_token_id", True),
    ("padding_token_id", 2.0),
    ("eot_token_id", 10**9),
    ("add_bos_token", "yes"),
]


def _refused(metadata: dict[str, Any]) -> str:
    with pytest.raises(GraftuneError) as error:
        from_gguf(metadata)
    assert "\n" not in str(error.value)
    return str(error.value)


BYTE_LEVEL: list[tuple[str, Any]] = [
    ("merges", None),
    ("merges", []),
    ("merges", ["ab"]),
    ("merges", ["h e", "qq zz"]),
    ("merges", [3]),
    ("merges", "h e"),
    ("pre", "from-mars"),
    ("pre", "whitespace"),
    ("pre", ""),
    ("pre", 3),
]
SCORES: list[tuple[str, Any]] = [("scores", None), ("scores", [0.0]), ("scores", ["a"]), ("add_space_prefix", 1)]


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [("gpt2", *one) for one in WRONG + BYTE_LEVEL] + [("llama", *one) for one in WRONG + SCORES],
)
def test_gguf(kind: str, key: str, value: Any, small_metadata: dict[str, Any]) -> None:
    message = _refused((small_metadata if kind == "gpt2" else sentencepiece()) | {K + key: value})
    assert f"{K}{key}" in message
    assert key != "pre" or not isinstance(value, str) or value in message


@pytest.mark.parametrize("shift", [-1, 1])
@pytest.mark.parametrize("key", ["token_type", "scores"])
def test_a_count_that_lies(key: str, shift: int) -> None:
    good = sentencepiece()
    values = good[K + key]
    message = _refused(good | {K + key: values[:-1] if shift < 0 else [*values, values[-1]]})
    assert f"{len(values) + shift} entries for {len(values)} tokens" in message


def test_a_merge_listed_twice_keeps_its_first_rank(small_metadata: dict[str, Any]) -> None:
    good = small_metadata
    texts = [" the and in there", "hello  world"]
    again = from_gguf(good | {K + "merges": [*good[K + "merges"], *good[K + "merges"][:5]]})
    assert [again.encode(text) for text in texts] == [from_gguf(good).encode(text) for text in texts]


def test_gguf_odds_and_ends(small_metadata: dict[str, Any]) -> None:
    byte_level = small_metadata
    _refused({})
    without_bos = {key: value for key, value in byte_level.items() if key != K + "bos_token_id"}
    assert "add_bos_token" in _refused(without_bos | {K + "add_bos_token": True})
    fault = from_gguf(byte_level | {"tokenizer.chat_template": "{% if"}).template_fault
    assert "chat_template, line 1" in str(fault)
    few = {K + "model": "llama", K + "tokens": ["a"], K + "scores": [0.0]}
    assert from_gguf(few).encode("a") != []  # token 0 stands for what is unknown
    tokens = [*byte_level[K + "tokens"], ""]
    types = [*byte_level[K + "token_type"], 1]
    assert from_gguf(byte_level | {K + "tokens": tokens, K + "token_type": types}).encode("a")


FILES: list[tuple[str, str | bytes]] = [
    ("tokenizer.json", "{"),
    ("tokenizer.json", "[]"),
    ("tokenizer.json", '{"version": "1.0", "model": {"type": "Nonsense"}}'),
    ("tokenizer.json", b"\xff\xfe"),
    ("tokenizer_config.json", "{"),
    ("tokenizer_config.json", "[1]"),
    ("tokenizer_config.json", '{"eos_token": 5}'),
    ("tokenizer_config.json", '{"bos_token": "<not there>"}'),
    ("tokenizer_config.json", '{"add_bos_token": "yes"}'),
    ("tokenizer_config.json", '{"added_tokens_decoder": [1]}'),
    ("tokenizer_config.json", '{"added_tokens_decoder": {"0": {"content": "<|im_end|>"}}}'),
    ("tokenizer_config.json", '{"stop_token_ids": [999999]}'),
    ("special_tokens_map.json", "nope"),
    ("tokenizer_config.json", '{"pad_token": {"content": 4}}'),
    ("generation_config.json", '{"eos_token_id": "x"}'),
    ("generation_config.json", '{"eos_token_id": [2, -1]}'),
    ("chat_template.jinja", b"\xc3"),
]


@pytest.mark.parametrize(("name", "content"), FILES)
def test_folder(name: str, content: str | bytes, small: Tokenizer, tmp_path: Path) -> None:
    small.save(tmp_path)
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(GraftuneError) as error:
        from_folder(tmp_path)
    assert name in str(error.value) and "\n" not in str(error.value)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(GraftuneError, match="no such folder"):
        from_folder(tmp_path / "nowhere")
    with pytest.raises(GraftuneError, match=r"no tokenizer\.json"):
        from_folder(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a")
    with pytest.raises(GraftuneError, match=r"only tokenizer\.model.*save_pretrained"):
        from_folder(tmp_path)


TEMPLATES: list[tuple[str, object]] = [
    ("chat_template.jinja", "file"),
    ("chat_template.json", {"chat_template": "json"}),
    ("tokenizer_config.json", {"chat_template": "one"}),
    (
        "tokenizer_config.json",
        {"chat_template": [{"name": "rag", "template": "no"}, {"name": "default", "template": "d"}]},
    ),
    ("tokenizer_config.json", {"chat_template": {"default": "table", "rag": "no"}}),
]


@pytest.mark.parametrize(("name", "content"), TEMPLATES)
def test_where_a_template_may_be(name: str, content: object, small: Tokenizer, tmp_path: Path) -> None:
    small.backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    template = from_folder(tmp_path).template
    assert template is not None and template.render([]) in ("file", "json", "one", "d", "table")


def test_templates_without_a_default(small: Tokenizer, tmp_path: Path) -> None:
    small.backend.save(str(tmp_path / "tokenizer.json"))
    named = [{"name": "rag", "template": "a"}, {"name": "tool_use", "template": "b"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    with pytest.raises(GraftuneError, match="rag, tool_use"):
        from_folder(tmp_path)


def test_what_other_files_add(small: Tokenizer, tmp_path: Path) -> None:
    small.backend.save(str(tmp_path / "tokenizer.json"))
    bare = from_folder(tmp_path)
    assert bare.bos_id is None and bare.eos_id is None and not bare.add_bos and bare.template is None
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|im_end|>"}, "pad_token": "<nope>"}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    added = {str(small.vocab_size): {"content": "<late>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    full = from_folder(tmp_path)
    assert full.eos_id == 2 and full.pad_id is None and full.stop_ids == (0, 2, 5)
    assert full.encode("<late>") == [small.vocab_size]
