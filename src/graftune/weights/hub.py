"""Models from the Hugging Face Hub: downloaded once, kept in its cache, found there again without a network.

huggingface_hub does the work: files go to a cache that other programs share, a connection that breaks off is taken up
where it ended, a later command fetches only the files that are not whole yet, and with HF_HUB_OFFLINE=1 or without a
network the cache alone is asked. Here its errors become sentences, and its progress becomes lines where no terminal is:
bars redrawn into a log file help nobody.
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from graftune.errors import GraftuneError
from graftune.observe.memory import human_bytes

LINE_EVERY = 10.0  # seconds


def download(name: str, revision: str, wanted: Sequence[str]) -> Path:
    """The folder that holds the model's files of these patterns at this revision ("" for the newest)."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

    settings: dict[str, Any] = {"revision": revision or None, "allow_patterns": list(wanted)}
    if not sys.stderr.isatty():
        settings["tqdm_class"] = _lines(name)
    try:
        return Path(snapshot_download(name, **settings))
    except RevisionNotFoundError:
        raise GraftuneError(f"has no revision {revision!r} on the Hub", where=name, mend="check --revision") from None
    except LocalEntryNotFoundError as error:
        raise _unreachable(name, error, "it is not in the cache, and ") from None
    except RepositoryNotFoundError:
        raise GraftuneError(
            "is neither a file or folder here nor a model on the Hub", where=name, mend="check the name or log in"
        ) from None
    except Exception as error:  # whatever the HTTP client of the day raises: its classes differ between versions
        raise _unreachable(name, error, "") from None


def _unreachable(name: str, error: Exception, also: str) -> GraftuneError:
    reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
    return GraftuneError(
        f"is no file or folder here, {also or 'and '}the Hub could not be reached ({reason})",
        where=name,
        mend="check the name and the network and ask again (files that came whole are kept), or give a local path",
    )


def _lines(name: str) -> Any:
    """A progress bar that writes lines: how many bytes now and then, how many files at the end. The package makes
    several bars of it at once, one of them for the files; nothing is said where all of them were in the cache."""
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    class Lines(tqdm):  # the package's own bars show nothing where no terminal is
        shown, received = time.monotonic(), 0

        def __init__(self, *values: Any, **settings: Any) -> None:
            super().__init__(*values, **{**settings, "disable": False, "file": io.StringIO()})

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            if self.unit == "B":
                Lines.received = max(Lines.received, int(self.n))
                if time.monotonic() - Lines.shown > LINE_EVERY:
                    Lines.shown = time.monotonic()
                    sys.stderr.write(f"{name}: {human_bytes(Lines.received)} downloaded\n")

        def close(self) -> None:
            if not self.disable and self.unit != "B" and Lines.received:
                received = human_bytes(Lines.received)
                sys.stderr.write(f"{name}: {self.n} of {self.total} files are here, {received} downloaded\n")
            super().close()

    return Lines
