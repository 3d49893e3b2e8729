"""A tokenizer as GGUF keys, for a base that came with a tokenizer.json.

Byte-level BPE is written as tokens and merges. GGUF stores only the name of the rule that cuts text before merging, so
all rules are tried until one cuts a text full of edge cases as the tokenizer does. SentencePiece-style BPE is written
with a score per token instead of merges; a score is the place of the merge that makes the token, so that the scores
restore the order of the merges. The keys are read back with our own reader of GGUF vocabularies (which is tested
against llama.cpp's) and have to give the same ids, or the export is refused.
"""

from __future__ import annotations

import json
from typing import Any

import tokenizers

from graftune.errors import GraftuneError
from graftune.exporting import gguf_file
from graftune.tokenizer import Tokenizer, from_gguf, pretokenize
from graftune.tokenizer.core import find_stop_ids

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
# The usual names first: several rules cut this text alike, and llama.cpp may treat their names differently elsewhere.
_FIRST = ("llama-bpe", "qwen2", "smollm", "gpt-2", "tekken", "gpt-4o", "qwen35", "dbrx", "deepseek-v3", "default")
# English with code, then other scripts, blanks of several kinds and runs of marks.
PROBE = (
    "Hello, World! It's 3 o'clock; they'LL've DON'T we'd I'M 1234567 and 3.14159e-10, 12,345 = 9\u00b2\n\n\n  i"
    "ndented\t\ttab   \n \r\n trailing   spaces   \n\u00fcber na\u00efve \u00d1and\u00fa \u00c9COLE camelCase X"
    "MLHttpRequest snake_case __init__ x+=1; y->z != (a[0] && {b}) // ~/path\\n #$%^&*\u65e5\u672c\u8a9e\u306e"
    "\u30c6\u30ad\u30b9\u30c8\u3001\u6f22\u5b57\u3068\u30ab\u30bf\u30ab\u30ca\u3002\u4e2d\u6587\u6587\u672c"
    "\u6d4b\u8bd5\uff1a\u4f60\u597d\uff0c\u4e16\u754c\uff01 \ud55c\uad6d\uc5b4 \ud14d\uc2a4\ud2b8 \u0e44\u0e17"
    "\u0e22 \u0939\u093f\u0928\u094d\u0926\u0940 \u092e\u0947\u0902 \u0627\u0644\u0639\u0631\u0628\u064a\u0629 "
    "\u0661\u0662\u0663 \u05e2\u05d1\u05e8\u05d9\u05ea \u0395\u03bb\u03bb\u03b7\u03bd\u03b9\u03ba\u03ac \u0440"
    "\u0443\u0441\u0441\u043a\u0438\u0439 \u0422\u0415\u041a\u0421\u0422 \U0001f44d\U0001f3fd\U0001f469\u200d"
    "\U0001f469\u200d\U0001f467 \u2026 \u2014 \u201cquoted\u201d \u2018single\u2019 \u20ac5 \u00bd \u2460  "
    "\u00a0nbsp\u200bzero ''''''```````\"\"\"\"......!!!!!!?????? 'S 'T 're"
)


def vocabulary(tokenizer: Tokenizer, rows: int, end_of_turn: int | None) -> dict[str, bytes]:
    """The keys under tokenizer.ggml, for an embedding of `rows` rows. `end_of_turn`: its id, if that is not EOS."""
    model = json.loads(tokenizer.backend.to_str())["model"]
    if model["type"] != "BPE":
        raise _unknown(f"a {model['type']} vocabulary")
    spm = bool(model.get("byte_fallback"))
    merges = [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model["merges"]]
    kinds = _kinds(tokenizer, rows, spm, model.get("unk_token"))
    values: dict[str, Any] = {"tokens": _tokens(tokenizer, rows), "token_type": kinds}
    if spm:
        values |= {"model": "llama", "pre": "default", "scores": _scores(merges, values["tokens"])}
        values["tokens"] = _with_blanks(values["tokens"], kinds)
        values["add_space_prefix"] = _space_prefix(tokenizer)
        if model.get("unk_token") is not None:
            values["unknown_token_id"] = tokenizer.backend.token_to_id(model["unk_token"])
    else:
        values |= {"model": "gpt2", "merges": [" ".join(pair) for pair in merges]}
        values["pre"] = _rule(tokenizer, bool(model.get("ignore_merges")))
    ids = {
        "bos": tokenizer.bos_id,
        "eos": tokenizer.eos_id,
        "padding": tokenizer.pad_id,
        "eot": end_of_turn,
        "eom": None,
    }
    # Stop tokens that no reader recognises by their text (Phi-3 names <|assistant|>) go under the keys that are left.
    unknown = sorted({*tokenizer.stop_ids} - {*find_stop_ids(tokenizer.backend, [tokenizer.eos_id, end_of_turn])})
    ids |= dict(zip([name for name in ("eom", "eot") if ids[name] is None], unknown, strict=False))
    values |= {f"{name}_token_id": id for name, id in ids.items() if id is not None}
    values |= {"add_bos_token": tokenizer.add_bos, "add_eos_token": tokenizer.add_eos}
    _check(tokenizer, {f"tokenizer.ggml.{key}": value for key, value in values.items()})
    return {f"tokenizer.ggml.{key}": gguf_file.encoded(value) for key, value in values.items()}


