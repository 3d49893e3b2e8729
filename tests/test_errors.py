"""What a message quotes from a file stays on its line, short, and without power over the terminal."""

from __future__ import annotations

from graftune.errors import LONGEST, GraftuneError, one_line, printable

EVIL = "\x1b[2J\x1b]0;title\x07\x9b31m\u202e\u2028\r\n\ud800"


def test_a_message_is_one_printable_line() -> None:
    error = GraftuneError(f"has a token {EVIL} of\nits own", where=f"a{EVIL}b.json", mend=f"remove\t{EVIL}")
    text = str(error)
    assert not [c for c in text if ord(c) < 0x20 or 0x7F <= ord(c) < 0xA0 or c in "\u202e\u2028\ud800"]
    assert "of its own" in text and text.encode()
    assert (error.where or "").startswith("a\u241b[2J"), "what was there is shown, not swallowed"
    assert "\x1b" not in error.what + (error.where or "") + (error.mend or "")


def test_a_long_name_is_cut_and_the_advice_stays() -> None:
    text = str(GraftuneError("x" * 100_000 + " is no layer", where="model.gguf", mend="get the file again"))
    assert len(text) < 2 * LONGEST and text.startswith("model.gguf: xxx") and " … " in text
    assert text.endswith("is no layer; get the file again")


def test_ordinary_text_stays_as_it_is() -> None:
    assert str(GraftuneError("rank is 0", where="run.yaml", mend="it must be at least 1")) == (
        "run.yaml: rank is 0; it must be at least 1"
    )
    assert str(GraftuneError("déjà vu: 你好 \U0001f600")) == "déjà vu: 你好 \U0001f600"
    assert one_line("a" * LONGEST) == "a" * LONGEST and printable("a\tb\n") == "a\tb\n"
