"""Streaming: what is shown is always whole characters, and together they are the answer."""

from __future__ import annotations

import pytest

from graftune.infer.generate import TextStream
from tests import tiny

TEXTS = ["plain words", "naïve 平均 🙂👩‍👩‍👧 e\u0301", "\n\n  two\tblanks  ", "한국어 العربية", "🙂"]


@pytest.mark.parametrize("text", TEXTS)
def test_a_character_is_shown_whole(text: str) -> None:
    """A token a byte: every character beyond ASCII comes in pieces."""
    tokenizer, shown = tiny.make_tokenizer(), []
    stream = TextStream(tokenizer, shown.append, tokenizer.stop_ids)
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    for count, id in enumerate(ids, 1):
        stream.push(id)
        sofar = "".join(shown)
        assert "\ufffd" not in sofar and text.startswith(sofar)
        assert len(sofar.encode()) > count - 4, "nothing is held back longer than a character is"
    assert "".join(shown) == text


def test_stop_tokens_and_control_tokens_are_not_shown() -> None:
    tokenizer, shown = tiny.make_tokenizer(), []
    stream = TextStream(tokenizer, shown.append, tokenizer.stop_ids)
    for id in [*tokenizer.encode("yes"), 1, *tokenizer.encode("!"), 2, 0]:
        stream.push(id)
    assert "".join(shown) == "yes!"


def test_bytes_that_never_become_a_character_do_not_stall_the_rest() -> None:
    tokenizer, shown = tiny.make_tokenizer(), []
    stream = TextStream(tokenizer, shown.append, ())
    half = tokenizer.encode("é")[:1]
    for id in [*tokenizer.encode("a"), *half, *tokenizer.encode("bc"), *half]:
        stream.push(id)
    assert "".join(shown) == "a\ufffdbc", "the broken one is shown once it is certain, the last one never"
