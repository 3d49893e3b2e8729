"""Downloads from the Hugging Face Hub: fetched once, kept in its cache, found there again without a network.

huggingface_hub does the work: files go to a cache that other programs share, a connection that breaks off is taken up
where it ended, a later command fetches only the files that are not whole yet, and with HF_HUB_OFFLINE=1 or without a
network only the cache is used. This module turns its errors into sentences, and its progress bars into lines where
stderr is not a terminal.
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from graftune.errors import GraftuneError

LINE_EVERY = 10.0  # seconds
Kind = Literal["model", "dataset"]
NAMES = {"model": "model", "dataset": "data set"}


def download(name: str, revision: str, wanted: Sequence[str], kind: Kind = "model") -> Path:
    """The folder that holds a repository's files of these patterns at this revision ("" for the newest)."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    settings: dict[str, Any] = {"revision": revision or None, "allow_patterns": list(wanted), "repo_type": kind}
    if not sys.stderr.isatty():
        settings["tqdm_class"] = _lines(name)
    try:
        return Path(snapshot_download(name, **settings))
    except RevisionNotFoundError:
        raise GraftuneError(f"has no revision {revision!r} on the Hub", where=name, fix="check its revision") from None
    except GatedRepoError:
        raise GraftuneError(
            f"is a {NAMES[kind]} with gated access on the Hub",
            where=name,
            fix="accept its terms on its page there, then log in with `hf auth login` or set HF_TOKEN",
        ) from None
    except LocalEntryNotFoundError as error:
        raise unreachable(name, error, "it is not in the cache, and ") from None
    except RepositoryNotFoundError:
        raise GraftuneError(
            f"is neither a file or folder here nor a {NAMES[kind]} on the Hub",
            where=name,
            fix="check the name or log in",
        ) from None
    except Exception as error:  # whatever the HTTP client of the day raises: its classes differ between versions
        raise unreachable(name, error, "") from None


def unreachable(name: str, error: Exception, also: str) -> GraftuneError:
    """The error for a Hub that cannot be reached."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return GraftuneError(
            "is not a file or folder here and not in the cache, and HF_HUB_OFFLINE keeps it from being downloaded",
            where=name,
            fix="check the name, or download it once without HF_HUB_OFFLINE",
        )
    reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
    return GraftuneError(
        f"is not a file or folder here, {also or 'and '}the Hub could not be reached ({reason})",
        where=name,
        fix="check the name and the network and ask again (files that came whole are kept), or give a local path",
    )


def _lines(name: str) -> Any:
    """A progress bar that writes lines: how many bytes now and then, how many files at the end. The package makes
    several bars of it at once, one of them for the files; nothing is said where all of them were in the cache."""
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    class ProgressLines(tqdm):  # the package's own bars show nothing where no terminal is
        shown, received = time.monotonic(), 0

        def __init__(self, *values: Any, **settings: Any) -> None:
            super().__init__(*values, **{**settings, "disable": False, "file": io.StringIO()})

        def update(self, n: float | None = 1) -> bool | None:
            if self.unit == "B":
                ProgressLines.received = max(ProgressLines.received, int(self.n + (n or 0)))
                if time.monotonic() - ProgressLines.shown > LINE_EVERY:
                    ProgressLines.shown = time.monotonic()
                    sys.stderr.write(f"{name}: {_megabytes(ProgressLines.received)} downloaded\n")
            shown: bool | None = super().update(n)
            return shown

        def close(self) -> None:
            if not self.disable and self.unit != "B" and ProgressLines.received:
                received = _megabytes(ProgressLines.received)
                sys.stderr.write(f"{name}: {self.n} of {self.total} files are here, {received} downloaded\n")
            super().close()

    return ProgressLines


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"
