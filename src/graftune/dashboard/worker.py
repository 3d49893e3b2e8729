"""A process beside the server that loads what the server does not: a model, or a tokenizer with its token cache.

It reads requests and writes answers as lines of JSON, one request at a time, and ends with the server (its input
closes). An answer is any number of documents and one with `end`. The `key` identifies what it has loaded: a request
with another key ends the process and starts a new one. It also ends when it has been idle for a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from graftune.dashboard.security import TOKEN

Document = dict[str, Any]
IDLE, LOOK = 300.0, 2.0  # seconds without a request until a worker ends, and between two calls of `must_end`
LONGEST = 64 << 20  # bytes of one document
COMMAND = (sys.executable, "-m", "graftune.cli.worker")


class Worker:
    def __init__(
        self, kind: str, command: Sequence[str] = COMMAND, must_end: Callable[[Document], bool] = lambda key: False
    ):
        """`must_end` says whether an idle process with this key has to end now."""
        self._must_end = must_end
        self._command = [*command, kind]
        self._key: Document | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._idle: asyncio.Task[None] | None = None
        self._number = 0
        self.busy = asyncio.Lock()

    async def ask(self, key: Document, request: Document) -> AsyncGenerator[Document, None]:
        """The documents of an answer. `key` says what has to be loaded. Closing the iterator stops the answer."""
        async with self.busy:
            process = await self._started(key)
            self._number += 1
            await self._send(process, {"number": self._number, **request})
            try:
                while True:
                    found = await self._read(process)
                    if found is None:
                        yield {"error": await self._why_it_ended(process)}
                        return
                    if found.pop("number") != self._number:  # left over from an answer that was stopped
                        continue
                    if found.get("end"):
                        return
                    yield found
            finally:
                await self._send(process, {"stop": self._number})
                self._end_later()

    async def _started(self, key: Document) -> asyncio.subprocess.Process:
        if self._idle is not None:
            self._idle.cancel()
        alive = self._process is not None and self._process.returncode is None
        if not alive or key != self._key:
            await self.end()
            # Opening a page must not download anything.
            environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
            environment.pop(TOKEN, None)
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                json.dumps(key),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=environment,
                limit=LONGEST,
                start_new_session=True,  # Ctrl-C on the terminal goes to the server only
            )
            self._key = key
        assert self._process is not None
        return self._process

    async def _read(self, process: asyncio.subprocess.Process) -> Document | None:
        assert process.stdout is not None
        line = await process.stdout.readline()
        return dict(json.loads(line)) if line else None

    async def _why_it_ended(self, process: asyncio.subprocess.Process) -> str:
        code = await process.wait()
        how = f"with code {code}" if code >= 0 else f"by signal {-code}"
        return f"the process that answers ended {how}; see its messages where graftune was started"

    async def _send(self, process: asyncio.subprocess.Process, document: Document) -> None:
        assert process.stdin is not None
        with contextlib.suppress(ConnectionError):  # it has ended; `_read` reports that
            process.stdin.write(json.dumps(document).encode() + b"\n")
            await process.stdin.drain()

    def _end_later(self) -> None:
        async def later() -> None:
            until = time.monotonic() + IDLE
            while time.monotonic() < until and self._key is not None:
                if await asyncio.to_thread(self._must_end, self._key):
                    break
                await asyncio.sleep(LOOK)
            await self.end()

        self._idle = asyncio.create_task(later())

    async def end(self) -> None:
        process, self._process, self._key = self._process, None, None
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()  # it has nothing to save
        await process.wait()
