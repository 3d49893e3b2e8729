"""The page's server: its addresses, and what each of them answers.

Everything under /api is JSON or a stream of server-sent events; the rest are the files of the page. Names of runs come
from the address as they were sent (a slash within one is %2F), and are looked up among the runs that were found: no
path is ever made of them. What takes longer than a moment is done in a thread, so that streams go on meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from urllib.parse import unquote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from graftune.dashboard import assets, streams
from graftune.dashboard.bounded import cut, to_bytes
from graftune.dashboard.chat import Chat
from graftune.dashboard.connections import AtMost
from graftune.dashboard.preview import Previews
from graftune.dashboard.reading import read_bytes
from graftune.dashboard.runs import Run, Runs
from graftune.dashboard.security import HEADERS, Guard
from graftune.dashboard.series import series
from graftune.dashboard.views import PROFILE, details
from graftune.errors import GraftuneError

VIEWS = ("series", "events", "preview", "profile")
LARGEST_PROFILE = 4 << 20  # bytes
MOST_TOKENS, LONGEST_TEXT = 1 << 18, 4 << 20  # values and characters of a page of examples
AT_ONCE = 6  # answers that are made or sent, each of some megabytes at most


class Server:
    """The answers, over the runs of one folder."""

    def __init__(self, runs: Runs, device: str = "auto"):
        self.runs, self.closing = runs, streams.Closing()
        self.chat, self.previews = Chat(runs, self.closing, device), Previews()
        self.watch = streams.ListWatch(runs, self.closing)
        self.readers = 0

    # The list

    async def list_runs(self, request: Request) -> Response:
        def asked() -> bytes:
            found = self.runs.documents()
            differing = found[0]["differing"] if found else []
            return to_bytes({"root": str(self.runs.root), "runs": found, "differing": differing})

        return Response(await asyncio.to_thread(asked), media_type="application/json")

    async def list_events(self, request: Request) -> Response:
        return self._stream(self.watch.events())

    # One run

    async def run(self, request: Request) -> Response:
        """/api/runs/ID and /api/runs/ID/VIEW."""
        raw = request.scope.get("raw_path") or request.scope["path"].encode()
        parts = raw.decode("latin-1").partition("?")[0].removeprefix("/api/runs/").split("/")
        view = parts.pop() if len(parts) > 1 and parts[-1] in VIEWS else ""
        run = await asyncio.to_thread(self._found, unquote("/".join(parts)))
        if view == "events":
            since = _whole(request, "since", 0) or 0
            return self._stream(streams.log_events(self.runs, run, since, self.closing))
        if view == "preview":
            return await self._preview(run, request)
        answer: Callable[[], Response] = {
            "": lambda: self._details(run),
            "series": lambda: self._series(run, request),
            "profile": lambda: _profile(run),
        }[view]
        return await asyncio.to_thread(answer)

    async def _preview(self, run: Run, request: Request) -> Response:
        page, size = _whole(request, "page", 0) or 0, _whole(request, "size", 20) or 20
        search = request.query_params.get("search", "")[:1000]
        found = await self.previews.page(run, page, size, search)
        if found is None:
            return _none("preview of its data")
        return Response(to_bytes(cut(found, MOST_TOKENS, LONGEST_TEXT)), media_type="application/json")

    async def ask(self, request: Request) -> Response:
        """POST /api/chat."""
        return self._stream(await self.chat.events(request))

    def _found(self, key: str) -> Run:
        try:
            return self.runs.get(key)
        except KeyError:
            raise HTTPException(404, "there is no such run in the watched folder") from None

    def _details(self, run: Run) -> Response:
        self.runs.refresh()
        document = details(run, self.runs.differing())
        self.runs.keep(run)
        return Response(to_bytes(document), media_type="application/json")

    def _series(self, run: Run, request: Request) -> Response:
        names = [name for name in request.query_params.get("names", "").split(",") if name]
        points = _whole(request, "points", 2000) or 2000
        first, last = _whole(request, "from", None), _whole(request, "to", None)
        with run.log() as log:
            document = series(log, names, points, first, last)
        self.runs.keep(run)
        return Response(to_bytes(document), media_type="application/json")

    def _stream(self, events: AsyncIterator[str]) -> Response:
        if self.readers >= streams.MOST_READERS:
            raise HTTPException(503, f"{self.readers} pages are open already; close one of them")
        return StreamingResponse(self._counted(events), media_type="text/event-stream")

    async def _counted(self, events: AsyncIterator[str]) -> AsyncIterator[str]:
        self.readers += 1
        try:
            async for event in events:
                yield event
                await asyncio.sleep(0)  # others get their turn, and a reader that has gone is noticed
        finally:
            self.readers -= 1
            await events.aclose()  # type: ignore[attr-defined]

    @contextlib.asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        yield
        self.closing.set = True
        await self.chat.worker.end()
        await self.previews.worker.end()


def application(runs: Runs, *, host: str = "127.0.0.1", token: str = "", device: str = "auto") -> Starlette:
    """The whole server, as something that uvicorn or a test runs. `device`: where the chat box loads a model."""
    server = Server(runs, device)
    app = Starlette(
        routes=[
            *(Route(path, assets.answer) for path in assets.assets()),
            Route("/api/runs", server.list_runs),
            Route("/api/events", server.list_events),
            Route("/api/chat", server.ask, methods=["POST"]),
            Route("/api/runs/{rest:path}", server.run),
        ],
        middleware=[Middleware(Guard, host=host, token=token), Middleware(AtMost, most=AT_ONCE)],
        exception_handlers={HTTPException: _refused, GraftuneError: _mistaken, Exception: _failed},  # type: ignore[dict-item]
        lifespan=server.lifespan,
    )
    app.state.server = server
    return app


def _profile(run: Run) -> Response:
    content = read_bytes(run.folder / PROFILE, LARGEST_PROFILE)
    return _none("profile") if content is None else Response(content, media_type="application/json")


def _none(what: str) -> Response:
    return JSONResponse({"error": f"this run has no {what}"}, 404)


def _whole(request: Request, name: str, default: int | None) -> int | None:
    given = request.query_params.get(name, "")
    if not given:
        return default
    if not given.isascii() or not given.isdecimal() or len(given) > 15:
        raise HTTPException(400, f"{name} has to be a whole number")
    return int(given)


async def _refused(request: Request, error: HTTPException) -> Response:
    return JSONResponse({"error": error.detail}, error.status_code, headers=error.headers)


async def _failed(request: Request, error: Exception) -> Response:
    """A bug of ours: its traceback goes to stderr."""
    return JSONResponse({"error": "this failed inside graftune; see the messages of graftune watch"}, 500, HEADERS)


async def _mistaken(request: Request, error: GraftuneError) -> Response:
    return JSONResponse({"error": str(error)}, 400)
