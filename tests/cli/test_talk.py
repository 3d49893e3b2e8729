"""A conversation on a terminal, driven in process against a stand-in for the model."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from graftune.cli import main
from graftune.cli.talk import read_message
from graftune.errors import GraftuneError
from tests.cli.conftest import Engine

Capture = pytest.CaptureFixture[str]
Typed = str | type[BaseException] | Callable[[], None]


class Keyboard(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lines that are typed, keys that raise, and functions that are called between two lines."""

    def set_up(*lines: Typed) -> None:
        waiting = list(lines)

        def answer(prompt: str = "") -> str:
            while not isinstance(line := waiting.pop(0), str):
                if isinstance(line, type):
                    raise line()
                line()
            return line

        monkeypatch.setattr("sys.stdin", Keyboard())
        monkeypatch.setattr("builtins.input", answer)

    return set_up


def asked(engine: Engine) -> list[list[str]]:
    """What each call was asked: the roles' initials and their text."""
    return [[f"{m['role'][0]}:{m['content']}" for m in args[0]] for args, _ in engine.of("chat")]


def test_keeps_and_forgets(engine: Engine, capsys: Capture, typed: Any) -> None:
    typed("one", "two", "/reset", "", "three", "/nope", "/etc/hosts is what?", "/quit")
    assert main(["chat", "runs/a"]) == 0
    assert [len(messages) for messages in asked(engine)] == [1, 3, 1, 3]
    out, err = capsys.readouterr()
    assert out.count("tuned") == 4 and "/nope is not a command; /help lists them" in err


def test_comparing_keeps_both_sides(engine: Engine, capsys: Capture, typed: Any) -> None:
    typed("one", "two", EOFError)
    assert main(["chat", "runs/a", "--compare"]) == 0
    last = {how["adapted"]: args[0] for args, how in engine.of("chat")[-2:]}
    assert last[True][1]["content"].startswith("tuned") and last[False][1]["content"].startswith("base")
    assert "base:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("keys", "code"),
    [
        ([EOFError], 0),
        (["/exit"], 0),
        ([KeyboardInterrupt, KeyboardInterrupt], 130),
        ([KeyboardInterrupt, "hi", KeyboardInterrupt, EOFError], 0),
    ],
)
def test_leaving(engine: Engine, capsys: Capture, typed: Any, keys: list[Typed], code: int) -> None:
    typed(*keys)
    assert main(["chat", "runs/a"]) == code
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("how", [[], ["--compare"]])
def test_ctrl_c_stops_the_answer_and_keeps_the_session(
    engine: Engine, capsys: Capture, typed: Any, how: list[str]
) -> None:
    def stops(after: int | None) -> Callable[[], None]:
        return lambda: setattr(engine, "stops_after", after)

    typed("one", stops(0), "never", stops(None), "two", stops(None), "/quit")
    assert main(["chat", "runs/a", *how]) == 0
    assert asked(engine)[-1] == ["u:one", "a:tuned 1 \x1b[2J", "u:two"], "what was not begun leaves nothing behind"
    assert "stopped before the answer began" in capsys.readouterr().err


def test_what_was_said_before_ctrl_c_stays(engine: Engine, capsys: Capture, typed: Any) -> None:
    typed(
        lambda: setattr(engine, "stops_after", 1),
        "one",
        lambda: setattr(engine, "stops_after", None),
        "shorter",
        EOFError,
    )
    assert main(["chat", "runs/a"]) == 0
    assert asked(engine)[-1] == ["u:one", "a:tuned ", "u:shorter"]
    assert "/undo takes the message back" in capsys.readouterr().err


