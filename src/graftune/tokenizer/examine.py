"""Tries a tokenizer.json and a chat template in a process of their own before they are used for the first time.

Both come from strangers. The tokenizers library is compiled code that trusts its file: some files abort the process,
and a token with an id of a billion becomes an array of that length. A template is a program: it may loop for hours or
multiply a text until the memory is full. So a child process with limits on CPU time, memory and wall-clock time uses
them first (examine_process.py). What passed is remembered by its digest in the user's cache, so a file costs a few
tenths of a second once. Rejected: checking the files' structure here, which would follow every version of two formats
that others define; and metering every rendering. SECURITY.md states the risk that remains.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import jinja2
import tokenizers

from graftune.errors import GraftuneError
from graftune.io import user_cache

CACHE, CACHE_SIZE = "tokenizers", 500  # the name of the cache file, and how many digests it holds
WALL_SECONDS, WALL_A_BYTE = 100, 20 / (1 << 20)  # generous: the machine may be busy
FIXES = {"tokenizer": "fetch it again from the model's repository", "template": "use another chat template"}


class Untrusted(NamedTuple):
    """A text to examine. `kind` is tokenizer or template."""

    kind: str
    text: str
    where: str

    @property
    def key(self) -> str:
        versions = f"{tokenizers.__version__} {jinja2.__version__}"
        return f"{self.kind} {hashlib.sha256(self.text.encode('utf-8', 'surrogatepass')).hexdigest()} {versions}"


def check(*files: Untrusted) -> None:
    """Raise GraftuneError for the first of these texts that cannot be used safely."""
    for error in errors_of(*files).values():
        raise error


def errors_of(*files: Untrusted) -> dict[str, GraftuneError]:
    """The errors of the texts that cannot be used safely, by kind. If a text ends the examining process, those after it
    are not examined: a tokenizer comes first, and is refused with its template unread."""
    known, found = user_cache.recall(CACHE), dict[str, GraftuneError]()
    new = [file for file in files if known.get(file.key) is not True]
    for file, fault in zip(new, faults_of(new) if new else [], strict=False):
        if fault:
            what = f"the chat template is refused: {fault}" if file.kind == "template" else fault
            found[file.kind] = GraftuneError(what, where=file.where, fix=FIXES[file.kind])
        else:
            user_cache.remember(CACHE, file.key, True, CACHE_SIZE)
    return found


def faults_of(files: list[Untrusted]) -> list[str]:
    """Examine texts in one child process: why each cannot be used, or an empty string."""
    given = json.dumps([(file.kind, file.text) for file in files])
    child = Path(__file__).with_name("examine_process.py")
    try:
        made = subprocess.run(
            [sys.executable, "-I", str(child), json.dumps(sys.path)],
            input=given.encode(),
            capture_output=True,
            timeout=WALL_SECONDS + WALL_A_BYTE * len(given),
            env=os.environ | {"TOKENIZERS_PARALLELISM": "false", "RUST_BACKTRACE": "0"},
        )
        lines, code = made.stdout, made.returncode
    except subprocess.TimeoutExpired as expired:
        lines, code = expired.stdout or b"", -signal.SIGXCPU
    except OSError as error:
        raise GraftuneError(f"it cannot be examined ({error})", where=files[0].where) from None
    try:
        found = [str(json.loads(line)) for line in lines.splitlines()]
    except ValueError:  # something else of this Python installation printed there
        raise GraftuneError("it cannot be examined (unexpected output)", where=files[0].where) from None
    if len(found) < len(files):
        if code == -signal.SIGXCPU:
            found.append("it takes too long to use it once")
        else:
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            found.append(f"it ends the process that tries it ({how})")
    return found
