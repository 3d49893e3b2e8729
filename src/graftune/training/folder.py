"""What a process that was killed left half done in a run folder, and what it had no time to write.

Only whoever holds the folder's lock looks: what is half-written then is nobody's any more. Names are matched exactly,
so that no file of the user's is taken for ours.
"""

from __future__ import annotations

import re
import shutil
import time
from contextlib import suppress
from pathlib import Path

from graftune.errors import GraftuneError
from graftune.io.files import PART, check_own_folder, recover_folder, remove
from graftune.io.lock import LOCK, FolderLock
from graftune.observe.console import Console
from graftune.training.reporter import live_plot_of, write_pictures

_FILES = (
    "config.yaml", "plan.json", "preview.jsonl", "loss.png", "report.html", "profile.json", "trace.json.gz",
    "profile-trace.json", "tracker.json",
)  # fmt: skip
_FOLDERS = ("adapter", "model")
_FILLED = ("checkpoints", "tensorboard", "wandb")  # folders that are written into as they are, not replaced
_HALF = re.compile(rf"({'|'.join(map(re.escape, (*_FILES, *_FOLDERS)))})(\.[0-9]+)?{re.escape(PART)}")
# All that a run has before it can be resumed.
_BEFORE_START = (LOCK, "metrics.jsonl", "plan.json", f"plan.json{PART}", f"config.yaml{PART}")
_DEFAULT_NAME = re.compile(r".+-[0-9]{8}-[0-9]{6}(-[0-9]+)?")
_ABANDONED = 600.0  # seconds after which a folder that is not locked was not made a moment ago


def sweep(folder: Path) -> None:
    """Remove what is half-written; a folder that a kill left under its old name gets its own back. Before that, links
    that would lead the run to write elsewhere are refused."""
    for name in _FILLED:
        check_own_folder(folder / name)
    for path in folder.iterdir():
        if _HALF.fullmatch(path.name):
            remove(path)
    for place in (*(folder / name for name in _FOLDERS), *_checkpoints(folder)):
        recover_folder(place)


def _checkpoints(folder: Path) -> list[Path]:
    found = (re.fullmatch(r"(step-[0-9]{1,15})\.(part|old)", path.name) for path in (folder / "checkpoints").glob("*"))
    return sorted({folder / "checkpoints" / match[1] for match in found if match})


def sweep_unstarted(parent: Path) -> None:
    """Remove runs that were killed before their first step: folders of the default name in which nobody trains, with
    nothing that a run could be resumed from."""
    with suppress(OSError):
        for folder in parent.iterdir():
            if _DEFAULT_NAME.fullmatch(folder.name) and _is_unstarted(folder):
                with suppress(OSError, GraftuneError), FolderLock(folder):
                    if _is_unstarted(folder):
                        shutil.rmtree(folder)


def _is_unstarted(folder: Path) -> bool:
    if folder.is_symlink() or not folder.is_dir() or time.time() - folder.stat().st_mtime < _ABANDONED:
        return False
    names = {path.name for path in folder.iterdir()}
    return LOCK in names and names <= set(_BEFORE_START)


def complete(folder: Path, console: Console) -> None:
    """A finished run that was killed amid its last words: its picture and its report are made up for."""
    half = any(_HALF.fullmatch(path.name) for path in folder.iterdir())
    missing = [name for name in ("loss.png", "report.html") if not (folder / name).exists()]
    if half or missing:
        with FolderLock(folder):
            sweep(folder)
            write_pictures(folder, live_plot_of(folder), console.warn)
