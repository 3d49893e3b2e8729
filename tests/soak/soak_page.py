"""The page's server under attack, by raw sockets: python -m tests.soak.soak_page [--only NAME,...] [--connections N].

A real `graftune watch` over a folder that holds a run as it should be and several that a stranger made. One attack
after the other; during each the page is asked for its list, and after each the server's resident memory, its open
handles and the slowest of those answers are printed. It has to stay up, answer within PATIENCE seconds and stay below
MOST_MIB, the goal of benchmarks/page.py. tests/dashboard has the short form of each limit.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.page.folders import RunFolder
from tests.soak.runner import run

MOST_MIB, PATIENCE = 150.0, 10.0
STEP = {"event": "step", "time": 1.0, "step": 1, "loss": 1.0}


class Target:
    """The server that is attacked."""

    def __init__(self, process: subprocess.Popen[str], port: int, folder: Path):
        self.process, self.port, self.folder = process, port, folder
        self.peak_mib, self.peak_handles, self.slowest = 0.0, 0, 0.0

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)

    def connect_many(self, stack: ExitStack, count: int, *requests: str) -> list[socket.socket]:
        """Connections that send one of the requests, each in turn, and read nothing. The server may refuse some."""
        opened = []
        for number in range(count):
            with contextlib.suppress(OSError):
                stream = stack.enter_context(self.connect())
                if requests:
                    stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                    stream.sendall(requests[number % len(requests)].encode())
                opened.append(stream)
        return opened

    def send(self, request: str | bytes, *, wait: float = 5.0) -> bytes:
        """All that comes back for some bytes, until the server closes or nothing more comes for `wait` seconds."""
        found = b""
        with self.connect() as stream, contextlib.suppress(OSError):
            stream.settimeout(wait)
            with contextlib.suppress(OSError):  # refused before all was sent: the answer may be there
                stream.sendall(request if isinstance(request, bytes) else request.encode())
            while piece := stream.recv(65536):
                found += piece
            return found
        return found

    def get(self, path: str, wait: float = 30.0) -> tuple[int, bytes]:
        head = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nConnection: close\r\n\r\n"
        answer = self.send(head, wait=wait)
        return int(answer.split(b" ", 2)[1]) if answer else 0, answer.partition(b"\r\n\r\n")[2]

    def measure(self) -> None:
        assert self.process.poll() is None, "the server has ended"
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert found
        self.peak_mib = max(self.peak_mib, int(found[1]) / 1024)
        self.peak_handles = max(self.peak_handles, len(os.listdir(f"/proc/{self.process.pid}/fd")))

    def look(self) -> None:
        """Ask for the list as a page would, again and again if there is no room for it."""
        began = time.monotonic()
        while True:
            with contextlib.suppress(OSError):
                if self.get("/api/runs", wait=PATIENCE)[0] == 200:
                    break
            assert time.monotonic() - began < 60, "the server does not answer any more"
            time.sleep(0.1)
        self.slowest = max(self.slowest, time.monotonic() - began)
        self.measure()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look at the server from beside the attack."""
        self.peak_mib, self.peak_handles, self.slowest = 0.0, 0, 0.0
        over, failed = threading.Event(), list[BaseException]()

        def looking() -> None:
            try:
                while not over.wait(0.2):
                    self.look()
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=looking)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
        if failed:
            raise failed[0]
        self.look()


