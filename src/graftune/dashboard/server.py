"""The page's server: its addresses and their answers.

Everything under /api is JSON or a stream of server-sent events; the rest are the files of the page, built once and
served from memory: its HTML, one style sheet, the script of its head and the script of its views, each joined from the
files in static/ (observe/page_files.py); views with charts also load uPlot. Names of runs come
from the address undecoded (a slash within one is %2F), and are looked up among the runs that were found: no path is
ever made of them. Work that takes longer than a moment runs in a thread, so that streams go on meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable
from functools import cache
from urllib.parse import unquote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from graftune.dashboard import streams
from graftune.dashboard.chat import Chat, find_run
from graftune.dashboard.log import series
from graftune.dashboard.preview import Previews
from graftune.dashboard.reading import read_bytes
from graftune.dashboard.runs import Runs, WatchedRun
from graftune.dashboard.security import HEADERS, AccessCheck
from graftune.dashboard.views import PROFILE, details
from graftune.errors import GraftuneError
from graftune.observe.events import plain
from graftune.observe.page_files import asset, joined_script, joined_style

VIEWS = ("series", "events", "preview", "profile")
LARGEST_PROFILE = 4 << 20  # bytes
HTML, CSS, JS, SVG = "text/html", "text/css", "text/javascript", "image/svg+xml"


@cache
def assets() -> dict[str, tuple[str, str]]:
    """Text and media type, by the path of their address. Only these are served: no name from an address is ever joined
    to a path."""
    # The script of the head runs before the first paint, and requests data before the styles are loaded.
    return {
        "/": (asset("index.html"), HTML),
        "/static/page.css": (joined_style(), CSS),
        "/static/head.js": (asset("early.js") + asset("theme.js"), JS),
        "/static/page.js": (joined_script("main"), JS),
        "/static/uPlot.js": (asset("uPlot.iife.min.js"), JS),
        "/static/icon.svg": (asset("icon.svg"), SVG),
    }


class Server:
    def __init__(self, runs: Runs, device: str = "auto"):
        self.runs, self.closing = runs, threading.Event()  # when it is set, streams end
        self.chat, self.previews = Chat(runs, device), Previews()

    async def close(self) -> None:
        """Ends streams and processes, so that open pages do not delay the end of the server."""
        self.closing.set()
        await self.chat.worker.end()
        await self.previews.worker.end()

    @contextlib.asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        yield
        await self.close()

    async def list_runs(self, request: Request) -> Response:
        return await asyncio.to_thread(lambda: _json(self.runs.document()))

    async def list_events(self, request: Request) -> Response:
        return _stream(streams.follow(streams.list_looks(self.runs), self.closing))

    async def run(self, request: Request) -> Response:
        raw = request.scope.get("raw_path") or request.scope["path"].encode()
        parts = raw.decode("latin-1").partition("?")[0].removeprefix("/api/runs/").split("/")
        view = parts.pop() if len(parts) > 1 and parts[-1] in VIEWS else ""
        run = await asyncio.to_thread(find_run, self.runs, unquote("/".join(parts)))
        if view == "events":
            since = _whole(request, "since", 0) or 0
            return _stream(streams.follow(streams.log_looks(self.runs, run, since), self.closing))
        if view == "preview":
            return await self._preview(run, request)
        answer: Callable[[], Response] = {
            "": lambda: self._details(run),
            "series": lambda: self._series(run, request),
            "profile": lambda: _profile(run),
        }[view]
        return await asyncio.to_thread(answer)

    async def _preview(self, run: WatchedRun, request: Request) -> Response:
        page, size = _whole(request, "page", 0) or 0, _whole(request, "size", 20) or 20
        search = request.query_params.get("search", "")[:1000]
        found = await self.previews.page(run, page, size, search)
        return _missing("preview of its data") if found is None else _json(plain(found))

    async def ask(self, request: Request) -> Response:
        return _stream(await self.chat.events(request))

    def _details(self, run: WatchedRun) -> Response:
        self.runs.refresh()
        with self.runs.log(run) as log:
            document = details(run, log, self.runs.differing())
        return _json(document)

    def _series(self, run: WatchedRun, request: Request) -> Response:
        names = [name for name in request.query_params.get("names", "").split(",") if name]
        points = _whole(request, "points", 2000) or 2000
        first, last = _whole(request, "from", None), _whole(request, "to", None)
        with self.runs.log(run) as log:
            document = series(log, names, points, first, last)
        return _json(document)


def application(runs: Runs, *, host: str = "127.0.0.1", token: str = "", device: str = "auto") -> Starlette:
    """The whole server, for uvicorn or a test. `device`: where the chat box loads a model."""
    server = Server(runs, device)
    app = Starlette(
        routes=[
            *(Route(path, _asset) for path in assets()),
            Route("/api/runs", server.list_runs),
            Route("/api/events", server.list_events),
            Route("/api/chat", server.ask, methods=["POST"]),
            Route("/api/runs/{rest:path}", server.run),
        ],
        middleware=[Middleware(AccessCheck, host=host, token=token)],
        exception_handlers={HTTPException: _http_error, GraftuneError: _user_error, Exception: _bug},  # type: ignore[dict-item]
        lifespan=server.lifespan,
    )
    app.state.server = server
    return app


async def _asset(request: Request) -> Response:
    content, media_type = assets()[request.scope["path"]]
    return Response(content, media_type=media_type)


def _json(document: object) -> Response:
    """In ASCII, because a file may contain unpaired surrogates, which UTF-8 cannot encode."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return Response(text, media_type="application/json")


def _stream(events: AsyncIterator[str]) -> Response:
    return StreamingResponse(events, media_type="text/event-stream")


def _profile(run: WatchedRun) -> Response:
    content = read_bytes(run.folder / PROFILE, LARGEST_PROFILE)
    return _missing("profile") if content is None else Response(content, media_type="application/json")


def _missing(what: str) -> Response:
    return JSONResponse({"error": f"this run has no {what}"}, 404)


def _whole(request: Request, name: str, default: int | None) -> int | None:
    given = request.query_params.get(name, "")
    if not given:
        return default
    if not given.isascii() or not given.isdecimal() or len(given) > 15:
        raise HTTPException(400, f"{name} has to be a whole number")
    return int(given)


async def _http_error(request: Request, error: HTTPException) -> Response:
    return JSONResponse({"error": error.detail}, error.status_code, headers=error.headers)


async def _bug(request: Request, error: Exception) -> Response:
    """The traceback goes to stderr."""
    return JSONResponse({"error": "this failed inside graftune; see the messages of graftune watch"}, 500, HEADERS)


async def _user_error(request: Request, error: GraftuneError) -> Response:
    return JSONResponse({"error": str(error)}, 400)
