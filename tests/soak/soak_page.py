"""The page's server with hostile run folders and requests: python -m tests.soak.soak_page [--only NAME,...].

A real `graftune watch` over a folder with one normal run and several hostile ones. During each attack the list of runs
is requested; after each, the server's resident memory and the slowest of those answers are printed. The server has to
stay up, answer within PATIENCE seconds and stay below MOST_MIB. tests/dashboard is the short form.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.page.folders import RunFolder
from tests.soak.runner import run

MOST_MIB, PATIENCE = 200.0, 10.0
STEP = {"event": "step", "time": 1.0, "step": 1, "loss": 1.0}


class Target:
    """The server that is attacked."""

    def __init__(self, process: subprocess.Popen[str], port: int, folder: Path):
        self.process, self.port, self.folder = process, port, folder
        self.peak_mib, self.slowest = 0.0, 0.0

    def connect(self) -> socket.socket:
        made = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        return made

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
        self.peak_mib, self.slowest = 0.0, 0.0
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


def huge_bodies(at: Target) -> str:
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


def huge_headers(at: Target) -> str:
    answers = []
    for head in ("X: " + "y" * (10 << 20), "X: y\r\n" * 100_000, "Cookie: " + "a=b; " * 5000):
        with contextlib.suppress(OSError):
            answer = at.send(f"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n{head}\r\n\r\n", wait=3)
            answers.append(answer[:40].split(b"\r\n")[0].decode() or "closed")
    return ", ".join(answers)


def smuggling(at: Target) -> str:
    """Requests that two servers could understand differently: one answer at most, and none that is another's."""
    inner = f"GET /api/runs HTTP/1.1\r\nHost: 127.0.0.1:{at.port}\r\n\r\n"
    host = f"Host: 127.0.0.1:{at.port}\r\n"
    cases = {
        "two lengths": f"POST /api/chat HTTP/1.1\r\n{host}Content-Length: 0\r\nContent-Length: 60\r\n\r\n{inner}",
        "two hosts": f"GET /api/runs HTTP/1.1\r\n{host}Host: evil.example\r\n\r\n",
        "two hosts, turned": f"GET /api/runs HTTP/1.1\r\nHost: evil.example\r\n{host}\r\n",
        "space before colon": f"POST /api/chat HTTP/1.1\r\n{host}Content-Length : 5\r\n\r\nxxxxx",
        "folded": f"POST /api/chat HTTP/1.1\r\n{host}Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
        "other encoding": f"POST /api/chat HTTP/1.1\r\n{host}Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        "negative length": f"POST /api/chat HTTP/1.1\r\n{host}Content-Length: -1\r\n\r\n",
        "whole address": f"GET http://evil.example/api/runs HTTP/1.1\r\n{host}\r\n",
        "no host": "GET /api/runs HTTP/1.0\r\n\r\n",
    }
    said = []
    for name, request in cases.items():
        answer = at.send(request, wait=1)
        lines = re.findall(rb"^HTTP/1.1 (\d+)", answer, re.M)
        assert b'"runs"' not in answer, f"{name}: {answer[:300]!r}"
        said.append(f"{name} {b' '.join(lines).decode() or 'closed'}")
    return ", ".join(said)


def hostile(at: Target) -> str:
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


ATTACKS: dict[str, Callable[[Target], str]] = {
    each.__name__: each for each in (hostile, huge_bodies, huge_headers, smuggling)
}


def soak(root: Path, only: str = ",".join(ATTACKS)) -> bool:
    bad = []
    hostile_runs(root / "runs")
    with target(root / "runs") as found:
        for name in only.split(","):
            try:
                with found.watched():
                    text = ATTACKS[name](found)
            except AssertionError as error:
                text = f"FAILED: {error}"
            good = found.peak_mib < MOST_MIB and found.slowest < PATIENCE and not text.startswith("FAILED")
            bad += [] if good else [name]
            print(f"{'holds' if good else 'FAILS'}  {name}: {text}; {found.peak_mib:.0f} MiB, "
                  f"slowest answer {found.slowest:.2f} s", flush=True)  # fmt: skip
    return not bad


if __name__ == "__main__":
    run(soak)
