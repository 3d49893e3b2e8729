"""All output to the user.

stdout carries results (tables, answers, or in json mode the one JSON document); progress, notes and warnings go to
stderr, so `graftune ... > file` and `graftune ... --json | jq` contain results only. On a terminal rich renders;
elsewhere the same content is written as plain lines, so that logs can be searched. Text from models and data is never
read as markup, and its control characters are made visible: a data row must not be able to colour, clear or retitle a
terminal.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, TextIO

from graftune.errors import one_line, printable, without_secrets
from graftune.observe.events import to_json
from graftune.observe.progress import TRAINING, BarProgress, HeartbeatThread, LineProgress, WorkProgress, rich_bar


@dataclass(frozen=True)
class AnswerRow:
    """One row of `side_by_side`. None where there is no answer of the base, no adapter, or no known good answer."""

    prompt: str
    base: str | None
    tuned: str | None = None
    reference: str | None = None


class Console:
    """`json`: stdout contains only `result`. `quiet`: no notes or progress; warnings and results stay.
    `silent`: only `fail`, for every rank of a run except the first."""

    documents: ClassVar[int] = 0  # printed by this process: an error after one does not print a second

    def __init__(
        self,
        json: bool = False,
        quiet: bool = False,
        *,
        silent: bool = False,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
    ) -> None:
        self.json, self.quiet = json and not silent, quiet or silent
        self._out, self._err = stdout or sys.stdout, stderr or sys.stderr
        self._failures = self._err
        if silent:
            self._out = self._err = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (until the process ends)
        self._rich: dict[int, Any] = {}
        self._bar: Any = None  # the live progress bar, if one is on the terminal
        self._writing = threading.RLock()  # the heartbeat may write at the same time as the main thread
        self._active: list[LineProgress] = []  # the innermost last
        self._wrote = time.monotonic()
        self._ignores_broken_pipes, self.gone = False, ""  # why a stream can no longer be written

    def ignore_broken_pipes(self) -> None:
        """From here on, a stream whose reader has gone (`| head -1`, a closed terminal) or that cannot be written is
        dropped, and `gone` says why: training goes on without it."""
        self._ignores_broken_pipes = True

    @contextmanager
    def _surviving(self, stream: TextIO) -> Iterator[None]:
        try:
            yield
        except (OSError, SystemExit) as error:  # rich raises the second for a closed pipe
            if not self._ignores_broken_pipes:
                raise
            why = (error.strerror if isinstance(error, OSError) else "") or "Broken pipe"
            self.gone = self.gone or f"{'stdout' if stream is self._out else 'stderr'}: {why}"
            self._bar = None
            nowhere = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (until the process ends)
            self._out, self._err = (nowhere if held is stream else held for held in (self._out, self._err))

    # To stderr: notes, warnings, failures.

    def note(self, text: str) -> None:
        if not self.quiet:
            self._write(self._err, without_secrets(text))

    def warn(self, text: str) -> None:
        self._write(self._err, f"warning: {without_secrets(text)}", style="yellow")

    def fail(self, text: str) -> None:
        """Print why the process ends now, and remove the progress bar."""
        with self._bar_hidden():
            self._bar = None
            self._failures.write(f"graftune: {one_line(text, longest=2000)}\n")
            self._failures.flush()
        self.result({"error": {"message": text}})

    # Results: to stdout, or to stderr while stdout is reserved for the JSON document.

    def line(self, text: str = "") -> None:
        self._write(self._results, text)

    def stream(self, text: str) -> None:
        """Write a piece of an answer, without a newline, and flush."""
        with self._surviving(stream := self._results):
            stream.write(printable(text))
            stream.flush()

    def result(self, document: dict[str, Any]) -> None:
        """The JSON document of a command: one line on stdout in json mode, nothing otherwise."""
        if self.json:
            Console.documents += 1
            with self._surviving(self._out):
                self._out.write(to_json(document) + "\n")
                self._out.flush()

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        title, cells = printable(title), [[printable(str(cell)) for cell in row] for row in rows]
        assert all(len(row) == len(columns) for row in cells), f"{title}: every row needs {len(columns)} cells"
        numeric = [bool(cells) and all(_is_number(row[i]) for row in cells) for i in range(len(columns))]
        if not self._results.isatty():
            self._write(self._results, "\n".join([title, *_plain_table(columns, cells, numeric)]))
            return
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(title=Text(title), box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
        for name, right in zip(columns, numeric, strict=True):
            table.add_column(Text(name), justify="right" if right else "left", overflow="fold")
        for row in cells:
            table.add_row(*map(Text, row))
        self.render(table)

    def side_by_side(self, title: str, rows: Sequence[AnswerRow]) -> None:
        """Base and tuned answers to the same prompts: columns on a terminal, labelled paragraphs elsewhere."""
        if not self._results.isatty():
            blocks = [_plain_answer(number, row) for number, row in enumerate(rows, 1)]
            self._write(self._results, "\n\n".join([*([title] if title else []), *blocks]))
            return
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(
            title=Text(printable(title)) if title else None, box=box.SQUARE, show_lines=True, expand=True,
            title_justify="left", title_style="bold", border_style="dim",
        )  # fmt: skip
        fields = [("prompt", "dim"), ("base", "yellow"), ("tuned", "green"), ("reference", "cyan")]
        shown = [(name, style) for name, style in fields if any(getattr(row, name) is not None for row in rows)]
        for name, style in shown:
            table.add_column(name, style=style, overflow="fold", ratio=1)
        for row in rows:
            table.add_row(*(Text(printable((getattr(row, name) or "").strip())) for name, _ in shown))
        self.render(table)

    def render(self, renderable: Any) -> None:
        """A rich renderable of another module (the data preview), as a result; without colours unless on a terminal."""
        with self._surviving(stream := self._results), self._bar_hidden():
            # A file or pipe has no width to wrap to.
            self._rich_console(stream).print(_Printable(renderable), soft_wrap=not stream.isatty())
            stream.flush()

    @contextmanager
    def progress(self, total: int, done: int = 0, label: str = TRAINING, unit: str = "") -> Iterator[WorkProgress]:
        """Progress over `total` units, named by `unit` in the plural, of which `done` were done before (a resumed run).

        Inside another progress it is shown below the outer one on a terminal, and instead of it elsewhere.
        """
        if self.quiet:
            yield WorkProgress(total, done, label, unit)
        elif self._err.isatty():
            with self._live(keep=label == TRAINING) as bar:
                shown = BarProgress(total, done, label, bar, self._write_progress, unit=unit)
                try:
                    yield shown
                finally:
                    if label != TRAINING:
                        bar.remove_task(shown.task)
        else:
            with self._with_heartbeat(LineProgress(total, done, label, self._write_progress, unit=unit)) as lines:
                yield lines

    @contextmanager
    def working(self, label: str) -> Iterator[None]:
        """Work that cannot be counted: shown with a clock on a terminal, elsewhere once it has taken some seconds."""
        with self.progress(0, label=label):
            yield

    @contextmanager
    def _live(self, keep: bool) -> Iterator[Any]:
        """The live display, which all progress on a terminal shares. The outermost progress starts and stops it."""
        if self._bar is not None:
            yield self._bar
            return
        with rich_bar(self._rich_console(self._err)) as bar:
            self._bar = bar
            try:
                yield bar
            finally:
                bar.live.transient = not keep
                self._bar = None

    @contextmanager
    def _with_heartbeat(self, lines: LineProgress) -> Iterator[LineProgress]:
        self._active.append(lines)
        heartbeat = None
        if len(self._active) == 1:
            heartbeat = HeartbeatThread(
                lambda: time.monotonic() - self._wrote,
                lambda: self._active[-1].age,
                lambda: self._write_progress(self._active[-1].heartbeat_line()),
            )
        try:
            yield lines
        finally:
            if heartbeat is not None:
                heartbeat.stop()
            self._active.remove(lines)

    @property
    def _results(self) -> TextIO:
        return self._err if self.json else self._out

    def _write_progress(self, text: str) -> None:
        self._write(self._err, text)

    def _write(self, stream: TextIO, text: str, style: str = "") -> None:
        """Write a line or several, with control characters made visible."""
        text = printable(text)
        with self._surviving(stream), self._bar_hidden():
            if style and stream.isatty():
                from rich.text import Text

                self._rich_console(stream).print(Text(text, style=style), soft_wrap=True)
            else:
                stream.write(text + "\n")
                stream.flush()
        self._wrote = time.monotonic()

    @contextmanager
    def _bar_hidden(self) -> Iterator[None]:
        """Hides the live bar while something else is written."""
        with self._writing:
            bar = self._bar
            if bar is not None:
                bar.live.transient = True  # or the bar would stay on the screen
                bar.stop()
            try:
                yield
            finally:
                if bar is not None and self._bar is not None:
                    bar.live.transient = False
                    bar.start()

    def _rich_console(self, stream: TextIO) -> Any:
        from rich.console import Console as RichConsole

        if id(stream) not in self._rich:
            self._rich[id(stream)] = RichConsole(file=stream, highlight=False, markup=False, emoji=False)
        return self._rich[id(stream)]


class _Printable:
    """A renderable whose text passes through `printable`: rich itself does not remove escape sequences."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.segment import Segment

        for text, style, control in console.render(self._inner, options):
            yield Segment(printable(text), style, control)


