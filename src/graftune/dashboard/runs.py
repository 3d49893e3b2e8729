"""The runs below a folder, each as a short document, kept current at the cost of looking at what has changed.

A folder is a run if it holds metrics.jsonl, the first file that a run makes. Runs are found by walking, without
following links, and known by their path below the watched folder; a request can only name one that was found, so no
name leads out of it. What a run says is read again when its files' sizes or times change, and of its log only what is
new.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from graftune.dashboard.bounded import cut
from graftune.dashboard.glance import Glance
from graftune.dashboard.log import Log
from graftune.dashboard.reading import stamp
from graftune.dashboard.settings_file import settings_of
from graftune.dashboard.states import CONFIG, RUNNING, Pulse, State, state_of
from graftune.errors import GraftuneError, one_line
from graftune.observe.events import number

LOG = "metrics.jsonl"
DEEPEST = 6  # folders below the watched one
MOST_RUNS, MOST_FOLDERS = 20_000, 100_000  # that are looked for, and in
FRESH = 0.5  # seconds for which a look at all folders holds
KEPT_BYTES = 32 << 20  # figures of steps that are held in memory, over all runs
MOST_SETTINGS, LONGEST_SETTINGS = 1000, 32 << 10  # values of a run's settings, and their characters
Document = dict[str, Any]


class Run:
    """One run folder."""

    def __init__(self, key: str, folder: Path):
        self.id, self.folder, self.lock = key, folder, threading.RLock()
        self._log_path, self._config_path = str(folder / LOG), str(folder / CONFIG)
        self.glance, self.pulse = Glance(self._log_path), Pulse(folder)
        self.settings: dict[str, Any] = {}
        self._log: Log | None = None
        self._log_lock = threading.Lock()  # of its own: the list does not wait for a long log that is read
        self._stamps: tuple[Any, ...] = ()
        self.state = State("preparing", "")
        self.version = 0  # rises whenever the document changes
        self._looked = -math.inf

    def refresh(self, fresh: float = 0.0) -> None:
        """Read what has changed, unless that was done in the last `fresh` seconds."""
        with self.lock:
            if time.monotonic() - self._looked < fresh:
                return
            self._looked = time.monotonic()
            log, config = stamp(self._log_path), stamp(self._config_path)
            before = self._stamps
            if before[1:] != (config,):
                self.settings = cut(settings_of(self._config_path), MOST_SETTINGS, LONGEST_SETTINGS)
            if before[:1] != (log,) or self.glance.behind:
                self.glance.advance()
            state = state_of(self.folder, self.glance, None if self._over() else self.pulse.holder())
            if before != (log, config) or state != self.state or self.glance.behind:
                self._stamps, self.state = (log, config), state
                self.version += 1

    def _over(self) -> bool:
        """An ended run is looked at once more only if somebody has its lock."""
        return bool(self.glance.end) and not os.path.lexists(self.pulse.path)

    def document(self, differing: list[str]) -> Document:
        with self.lock:
            glance, settings = self.glance, self.settings
            best, best_step = glance.best()
            return {
                "id": self.id,
                "name": shown_name(self.folder.name),
                "state": self.state.state,
                "sentence": self.state.sentence,
                # Empty where the settings could not be read: what is not known is not made up.
                "base": (_text(settings["base"]) or "bundled SmolLM2-135M-Instruct") if "base" in settings else "",
                "data": _data(settings["data"]) if "data" in settings else "",
                "method": _text(settings.get("method")),
                "steps": glance.steps,
                "max_steps": glance.total,
                "best_eval": best,
                "best_eval_step": best_step,
                "last_loss": number(glance.step.get("loss")),
                "tok_s": number(glance.step.get("tok_s")) if self.state.state in RUNNING else None,
                "started": number(glance.start.get("time")),
                "updated": glance.updated,
                "worked_s": glance.worked_s,
                "last_began": glance.began[0],
                "last_began_step": glance.began[1],
                "settings": settings,
                "differing": differing,
            }

    @contextmanager
    def log(self) -> Iterator[Log]:
        """All figures, current, and not changed by another thread meanwhile."""
        with self._log_lock:
            log = self._log or Log(self._log_path)
            log.advance()
            self._log = log
            yield log

    @property
    def held_bytes(self) -> int:
        log = self._log
        return log.nbytes if log is not None else 0

    def let_go(self) -> None:
        self._log = None


class Runs:
    """All runs below `root`, or the one that `root` is."""

    def __init__(self, root: Path):
        self.root = Path(os.path.realpath(root))
        self._runs: dict[str, Run] = {}
        self._lock = threading.Lock()
        self._looked = -FRESH
        self._used: list[Run] = []  # runs whose figures are held, the latest last

    def refresh(self) -> None:
        """Find runs that are new or gone, and read what has changed in the others."""
        with self._lock:
            if time.monotonic() - self._looked < FRESH:
                return
            found, known = self._found(), self._runs
            self._runs = {key: _same(known.get(key), at) or Run(key, Path(at)) for key, at in found.items()}
            for run in self._runs.values():
                run.refresh()
            self._looked = time.monotonic()

    def _found(self) -> dict[str, str]:
        """Asked at each look: an empty folder may become a run. Settings alone are one only where no run lies below."""
        root, alone = str(self.root), {self.root.name or "run": str(self.root)}
        if _has(self.root, LOG):
            return alone
        return found_runs(root) or (alone if _has(self.root, CONFIG) else {})

    def read_ahead(self) -> None:
        """Read the list, and the figures of the run that was written to last."""
        runs = self.all()
        if runs:
            run = max(runs, key=lambda each: each.glance.updated or 0.0)
            with run.log():
                self.keep(run)

    def known(self) -> list[Run]:
        """As of the last look."""
        return list(self._runs.values())

    def all(self) -> list[Run]:
        self.refresh()
        return list(self._runs.values())

    def get(self, key: str) -> Run:
        """The run of that id. KeyError where there is none, or its folder has become a link."""
        run = self._runs.get(key)
        if run is None:
            self.refresh()
            run = self._runs[key]
        if Path(os.path.realpath(run.folder)) != run.folder or not run.folder.is_dir():
            raise KeyError(key)
        return run

    def differing(self) -> list[str]:
        """Settings that are not the same in all runs."""
        seen: dict[str, Any] = {}
        found: set[str] = set()
        runs = list(self._runs.values())
        for run in runs:
            for name, value in run.settings.items():
                if name != "out" and seen.setdefault(name, value) != value:
                    found.add(name)
        return sorted(found)

    def documents(self) -> list[Document]:
        runs = self.all()
        differing = self.differing()
        return [run.document(differing) for run in runs]

    def keep(self, run: Run) -> None:
        """Hold the figures of a run that was looked at; those looked at longest ago go when it is too much."""
        with self._lock:
            self._used = [*(one for one in self._used if one is not run), run]
            while len(self._used) > 1 and sum(one.held_bytes for one in self._used) > KEPT_BYTES:
                self._used.pop(0).let_go()


def open_runs(folder: str) -> Runs:
    """The runs of a folder that a user named."""
    path = Path(folder).expanduser()
    if not path.exists():
        raise GraftuneError(
            "there is no such folder", where=folder, fix="give a run folder or a folder of runs, or train a run first"
        )
    if not path.is_dir():
        raise GraftuneError("is a file", where=folder, fix="give a run folder or a folder of runs")
    if not os.access(path, os.R_OK | os.X_OK):
        raise GraftuneError("cannot be read", where=folder, fix="change its permissions, or give another folder")
    return Runs(path)


def _has(folder: Path, name: str) -> bool:
    return stamp(folder / name) != (0, 0, 0)


def _same(run: Run | None, folder: str) -> Run | None:
    return run if run is not None and str(run.folder) == folder else None


def found_runs(root: str) -> dict[str, str]:
    """Run folders by id, in the order of their names. What lies in a run is no run."""
    found: dict[str, str] = {}  # text, not Path, and so is what Run looks at often: a thousand of them take their time
    waiting, left = [(root, 0)], MOST_FOLDERS
    while waiting and left and len(found) < MOST_RUNS:
        folder, depth = waiting.pop()
        left -= 1
        try:
            with os.scandir(folder) as entries:
                inside = list(entries)
        except OSError:
            continue
        if folder != root and any(entry.name == LOG and entry.is_file(follow_symlinks=False) for entry in inside):
            key = shown_name(os.path.relpath(folder, root))
            while key in found:
                key += "~"
            found[key] = folder
        elif depth < DEEPEST:
            below = [e for e in inside if e.is_dir(follow_symlinks=False) and not e.name.startswith(".")]
            waiting += [(entry.path, depth + 1) for entry in below]
    return dict(sorted(found.items()))


def shown_name(name: str) -> str:
    """A name as text that every encoder takes: bytes that are no UTF-8 are spelled out."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _data(value: Any) -> str:
    """What the run was trained on, in few words."""
    if isinstance(value, list) and value:
        first = value[0].get("path") if isinstance(value[0], dict) else value[0]
        more = len(value) - 1
        return one_line(str(first)) + (f" and {more} more" if more else "")
    return _text(value) or "bundled sample"
