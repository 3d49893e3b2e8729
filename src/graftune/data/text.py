"""Plain text -> windows of at most `max_seq_len` tokens, in time and memory that grow with the text's length only."""

from __future__ import annotations

from collections.abc import Iterator

from graftune.batch import Example
from graftune.data.fit import Built
from graftune.data.row import Refusal
from graftune.tokenizer import Tokenizer


def windows(text: str, tokens: list[int], tokenizer: Tokenizer, limit: int, weight: float = 1.0) -> Iterator[Built]:
    """Plain text, every token trained, BOS as the tokenizer says and EOS always. Too long: several windows.

    Each later window starts with BOS, or else with the last token of the window before it, so that every token is
    predicted once. Only the first one has a prompt: a sample answer continues the beginning of a text.
    """
    bos = tokenizer.bos_id if tokenizer.add_bos else None
    if tokenizer.eos_id is None:
        raise Refusal("no EOS token", "the tokenizer names none to end a text with")
    whole = [*([] if bos is None else [bos]), *tokens, tokenizer.eos_id]
    end = _quarter(text)
    prompt = ((tokenizer.bos_token or "") if bos is not None else "") + text[:end]
    first = min(limit, len(whole))
    yield Built(_trained(whole[:first], weight), prompt, text[end:].strip(), [])
    for start in range(first, len(whole), limit - 1):
        head = whole[start - 1] if bos is None else bos
        window = [head, *whole[start : start + limit - 1]]
        yield Built(_trained(window, weight), "", "", [])


def _trained(tokens: list[int], weight: float) -> Example:
    return Example(tokens, [True] * len(tokens), weights=None if weight == 1 else [weight] * len(tokens))


def _quarter(text: str) -> int:
    """About a quarter of a text, to the end of a word: what a sample continues."""
    space = text.find(" ", max(1, len(text) // 4))
    return space if space > 0 else max(1, len(text) // 4)
