"""The console: who writes where, what a terminal gets and what a pipe gets, and that data cannot take control."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from graftune.observe.console import Answer, Console, LineProgress, printable

EVIL = "[bold red]x[/] \x1b[2J\x1b]0;title\x07 :smile: \u202e"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("COLUMNS", "110")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    yield


def make(terminal: bool = False, **how: bool) -> tuple[Console, io.StringIO, io.StringIO]:
    out, err = (Terminal(), Terminal()) if terminal else (io.StringIO(), io.StringIO())
    return Console(stdout=out, stderr=err, **how), out, err


def everything(console: Console) -> None:
    console.note("a note")
    console.warn("a warning")
    console.heading("a heading")
    console.table("a table", ("name", "value"), [("loss", 1.5), ("steps", 20)])
    console.side_by_side("answers", [Answer("p", "b", "t", "r")])
    console.line("a line")
    with console.progress(2) as progress:
        progress.update(1, loss=0.5)
    console.result({"ok": float("nan")})


def test_results_on_stdout_narration_on_stderr() -> None:
    console, out, err = make()
    everything(console)
    assert "a table" in out.getvalue() and "answers" in out.getvalue() and "a line" in out.getvalue()
    assert "ok" not in out.getvalue()
    for text in ("a note", "warning: a warning", "a heading", "step 1/2"):
        assert text in err.getvalue() and text not in out.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_json_mode_keeps_stdout_for_the_document(terminal: bool) -> None:
    console, out, err = make(terminal, json=True)
    everything(console)
    assert json.loads(out.getvalue()) == {"ok": None}
    assert "a table" in err.getvalue()


def test_quiet_keeps_warnings_and_results() -> None:
    console, out, err = make(quiet=True)
    everything(console)
    assert err.getvalue() == "warning: a warning\n"
    assert "a table" in out.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_data_cannot_take_control(terminal: bool) -> None:
    console, out, err = make(terminal)
    console.note(EVIL)
    console.warn(EVIL)
    console.table(EVIL, ("c",), [(EVIL,)])
    console.side_by_side(EVIL, [Answer(EVIL, EVIL, EVIL, EVIL)])
    console.stream(EVIL)
    text = out.getvalue() + err.getvalue()
    assert "\x1b[2J" not in text and "\x1b]0" not in text and "\x07" not in text and "\u202e" not in text
    joined = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert joined.count("[bold red]x[/]") >= 4 and ":smile:" in joined
    # The only escapes left are rich's own colours.
    assert all(re.match(r"\x1b\[[0-9;?]*[a-zA-Z]", text[m.start() :]) for m in re.finditer("\x1b", text))


def test_printable() -> None:
    assert printable("a\tb\nc") == "a\tb\nc"
    assert printable("a\r\nb") == "a\nb"
    assert printable("\x1b[31m\x9b") == "\u241b[31m\ufffd"


def test_plain_table_is_aligned() -> None:
    console, out, _ = make()
    console.table("T", ("name", "n"), [("a", 5), ("long name", 1234)])
    assert out.getvalue() == "T\n  name          n\n  a             5\n  long name  1234\n"
    console.table("empty", ("name", "n"), [])


def test_side_by_side_plain_shows_all_four() -> None:
    console, out, _ = make()
    console.side_by_side("Answers", [Answer("p" * 200, "line 1\nline 2", "", None)])
    text = out.getvalue()
    assert "[1]" in text and "base:" in text and "tuned:" in text and "reference:" not in text
    assert max(map(len, text.splitlines())) <= 110
    assert text.replace("\n", "").replace(" ", "").count("p" * 200) == 1


def test_side_by_side_on_a_terminal_has_columns() -> None:
    console, out, _ = make(terminal=True)
    console.side_by_side("Answers", [Answer("Q", "BASE ANSWER", "TUNED ANSWER")])
    row = next(line for line in out.getvalue().splitlines() if "BASE ANSWER" in line)
    assert "TUNED ANSWER" in row


def test_progress_on_a_terminal_is_a_bar_with_figures() -> None:
    console, out, err = make(terminal=True)
    with console.progress(60) as progress:
        for step in range(1, 61):
            progress.update(step, loss=0.713, lr=1.8e-4, tok_s=142)
        console.note("in between")
        console.line("a result")
    assert "60/60" in err.getvalue() and "loss 0.713" in err.getvalue() and "142 tok/s" in err.getvalue()
    assert "in between" in err.getvalue() and out.getvalue() == "a result\n"


def lines(total: int, seconds_a_step: float, done: int = 0) -> list[str]:
    now, shown = [0.0], []
    progress = LineProgress(total, done, "training", shown.append, clock=lambda: now[0])
    for step in range(done + 1, total + 1):
        now[0] += seconds_a_step
        progress.update(step, loss=0.7134, lr=1.8e-4, tok_s=142.4)
    return shown


def test_plain_progress_line() -> None:
    assert lines(60, 6.5)[0] == "step  1/60  loss 0.713  lr 1.8e-04  142 tok/s  left 0:06:24"
    assert lines(60, 6.5)[-1].startswith("step 60/60") and lines(60, 6.5)[-1].endswith("left 0:00:00")


@pytest.mark.parametrize(
    ("total", "pace", "most"), [(60, 0.01, 22), (10_000, 0.001, 22), (1000, 0.5, 60), (100_000, 0.9, 2000), (1, 1, 1)]
)
def test_plain_progress_is_sparse_but_has_first_and_last(total: int, pace: float, most: int) -> None:
    shown = lines(total, pace)
    assert len(shown) <= most
    assert shown[0].split()[1].startswith("1/") and f"{total}/{total}" in shown[-1]


def test_resumed_progress_counts_time_from_the_resume() -> None:
    assert lines(100, 2.0, done=90)[0] == "step  91/100  loss 0.713  lr 1.8e-04  142 tok/s  left 0:00:18"


def test_observe_imports_without_rich_and_matplotlib() -> None:
    code = (
        "import sys\n"
        "for name in ('rich', 'matplotlib', 'cyclopts', 'yaml'): sys.modules[name] = None\n"
        "from graftune.observe import console, events, memory, plot, speed\n"
        "c = console.Console()\n"
        "c.table('t', ('a',), [(1,)]); c.side_by_side('s', [console.Answer('p', 'b')])\n"
        "with c.progress(1) as p: p.update(1, loss=1.0)\n"
    )
    # None in sys.modules makes find_spec raise ValueError; a machine without rich answers None, as here.
    code = code.replace(
        "from graftune", "import importlib.util as u; real = u.find_spec\n"
        "u.find_spec = lambda n, *a: None if n == 'rich' else real(n, *a)\nfrom graftune", 1,
    )  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
