"""Limits on connections, below HTTP: how many there are, how long a request may take to arrive, and who does not read.

uvicorn limits what it has understood as a request. A connection that says nothing, a header that grows by a byte at a
time, a body that never ends, and a reader that does not read its answer are held for ever, and each is a handle and a
piece of memory. Its HTTP/1.1 protocol is extended here by a clock for each of them. It is always h11's, which refuses
what two servers could read differently, also where a faster parser is installed.
"""

from __future__ import annotations

import asyncio
import resource
from collections import Counter
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

RECEIVE_S = 10.0  # seconds until a request is there as a whole
STALLED_S = 15.0  # seconds in which a reader takes nothing
LINGER_S = 1.0  # seconds for an answer to reach a client that is still sending what was refused
MOST, SPARE = 1000, 128  # connections; handles that are left for files
WRITE_BUFFER, MOST_BEHIND = 16 << 10, 8 << 10  # bytes not read by a client yet, and sent by it before its turn


def most_connections() -> int:
    """At once: no more than there are handles for, files included."""
    handles = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MOST if handles == resource.RLIM_INFINITY else max(16, min(MOST, handles - SPARE))


class Connections:
    """Those of one server, by address. One address gets no more than half of them."""

    def __init__(self, most: int | None = None):
        self.most = most_connections() if most is None else most
        self._open: Counter[str] = Counter()

    def enter(self, address: str) -> bool:
        """Whether there is room for one more; it has to `leave` again either way."""
        self._open[address] += 1
        return self._open.total() <= self.most and self._open[address] <= max(1, self.most // 2)

    def leave(self, address: str) -> None:
        self._open[address] -= 1
        if not self._open[address]:
            del self._open[address]


def protocol(connections: Connections) -> type[asyncio.Protocol]:
    """uvicorn's protocol, with limits that all of a server's connections share."""

    class Limited(H11Protocol):
        _late: asyncio.TimerHandle | None = None
        _stalled: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            transport.set_write_buffer_limits(WRITE_BUFFER)
            self._address = self.client[0] if self.client else ""
            if connections.enter(self._address):
                self._late = self.loop.call_later(RECEIVE_S, transport.abort)
            else:
                transport.abort()

        def connection_lost(self, exc: Exception | None) -> None:
            connections.leave(self._address)
            self._late, self._stalled = _cancelled(self._late), _cancelled(self._stalled)
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
                # More bytes do not put it off.
                self._late = self._late or self.loop.call_later(RECEIVE_S, self.transport.abort)
            else:
                self._late = _cancelled(self._late)
                if len(self.conn.trailing_data[0]) > MOST_BEHIND:  # browsers send no request before the last is answered
                    self.transport.abort()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.conn.their_state is h11.SEND_BODY:  # refused by its header: nobody reads the rest
                self.flow.pause_reading()
                self._late = _cancelled(self._late)
                self._late = self.loop.call_later(LINGER_S, self.transport.abort)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._stalled = self._stalled or self.loop.call_later(STALLED_S, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._stalled = _cancelled(self._stalled)

    return Limited


def _cancelled(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


class AtMost:
    """Middleware: so many answers at once, from the question until the last byte is sent. Streams are not counted."""

    def __init__(self, app: Any, most: int):
        self.app, self._free = app, asyncio.Semaphore(most)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope.get("path", "")
        if scope["type"] != "http" or not path.startswith("/api/runs") or path.endswith("/events"):
            await self.app(scope, receive, send)
            return
        async with self._free:
            await self.app(scope, receive, send)
