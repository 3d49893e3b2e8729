"""Run folders: made and locked for a new run, removed again if it does not start, and cleaned of what a killed process
left half done.

Only the process that holds the folder's lock cleans it: half-written files belong to no running process then. Names are
matched exactly, so that no file of the user's is taken for ours.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from graftune.data.row import plain
from graftune.errors import GraftuneError
from graftune.io.files import PART, check_own_folder, open_own, recover_folder, remove
from graftune.io.lock import LOCK, FolderLock
from graftune.observe.console import Console
from graftune.observe.plot import LivePlot
from graftune.settings.config import Config
from graftune.settings.sources import DataValue, slug
from graftune.training.reporter import write_pictures

_FILES = (
    "config.yaml", "plan.json", "preview.jsonl", "loss.png", "report.html", "profile.json", "trace.json.gz",
    "profile-trace.json", "tracker.json", "round.json",
)  # fmt: skip
_FOLDERS = ("adapter", "model")
_FILLED = ("checkpoints", "tensorboard", "wandb")  # folders that are written into as they are, not replaced
_HALF = re.compile(rf"({'|'.join(map(re.escape, (*_FILES, *_FOLDERS)))})(\.[0-9]+)?{re.escape(PART)}")


def sweep(folder: Path) -> None:
    """Remove half-written files, and give folders that a kill left under their old name their own name back. Before
    that, refuse links that would make the run write elsewhere."""
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


def complete(folder: Path, console: Console) -> None:
    """Write the picture and the report of a finished run that was killed before they were written."""
    half = any(_HALF.fullmatch(path.name) for path in folder.iterdir())
    missing = [name for name in ("loss.png", "report.html") if not (folder / name).exists()]
    if half or missing:
        with FolderLock(folder):
            sweep(folder)
            write_pictures(folder, LivePlot(folder), console.warn)


def new_folder(config: Config, data: DataValue, made: ExitStack, held: ExitStack) -> Path:
    """Make and lock a folder before the model is loaded, so that a read-only disk shows at once. `made` is closed if
    the run does not start, which removes what is new; `held` keeps the lock."""
    folder = Path(config.run.out) if config.run.out else _unused_folder(Path("runs"), slug(data))
    if (folder / "config.yaml").exists():
        raise GraftuneError(
            "there is a run in this folder", where=str(folder), fix="resume it, or set out to another folder"
        )
    _refuse_other_files(folder)
    try:
        for path in (*reversed(folder.parents), folder):
            if not path.is_dir():
                path.mkdir()
                made.callback(_remove, path)
        new = [name for name in (LOCK, "metrics.jsonl", "plan.json", "config.yaml") if not (folder / name).exists()]
        held.enter_context(FolderLock(folder))
        for name in new:
            made.callback(_remove, folder / name)
        sweep(folder)  # files of a run that was killed before its first step
        os.close(open_own(folder / "metrics.jsonl"))
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):  # too many open files: another folder does not help
            raise
        raise GraftuneError(
            f"cannot be written to ({error.strerror})", where=str(folder), fix="set out to another folder"
        ) from None
    return folder


def _remove(path: Path) -> None:
    with suppress(OSError):  # another file is in the folder, or this one was never written
        path.rmdir() if path.is_dir() else path.unlink()


def _refuse_other_files(folder: Path) -> None:
    """Refuse a folder that holds anything except the files of a run that did not start."""
    if folder.is_dir():
        names = {path.name for path in folder.iterdir()} - {LOCK, "metrics.jsonl", "plan.json", *_FILLED}
        others = sorted(name for name in names if not _HALF.fullmatch(name))
        if others:
            raise GraftuneError(
                f"the folder holds other files ({plain(others[0])})", where=str(folder), fix="set out to a new folder"
            )


def _unused_folder(parent: Path, name: str) -> Path:
    """A folder named by the data and the clock, and by a number if two runs start in the same second."""
    name = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    numbered = (parent / (name if number == 1 else f"{name}-{number}") for number in itertools.count(1))
    return next(folder for folder in numbered if not folder.exists())
