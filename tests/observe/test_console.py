"""The console: which stream gets what, on a terminal and in a pipe; data cannot control the terminal."""

from __future__ import annotations

import io
import json
import re
import threading
from collections.abc import Iterator
from unittest.mock import Mock

import pytest

from graftune.observe import progress as progress_module
from graftune.observe.console import AnswerRow, Console
from graftune.observe.progress import BarProgress, LineProgress, WorkProgress

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
    console.table("a table", ("name", "value"), [("loss", 1.5), ("steps", 20)])
    console.side_by_side("answers", [AnswerRow("p", "b", "t", "r")])
    console.line("a line")
    with console.progress(2) as progress:
        progress.update(1, loss=0.5)
    console.result({"ok": float("nan")})


def test_results_go_to_stdout_and_notes_to_stderr() -> None:
    console, out, err = make()
    everything(console)
    assert "a table" in out.getvalue() and "answers" in out.getvalue() and "a line" in out.getvalue()
    assert "ok" not in out.getvalue()
    for text in ("a note", "warning: a warning", "step 1/2"):
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
def test_data_cannot_control_the_terminal(terminal: bool) -> None:
    console, out, err = make(terminal)
    console.note(EVIL)
    console.warn(EVIL)
    console.table(EVIL, ("c",), [(EVIL,)])
    console.side_by_side(EVIL, [AnswerRow(EVIL, EVIL, EVIL, EVIL)])
    console.stream(EVIL)
    text = out.getvalue() + err.getvalue()
    assert "\x1b[2J" not in text and "\x1b]0" not in text and "\x07" not in text and "\u202e" not in text
    joined = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert joined.count("[bold red]x[/]") >= 4 and ":smile:" in joined
    # The only escapes left are rich's own colours.
    assert all(re.match(r"\x1b\[[0-9;?]*[a-zA-Z]", text[m.start() :]) for m in re.finditer("\x1b", text))


def test_plain_table_is_aligned() -> None:
    console, out, _ = make()
    console.table("T", ("name", "n"), [("a", 5), ("long name", 1234)])
    assert out.getvalue() == "T\n  name          n\n  a             5\n  long name  1234\n"
    console.table("empty", ("name", "n"), [])


def test_side_by_side_plain_shows_all_four() -> None:
    console, out, _ = make()
    console.side_by_side("Answers", [AnswerRow("p" * 200, "line 1\nline 2", "", None)])
    text = out.getvalue()
    assert "[1]" in text and "base:" in text and "tuned:" in text and "reference:" not in text
    assert max(map(len, text.splitlines())) <= 110
    assert text.replace("\n", "").replace(" ", "").count("p" * 200) == 1


def test_side_by_side_on_a_terminal_has_columns() -> None:
    console, out, _ = make(terminal=True)
    console.side_by_side("Answers", [AnswerRow("Q", "BASE ANSWER", "TUNED ANSWER")])
    row = next(line for line in out.getvalue().splitlines() if "BASE ANSWER" in line)
    assert "TUNED ANSWER" in row


def test_progress_on_a_terminal_is_a_bar_with_figures() -> None:
    console, out, err = make(terminal=True)
    with console.progress(60) as progress:
        for step in range(1, 61):
            progress.update(step, loss=0.713, lr=1.8e-4, tokens=142)
        console.note("in between")
        console.line("a result")
    assert "60/60" in err.getvalue() and "loss 0.713" in err.getvalue() and "tok/s" in err.getvalue()
    assert "in between" in err.getvalue() and out.getvalue() == "a result\n"


def lines(total: int, seconds_a_step: float, done: int = 0) -> list[str]:
    now, shown = [0.0], []
    progress = LineProgress(total, done, "training", shown.append, clock=lambda: now[0])
    for step in range(done + 1, total + 1):
        now[0] += seconds_a_step
        progress.update(step, loss=0.7134, lr=1.8e-4, tokens=926)
    return shown


def test_plain_progress_line() -> None:
    shown = lines(60, 6.5)
    assert shown[0] == "step  1/60  loss 0.713  lr 1.8e-04  142 tok/s"
    assert shown[1] == "step  2/60  loss 0.713  lr 1.8e-04  142 tok/s  left 0:06:17"
    assert shown[-1].startswith("step 60/60") and shown[-1].endswith("left 0:00:00")


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("total", "pace", "most"), [(60, 0.01, 22), (10_000, 0.001, 22), (1000, 0.5, 110), (100_000, 0.9, 2000), (1, 1, 1)]
)
def test_plain_progress_is_sparse_but_has_first_and_last(total: int, pace: float, most: int) -> None:
    shown = lines(total, pace)
    assert len(shown) <= most
    assert shown[0].split()[1].startswith("1/") and f"{total}/{total}" in shown[-1]


def test_resumed_progress_counts_time_from_the_resume() -> None:
    assert lines(100, 2.0, done=90)[1] == "step  92/100  loss 0.713  lr 1.8e-04  463 tok/s  left 0:00:16"


