"""The files of the page, built once and served from memory.

The page is four requests: its HTML, one style sheet, the script of its head and the script of its views, each joined
from the files in static/ (observe/page_files.py). Views with charts also load uPlot. Only the paths in this fixed list
are served: no name from an address is ever joined to a path. A browser caches the files and asks whether they are
unchanged (ETag), so a new version of graftune shows at the next load.
"""

from __future__ import annotations

import hashlib
from functools import cache
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response

from graftune.observe.page_files import asset, joined_script, joined_style

HTML, CSS, JS, SVG = "text/html", "text/css", "text/javascript", "image/svg+xml"


class Asset(NamedTuple):
    content: bytes
    media_type: str
    etag: str


@cache
def assets() -> dict[str, Asset]:
    """By the path of their address."""
    # The script of the head runs before the first paint, and requests data before the styles are loaded.
    texts = {
        "/": (asset("index.html"), HTML),
        "/static/page.css": (joined_style(), CSS),
        "/static/head.js": (asset("early.js") + asset("theme.js"), JS),
        "/static/page.js": (joined_script("main"), JS),
        "/static/uPlot.js": (asset("uPlot.iife.min.js"), JS),
        "/static/icon.svg": (asset("icon.svg"), SVG),
    }
    return {path: Asset(text.encode(), kind, _etag(text)) for path, (text, kind) in texts.items()}


def _etag(text: str) -> str:
    return f'"{hashlib.sha256(text.encode()).hexdigest()[:32]}"'


async def answer(request: Request) -> Response:
    found = assets()[request.scope["path"]]
    headers = {"etag": found.etag, "cache-control": "no-cache"}
    if request.headers.get("if-none-match") == found.etag:
        return Response(status_code=304, headers=headers)
    return Response(found.content, headers=headers, media_type=found.media_type)
