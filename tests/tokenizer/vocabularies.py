"""Small vocabularies for tests: the first pieces of SmolLM2's, and a SentencePiece-style one made from a sentence."""

from __future__ import annotations

from collections import Counter
from typing import Any

from gguf import TokenType

TEXT = (
    "The quick brown fox jumps over the lazy dog and then it rests under the old tree while the sun goes down over "
    "the hills; nobody knows whether the dog, the fox or the tree remembers what happened there, naïve as they are. "
    "한국어 日本語 中文 <s> s> </s"
)


def small_byte_level(full: dict[str, Any], merges: int = 3000) -> dict[str, Any]:
    """SmolLM2's vocabulary cut to its control tokens, its bytes and its first merges: quick to load, real pieces."""
    kept = full["tokenizer.ggml.merges"][:merges]
    wanted = {part for line in kept for part in (*line.split(" "), line.replace(" ", ""))}
    types = full["tokenizer.ggml.token_type"]
    pairs = [
        (text, kind)
        for text, kind in zip(full["tokenizer.ggml.tokens"], types, strict=True)
        if kind != TokenType.NORMAL or len(text) == 1 or text in wanted
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