def test_other_work_is_counted_in_its_own_units() -> None:
    now, shown = [0.0], []
    progress = LineProgress(24, 0, "asking", shown.append, unit="answers", clock=lambda: now[0])
    for tick in range(1, 241):  # a round of tokens a second; every tenth completes an answer
        now[0] += 1
        progress.update(tick // 10)
    assert shown[0] == "asking: 0/24 answers" and shown[1] == "asking: 0/24 answers, 0:00:04"
    assert shown[-1] == "asking: 24/24 answers, 0:04:00"
    assert len(shown) < 20 and any(
        re.fullmatch(r"asking: 4/24 answers, 0:00:4\d, left 0:03:\d\d", line) for line in shown
    )
    quick: list[str] = []
    LineProgress(3, 0, "asking", quick.append, unit="answers", clock=lambda: 0.0).update(3)
    assert quick == ["asking: 0/3 answers"]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "SILENCE", 0.02)


class Waiting(io.StringIO):
    """Lets a test wait until something was written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def write(self, text: str) -> int:
        self.written.set()
        return super().write(text)

    def wait(self) -> None:
        self.written.clear()
        assert self.written.wait(10), "nothing was written"


def test_a_heartbeat_line_is_written_after_some_seconds_of_silence(impatient: None) -> None:
    """Whatever the main thread does: here it only waits."""
    err = Waiting()
    console = Console(stdout=io.StringIO(), stderr=err)
    with console.working("planning memory"):
        err.wait()
    assert err.getvalue().startswith("planning memory\n")
    with console.progress(24) as bar:
        bar.activity = "3 of 64 answers sampled"
        err.wait()
        bar.update(7, loss=1.0)
        with console.progress(60, label="validating", unit="examples"):
            err.wait()
            err.wait()
        err.wait()
        err.wait()
    text = err.getvalue()
    before, _, after = text.rpartition("validating")
    assert "step 1/24: running for 0 s, 3 of 64 answers sampled" in before and "validating: 0/60 examples" in text
    assert "step  7/24  loss 1.000" in after, "the outer progress is shown again once the inner one is done"
    assert "step 8/24: running for 0 s" not in text, "steps that come quickly are not stuck"
    assert not [thread for thread in threading.enumerate() if thread.name == "graftune-heartbeat"]


def test_quick_work_without_a_count_writes_nothing() -> None:
    console, out, err = make()
    with console.working("planning memory"):
        pass
    assert out.getvalue() == err.getvalue() == ""


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("total", "pace", "least", "most"),
    [(24, 10.0, 7, 9), (3000, 1.0, 18, 22), (8640, 10.0, 140, 150), (20, 0.1, 1, 1)],
)
def test_a_terminal_keeps_lines_with_the_loss(total: int, pace: float, least: int, most: int) -> None:
    now, shown = [0.0], list[str]()
    progress = BarProgress(total, 0, "training", Mock(), shown.append, clock=lambda: now[0])
    for step in range(1, total + 1):
        now[0] += pace
        progress.update(step, loss=0.7134, lr=1.8e-4, tokens=426)
    assert least <= len(shown) <= most
    assert all("loss 0.713" in text for text in shown) and f"{total}/{total}" in shown[-1]


@pytest.mark.parametrize("width", [26, 40, 60, 100, 140])
def test_a_bar_fits_the_terminal_and_keeps_count_and_loss(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    console, _, err = make(terminal=True)
    with console.progress(12_000) as bar:
        bar.update(1000, loss=0.713, lr=1e-4, tokens=100)
        with console.progress(60, label="validating", unit="examples") as inner:
            inner.update(30)
            console.note("in between")  # hides the display and draws it again
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", err.getvalue())
    drawn = [line for line in re.split(r"[\r\n]", text) if "1000/12000" in line]
    assert drawn and all("loss 0.713" in line and len(line.rstrip()) <= width for line in drawn)
    assert "30/60 examples" in text and ("tok/s" in text) == (width > 60)


@pytest.mark.parametrize("terminal", [False, True])
def test_the_label_of_the_work_may_change(terminal: bool) -> None:
    console, _, err = make(terminal)
    with console.progress(3, label="writing", unit="MB") as bar:
        bar.label = f"copying layers.7 {EVIL}"
        bar.began -= 100.0  # so that plain output has a line at the end
        bar.update(3)
        if isinstance(bar, BarProgress):
            bar._bar.refresh()  # now, and not a quarter of a second later
    assert "copying layers.7 [bold red]x" in err.getvalue() and "\x1b[2J" not in err.getvalue()


def test_a_quiet_progress_still_measures() -> None:
    console, _, err = make(quiet=True)
    with console.progress(3) as bar:
        assert type(bar) is WorkProgress
        bar.update(1, tokens=10)
        assert bar.meter.tok_s > 0
    assert err.getvalue() == ""