def _plain_table(columns: Sequence[str], cells: Sequence[Sequence[str]], right: Sequence[bool]) -> list[str]:
    """Aligned columns, two spaces apart, those of `right` to the right; newlines in a cell become spaces."""
    flat = [[" ".join(cell.split()) for cell in row] for row in cells]
    widths = [max(len(name), *(len(row[i]) for row in flat), 0) for i, name in enumerate(columns)]
    lines = []
    for row in [list(columns), *flat]:
        padded = [cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(row, widths, right, strict=True)]
        lines.append(("  " + "  ".join(padded)).rstrip())
    return lines


def _plain_answer(number: int, row: AnswerRow) -> str:
    width = max(40, min(120, shutil.get_terminal_size((100, 24)).columns))
    lines = []
    for name in ("prompt", "base", "tuned", "reference"):
        text = getattr(row, name)
        if text is None:
            continue
        label = f"{f'[{number}]' if name == 'prompt' else '':<5}{name + ':':<11}"
        for piece in printable(text).strip().split("\n"):
            wrapped = textwrap.wrap(piece, width - len(label), drop_whitespace=False) or [""]
            for part in wrapped:
                lines.append((label + part).rstrip())
                label = " " * len(label)
    return "\n".join(lines)


def _is_number(cell: str) -> bool:
    try:
        float(cell.replace(",", "").rstrip("%"))
    except ValueError:
        return cell in ("", "-")
    return True
