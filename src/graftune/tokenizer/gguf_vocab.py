"""A tokenizer from the vocabulary inside a GGUF file, equal to llama.cpp's.

Purpose: the base a user serves is often a .gguf with no tokenizer.json beside it. Method: byte-level vocabularies
("gpt2") carry their merges and name their pre-tokenizer; SentencePiece-style ones ("llama") carry a score per token,
and llama.cpp merges the neighbouring pair whose joined token scores best, leftmost first. The same result comes from
plain BPE whose merge list holds every way to write a token as two tokens, ordered by that score, with bytes for what
is left. Rejected: transformers' GGUF conversion, which fails a third of llama.cpp's own cases for Llama 2.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, processors

from graftune.errors import GraftuneError
from graftune.tokenizer import pretokenize
from graftune.tokenizer.core import TURN_ENDS, Tokenizer, find_stop_ids
from graftune.tokenizer.template import ChatTemplate


class TokenType(enum.IntEnum):
    """tokenizer.ggml.token_type, as llama.cpp numbers it (the gguf package need not be here for a base without one)."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4


_PREFIX = "tokenizer.ggml."
_SPACE = "\u2581"  # SentencePiece's visible blank
_MEND = "convert the model again with a recent llama.cpp, or use its Hugging Face folder as the base"


def from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer described by a GGUF file's metadata (key to plain Python value)."""
    model = _read(metadata, "model", str)
    if model not in ("gpt2", "llama"):
        raise GraftuneError(
            f"the vocabulary type '{model}' is not supported",
            where=f"GGUF key {_PREFIX}model",
            mend="use a base whose type is 'gpt2' (byte-level BPE) or 'llama' (SentencePiece scores)",
        )
    tokens = _tokens(metadata)
    kinds = _kinds(metadata, tokens)
    backend, bos_by_default = _byte_level(metadata, tokens) if model == "gpt2" else _sentencepiece(metadata, tokens)
    _mark_special(backend, tokens, kinds, strip_right=_strips_right(metadata))

    # llama.cpp assumes ids 0, 1 and 2 for SentencePiece files that name none, as Llama's own vocabulary has them.
    spm = model == "llama"
    bos = _special_id(metadata, "bos", len(tokens), 1 if spm else None)
    eos = _special_id(metadata, "eos", len(tokens), 2 if spm else None)
    pad = _special_id(metadata, "padding", len(tokens), None)
    add_bos = _around(metadata, "add_bos_token", bos_by_default, bos)
    add_eos = _around(metadata, "add_eos_token", False, eos)
    backend.post_processor = _post_processor(tokens, bos if add_bos else None, eos if add_eos else None)
    ends = [eos, *(_special_id(metadata, name, len(tokens), None) for name in ("eot", "eom"))]
    return Tokenizer(
        backend=backend,
        bos_id=bos,
        eos_id=eos,
        pad_id=pad,
        add_bos=add_bos,
        add_eos=add_eos,
        template=_template(metadata, None if bos is None else tokens[bos], None if eos is None else tokens[eos]),
        stop_ids=find_stop_ids(backend, ends),
    )


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> tuple[tokenizers.Tokenizer, bool]:
    rule = pretokenize.rule_for(_read(metadata, "pre", str, default="default"), f"GGUF key {_PREFIX}pre")
    vocabulary = {text: id for id, text in enumerate(tokens)}
    merges = []
    for position, line in enumerate(_read_list(metadata, "merges", str)):
        # From the second character on: a piece may itself be a blank.
        at = line.find(" ", 1)
        pair = (line[:at], line[at + 1 :])
        if at < 0 or not all(part in vocabulary for part in (*pair, pair[0] + pair[1])):
            raise GraftuneError(
                f"merge {position} ('{line}') is not a pair of tokens whose joint text is a token",
                where=f"GGUF key {_PREFIX}merges",
                mend=_MEND,
            )
        merges.append(pair)
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=rule.ignore_merges))
    backend.pre_tokenizer = pretokenize.build(rule, vocabulary)
    backend.decoder = decoders.ByteLevel()
    return backend, rule.add_bos


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str]) -> tuple[tokenizers.Tokenizer, bool]:
    scores = _read_list(metadata, "scores", float)
    _same_length(scores, tokens, "scores")
    vocabulary = {text: id for id, text in enumerate(tokens)}
    unknown = _special_id(metadata, "unknown", len(tokens), 0)
    prefix = _read(metadata, "add_space_prefix", bool, default=True)
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocabulary,
            _merges_from_scores(tokens, scores, vocabulary),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=False,
            byte_fallback=True,
        )
    )
    blanks = normalizers.Replace(" ", _SPACE)
    # Prepend works on every stretch between special tokens, which is where llama.cpp adds its blank too.
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), blanks]) if prefix else blanks
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend, True


def _merges_from_scores(
    tokens: list[str], scores: Sequence[float], vocabulary: Mapping[str, int]
) -> list[tuple[str, str]]:
    """Every split of every token into two tokens, best joint score first.

    Equal scores go by id, where llama.cpp takes the leftmost pair: a list of merges cannot hold ties. Llama's
    vocabulary has them for runs of blanks only, and there both ways end in the same tokens (tested).
    """
    order = sorted((id for id, text in enumerate(tokens) if len(text) > 1), key=lambda id: (-scores[id], id))
    pairs = []
    for id in order:
        text = tokens[id]
        for at in range(1, len(text)):
            left, right = text[:at], text[at:]
            if left in vocabulary and right in vocabulary:
                pairs.append((left, right))
    return pairs


