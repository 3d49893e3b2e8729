"""Server-sent events: what is appended to a log, and what changes in the list, sent to every page that is open.

Each reader keeps its own place in the file and looks at its size twice a second; what two readers read is in the
system's cache. The list is looked at once for all of its readers. A comment every few seconds keeps proxies from
closing a quiet line, and lets the server notice readers that have gone.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

from graftune.dashboard.bounded import cut
from graftune.dashboard.lines import appended
from graftune.dashboard.runs import LOG, Run, Runs
from graftune.dashboard.states import RUNNING, State
from graftune.observe.events import parsed

LOOK, BEAT = 0.5, 5.0  # seconds between two looks at a file, and between two comments
MOST_READERS = 200
MOST_WAITING = 2000  # changes of the list that a reader may be behind
VALUES, CHARACTERS = 500, 16 << 10  # of an event: hundreds of streams may send it at once


def message(document: Any, event: str = "") -> str:
    """One server-sent event."""
    return (f"event: {event}\n" if event else "") + f"data: {json.dumps(document, allow_nan=False)}\n\n"


class Quiet:
    """Says when it is time for a comment."""

    def __init__(self) -> None:
        self.last = time.monotonic()

    def sent(self) -> None:
        self.last = time.monotonic()

    def due(self) -> bool:
        if time.monotonic() - self.last < BEAT:
            return False
        self.sent()
        return True


class Closing:
    """Set when the server ends: streams end with it instead of holding it up."""

    def __init__(self) -> None:
        self.set = False

    async def wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self.set and (left := end - time.monotonic()) > 0:
            await asyncio.sleep(min(left, 0.25))


async def log_events(runs: Runs, run: Run, since: int, closing: Closing) -> AsyncIterator[str]:
    """Every event behind the byte `since`, as it is written; and the state whenever it changes."""
    offset, said, quiet = since, None, Quiet()
    yield ": follow\n\n"
    while not closing.set:
        found = await asyncio.to_thread(_look, runs, run, offset)
        if found is None:
            yield message({"gone": run.id}, "gone")
            return
        state, piece, began, after = found
        if state != said:
            said = state
            yield message({"state": state.state, "sentence": state.sentence}, "state")
            quiet.sent()
        if began != offset:  # another file has taken the place of the one that was followed
            yield message({"reset": True}, "reset")
        messages, offset = _messages(piece, began), after
        del piece, found  # a reader may take its time, and hundreds of them may hold a long line
        for text in messages:
            yield text
            quiet.sent()
        if quiet.due():
            yield ": still here\n\n"
        if after == began:
            await closing.wait(LOOK if state.state in RUNNING else 2 * LOOK)


def _messages(piece: bytes, offset: int) -> list[str]:
    """Of the events on some lines that begin at `offset`."""
    made = []
    for line in piece.split(b"\n")[:-1]:
        offset += len(line) + 1
        event = parsed(line)
        if event is not None:
            made.append(message({"offset": offset, "event": cut(event, VALUES, CHARACTERS)}))
    return made


def _look(runs: Runs, run: Run, offset: int) -> tuple[State, bytes, int, int] | None:
    """The run's state and what is new in its log; None if it is gone."""
    try:
        runs.get(run.id)
    except KeyError:
        return None
    run.refresh(LOOK / 2)  # of several readers' looks one is enough
    return run.state, *appended(run.folder / LOG, offset)


class ListWatch:
    """What changes in the list, found once for all readers."""

    def __init__(self, runs: Runs, closing: Closing):
        self.runs, self.closing = runs, closing
        self.readers: set[asyncio.Queue[str]] = set()
        self._task: asyncio.Task[None] | None = None
        self._versions: dict[str, int] = {}

    async def events(self) -> AsyncIterator[str]:
        queue: asyncio.Queue[str] = asyncio.Queue(maxsize=MOST_WAITING)
        if self._task is None or self._task.done():
            self._versions = await asyncio.to_thread(self._looked)
            self._task = asyncio.create_task(self._watch())
        self.readers.add(queue)
        try:
            yield ": follow\n\n"
            while not self.closing.set and queue in self.readers:
                try:
                    yield await asyncio.wait_for(queue.get(), BEAT)
                except TimeoutError:
                    yield ": still here\n\n"
        finally:
            self.readers.discard(queue)

    async def _watch(self) -> None:
        while self.readers and not self.closing.set:
            began = time.monotonic()
            versions = await asyncio.to_thread(self._looked)
            differing = self.runs.differing()
            for run in self.runs.known():
                if versions.get(run.id) != self._versions.get(run.id):
                    self._send(message({"run": run.document(differing)}))
            for key in self._versions.keys() - versions.keys():
                self._send(message({"gone": key}))
            self._versions = versions
            # Thousands of runs are looked at less often, so that looking takes no more than a tenth of a core.
            await self.closing.wait(max(1.0, 10 * (time.monotonic() - began)))

    def _looked(self) -> dict[str, int]:
        return {run.id: run.version for run in self.runs.all()}

    def _send(self, text: str) -> None:
        for queue in list(self.readers):
            if queue.full():  # a reader that does not read: its stream ends, and it asks for the list anew
                self.readers.discard(queue)
            else:
                queue.put_nowait(text)
