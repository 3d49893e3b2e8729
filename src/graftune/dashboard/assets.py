"""The files of the page, made once and answered from memory.

The page is four requests: its frame, one style, the script of its head and the script of its views, each joined from
the files in static/ (observe/page_files.py). The one with the charts is asked for by views that have any. What can be
asked for is this fixed list: no name from an address is ever joined to a path. A browser keeps what it has and asks
whether it is still the same (its digest, in ETag), so a new version of graftune shows at the next load.
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
    digest: str


@cache
def assets() -> dict[str, Asset]:
    """By the path of their address."""
    # The script of the head runs before the first paint, and asks for data before styles are there.
    texts = {
        "/": (asset("index.html"), HTML),
        "/static/page.css": (joined_style(), CSS),
        "/static/head.js": (asset("early.js") + asset("theme.js"), JS),
        "/static/page.js": (joined_script("main"), JS),
        "/static/uPlot.js": (asset("uPlot.iife.min.js"), JS),
        "/static/icon.svg": (asset("icon.svg"), SVG),
    }
    return {path: _made(text.encode(), kind) for path, (text, kind) in texts.items()}


def _made(content: bytes, media_type: str) -> Asset:
    return Asset(content, media_type, f'"{hashlib.sha256(content).hexdigest()[:32]}"')


async def answer(request: Request) -> Response:
    found = assets()[request.scope["path"]]
    headers = {"etag": found.digest, "cache-control": "no-cache"}
    if request.headers.get("if-none-match") == found.digest:
        return Response(status_code=304, headers=headers)
    return Response(found.content, headers=headers, media_type=found.media_type)