def _tokens(metadata: Mapping[str, Any]) -> list[str]:
    # An empty text would match everywhere; llama.cpp gives it the same stand-in.
    tokens = [text or f"[EMPTY_{id}]" for id, text in enumerate(_read_list(metadata, "tokens", str))]
    if not tokens:
        raise GraftuneError("the vocabulary is empty", where=f"GGUF key {_PREFIX}tokens", mend=_MEND)
    try:
        "".join(tokens).encode()
    except UnicodeEncodeError as error:
        raise GraftuneError("a token is not valid UTF-8", where=f"GGUF key {_PREFIX}tokens", mend=_MEND) from error
    first: dict[str, int] = {}
    for id, text in enumerate(tokens):
        if first.setdefault(text, id) != id:
            raise GraftuneError(
                f"the token '{text}' occurs twice (ids {first[text]} and {id})",
                where=f"GGUF key {_PREFIX}tokens",
                mend=_MEND,
            )
    return tokens


def _kinds(metadata: Mapping[str, Any], tokens: list[str]) -> list[int]:
    kinds = _read_list(metadata, "token_type", int, default=[int(TokenType.NORMAL)] * len(tokens))
    _same_length(kinds, tokens, "token_type")
    # Converters sometimes leave end-of-turn tokens as plain text; as llama.cpp does, take them for control tokens.
    return [int(TokenType.CONTROL) if text in TURN_ENDS else kind for text, kind in zip(tokens, kinds, strict=True)]


def _mark_special(
    backend: tokenizers.Tokenizer, tokens: list[str], kinds: Sequence[int], *, strip_right: frozenset[str] | None
) -> None:
    """Control and unknown tokens are special (parsed only on request); user-defined ones are always whole."""
    special = (TokenType.CONTROL, TokenType.UNKNOWN)
    added = []
    for text, kind in zip(tokens, kinds, strict=True):
        if kind in (*special, TokenType.USER_DEFINED):
            rstrip = strip_right is not None and text not in strip_right
            added.append(tokenizers.AddedToken(text, special=kind in special, normalized=False, rstrip=rstrip))
    backend.add_tokens([token for token in added if not token.special])
    backend.add_special_tokens([token for token in added if token.special])


def _strips_right(metadata: Mapping[str, Any]) -> frozenset[str] | None:
    """Phi-3's special tokens swallow the blanks after them, all but three. GGUF has no field for it: llama.cpp goes
    by the model's name, and so must we. (It takes ASCII blanks only; `tokenizers` takes all.)"""
    name = str(metadata.get("general.name", "")).lower()
    return frozenset({"<unk>", "<s>", "<|endoftext|>"}) if "phi-3" in name or "phi3" in name else None


def _post_processor(tokens: list[str], bos: int | None, eos: int | None) -> processors.PostProcessor | None:
    """For readers of the saved tokenizer.json; our own `encode` adds BOS and EOS itself."""
    if bos is None and eos is None:
        return None
    head = [] if bos is None else [tokens[bos]]
    tail = [] if eos is None else [tokens[eos]]
    names = {tokens[id]: id for id in (bos, eos) if id is not None}
    return processors.TemplateProcessing(
        single=[*head, "$A", *tail], pair=[*head, "$A", *tail, *head, "$B", *tail], special_tokens=list(names.items())
    )


def _template(metadata: Mapping[str, Any], bos: str | None, eos: str | None) -> ChatTemplate | None:
    key = "tokenizer.chat_template"
    source = metadata.get(key)
    if source is None or source == "":
        return None
    return ChatTemplate(source, bos_token=bos or "", eos_token=eos or "", name=f"GGUF key {key}")


def _around(metadata: Mapping[str, Any], key: str, default: bool, id: int | None) -> bool:
    wanted = _read(metadata, key, bool, default=None)
    if wanted and id is None:
        raise GraftuneError(
            f"the file asks for {key} but names no such token", where=f"GGUF key {_PREFIX}{key}", mend=_MEND
        )
    return id is not None and (default if wanted is None else wanted)


def _special_id(metadata: Mapping[str, Any], name: str, size: int, default: int | None) -> int | None:
    key = f"{name}_token_id"
    id = _read(metadata, key, int, default=None)
    if id is None:
        return default if default is not None and default < size else None
    if not 0 <= id < size:
        raise GraftuneError(
            f"id {id} is outside the vocabulary of {size} tokens", where=f"GGUF key {_PREFIX}{key}", mend=_MEND
        )
    return id


def _same_length(values: Sequence[Any], tokens: list[str], key: str) -> None:
    if len(values) != len(tokens):
        raise GraftuneError(
            f"there are {len(values)} entries for {len(tokens)} tokens", where=f"GGUF key {_PREFIX}{key}", mend=_MEND
        )


_REQUIRED = object()


def _read(metadata: Mapping[str, Any], key: str, kind: type, default: Any = _REQUIRED) -> Any:
    value = metadata.get(_PREFIX + key)
    if value is None:
        if default is _REQUIRED:
            raise GraftuneError("the key is missing", where=f"GGUF key {_PREFIX}{key}", mend=_MEND)
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise GraftuneError(
            f"the value is {type(value).__name__}, not {kind.__name__}", where=f"GGUF key {_PREFIX}{key}", mend=_MEND
        )
    return value


def _read_list(metadata: Mapping[str, Any], key: str, kind: type, default: Any = _REQUIRED) -> list[Any]:
    values = metadata.get(_PREFIX + key)
    if values is None and default is not _REQUIRED:
        return default
    values = _read(metadata, key, list)
    accepted = (int, float) if kind is float else kind
    for position, value in enumerate(values):
        if not isinstance(value, accepted):
            raise GraftuneError(
                f"entry {position} is {type(value).__name__}, not {kind.__name__}",
                where=f"GGUF key {_PREFIX}{key}",
                mend=_MEND,
            )
    return values
