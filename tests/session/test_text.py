"""Text that is read while it is drawn: what is shown is always whole characters, and together they are the answer."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from graftune.infer.generate import Token
from graftune.session.text import Draft
from tests.support import tiny

TEXTS = ["plain words", "naïve 平均 🙂👩‍👩‍👧 e\u0301", "\n\n  two\tblanks  ", "한국어 العربية", "🙂"]


def begun(stop_ids: Sequence[int] | None = None, stop: Sequence[str] = ()) -> Draft:
    tokenizer = tiny.make_tokenizer()
    return Draft(tokenizer, tokenizer.stop_ids if stop_ids is None else stop_ids, stop, reads=True)


@pytest.mark.parametrize("text", TEXTS)
def test_a_character_is_shown_whole(text: str) -> None:
    """A token a byte: every character beyond ASCII comes in pieces."""
    answer, shown = begun(), ""
    ids = answer.tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    for count, id in enumerate(ids, 1):
        shown += answer.push(Token(id))
        assert "\ufffd" not in shown and text.startswith(shown)
        assert len(shown.encode()) > count - 4, "nothing is held back longer than a character is"
    assert shown == text and answer.finish() == "" and answer.sample(False).text == text


def test_stop_tokens_and_control_tokens_are_not_shown() -> None:
    answer = begun()
    encode = answer.tokenizer.encode
    shown = "".join(answer.push(Token(id)) for id in [*encode("yes"), 1, *encode("!"), 2])
    found = answer.sample(False)
    assert shown == "yes!" and (found.text, found.stopped, found.end) == ("yes!", "stop", Token(2))


def test_bytes_that_never_become_a_character_do_not_stall_the_rest() -> None:
    answer = begun(())
    encode = answer.tokenizer.encode
    half = encode("é")[:1]
    shown = "".join(answer.push(Token(id)) for id in [*encode("a"), *half, *encode("bc"), *half])
    assert shown == "a\ufffdbc", "the broken one is shown once it is certain"
    assert answer.finish() == "\ufffd" and answer.stopped == "length"


def test_what_may_become_a_stop_string_is_held_back() -> None:
    answer, shown = begun(stop=("END",)), []
    for id in answer.tokenizer.encode("an ENtry, END of it"):
        if answer.stopped:
            break
        shown.append(answer.push(Token(id)))
    assert "".join(shown) == "an ENtry, " == answer.sample(False).text and answer.stopped == "stop"
    assert shown[3:6] == ["", "", "ENt"], "E and N wait for what follows"