def _tokens(tokenizer: Tokenizer, rows: int) -> list[str]:
    """The tokens by id; rows that only pad the table are named as by llama.cpp's converter."""
    known = [tokenizer.backend.id_to_token(id) for id in range(rows)]
    return [f"[PAD{id}]" if token is None else token for id, token in enumerate(known)]


def _kinds(tokenizer: Tokenizer, rows: int, spm: bool, unknown: str | None) -> list[int]:
    added = tokenizer.backend.get_added_tokens_decoder()
    kinds = []
    for id in range(rows):
        token = tokenizer.backend.id_to_token(id)
        if token is None:
            kinds.append(UNUSED)
        elif spm and token == unknown:
            kinds.append(UNKNOWN)
        elif id in added:
            kinds.append(CONTROL if added[id].special else USER_DEFINED)
        elif spm and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            kinds.append(BYTE)
        else:
            kinds.append(NORMAL)
    return kinds


def _with_blanks(tokens: list[str], kinds: list[int]) -> list[str]:
    """The tokens, where runs of blanks that are always kept whole (Gemma's) are spelt with real blanks: llama.cpp looks
    for them in the text as it was typed, and prints them as the file spells them."""
    shown = [t.replace("\u2581", " ") if k == USER_DEFINED else t for t, k in zip(tokens, kinds, strict=True)]
    known = set(tokens)
    return [old if new in known else new for old, new in zip(tokens, shown, strict=True)]


def _scores(merges: list[list[str]], tokens: list[str]) -> list[float]:
    made: dict[str, int] = {}
    for place, pair in enumerate(merges):
        made.setdefault("".join(pair), place)
    # A token that no merge makes is found whole or not at all: its score is never compared.
    return [-float(made.get(token, len(merges))) for token in tokens]


def _space_prefix(tokenizer: Tokenizer) -> bool:
    """Whether a text gets a blank in front. Found by encoding one: a tokenizer.json can state it in several ways."""
    return tokenizer.backend.encode("a", add_special_tokens=False).tokens[0].startswith("\u2581")


def _rule(tokenizer: Tokenizer, ignore_merges: bool) -> str:
    """llama.cpp's name of the rule that cuts text before merging."""
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    known = backend.get_vocab(with_added_tokens=False)
    want = backend.encode(PROBE, add_special_tokens=False).ids
    backend.normalizer = None  # llama.cpp normalises no text here
    for name in dict.fromkeys((*_FIRST, *pretokenize.RULES)):
        rule = pretokenize.RULES[name]
        backend.pre_tokenizer = pretokenize.build(rule, known)
        if rule.ignore_merges == ignore_merges and backend.encode(PROBE, add_special_tokens=False).ids == want:
            return name
    raise _unknown("a way of cutting text into words")


def _check(tokenizer: Tokenizer, metadata: dict[str, Any]) -> None:
    back = from_gguf(metadata)
    runs = ("a" + " " * count + "b" for count in (2, 3, 8, 17))
    for text in (PROBE, " leading", "trailing ", *runs, "".join(sorted(set(PROBE)))):
        if back.encode(text, add_special=True) != tokenizer.encode(text, add_special=True):
            raise _unknown("a tokenizer")
    if not set(tokenizer.stop_ids) <= set(back.stop_ids):
        missing = tokenizer.token(min(set(tokenizer.stop_ids) - set(back.stop_ids)))
        raise GraftuneError(
            f"a GGUF file cannot name {missing!r} as one more token that ends an answer",
            fix="export to merged and convert that",
        )


def _unknown(what: str) -> GraftuneError:
    return GraftuneError(
        f"the base has {what} that GGUF has no name for", fix="export to merged or peft, or train on a GGUF base"
    )
