"""A tokenizer from the vocabulary inside a GGUF file, equal to llama.cpp's.

Purpose: the base a user serves is often a .gguf with no tokenizer.json beside it. Method: byte-level vocabularies
("gpt2") carry their merges and name their pre-tokenizer (pretokenize); so do Gemma 4's, whose pieces are text with
visible blanks; SentencePiece-style ones ("llama") carry a score per token, and llama.cpp merges the neighbouring pair
whose joined token scores best, leftmost first. The same result comes from plain BPE whose merge list holds every way to
write a token as two tokens, ordered by that score, with bytes for what is left. Rejected: transformers' GGUF
conversion, which fails a third of llama.cpp's own cases for Llama 2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from graftune.errors import GraftuneError
from graftune.tokenizer import examine, pretokenize, token_kinds
from graftune.tokenizer.core import Tokenizer, find_stop_ids, guarded
from graftune.tokenizer.gguf_keys import Keys
from graftune.tokenizer.pretokenize import PreRule
from graftune.tokenizer.template import ChatTemplate, base_template

Build = Callable[[Keys, list[str], PreRule], tokenizers.Tokenizer]
_SPACE = "\u2581"  # SentencePiece's visible blank
# SentencePiece does not split text before merging, and its vocabularies expect BOS. If a file names no ids, llama.cpp
# assumes those of Llama's own vocabulary: 0 unknown, 1 BOS, 2 EOS.
_SENTENCEPIECE = PreRule((), add_bos=True)


def from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer described by a GGUF file's metadata (key to plain Python value)."""
    keys = Keys(metadata)
    build, rule = _kind(keys)
    spm = rule is _SENTENCEPIECE
    tokens = keys.tokens()
    kinds = token_kinds.kinds(keys, tokens)
    with guarded("be built", "the GGUF file's vocabulary"):
        backend = build(keys, tokens, rule)
        token_kinds.mark(backend, keys, tokens, kinds)

    size = len(tokens)
    bos, eos = keys.token_id("bos", size, 1 if spm else None), keys.token_id("eos", size, 2 if spm else None)
    add_bos = keys.wanted("add_bos_token", rule.add_bos, bos) or (rule.always_bos and bos is not None)
    add_eos = keys.wanted("add_eos_token", False, eos)
    backend.post_processor = _post_processor(tokens, bos if add_bos else None, eos if add_eos else None)
    template, fault = _template(metadata, None if bos is None else tokens[bos], None if eos is None else tokens[eos])
    return Tokenizer(
        backend=backend,
        bos_id=bos,
        eos_id=eos,
        pad_id=keys.token_id("padding", size),
        add_bos=add_bos,
        add_eos=add_eos,
        template=template,
        template_fault=fault,
        stop_ids=find_stop_ids(backend, [eos, keys.token_id("eot", size), keys.token_id("eom", size)]),
    )


def _kind(keys: Keys) -> tuple[Build, PreRule]:
    """How the file's vocabulary is built; a kind that is not supported is refused by name."""
    model = keys.read("model", str)
    name = "gemma4" if model == "gemma4" else keys.read("pre", str, "default")
    if model == "llama":
        return _sentencepiece, _SENTENCEPIECE
    if model not in ("gpt2", "gemma4"):
        raise keys.fault(
            "model",
            f"the vocabulary type '{model}' is not supported",
            "use a base whose type is 'gpt2' (byte-level BPE), 'gemma4' or 'llama' (SentencePiece scores)",
        )
    if name in pretokenize.RAW_RULES:
        return _visible_blanks, pretokenize.RAW_RULES[name]
    if name in pretokenize.RULES:
        return _byte_level, pretokenize.RULES[name]
    raise keys.fault(
        "pre",
        f"the pre-tokenizer '{name}' is not supported",
        "use the model's Hugging Face folder as the base (its tokenizer.json states the rule), or a GGUF "
        f"with one of: {', '.join(sorted({*pretokenize.RULES, *pretokenize.RAW_RULES}))}",
    )


def _byte_level(keys: Keys, tokens: list[str], rule: PreRule) -> tokenizers.Tokenizer:
    vocabulary = _ids(tokens)
    merges = keys.merges(vocabulary)
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=rule.ignore_merges))
    backend.pre_tokenizer = pretokenize.build(rule, vocabulary)
    backend.decoder = decoders.ByteLevel()
    return backend


def _visible_blanks(keys: Keys, tokens: list[str], rule: PreRule) -> tokenizers.Tokenizer:
    vocabulary = _ids(tokens)
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, keys.merges(vocabulary, raw=True), byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Replace(" ", _SPACE)])
    backend.pre_tokenizer = pre_tokenizers.Sequence(pretokenize.splits(rule))
    backend.decoder = _text_decoder(prefix=False)
    return backend


def _sentencepiece(keys: Keys, tokens: list[str], rule: PreRule) -> tokenizers.Tokenizer:
    scores = keys.per_token("scores", float, tokens)
    vocabulary = _ids(tokens)
    unknown = keys.token_id("unknown", len(tokens), 0)
    prefix = keys.read("add_space_prefix", bool, True)
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
    backend.decoder = _text_decoder(prefix=prefix)
    return backend


def _text_decoder(*, prefix: bool) -> decoders.Decoder:
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)


def _ids(tokens: Sequence[str]) -> dict[str, int]:
    return {text: id for id, text in enumerate(tokens)}


def _merges_from_scores(
    tokens: list[str], scores: Sequence[float], vocabulary: Mapping[str, int]
) -> list[tuple[str, str]]:
    """Every split of every token into two tokens, best joint score first.

    Equal scores go by id, where llama.cpp takes the leftmost pair: a list of merges cannot hold ties. Llama's
    vocabulary has them for runs of blanks only, and there both ways end in the same tokens (tested).
    """
    order = sorted((id for id, text in enumerate(tokens) if len(text) > 1), key=lambda id: (-scores[id], id))
    return [
        (left, right)
        for text in map(tokens.__getitem__, order)
        for at in range(1, len(text))
        if (left := text[:at]) in vocabulary and (right := text[at:]) in vocabulary
    ]


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


def _template(
    metadata: Mapping[str, Any], bos: str | None, eos: str | None
) -> tuple[ChatTemplate | None, GraftuneError | None]:
    key = "tokenizer.chat_template"
    source = metadata.get(key)
    if source is None or source == "":
        return None, None
    fault = None
    if isinstance(source, str):
        fault = examine.errors_of(examine.Untrusted("template", source, f"GGUF key {key}")).get("template")
    return base_template(source, fault, bos_token=bos or "", eos_token=eos or "", name=f"GGUF key {key}")
