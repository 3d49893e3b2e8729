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
    """Those of one server. One address gets no more than half of them. Where there is no room for another, the one that
    has waited longest with its request ends: a page gets through, however many connections say nothing."""

    def __init__(self, most: int | None = None):
        self.most = most_connections() if most is None else most
        self._open: Counter[str] = Counter()
        self._waiting: dict[asyncio.Transport, str] = {}  # with the address, the longest first

    def enter(self, transport: asyncio.Transport, address: str) -> bool:
        """Whether there is room for one more; it has to `leave` again either way."""
        self._open[address] += 1
        alone = self._open[address] > max(1, self.most // 2)
        if alone or self._open.total() > self.most:
            waiting = self._waiting.items()
            longest = next((one for one, whose in waiting if whose == address or not alone), None)
            if longest is None:
                return False
            del self._waiting[longest]
            longest.abort()
        self._waiting[transport] = address
        return True

    def asked(self, transport: asyncio.Transport) -> None:
        """Its request is there."""
        self._waiting.pop(transport, None)

    def leave(self, transport: asyncio.Transport, address: str) -> None:
        self.asked(transport)
        self._open[address] -= 1
        if not self._open[address]:
            del self._open[address]


def protocol(connections: Connections) -> type[asyncio.Protocol]:
    """uvicorn's protocol, with limits that all of a server's connections share."""

    class Limited(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            transport.set_write_buffer_limits(WRITE_BUFFER)
            self._arriving, self._reading = _Clock(self.loop, transport), _Clock(self.loop, transport)
            self._address = self.client[0] if self.client else ""
            if connections.enter(transport, self._address):
                self._arriving.start(RECEIVE_S)
            else:
                transport.abort()

        def connection_lost(self, exc: Exception | None) -> None:
            connections.leave(self.transport, self._address)
            self._arriving.stop()
            self._reading.stop()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
                self._arriving.start(RECEIVE_S)  # unless it runs already: more bytes do not put it off
                return
            self._arriving.stop()
            connections.asked(self.transport)
            if len(self.conn.trailing_data[0]) > MOST_BEHIND:  # browsers send nothing before they have their answer
                self.transport.abort()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.conn.their_state is h11.SEND_BODY:  # refused by its header: nobody reads the rest
                self.flow.pause_reading()
                self._arriving.stop()
                self._arriving.start(LINGER_S)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._reading.start(STALLED_S)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._reading.stop()

    return Limited


class _Clock:
    """Ends a connection when its time is over."""

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport):
        self._loop, self._transport = loop, transport
        self._timer: asyncio.TimerHandle | None = None

    def start(self, seconds: float) -> None:
        """No effect on a clock that runs."""
        if self._timer is None and not self._transport.is_closing():
            self._timer = self._loop.call_later(seconds, self._transport.abort)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


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
