"""The runs below a folder, each as a short document; only what has changed is read again.

A folder is a run if it contains metrics.jsonl, the first file that a run writes. Runs are found by walking, without
following links, and are named by their path below the watched folder. A request can only name a run that was found, so
no name leads out of the folder.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from graftune.dashboard.log import Log
from graftune.dashboard.reading import Stamp, is_file, read_settings, stamp
from graftune.dashboard.states import CONFIG, RUNNING, Heartbeat, RunStatus, state_of
from graftune.dashboard.summary import RunSummary
from graftune.errors import GraftuneError
from graftune.observe.events import number
from graftune.observe.report import base_name, data_name
from graftune.settings.sections import NOT_FOR_REWARDS, RlConfig

LOG = "metrics.jsonl"
OF_REWARDS = frozenset(field.name for field in fields(RlConfig)) - {"reward"}
DEEPEST = 6  # folders below the watched one
MOST_RUNS, MOST_FOLDERS = 20_000, 100_000  # runs that are found, and folders that are searched
FRESH = 0.5  # seconds until the folders are read again
MOST_LOGS = 16  # that are held in memory, those that were requested last
Document = dict[str, Any]


class WatchedRun:
    def __init__(self, key: str, folder: Path):
        self.id, self.folder, self.lock = key, folder, threading.RLock()
        self.log_path, self._config_path = str(folder / LOG), str(folder / CONFIG)
        self.summary, self.heartbeat = RunSummary(self.log_path), Heartbeat(folder)
        self.settings: dict[str, Any] = {}
        self._log_stamp: Stamp | None = None  # None: not read yet
        self._config_stamp: Stamp | None = None
        self.state = RunStatus("preparing", "")
        self.version = 0  # rises whenever the document changes
        self._refreshed = -math.inf

    def refresh(self, fresh: float = 0.0) -> None:
        """Read what has changed, unless that was done in the last `fresh` seconds."""
        with self.lock:
            if time.monotonic() - self._refreshed < fresh:
                return
            self._refreshed = time.monotonic()
            log, config = stamp(self.log_path), stamp(self._config_path)
            new_log, new_config = log != self._log_stamp or self.summary.behind, config != self._config_stamp
            if new_config:
                self.settings = read_settings(self._config_path)
            if new_log:
                self.summary.advance()
            # A run that has ended can only be training again if its lock file is there.
            ended = self.summary.end and not os.path.lexists(self.heartbeat.path)
            state = state_of(self.folder, self.summary, None if ended else self.heartbeat.holder())
            if new_log or new_config or state != self.state:
                self._log_stamp, self._config_stamp, self.state = log, config, state
                self.version += 1

    def document(self, differing: list[str]) -> Document:
        with self.lock:
            summary, settings = self.summary, self.settings
            best, best_step = summary.best()
            return {
                "id": self.id,
                "name": shown_name(self.folder.name),
                "state": self.state.state,
                "sentence": self.state.sentence,
                "base": base_name(settings),
                "data": data_name(settings),
                "method": _text(settings.get("method")),
                "steps": summary.steps,
                "max_steps": summary.total,
                "best_eval": best,
                "best_eval_step": best_step,
                "last_loss": number(summary.step.get("loss")),
                "tok_s": number(summary.step.get("tok_s")) if self.state.state in RUNNING else None,
                "started": number(summary.start.get("time")),
                "updated": summary.updated,
                "worked_s": summary.worked_s,
                "last_began": summary.began[0],
                "last_began_step": summary.began[1],
                "last_stepped": number(summary.step.get("time")),
                "settings": settings,
                "differing": differing,
            }


class Runs:
    """All runs below `root`, or the one run that `root` is."""

    def __init__(self, root: Path):
        self.root = Path(os.path.realpath(root))
        self._runs: dict[str, WatchedRun] = {}
        self._lock = threading.Lock()
        self._refreshed = -FRESH
        self._logs = lru_cache(MOST_LOGS)(Log)

    def refresh(self) -> None:
        """Find runs that are new or gone, and read what has changed in the others."""
        with self._lock:
            if time.monotonic() - self._refreshed < FRESH:
                return
            runs = {}
            for key, folder in self._found().items():
                known = self._runs.get(key)
                runs[key] = known if known and str(known.folder) == folder else WatchedRun(key, Path(folder))
                runs[key].refresh()
            self._runs = runs
            self._refreshed = time.monotonic()

    def _found(self) -> dict[str, str]:
        """The run folders by id; none in an empty root, which may become a run later. A root with settings but no log
        is a run only if none lies below it."""
        root, alone = str(self.root), {self.root.name or "run": str(self.root)}
        if is_file(self.root / LOG):
            return alone
        return found_runs(root) or (alone if is_file(self.root / CONFIG) else {})

    def known(self) -> list[WatchedRun]:
        """The runs as of the last refresh."""
        return list(self._runs.values())

    def all(self) -> list[WatchedRun]:
        self.refresh()
        return self.known()

    def get(self, key: str) -> WatchedRun | None:
        """The run of that id; None where there is none, or its folder has become a link."""
        if key not in self._runs:
            self.refresh()
        run = self._runs.get(key)
        if run is None or Path(os.path.realpath(run.folder)) != run.folder or not run.folder.is_dir():
            return None
        return run

    def differing(self) -> list[str]:
        """Settings that are not the same in all runs that use them."""
        seen: dict[str, Any] = {}
        found: set[str] = set()
        for run in self.known():
            unused = NOT_FOR_REWARDS if run.settings.get("reward") else OF_REWARDS
            for name, value in run.settings.items():
                if name != "out" and name not in unused and seen.setdefault(name, value) != value:
                    found.add(name)
        return sorted(found)

    def document(self) -> Document:
        """The list of runs, for the page and for `graftune runs --json`."""
        runs = self.all()
        differing = self.differing()
        return {"root": str(self.root), "runs": [run.document(differing) for run in runs], "differing": differing}

    @contextmanager
    def log(self, run: WatchedRun) -> Iterator[Log]:
        """The whole log of a run, up to date and locked against other threads."""
        log = self._logs(run.log_path)
        with log.lock:
            log.advance()
            yield log


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


def found_runs(root: str) -> dict[str, str]:
    """Run folders by id, in the order of their names. A folder inside a run is not a run."""
    found: dict[str, str] = {}  # paths as text: thousands of Path objects take too long
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
            while key in found:  # names that differ only in what cannot be printed
                key += "~"
            found[key] = folder
        elif depth < DEEPEST:
            below = [e for e in inside if e.is_dir(follow_symlinks=False) and not e.name.startswith(".")]
            waiting += [(entry.path, depth + 1) for entry in below]
    return dict(sorted(found.items()))


def shown_name(name: str) -> str:
    """A file name as text; bytes that are not UTF-8 are escaped."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
