"""Who may ask: the checks that every request passes before anything is looked up.

A page on 127.0.0.1 can be reached by every page that is open in the same browser. So the name in Host has to be one
under which this server is meant to be reached (a strange name that leads here is an attack by DNS), what a browser says
of the request's origin has to be this very page, and nothing of ours may be framed or run a script that is not a file
of ours. Outside of loopback every request needs the token as well. It is compared in constant time, never written to a
log, and taken from the address by a redirect as soon as it is in a cookie.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import secrets
import socket
import time
from collections import OrderedDict
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "graftune_token"
LARGEST_HEAD, LARGEST_BODY = 32 << 10, 1 << 20  # bytes of a request
BURST, PER_SECOND = 400.0, 50.0  # requests of one address: at once, and as they come back
WRONG_TOKENS, WRONG_PER_SECOND = 10.0, 0.2
ADDRESSES = 1000  # that are remembered
ONCE = ("host", "origin", "authorization", "cookie", "sec-fetch-site", "sec-fetch-mode", "sec-fetch-dest")
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


def new_token() -> str:
    return secrets.token_urlsafe(24)


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Budget:
    """So many at once, and so many a second after that, for each address."""

    def __init__(self, burst: float, per_second: float):
        self.burst, self.per_second = burst, per_second
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # what is left, and since when

    def take(self, address: str, cost: float = 1.0) -> bool:
        """Whether there is something left; if so, `cost` of it is gone."""
        now = time.monotonic()
        left, since = self._left.pop(address, (self.burst, now))
        left = min(self.burst, left + (now - since) * self.per_second)
        allowed = left >= 1
        self._left[address] = (left - cost if allowed else left, now)
        if len(self._left) > ADDRESSES:
            self._left.popitem(last=False)
        return allowed


class Refused(Exception):
    def __init__(self, status: int, sentence: str):
        super().__init__(sentence)
        self.status, self.sentence = status, sentence


class Guard:
    """Middleware around the whole application."""

    def __init__(self, app: ASGIApp, *, host: str = "127.0.0.1", token: str = ""):
        """`host`: the address that is listened on. `token`: what every request has to bring; empty: none is needed."""
        if not token and not is_loopback(host):
            raise ValueError("outside of loopback a server needs a token")
        self.app, self._token = app, token
        self._loopback = is_loopback(host)
        names = ["localhost"] if self._loopback else ["localhost", host, socket.gethostname(), socket.getfqdn()]
        self._names = {name.lower() for name in names}
        self._requests, self._wrong = Budget(BURST, PER_SECOND), Budget(WRONG_TOKENS, WRONG_PER_SECOND)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # there are no web sockets here
            return
        try:
            headers = _headers(scope)
            cookie = self._check(scope, headers)
        except Refused as refused:
            # What else came with the request on this connection is not looked at.
            await _answer(send, refused.status, {"error": refused.sentence}, {"connection": "close"})
            return
        if cookie:
            await _answer(send, 303, {}, {"location": "/", "set-cookie": cookie})
            return
        await self.app(scope, _limited(receive), _with_headers(send))

    def _check(self, scope: Scope, headers: dict[str, str]) -> str:
        """Raises Refused; returns the cookie to set where the token came with the address."""
        address = _network((scope.get("client") or ("",))[0])
        if not self._requests.take(address):
            raise Refused(429, "too many requests; wait a moment")
        host = _name(f"//{headers.get('host', '')}")
        if not self._allowed(host):
            raise Refused(403, "the name in Host is not this server's; open the address that graftune printed")
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc.lower() != headers.get("host", "").lower():
            raise Refused(403, "requests of other pages are refused")
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and not _opens(scope, headers):
            raise Refused(403, "requests of other pages are refused")
        if scope["method"] not in ("GET", "HEAD", "POST"):
            raise Refused(405, "only GET and POST are understood")
        length = headers.get("content-length", "")
        if length.isdecimal() and (len(length) > 15 or int(length) > LARGEST_BODY):
            raise Refused(413, f"a request may have {LARGEST_BODY >> 20} MiB")
        return self._identify(scope, headers, address) if self._token else ""

    def _allowed(self, host: str) -> bool:
        """An address in digits cannot be a name that somebody else has pointed here."""
        if host in self._names:
            return True
        try:
            number = ipaddress.ip_address(host)
        except ValueError:
            return False
        return number.is_loopback or not self._loopback

    def _identify(self, scope: Scope, headers: dict[str, str], address: str) -> str:
        given = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token", [""])[0]
        asked = given if scope["path"] == "/" else ""
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        offered = asked or (bearer.strip() if kind.lower() == "bearer" else "") or _cookie(headers.get("cookie", ""))
        if not offered:
            raise Refused(401, "this page needs its token; open the address that graftune printed")
        if not self._wrong.take(address, 0.0):
            raise Refused(429, "too many wrong tokens; wait a while")
        if not hmac.compare_digest(offered.encode(), self._token.encode()):
            self._wrong.take(address)
            raise Refused(401, "this is not the page's token; open the address that graftune printed")
        return f"{COOKIE}={self._token}; Path=/; HttpOnly; SameSite=Strict" if asked else ""


def _headers(scope: Scope) -> dict[str, str]:
    """By name. One that decides who asks may stand there once."""
    found: dict[str, str] = {}
    if sum(len(name) + len(value) for name, value in scope["headers"]) > LARGEST_HEAD:
        raise Refused(431, f"the headers of a request may have {LARGEST_HEAD >> 10} KiB")
    for raw, value in scope["headers"]:
        name = raw.decode("latin-1").lower()
        if name in found and name in ONCE:
            raise Refused(400, f"the request has {name} more than once")
        found[name] = value.decode("latin-1")
    if "content-length" in found and "transfer-encoding" in found:
        raise Refused(400, "the request has two lengths")
    return found


def _network(address: str) -> str:
    """Whose budget a request is taken from: with IPv6 one machine has as many addresses as it likes, in one network."""
    try:
        number = ipaddress.ip_address(address)
    except ValueError:
        return address
    return address if number.version == 4 else str(ipaddress.ip_network((int(number), 64), strict=False))


def _name(address: str) -> str:
    """The host of an address, without its port."""
    try:
        return (urlsplit(address).hostname or "").lower()
    except ValueError:
        return ""


def _opens(scope: Scope, headers: dict[str, str]) -> bool:
    """Somebody follows a link to the page: it opens in a window of its own, and the other page sees nothing of it."""
    opens = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    return opens and scope["method"] == "GET" and scope["path"] == "/"


def _cookie(text: str) -> str:
    try:
        found = SimpleCookie(text).get(COOKIE)
    except CookieError:
        return ""
    return found.value if found is not None else ""


def _limited(receive: Receive) -> Receive:
    """The body, of which no more than the limit is taken, whatever its header said."""
    seen = 0

    async def limited() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > LARGEST_BODY:
            return {"type": "http.disconnect"}
        return message

    return limited


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            there = {name.lower() for name, _ in message["headers"]}
            more = {"cache-control": "no-store", **HEADERS}
            message["headers"] = [
                *message["headers"],
                *((name.encode(), value.encode()) for name, value in more.items() if name.encode() not in there),
            ]
        await send(message)

    return sending


async def _answer(send: Send, status: int, document: object, more: dict[str, str] | None = None) -> None:
    body = json.dumps(document).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), **(more or {})}
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    sending = _with_headers(send)
    await sending({"type": "http.response.start", "status": status, "headers": raw})
    await sending({"type": "http.response.body", "body": body})
