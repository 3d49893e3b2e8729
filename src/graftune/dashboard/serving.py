"""The server on a port, which is bound before the address is printed, so that a taken port is one sentence.

uvicorn limits connections and the time that an idle one stays open.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import threading

import uvicorn

from graftune.dashboard.runs import Runs
from graftune.dashboard.security import TOKEN, is_loopback
from graftune.dashboard.server import Server, application
from graftune.errors import GraftuneError

SHORTEST_TOKEN = 16
MOST_CONNECTIONS = 500


class Page:
    """A bound port and the application behind it. `run` serves until a signal."""

    def __init__(self, runs: Runs, *, host: str, port: int, token: str = "", device: str = "auto"):
        self._runs, self._socket = runs, _bound(host, port)
        self.host, self.port, self._token = host, self._socket.getsockname()[1], token
        app = application(runs, host=host, token=token, device=device)
        config = uvicorn.Config(
            app, log_level="error", access_log=False, server_header=False, timeout_graceful_shutdown=2, ws="none",
            http="h11", h11_max_incomplete_event_size=32 << 10, limit_concurrency=MOST_CONNECTIONS,
        )  # fmt: skip
        self._server = _UvicornServer(config, app.state.server)

    @property
    def address(self) -> str:
        """The page's address, with the token if there is one: shown to the user only."""
        name = socket.gethostname() if self.host in ("0.0.0.0", "::") else self.host  # noqa: S104 (compared)
        name = f"[{name}]" if ":" in name else name
        return f"http://{name}:{self.port}/" + (f"?token={self._token}" if self._token else "")

    def run(self) -> None:
        # Reads the list while the browser starts.
        threading.Thread(target=self._runs.refresh, name="read ahead", daemon=True).start()
        self._server.run(sockets=[self._socket])


class _UvicornServer(uvicorn.Server):
    """Ends streams before it waits for connections to close."""

    def __init__(self, config: uvicorn.Config, server: Server):
        super().__init__(config)
        self._page_server = server

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._page_server.close()
        await super().shutdown(sockets)


def token_for(host: str, always: bool, shown: bool) -> str:
    """The token that a page on `host` needs: the user's own, or a random one if the user can see it (`shown`). Empty on
    loopback, unless `always`."""
    own = os.environ.get(TOKEN, "")
    if is_loopback(host) and not always and not own:
        return ""
    if own:
        if len(own) < SHORTEST_TOKEN or not own.isascii() or not own.isprintable() or set(own) & set(' ;,"\\&#%+?='):
            raise GraftuneError(
                f"{TOKEN} is too short or holds other characters than letters, digits, - and _",
                fix=f"give it at least {SHORTEST_TOKEN} of them",
            )
        return own
    if not shown:
        raise GraftuneError(
            "the page needs a token, which cannot be shown because stderr is not a terminal",
            fix=f"set {TOKEN} to a token of your own",
        )
    return secrets.token_urlsafe(24)


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(256)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            raise GraftuneError(f"port {port} is taken", fix="give another one with --port, or 0 for any") from None
        raise GraftuneError(
            f"cannot listen on {host}, port {port} ({error.strerror or error})", fix="give another host or port"
        ) from None
    return listening
