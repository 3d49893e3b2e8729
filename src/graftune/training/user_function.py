"""Runs a function of the user's, a metric or a reward, in a process of its own with a time limit per call.

A call that raises, hangs, ends its process or returns something else than numbers raises `CallFailed` here, and the run
goes on. Ctrl-C is noticed while a function computes.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from graftune.errors import GraftuneError

LOADING = 120.0  # seconds in which the file of a function has to be imported
HANGS = 3  # calls in a row that hang; the next ones are then not tried, until `hangs` is set to 0
_SLICE = 0.1  # seconds between two looks for a signal
Between = Callable[[], None]
Kind = Literal["metric", "reward"]


@dataclass(frozen=True)
class FunctionName:
    """A function of the user's, `file.py:function`. A reward's may have a weight, `file.py:function=WEIGHT`, and is
    named `reward` if no name is given."""

    path: Path
    name: str
    weight: float = 1.0

    @staticmethod
    def of(text: str, kind: Kind = "reward") -> FunctionName:
        match = re.fullmatch(r"(.+\.py)(?::([A-Za-z_]\w*))?(?:=([+-]?[0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?))?", text)
        if match is None or (kind == "metric" and (match[2] is None or match[3])):
            fixes = {
                "reward": "write file.py, file.py:function or file.py:function=WEIGHT",
                "metric": "write exact or sample, or file.py:function",
            }
            raise GraftuneError(f"{kind} is {text!r}", fix=fixes[kind])
        path = Path(match[1]).expanduser().resolve()
        if not path.is_file():
            what = f"{kind} is {text!r}, and there is no such file"
            raise GraftuneError(what, where=str(path), fix="name a Python file")
        return FunctionName(path, match[2] or "reward", float(match[3] or 1))

    def __str__(self) -> str:
        return f"{self.path}:{self.name}" + ("" if self.weight == 1 else f"={self.weight:g}")


class CallFailed(Exception):
    """A call gave no usable numbers. `wrong_count`: it returned more or fewer than there are completions."""

    def __init__(self, why: str, wrong_count: bool = False):
        self.wrong_count = wrong_count
        super().__init__(why)


class UserFunction:
    """A function of the user's in its process, which is started for the first call, and again after one that hung."""

    def __init__(self, function: FunctionName, seconds: float, kind: Kind):
        self.path, self.name, self.seconds, self.kind = function.path, function.name, seconds, kind
        self.hangs = 0  # in a row
        self.needed: list[str] = []  # parameters without a default, known once the function is imported
        self._process: subprocess.Popen[bytes] | None = None
        self._read = b""

    def check(self, name: str) -> None:
        """Refuse a function that cannot be imported; the message calls it `name`. Its process keeps running."""
        try:
            self._start(lambda: None)
        except CallFailed as why:
            what = f"the {self.kind} {name} cannot be used: {why}"
            raise GraftuneError(what, where=str(self.path), fix="correct the file") from None

    def _start(self, between: Between) -> None:
        """Import the function; raises `CallFailed`."""
        script = str(Path(__file__).with_name("user_process.py"))
        arguments = [json.dumps([entry or os.getcwd() for entry in sys.path]), str(self.path), self.name]
        self._read = b""
        self._process = subprocess.Popen(
            [sys.executable, script, *arguments, str(self.seconds), self.kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # keeps Ctrl-C from it, and lets `close` end what the function has started
        )
        found = self._line(LOADING, between)
        if isinstance(found, str):
            self.close()
            raise CallFailed(found)
        self.needed = found

    def __call__(self, given: dict[str, Any], between: Between) -> dict[str, Any]:
        """Call the function; raises `CallFailed`. Returns its answer (user_process.py)."""
        if self.hangs >= HANGS:
            raise CallFailed("not tried, because the calls before it took too long")
        if self._process is None:
            self._start(between)
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(given, default=str).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            pass  # the process has ended; `_line` reports how
        found = self._line(self.seconds, between)
        self.hangs = 0
        if "error" in found:
            raise CallFailed(found["error"], found["wrong_count"])
        return dict(found)

    def _line(self, seconds: float, between: Between) -> Any:
        """The next line of the process, as JSON. Ends the process if there is none in time."""
        assert self._process is not None and self._process.stdout is not None
        until, out = time.monotonic() + seconds, self._process.stdout
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(out, selectors.EVENT_READ)
                while b"\n" not in self._read:
                    between()
                    left = until - time.monotonic()
                    if left <= 0:
                        self.hangs += 1
                        raise CallFailed(f"it took longer than {seconds:g} s")
                    if selector.select(min(left, _SLICE)):
                        piece = os.read(out.fileno(), 1 << 16)
                        if not piece:
                            raise CallFailed(f"its process ended{self._status()}")
                        self._read += piece
        except BaseException:
            self.close()
            raise
        line, _, self._read = self._read.partition(b"\n")
        return json.loads(line)

    def _status(self) -> str:
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            return f" with status {self._process.wait(1)}"
        return ""

    def close(self) -> None:
        """End the process, and those that it started."""
        process, self._process = self._process, None
        if process is not None:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with suppress(OSError):
                    pipe.close()  # type: ignore[union-attr]