def test_the_oldest_turns_leave_a_full_context(engine: Engine, capsys: Capture, typed: Any) -> None:
    engine.context = 40
    typed(*(f"message {i} has five words" for i in range(8)), "/quit")
    assert main(["chat", "runs/a", "--system", "Be brief.", "--max-new-tokens", "10"]) == 0
    calls = asked(engine)
    assert len(calls) == 8 and all(call[0] == "s:Be brief." and call[1].startswith("u:message") for call in calls)
    assert calls[-1][-1] == "u:message 7 has five words" and calls[-1][1] == "u:message 5 has five words"
    assert all(engine.prompt_tokens(args[0]) + 10 <= 40 for args, _ in engine.of("chat"))
    assert capsys.readouterr().err.count("context of 40 tokens is full") == 1


def test_a_message_that_is_refused_does_not_end_the_session(engine: Engine, capsys: Capture, typed: Any) -> None:
    error = GraftuneError("a prompt has 9000 tokens", fix="it needs 1 to 2047 of them")
    typed("one", lambda: setattr(engine, "raises", error), "x" * 9000, "/retry",
          lambda: setattr(engine, "raises", None), "two", EOFError)  # fmt: skip
    assert main(["chat", "runs/a"]) == 0
    assert [m[:2] for m in asked(engine)[-1]] == ["u:", "a:", "u:"]
    assert capsys.readouterr().err.count("warning: a prompt has 9000 tokens") == 2


def test_system_undo_and_retry(engine: Engine, capsys: Capture, typed: Any) -> None:
    typed(
        "/retry",
        "/undo",
        "one",
        "two",
        "/undo",
        "/system Be brief.",
        "three",
        "/retry",
        "/system",
        "four",
        "/help",
        EOFError,
    )
    assert main(["chat", "runs/a", "--temperature", "1", "--seed", "5"]) == 0
    calls = asked(engine)
    assert [m.split()[0] for m in calls[2]] == ["s:Be", "u:one", "a:tuned", "u:three"] and calls[3] == calls[2]
    assert [m.split()[0] for m in calls[4]] == ["u:one", "a:tuned", "u:three", "a:tuned", "u:four"]
    assert [how["seed"] for _, how in engine.of("chat")] == [5, 5, 5, 6, 6], "another draw at each retry"
    out, err = capsys.readouterr()
    assert "nothing to answer again" in err and "nothing to take back" in err and "taken back: two" in err
    assert all(command in out for command in ("/system TEXT", "/undo", "/retry", "/save FILE", "/reset", "/quit"))


def test_saved_conversations_are_training_data(engine: Engine, capsys: Capture, typed: Any, tmp_path: Path) -> None:
    file, nowhere = tmp_path / "my talk.jsonl", tmp_path / "none" / "x.jsonl"
    typed("/save", f"/save {file}", "one", f"/save {file}", "two", f"/save {file}", f"/save {nowhere}", EOFError)
    assert main(["chat", "runs/a", "--system", "Be brief."]) == 0
    rows = [json.loads(line)["messages"] for line in file.read_text().splitlines()]
    assert [len(row) for row in rows] == [3, 5] and rows[1][-2] == {"role": "user", "content": "two"}
    err = capsys.readouterr().err
    assert "saved 1 exchange to" in err and "saved 2 exchanges to" in err
    assert "needs the name of a file" in err and "nothing to save yet" in err and "No such file" in err


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['"""first', "  second", 'third"""'], "first\n  second\nthird"),
        (['"""', "/quit", "", "x", '"""'], "/quit\n\nx"),
        (['"""one"""'], "one"),
        (["first\\", "second\\", "third"], "first\nsecond\nthird"),
        (["  plain  "], "plain"),
    ],
)
def test_messages_of_several_lines(typed: Any, lines: list[str], message: str) -> None:
    typed(*lines)
    assert read_message() == message


def test_a_pasted_block_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a real terminal: its lines are there at once, faster than any typing."""
    ours, theirs = os.openpty()
    with open(theirs, encoding="utf-8") as terminal:
        monkeypatch.setattr("sys.stdin", terminal)
        os.write(ours, b"one\n  two\nthree\n")
        assert read_message() == "one\n  two\nthree"
        os.write(ours, b"/undo\nnext\n")
        assert read_message() == "/undo" and read_message() == "next", "a command is a line of its own"
    os.close(ours)
