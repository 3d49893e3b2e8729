"""A model's tokenizer.json as the GGUF metadata that llama.cpp's converter would write: two roads to one vocabulary.

Byte-level vocabularies keep their merges. Gemma's has none in GGUF: the scores are those of its SentencePiece model,
whose order the merges of tokenizer.json repeat (each token's first merge stands where its score does).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gguf import TokenType

K = "tokenizer.ggml."


def metadata(folder: Path, *, pre: str | None) -> dict[str, Any]:
    """`pre`: the name the converter gives the pre-tokenizer; None for a SentencePiece-style vocabulary."""
    whole = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    texts: dict[int, str] = {id: text for text, id in whole["model"]["vocab"].items()}
    kinds = {id: TokenType.BYTE if pre is None and _is_byte(text) else TokenType.NORMAL for id, text in texts.items()}
    for token in whole["added_tokens"]:
        special = token["special"] or _looks_special(token["content"])
        kinds[token["id"]] = TokenType.CONTROL if special else TokenType.USER_DEFINED
        texts[token["id"]] = token["content"] if special else token["content"].replace("\u2581", " ")
    size = max(texts) + 1
    made: dict[str, Any] = {
        K + "model": "llama" if pre is None else "gpt2",
        K + "tokens": [texts.get(id, f"[PAD{id}]") for id in range(size)],
        K + "token_type": [int(kinds.get(id, TokenType.UNUSED)) for id in range(size)],
    }
    pairs = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in whole["model"]["merges"]]
    if pre is not None:
        made |= {K + "pre": pre, K + "merges": [" ".join(pair) for pair in pairs]}
    else:
        order = {text: -float(rank) for rank, text in enumerate(dict.fromkeys(left + right for left, right in pairs))}
        worst = -float(len(order)) - 1
        made |= {
            K + "scores": [order.get(texts.get(id, ""), worst) for id in range(size)],
            K + "add_space_prefix": False,
        }
        made[K + "unknown_token_id"] = whole["model"]["vocab"][whole["model"]["unk_token"]]
    ids = {text: id for id, text in texts.items()}
    for key, name in (("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding")):
        value = config.get(key)
        value = value["content"] if isinstance(value, dict) else value
        if value is not None:
            made[f"{K}{name}_token_id"] = ids[value]
    for key in ("add_bos_token", "add_eos_token"):
        if isinstance(config.get(key), bool):
            made[K + key] = config[key]
    if config.get("chat_template"):
        made["tokenizer.chat_template"] = config["chat_template"]
    return made


def _is_byte(text: str) -> bool:
    return len(text) == 6 and text.startswith("<0x") and text.endswith(">")


def _looks_special(text: str) -> bool:
    """Some tokens are control tokens in all but name: the converter goes by their look."""
    return text in ("<pad>", "<mask>", "<2mass>", "[@BOS@]") or (
        text.startswith(("<|", "<\uff5c", "<unused")) and text.endswith((">", "\uff5c>"))
    )
