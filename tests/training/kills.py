"""Runs and exports that are killed at random moments and taken up again, and what has to hold after every kill.

A life is one run: begun, killed, resumed, killed again, finished, exported. The moment of a kill is uniform over the
time that the process would have taken, so imports aside (a forked child has them) every phase is hit as often as it is
long. A process of its own starts for longer than it trains: most of its kills wait for a step that is drawn. After
each kill what has its final name must be whole; at the end of a life the adapter, the export and the log's figures
must be those of the undisturbed run, and nothing else may lie about. tests/two_ways/test_resume.py lives a few lives,
tests/soak/soak_kills.py hundreds.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from graftune.observe.events import BEGINNINGS, evals, parsed, read_events, steps
from graftune.weights import checkpoint
from tests.training.runs import ROOT

FIGURES = ("step", "epoch", "loss", "grad_norm", "lr", "response_tokens")
MOST_IN_A_ROW = 8  # kills of one run before it may finish
IN_STEPS = 0.8  # of the kills of processes that start slowly: those that wait for a step
AFTER_A_STEP = 0.3  # seconds, at most
EXPORTS = (("merged", "merged"), ("gguf-lora", "adapter.gguf"))


class Starts(Protocol):
    """Something that starts `graftune ...`, one process at a time: tests.training.runs.Processes, or Fresh."""

    slow: bool  # whether starting takes longer than training

    def start(self, *line: str, log: Path, environment: dict[str, str] | None = None) -> int: ...
    def wait(self) -> int: ...


class Fresh:
    """A process of its own for each command line, imports and all: on a GPU nothing can be forked."""

    slow = True

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *line: str, log: Path, environment: dict[str, str] | None = None) -> int:
        paths = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
        everything = {**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", **(environment or {})}
        with log.open("wb") as said:
            command = [sys.executable, "-m", "graftune", *line]
            self.process = subprocess.Popen(command, stdout=said, stderr=said, env=everything)
        return self.process.pid

    def wait(self) -> int:
        assert self.process is not None
        return self.process.wait()


@dataclass
class Tally:
    """What was killed, and where."""

    kills: int = 0
    resumes: int = 0  # of the kills, those of a process that resumed
    lives: int = 0
    phases: Counter[str] = field(default_factory=Counter)


class Lives:
    """`line` trains; `straight` is where it did so undisturbed, in `seconds`."""

    def __init__(self, starts: Starts, line: list[str], straight: Path, root: Path, seconds: float, seed: int):
        self.starts, self.line, self.straight, self.root, self.seconds = starts, line, straight, root, seconds
        self.draw, self.tally = random.Random(seed), Tally()
        self.log, self.temp, self.cache = root / "log", root / "temp", root / "cache"
        for folder in (self.temp, self.cache):
            folder.mkdir(parents=True)
        self.environment = {"TMPDIR": str(self.temp), "GRAFTUNE_CACHE": str(self.cache)}
        self.want = figures(straight)
        self.exported = {name: (self.export(straight, to, name), self._contents(root / name)) for to, name in EXPORTS}

    def export(self, run: Path, to: str, name: str) -> float:
        """Undisturbed, into `root`; the seconds it took."""
        began = time.monotonic()
        assert self._run(*self._export_line(run, to, self.root / name)) == 0, self.said()
        return time.monotonic() - began

    def _export_line(self, run: Path, to: str, place: Path) -> list[str]:
        return ["export", str(run), "--to", to, "--out", str(place), "--force"]

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def _run(self, *line: str) -> int:
        self.starts.start(*line, log=self.log, environment=self.environment)
        return self.starts.wait()

    def _killed(self, seconds: float, *line: str, run: Path | None = None) -> bool:
        """Whether the process was there to be killed at a moment of so many seconds, or at a step of `run`."""
        began, before = time.monotonic(), _begun(run) if run else 0
        pid = self.starts.start(*line, log=self.log, environment=self.environment)
        if run and self.starts.slow and self.draw.random() < IN_STEPS:
            wanted = self.draw.randint(0, len(self.want[0]) - _done(run))
            while not _came_to(run, wanted, before) and time.monotonic() - began < 4 * self.seconds:
                time.sleep(0.01)
            time.sleep(self.draw.uniform(0, AFTER_A_STEP))
        else:
            time.sleep(max(0.0, self.draw.uniform(0, seconds) - (time.monotonic() - began)))
        with suppress(ProcessLookupError):  # it was done already
            os.kill(pid, signal.SIGKILL)
        code = self.starts.wait()
        assert code in (0, -signal.SIGKILL), self.said()
        return code != 0

    def until(self, kills: int) -> Tally:
        while self.tally.kills < kills:
            self._live(kills)
        return self.tally

    def _live(self, most: int) -> None:
        number = self.tally.lives
        home = self.root / f"life-{number}"
        home.mkdir()
        if number % 2:  # data are encoded anew, not found in the cache
            shutil.rmtree(self.cache)
            self.cache.mkdir()
        run, in_a_row = home / self.straight.name, 0  # which an export puts into its file
        while self.tally.kills < most and in_a_row < MOST_IN_A_ROW:
            resumes = (run / "config.yaml").exists()
            if in_a_row and resumes and 2 * self.tally.resumes > self.tally.kills:
                break
            left = 1 - 0.7 * _done(run) / len(self.want[0])
            before = _resumed(run)
            if not self._killed(self.seconds * left, *self._next(run), run=run):
                break
            self._count(run, resumes, before)
            in_a_row += 1
        if self._run(*self._next(run)) != 0:
            raise AssertionError(self.said())
        self._check(run, home)
        self._export_killed(run, home, number, most)
        self.tally.lives += 1
        shutil.rmtree(home)

    def _next(self, run: Path) -> list[str]:
        """The command that a user would type now."""
        begun = (run / "config.yaml").exists()
        return ["train", "--resume", str(run)] if begun else [*self.line, "--out", str(run)]

    def _count(self, run: Path, resumes: bool, before: int) -> None:
        self.tally.kills += 1
        self.tally.resumes += resumes
        came_to_resume = _resumed(run) > before
        self.tally.phases[phase(run, resumes and not came_to_resume)] += 1
        check_whole(run, self.straight)

    def _check(self, run: Path, home: Path) -> None:
        assert figures(run) == self.want
        assert read_events(run / "metrics.jsonl")[-1]["event"] == "run_end", "the log's last word"
        assert self.same_adapter(run)
        assert names(run) == names(self.straight), set(names(run)) ^ set(names(self.straight))
        assert names(home, deep=False) == [run.name] and not names(self.temp), (names(home, False), names(self.temp))

    def _export_killed(self, run: Path, home: Path, number: int, most: int) -> None:
        to, name = EXPORTS[number % len(EXPORTS)]
        place, line = home / "out" / name, self._export_line(run, to, home / "out" / name)
        seconds, want = self.exported[name]
        enough = 2 * self.tally.resumes >= self.tally.kills  # half of all kills are those of a resume
        if self.tally.kills < most and enough and self._killed(seconds, *line):
            self.tally.kills += 1
            begun = (home / "out").exists() and any(path.name.endswith(".part") for path in (home / "out").iterdir())
            self.tally.phases["export: " + ("writing" if begun else "written" if place.exists() else "opening")] += 1
            assert not place.exists() or self._contents(place) == want, "an export that is there is whole"
        assert self._run(*line) == 0, self.said()
        assert self._contents(place) == want
        beside = {name} | ({"adapter.Modelfile"} if to == "gguf-lora" else set())
        assert set(names(home / "out", deep=False)) == beside and not names(self.temp)
        assert names(run) == names(self.straight)

    def same_adapter(self, run: Path) -> bool:
        return self._contents(run / "adapter") == self._contents(self.straight / "adapter")

    def _contents(self, place: Path) -> dict[str, bytes]:
        """Of a file or folder."""
        paths = [place] if place.is_file() else sorted(path for path in place.rglob("*") if path.is_file())
        return {path.name: path.read_bytes() for path in paths}


def figures(run: Path) -> tuple[list[tuple[object, ...]], ...]:
    events = read_events(run / "metrics.jsonl")
    return tuple([tuple(e.get(k) for k in FIGURES) for e in kind] for kind in (steps(events), evals(events)))


def names(folder: Path, deep: bool = True) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in (folder.rglob("*") if deep else folder.iterdir()))


def check_whole(run: Path, straight: Path) -> None:
    """Whatever has its final name is whole, at whatever moment the process died."""
    for path in checkpoint.steps(run / "checkpoints").values():
        checkpoint.check_whole(path)
    adapter = run / "adapter"
    if adapter.exists():
        for path in (straight / "adapter").iterdir():
            assert (adapter / path.name).read_bytes() == path.read_bytes(), "an adapter that is there is whole"


def phase(run: Path, resuming: bool) -> str:
    """What the process was at, by what it left."""
    if resuming:
        return "resuming, before its first event"
    if not (run / "config.yaml").exists():
        return "preparing" if run.exists() else "starting"
    if any(path.name.endswith(".part") for path in (run / "checkpoints").glob("*")):
        return "writing a checkpoint"
    if (run / "adapter.part").exists():
        return "writing the adapter"
    said = "preparing the first step"
    for event in _events(run):
        if event["event"] == "run_end":
            return "after the last event"
        said = str(event["phase"]) if event["event"] == "phase" else said
    return said


def _events(run: Path) -> list[dict[str, object]]:
    """Of the process that was last; read as a kill left it."""
    lines = (run / "metrics.jsonl").read_bytes().split(b"\n") if (run / "metrics.jsonl").exists() else []
    found = [event for line in lines if (event := parsed(line)) is not None]
    starts = [at for at, event in enumerate(found) if event["event"] in BEGINNINGS]
    return found[starts[-1] :] if starts else []


def _came_to(run: Path, steps: int, before: int) -> bool:
    """Whether the process that begins after `before` others has logged so many steps, or its end."""
    if _begun(run) == before:
        return False
    said = [event["event"] for event in _events(run)]
    return said.count("step") >= steps or "run_end" in said


def _begun(run: Path, kinds: tuple[str, ...] = BEGINNINGS) -> int:
    log = run / "metrics.jsonl"
    said = log.read_bytes() if log.exists() else b""
    return sum(said.count(f'"event": "{kind}"'.encode()) for kind in kinds)


def _resumed(run: Path) -> int:
    return _begun(run, ("resume",))


def _done(run: Path) -> int:
    found = checkpoint.steps(run / "checkpoints")
    return max(found) if found else 0
