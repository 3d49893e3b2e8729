"""Checks every request before anything is looked up.

Every page that is open in the same browser can reach a page on 127.0.0.1. So the name in Host must be one of this
server's (a foreign name that resolves to this address is a DNS rebinding attack), Origin and Sec-Fetch-Site must be
this page's own, and the page may not be framed or run a script that is not one of its files. Outside of loopback every
request needs the token as well. It is compared in constant time, never logged, and a redirect moves it from the address
into a cookie. A client that holds all connections open can keep the page from answering (SECURITY.md).
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "graftune_token"
LARGEST_BODY = 1 << 20  # bytes of a request
TOKEN = "GRAFTUNE_WATCH_TOKEN"  # noqa: S105 (the name of a variable)
HEADERS = {
    "content-security-policy": "default-src 'self'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class AccessCheck:
    """Middleware around the whole application."""

    def __init__(self, app: ASGIApp, *, host: str = "127.0.0.1", token: str = ""):
        """`host`: the address that the server listens on. `token`: required of every request unless empty."""
        if not token and not is_loopback(host):
            raise ValueError("outside of loopback a server needs a token")
        self.app, self._token = app, token
        self._loopback = is_loopback(host)
        names = ["localhost"] if self._loopback else ["localhost", host, socket.gethostname(), socket.getfqdn()]
        self._names = {name.lower() for name in names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":  # there are no web sockets here
            response = self._refused(Request(scope)) or self._without_token(Request(scope))
            await (response or self.app)(scope, _limited(receive), _with_headers(send))

    def _refused(self, request: Request) -> Response | None:
        """The answer to a request of another page or to another name."""
        headers, host = request.headers, request.headers.get("host", "")
        if not self._is_own_name(host):
            return _error(403, "the name in Host is not this server's; open the address that graftune printed")
        other_origin = "origin" in headers and urlsplit(headers["origin"]).netloc.lower() != host.lower()
        same_site = headers.get("sec-fetch-site", "none") in ("none", "same-origin")
        if other_origin or not (same_site or _is_navigation(request)):
            return _error(403, "requests of other pages are refused")
        if request.method not in ("GET", "HEAD", "POST"):
            return _error(405, "only GET and POST are understood")
        length = headers.get("content-length", "")
        if length.isdecimal() and (len(length) > 15 or int(length) > LARGEST_BODY):
            return _error(413, f"a request may have {LARGEST_BODY >> 20} MiB")
        return None

    def _is_own_name(self, host: str) -> bool:
        """A numeric address is safe: DNS cannot point it here."""
        try:
            name = (urlsplit(f"//{host}").hostname or "").lower()
            return name in self._names or ipaddress.ip_address(name).is_loopback or not self._loopback
        except ValueError:
            return False

    def _without_token(self, request: Request) -> Response | None:
        """The answer to a request without the right token, or the redirect that sets its cookie."""
        if not self._token:
            return None
        asked = request.query_params.get("token", "") if request.url.path == "/" else ""
        kind, _, bearer = request.headers.get("authorization", "").partition(" ")
        offered = asked or (bearer.strip() if kind.lower() == "bearer" else "") or request.cookies.get(COOKIE, "")
        if not offered:
            return _error(401, "this page needs its token; open the address that graftune printed")
        if not hmac.compare_digest(offered.encode(), self._token.encode()):
            return _error(401, "this is not the page's token; open the address that graftune printed")
        if not asked:
            return None
        response = RedirectResponse("/", 303)
        response.set_cookie(COOKIE, self._token, httponly=True, samesite="strict")
        return response


def _error(status: int, sentence: str) -> Response:
    return JSONResponse({"error": sentence}, status, {"connection": "close"})


def _is_navigation(request: Request) -> bool:
    """The user follows a link to the page: it opens in its own window, and the other page cannot read it."""
    headers, path = request.headers, request.url.path
    opens = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    return opens and request.method == "GET" and path == "/"


def _limited(receive: Receive) -> Receive:
    """Receive at most `LARGEST_BODY` bytes of the body, whatever its header says; then report a disconnected client."""
    seen = 0

    async def limited() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        return {"type": "http.disconnect"} if seen > LARGEST_BODY else message

    return limited


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in {"cache-control": "no-store", **HEADERS}.items():
                headers.setdefault(name, value)
        await send(message)

    return sending
