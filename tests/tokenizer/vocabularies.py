"""Small vocabularies for tests: the first pieces of SmolLM2's, and a SentencePiece-style one made from a sentence."""

from __future__ import annotations

from collections import Counter
from typing import Any

from gguf import TokenType

COMMON = "aelrstvxdmABELMSTVZ 0123457\n\r\t'!/_<>.,:$|()-\u3000\u00a0é中日の한รह½…👩\u200d\u0301\uff11"
TEXT = (
    "The quick brown fox jumps over the lazy dog and then it rests under the old tree while the sun goes down over "
    "the hills; no one knows whether the dog, the fox or the tree remembers what happened there, naïve as they are. "
    "한국어 日本語 中文 <s> s> </s"
)


def small_byte_level(full: dict[str, Any], merges: int = 3000) -> dict[str, Any]:
    """SmolLM2's vocabulary cut to its control tokens, its bytes and its first merges: quick to load, real pieces."""
    kept = full["tokenizer.ggml.merges"][:merges]
    wanted = {part for line in kept for part in (*line.split(" "), line.replace(" ", ""))}
    pairs = [
        (text, kind) for text, kind in _pairs(full) if kind != TokenType.NORMAL or len(text) == 1 or text in wanted
    ]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": [text for text, _ in pairs],
        "tokenizer.ggml.token_type": [int(kind) for _, kind in pairs],
        "tokenizer.ggml.merges": kept,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def boundaries(full: dict[str, Any]) -> dict[str, Any]:
    """A byte-level vocabulary that shows where text was cut: every pair of common bytes is a token, so that a piece
    that begins one character later, or is longer by one, gives other ids. Control tokens as in SmolLM2's."""
    names = bytes_to_names()
    symbols = [names[byte] for byte in sorted(set(COMMON.encode()))]
    pairs = [(left, right) for left in symbols for right in symbols]
    control = [(text, kind) for text, kind in _pairs(full) if kind != TokenType.NORMAL]
    # Tokens that no merge makes, found only where whole pieces are looked up.
    whole = ["hello", "Ġhello", "World", "ĠWorld"]
    tokens = [*(text for text, _ in control), *names, *(left + right for left, right in pairs), *whole]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [*(int(kind) for _, kind in control), *[1] * (len(tokens) - len(control))],
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in pairs],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.seperator_token_id": 2,
    }


def bytes_to_names() -> list[str]:
    """GPT-2's letter for each byte: itself where it prints, else the next free one from U+0100 on."""
    spare = iter(range(0x100, 0x200))
    printed = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    return [chr(byte if byte in printed else next(spare)) for byte in range(256)]


def _pairs(full: dict[str, Any]) -> list[tuple[str, int]]:
    return list(zip(full["tokenizer.ggml.tokens"], full["tokenizer.ggml.token_type"], strict=True))


def sentencepiece(*, prefix: bool = True) -> dict[str, Any]:
    """Every substring of TEXT up to five characters, scored by how often it occurs, no two alike."""
    words = ["\u2581" + word for word in TEXT.split()]
    counts = Counter(word[i : i + n] for word in words for n in range(1, 6) for i in range(len(word) - n + 1))
    pieces = sorted(counts, key=lambda piece: (-counts[piece] * len(piece), piece))
    control = [("<unk>", TokenType.UNKNOWN), ("<s>", TokenType.CONTROL), ("</s>", TokenType.CONTROL)]
    control += [(f"<0x{byte:02X}>", TokenType.BYTE) for byte in range(256)]
    pieces = [piece for piece in pieces if piece not in dict(control)]
    last = [("<mark>", TokenType.USER_DEFINED), ("  ", TokenType.USER_DEFINED), ("<end_of_turn>", TokenType.CONTROL)]
    kinds = [*control, *((piece, TokenType.NORMAL) for piece in pieces), *last]
    scores = [0.0] * len(control) + [-float(rank) for rank in range(len(pieces))] + [-1000.0] * len(last)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [text for text, _ in kinds],
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [int(kind) for _, kind in kinds],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": prefix,
        "tokenizer.chat_template": "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}"
        "{{ eos_token }}{% endfor %}",
    }


def visible_blanks(name: str) -> dict[str, Any]:
    """The same pieces with merges in place of scores, as Gemma 4 has them, and line breaks among them."""
    scored = sentencepiece(prefix=False)
    tokens, types = list(scored["tokenizer.ggml.tokens"]), list(scored["tokenizer.ggml.token_type"])
    tokens += ["\n", "\n\n", "\n\n\n"]
    types += [int(TokenType.NORMAL)] * 3
    known = set(tokens)
    ordered = [text for text, kind in zip(tokens, types, strict=True) if kind == TokenType.NORMAL and len(text) > 1]
    merges = [
        f"{text[:at]} {text[at:]}"
        for text in ordered
        for at in range(1, len(text))
        if text[:at] in known and text[at:] in known
    ]
    left_out = ("tokenizer.ggml.scores", "tokenizer.ggml.add_space_prefix")
    return {key: value for key, value in scored.items() if key not in left_out} | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": ["\u2581 \u2581", *merges],
    }
