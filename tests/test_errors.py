"""What a message quotes from a file stays on its line, short, and without power over the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from graftune import errors
from graftune.errors import LONGEST, GraftuneError, one_line, printable
from graftune.observe.console import Console
from graftune.observe.events import EventLog, read_events

EVIL = "\x1b[2J\x1b]0;title\x07\x9b31m\u202e\u2028\r\n\ud800"


def test_a_message_is_one_printable_line() -> None:
    error = GraftuneError(f"has a token {EVIL} of\nits own", where=f"a{EVIL}b.json", fix=f"remove\t{EVIL}")
    text = str(error)
    assert not [c for c in text if ord(c) < 0x20 or 0x7F <= ord(c) < 0xA0 or c in "\u202e\u2028\ud800"]
    assert "of its own" in text and text.encode()
    assert (error.where or "").startswith("a\u241b[2J"), "what was there is shown, not swallowed"
    assert "\x1b" not in error.what + (error.where or "") + (error.fix or "")


def test_a_long_name_is_cut_and_the_advice_stays() -> None:
    text = str(GraftuneError("x" * 100_000 + " is no layer", where="model.gguf", fix="get the file again"))
    assert len(text) < 2 * LONGEST and text.startswith("model.gguf: xxx") and " … " in text
    assert text.endswith("is no layer; get the file again")


def test_ordinary_text_stays_as_it_is() -> None:
    assert str(GraftuneError("rank is 0", where="run.yaml", fix="it must be at least 1")) == (
        "run.yaml: rank is 0; it must be at least 1"
    )
    assert str(GraftuneError("déjà vu: 你好 \U0001f600")) == "déjà vu: 你好 \U0001f600"
    assert one_line("a" * LONGEST) == "a" * LONGEST and printable("a\tb\n") == "a\tb\n"


def test_what_moves_the_cursor_or_turns_a_line_is_shown() -> None:
    """In answers and rows of data, too, which are longer than a line: a lone carriage return writes over its line."""
    assert printable("a\rb\r\nc\x7f\x08") == "a\u240db\nc\u2421\u2408"
    for turns in (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x2028, 0x2029, 0x85, 0x9B):
        assert printable(f"a{chr(turns)}b") == "a\ufffdb", hex(turns)


KEY, PASSWORD = "wk-0123456789abcdef", "pass/word-of-mine"


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patched:
        own = {"A_TOKEN": KEY[:12], "WANDB_API_KEY": KEY, "mlflow_tracking_password": PASSWORD, "OWN_TOKEN": "short"}
        for name, value in own.items():
            patched.setenv(name, value)
        errors._secrets.cache_clear()
        yield
    errors._secrets.cache_clear()


def test_no_secret_gets_into_a_message_or_a_run_folder(
    tmp_path: Path, secrets: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tracker's own error may quote its key, and an address its login."""
    said = f"refused: {KEY}, {PASSWORD} (short) at https://me:{KEY[:5]}@host/x?a=b@c and http://host/@a"
    clean = "refused: [WANDB_API_KEY], [mlflow_tracking_password] (short) at https://[login]@host/x?a=b@c"
    clean += " and http://host/@a"
    assert str(GraftuneError(said)) == clean
    address = "https://host/d.jsonl?v=dQw4&hf_token=[secret]&X-Amz-Signature=[secret]&monkey"
    assert str(GraftuneError(address.replace("[secret]", "a1-b2%2F"))) == address
    assert (
        str(GraftuneError("at http://me:a@b@host/x and ftp://b@c/d"))
        == "at http://[login]@host/x and ftp://[login]@c/d"
    )
    with EventLog(tmp_path / "metrics.jsonl") as log:
        log.emit("warning", text=said, nested=[{"text": said}])
    Console().warn(said)
    (event,) = read_events(tmp_path / "metrics.jsonl")
    assert event["text"] == event["nested"][0]["text"] == clean
    assert f"warning: {clean}" in capsys.readouterr().err
