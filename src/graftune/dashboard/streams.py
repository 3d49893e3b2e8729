"""Server-sent events: the events that are appended to a log, and the runs that change in the list.

Each reader has its own position in the file and looks at it twice a second; the file's pages are in the system's cache.
All readers of the list share one look (`FRESH` of runs.py). A comment every few seconds keeps proxies from closing a
quiet connection.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from graftune.dashboard.line_reader import LineReader
from graftune.dashboard.runs import LOG, Runs, WatchedRun
from graftune.observe.events import parsed, plain

Look = tuple[list[str], float]  # messages, and the seconds until the next look
LOOK, COMMENT = 0.5, 5.0  # seconds between two looks at a file, and between two comments


def message(document: Any, event: str = "") -> str:
    """One server-sent event."""
    return (f"event: {event}\n" if event else "") + f"data: {json.dumps(document, allow_nan=False)}\n\n"


class _NewEvents(LineReader):
    """The messages of the events that were appended since the last call of `read`."""

    SECONDS = 0.0  # one piece at a time

    def clear(self) -> None:
        self._messages: list[str] = []
        if self._inode:
            self._messages.append(message({"reset": True}, "reset"))

    def take(self, piece: bytes) -> None:
        offset = self.offset - len(piece)
        for line in piece.split(b"\n")[:-1]:
            offset += len(line) + 1
            if (event := parsed(line)) is not None:
                self._messages.append(message({"offset": offset, "event": plain(event)}))

    def read(self) -> list[str]:
        self.advance()
        found, self._messages = self._messages, []
        return found


async def follow(looks: Iterator[Look], closing: threading.Event) -> AsyncIterator[str]:
    """Sends what each look finds, until there are no more."""
    last = time.monotonic()
    while not closing.is_set() and (look := await asyncio.to_thread(next, looks, None)):
        found, pause = look
        if not found and time.monotonic() - last > COMMENT:
            found = [": still here\n\n"]
        for text in found:
            yield text
            last = time.monotonic()
            await asyncio.sleep(0)  # lets the server notice a reader that has gone
        await asyncio.sleep(pause)


def log_looks(runs: Runs, run: WatchedRun, since: int) -> Iterator[Look]:
    """Every event after the byte `since`, as it is written; and the state whenever it changes."""
    new, state = _NewEvents(run.folder / LOG, since), None
    yield [": follow\n\n"], 0.0
    while runs.get(run.id) is not None:
        run.refresh(LOOK / 2)  # readers of the same run share one look
        found = new.read()
        if run.state != state:
            state = run.state
            found.insert(0, message({"state": state.state, "sentence": state.sentence}, "state"))
        yield found, 0.0 if new.behind else LOOK
    yield [message({"gone": run.id}, "gone")], 0.0


def list_looks(runs: Runs) -> Iterator[Look]:
    """The document of every run that changes, and the id of every run that is gone."""
    versions = {run.id: run.version for run in runs.all()}
    yield [": follow\n\n"], 0.0
    while True:
        began = time.monotonic()
        before, versions = versions, {run.id: run.version for run in runs.all()}
        changed = [run for run in runs.known() if versions.get(run.id) != before.get(run.id)]
        differing = runs.differing() if changed else []
        found = [message({"run": run.document(differing)}) for run in changed]
        found += [message({"gone": key}) for key in before.keys() - versions.keys()]
        # With thousands of runs, look less often: this may take a tenth of a core.
        yield found, max(1.0, 10 * (time.monotonic() - began))
