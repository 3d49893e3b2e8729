"""What each token of a GGUF vocabulary is: ordinary text, a control token, or text that is always kept whole.

Purpose: the kind decides what is found in a text before anything is merged. Method: the file's own `token_type`, then
llama.cpp's corrections, which go by a token's text because converters get these wrong: tokens that end a turn and
those of fill-in-the-middle are control tokens even if the file says otherwise; four of Harmony's are always shown.
Rejected: believing the file, which gives other ids than the program that serves it (Qwen's vocabulary has an ordinary
`</s>`).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import tokenizers

from graftune.tokenizer.core import TURN_ENDS, not_an_end
from graftune.tokenizer.gguf_keys import Keys


class TokenType(enum.IntEnum):
    """tokenizer.ggml.token_type, as llama.cpp numbers it (the gguf package need not be here for a base without one)."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4


_SPECIAL = (TokenType.CONTROL, TokenType.UNKNOWN)
_HARMONY = frozenset(("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"))

# Fill-in-the-middle tokens by the keys that may name them. Where no key does, llama.cpp finds them by text (of several
# of one kind it takes any one; we take all).
_FILL_IN: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("fim_pre", "prefix"),
        "<|fim_prefix|> <fim-prefix> <fim_prefix> <\uff5cfim\u2581begin\uff5c> <PRE> \u2581<PRE> <|code_prefix|>"
        " <|prefix|> <|plamo:fim_prefix|>",
    ),
    (
        ("fim_suf", "suffix"),
        "<|fim_suffix|> <fim-suffix> <fim_suffix> <\uff5cfim\u2581hole\uff5c> <SUF> \u2581<SUF> <|code_suffix|>"
        " <|suffix|> <|plamo:fim_suffix|>",
    ),
    (
        ("fim_mid", "middle"),
        "<|fim_middle|> <fim-middle> <fim_middle> <\uff5cfim\u2581end\uff5c> <MID> \u2581<MID> <|code_middle|>"
        " <|middle|> <|plamo:fim_middle|>",
    ),
    (("fim_pad",), "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]"),
    (("fim_rep",), "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>"),
    (("fim_sep",), "<|file_sep|> <|plamo:file_separator|>"),
)


def kinds(keys: Keys, tokens: Sequence[str]) -> list[int]:
    """The kind of every token, corrected as llama.cpp corrects it."""
    listed = keys.per_token("token_type", int, tokens, [int(TokenType.NORMAL)] * len(tokens))
    control = TURN_ENDS | {
        text
        for names, texts in _FILL_IN
        if all(keys.token_id(name, len(tokens)) is None for name in names)
        for text in texts.split(" ")
    }
    corrected = dict.fromkeys(control, TokenType.CONTROL)
    corrected |= dict.fromkeys(_HARMONY, TokenType.USER_DEFINED)
    for text in not_an_end(TURN_ENDS.intersection(tokens)):
        corrected[text] = TokenType.NORMAL if text == "</s>" else TokenType.USER_DEFINED
    return [int(corrected.get(text, kind)) for text, kind in zip(tokens, listed, strict=True)]


def mark(backend: tokenizers.Tokenizer, keys: Keys, tokens: Sequence[str], kinds: Sequence[int]) -> None:
    """Control and unknown tokens are special (parsed only on request); user-defined ones are always whole."""
    kept = _blanks_after(keys)
    added = [
        tokenizers.AddedToken(
            text,
            special=kind in _SPECIAL,
            normalized=False,
            rstrip=kept is not None and text not in kept,
        )
        for text, kind in zip(tokens, kinds, strict=True)
        if kind in (*_SPECIAL, TokenType.USER_DEFINED)
    ]
    backend.add_tokens([token for token in added if not token.special])
    backend.add_special_tokens([token for token in added if token.special])


def _blanks_after(keys: Keys) -> frozenset[str] | None:
    """The special tokens that do not swallow the blanks after them; None: all of them.

    GGUF has no field for it: llama.cpp goes by names, and so must we. (It takes ASCII blanks only; `tokenizers` takes
    all.) Phi-3's special tokens swallow the blanks after them, all but three.
    """
    name = str(keys.metadata.get("general.name", "")).lower()
    return frozenset({"<unk>", "<s>", "<|endoftext|>"}) if "phi-3" in name or "phi3" in name else None