@contextmanager
def target(folder: Path) -> Iterator[Target]:
    words = [sys.executable, "-m", "graftune", "watch", str(folder), "--port", "0", "--quiet"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        found = re.search(r"http://\S+:(\d+)/", said := process.stderr.readline())
        assert found, said
        complaints: list[str] = []
        threading.Thread(target=lambda: complaints.extend(process.stderr or ()), daemon=True).start()
        try:
            yield Target(process, int(found[1]), folder)
        finally:
            process.terminate()
            process.wait(10)
        if complaints:
            print("the server said:", *complaints[-20:], sep="\n    ")
        assert not complaints


def hostile_runs(folder: Path) -> None:
    """Runs of a stranger. Each has a first event, so that it is listed."""
    RunFolder(folder / "good", steps=2000).start().train(2000).ended()

    def write(name: str, *lines: bytes) -> None:
        (folder / name).mkdir(parents=True)
        with open(folder / name / "metrics.jsonl", "wb") as file:
            file.write(b'{"event": "run_start", "time": 1, "steps": 9}\n')
            file.writelines(line + b"\n" for line in lines)

    nan = b", ".join(b'"n%d": NaN' % n for n in range(1_000_000))
    write("million-names", b'{"event": "step", "step": 1, ' + nan + b"}")
    write("million-short-lines", *([b'{"event":"w"}'] * 1_000_000))
    write("wide-start", b'{"event": "run_start", "a": [' + b"{}," * 300_000 + b"{}]}")
    write("deep", *(b'{"event": "warning", "text": ' + b"[" * d + b"]" * d + b"}" for d in (500, 900, 980, 100_000)))
    write("not-finite", b'{"event": "eval", "step": 1, "loss": NaN}', b'{"event": "eval", "step": 2, "loss": 1e999}')
    write("proto", b'{"event": "step", "step": 1, "__proto__": 1, "constructor": 2}', b'{"event": "__proto__"}')
    write("long-line", b'{"event": "warning", "text": "' + b"x" * (100 << 20) + b'"}', json.dumps(STEP).encode())
    write("large-warnings", *([b'{"event": "warning", "step": 1, "text": "%s"}' % (b"y" * 500_000)] * 200))
    write("evals", *(b'{"event": "eval", "step": %d, "loss": %d}' % (n, n) for n in range(500_000)))
    wide = ", ".join(f'"c{n}": 0.5' for n in range(60))
    write("wide-steps", *(f'{{"event": "step", "step": {n}, {wide}}}'.encode() for n in range(1, 150_000)))
    for name, content in (("profile.json", b"1" * (40 << 20)), ("plan.json", b"[" + b"{}," * 1_300_000 + b"{}]")):
        (folder / "deep" / name).write_bytes(content)
    token = b'{"tokens": [' + b",".join([b'"a"'] * 300_000) + b'], "trained": [' + b",".join([b"1"] * 300_000) + b"]}\n"
    (folder / "deep" / "preview.jsonl").write_bytes(token * 4)


def silent(at: Target, count: int) -> str:
    """Connections on which nothing is ever said."""
    with ExitStack() as stack:
        opened = at.connect_many(stack, count)
        time.sleep(1)
        held = handles(at)
        left = closed_within(opened, 15)
    return f"{len(opened)} opened, {held} held by the server, {left} of them after 15 s"


def handles(at: Target) -> int:
    return len(os.listdir(f"/proc/{at.process.pid}/fd"))


def closed_within(streams: list[socket.socket], seconds: float) -> int:
    """How many the server has not closed after that time."""
    end, left = time.monotonic() + seconds, streams
    while left and time.monotonic() < end:
        time.sleep(0.5)
        left = [stream for stream in left if not is_closed(stream)]
    return len(left)


def is_closed(stream: socket.socket) -> bool:
    stream.settimeout(0)
    try:
        while piece := stream.recv(65536):
            del piece
        return True
    except BlockingIOError:
        return False
    except OSError:
        return True


def slow_headers(at: Target, count: int) -> str:
    """A header that grows by a byte at a time."""
    with ExitStack() as stack:
        opened = at.connect_many(stack, min(count, 300))
        end, left = time.monotonic() + 20, opened
        while left and time.monotonic() < end:
            for stream in left:
                with contextlib.suppress(OSError):
                    stream.settimeout(1)
                    stream.sendall(b"x")
            time.sleep(0.5)
            left = [stream for stream in left if not is_closed(stream)]
    return f"{len(opened)} opened, {len(left)} left after 20 s"


def slow_body(at: Target, count: int) -> str:
    """A body that never ends, byte by byte; and one that is announced and does not come."""
    head = f"POST /api/chat HTTP/1.1\r\nHost: 127.0.0.1:{at.port}\r\nContent-Type: application/json\r\n"
    with ExitStack() as stack:
        kinds = ("Content-Length: 1000", "Transfer-Encoding: chunked")
        opened = at.connect_many(stack, 200, *(f"{head}{kind}\r\n\r\n" for kind in kinds))
        left = closed_within(opened, 20)
    return f"{len(opened)} opened, {left} left after 20 s"


def huge_bodies(at: Target, count: int) -> str:
    """A gigabyte after a length that was refused, and chunks without an end."""
    head = f"POST /api/chat HTTP/1.1\r\nHost: 127.0.0.1:{at.port}\r\nContent-Type: application/json\r\n"
    sent = []
    for kind in ("Content-Length: 1073741824", "Transfer-Encoding: chunked"):
        with at.connect() as stream:
            stream.settimeout(20)
            stream.sendall(f"{head}{kind}\r\n\r\n".encode())
            total, end = 0, time.monotonic() + 20
            with contextlib.suppress(OSError):
                while total < 1 << 30 and time.monotonic() < end:
                    stream.sendall(b"10000\r\n" + b"x" * 65536 + b"\r\n" if "chunked" in kind else b"x" * 65536)
                    total += 65536
            sent.append(f"{total >> 20} MiB")
    return " and ".join(sent) + " were taken before the connection was closed"


def huge_headers(at: Target, count: int) -> str:
    answers = []
    for head in ("X: " + "y" * (10 << 20), "X: y\r\n" * 100_000, "Cookie: " + "a=b; " * 5000):
        with contextlib.suppress(OSError):
            answer = at.send(f"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n{head}\r\n\r\n", wait=3)
            answers.append(answer[:40].split(b"\r\n")[0].decode() or "closed")
    return ", ".join(answers)


def smuggling(at: Target, count: int) -> str:
    """Requests that two servers could understand differently: one answer at most, and none that is another's."""
    inner = f"GET /api/runs HTTP/1.1\r\nHost: 127.0.0.1:{at.port}\r\n\r\n"
    host = f"Host: 127.0.0.1:{at.port}\r\n"
    both = "Content-Length: 5\r\nTransfer-Encoding: chunked"
    own = f"http://127.0.0.1:{at.port}"
    cases = {
        "both lengths": f"POST /api/chat HTTP/1.1\r\n{host}{both}\r\n\r\n0\r\n\r\n{inner}",
        "two lengths": f"POST /api/chat HTTP/1.1\r\n{host}Content-Length: 0\r\nContent-Length: 60\r\n\r\n{inner}",
        "two hosts": f"GET /api/runs HTTP/1.1\r\n{host}Host: evil.example\r\n\r\n",
        "two hosts, turned": f"GET /api/runs HTTP/1.1\r\nHost: evil.example\r\n{host}\r\n",
        "space before colon": f"POST /api/chat HTTP/1.1\r\n{host}Content-Length : 5\r\n\r\nxxxxx",
        "folded": f"POST /api/chat HTTP/1.1\r\n{host}Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
        "other encoding": f"POST /api/chat HTTP/1.1\r\n{host}Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        "negative length": f"POST /api/chat HTTP/1.1\r\n{host}Content-Length: -1\r\n\r\n",
        "whole address": f"GET http://evil.example/api/runs HTTP/1.1\r\n{host}\r\n",
        "two origins": f"GET /api/runs HTTP/1.1\r\n{host}Origin: http://evil.example\r\nOrigin: {own}\r\n\r\n",
        "no host": "GET /api/runs HTTP/1.0\r\n\r\n",
    }
    said = []
    for name, request in cases.items():
        answer = at.send(request, wait=1)
        lines = re.findall(rb"^HTTP/1.1 (\d+)", answer, re.M)
        assert b'"runs"' not in answer, f"{name}: {answer[:300]!r}"
        said.append(f"{name} {b' '.join(lines).decode() or 'closed'}")
    return ", ".join(said)


def readers(at: Target, count: int) -> str:
    """Streams of events that nobody reads, on a log that is long and one that grows."""
    live = RunFolder(at.folder / "live", steps=10**6).start().train(20_000).held()
    with ExitStack() as stack:
        paths = ("api/runs/large-warnings/events?since=0", "api/events", "api/runs/live/events?since=0", "api/events")
        opened = at.connect_many(
            stack, 600, *(f"GET /{path} HTTP/1.1\r\nHost: 127.0.0.1:{at.port}\r\n\r\n" for path in paths)
        )
        since = 20_000
        for _ in range(20):
            live.train(since + 200, since=since)
            since += 200
            time.sleep(1)
        held = handles(at)
    return f"{len(opened)} opened, {held} handles after 20 s"


def answers_unread(at: Target, count: int) -> str:
    """Large answers that are asked for and not read."""
    paths = ["/api/runs/deep/profile", "/api/runs/large-warnings", "/api/runs/deep/preview?search=a", "/api/runs/deep"]
    with ExitStack() as stack:
        requests = [f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{at.port}\r\n\r\n" for path in paths]
        opened = at.connect_many(stack, 200, *requests)
        time.sleep(15)
    return f"{len(opened)} asked"


def flood(at: Target, count: int) -> str:
    """As many requests as go through, 60 at a time."""
    statuses: dict[int, int] = {}
    request = f"GET /api/runs/good HTTP/1.1\r\nHost: 127.0.0.1:{at.port}\r\n\r\n".encode()
    for _ in range(20):
        for status in re.findall(rb"HTTP/1.1 (\d+) ", at.send(request * 60, wait=0.05)):
            statuses[int(status)] = statuses.get(int(status), 0) + 1
    time.sleep(9)  # what is left of the budget grows again
    return f"1200 at once: {statuses}"


def hostile(at: Target, count: int) -> str:
    """Every view of every run that a stranger made. Each answer is JSON as browsers read it."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    said, at_once = [], time.monotonic()
    for name in sorted(path.name for path in at.folder.iterdir()):
        took = time.monotonic()
        for view in ("", "/series", "/preview", "/profile"):
            status, body = at.get(f"/api/runs/{name}{view}")
            assert status in (200, 404), f"{name}{view}: {status} {body[:200]!r}"
            if view != "/profile" or status == 404:
                json.loads(body, parse_constant=refuse)
            at.measure()
        with at.connect() as stream, contextlib.suppress(TimeoutError):
            stream.sendall(f"GET /api/runs/{name}/events?since=0 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
            stream.settimeout(1.5)
            end = time.monotonic() + 3
            while time.monotonic() < end and stream.recv(1 << 20):
                at.measure()
        said.append(f"{name} {time.monotonic() - took:.1f} s {at.peak_mib:.0f} MiB")
    return f"{time.monotonic() - at_once:.0f} s: " + ", ".join(said)


ATTACKS: dict[str, Callable[[Target, int], str]] = {
    each.__name__: each
    for each in (
        hostile, silent, slow_headers, slow_body, huge_bodies, huge_headers, smuggling, flood, answers_unread, readers,
    )
}  # fmt: skip


def soak(root: Path, only: str = ",".join(ATTACKS), connections: int = 10_000) -> bool:
    bad, hard = [], resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    hostile_runs(root / "runs")
    # The server keeps the limit of handles that it would have; the attacker takes all that it may have.
    with target(root / "runs") as found:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, connections + 1000), hard))
        for name in only.split(","):
            try:
                with found.watched():
                    said = ATTACKS[name](found, connections)
            except AssertionError as error:
                said = f"FAILED: {error}"
            good = found.peak_mib < MOST_MIB and found.slowest < PATIENCE and not said.startswith("FAILED")
            bad += [] if good else [name]
            print(f"{'holds' if good else 'FAILS'}  {name}: {said}; {found.peak_mib:.0f} MiB, "
                  f"{found.peak_handles} handles, slowest answer {found.slowest:.2f} s", flush=True)  # fmt: skip
    return not bad


if __name__ == "__main__":
    run(soak)
