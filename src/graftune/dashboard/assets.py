"""The files of the page, built once and served from memory.

The page is four requests: its HTML, one style sheet, the script of its head and the script of its views, each joined
from the files in static/ (observe/page_files.py). Views with charts also load uPlot. Only the paths in this fixed list
are served: no name from an address is ever joined to a path.
"""

from __future__ import annotations

from functools import cache

from starlette.requests import Request
from starlette.responses import Response

from graftune.observe.page_files import asset, joined_script, joined_style

HTML, CSS, JS, SVG = "text/html", "text/css", "text/javascript", "image/svg+xml"


@cache
def assets() -> dict[str, tuple[str, str]]:
    """Text and media type, by the path of their address."""
    # The script of the head runs before the first paint, and requests data before the styles are loaded.
    return {
        "/": (asset("index.html"), HTML),
        "/static/page.css": (joined_style(), CSS),
        "/static/head.js": (asset("early.js") + asset("theme.js"), JS),
        "/static/page.js": (joined_script("main"), JS),
        "/static/uPlot.js": (asset("uPlot.iife.min.js"), JS),
        "/static/icon.svg": (asset("icon.svg"), SVG),
    }


async def answer(request: Request) -> Response:
    content, media_type = assets()[request.scope["path"]]
    return Response(content, media_type=media_type)
