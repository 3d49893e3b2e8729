"""The page's server beside clients and run folders that mean harm. tests/soak/soak_page.py is the long form."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from graftune.dashboard import connections, lines, log
from graftune.dashboard import runs as runs_module
from graftune.dashboard.bounded import CUT, cut
from graftune.dashboard.connections import AtMost, Connections, most_connections
from graftune.dashboard.glance import Glance
from graftune.dashboard.lines import appended
from graftune.dashboard.log import Log
from graftune.dashboard.reading import read_bytes
from graftune.dashboard.runs import open_runs
from graftune.dashboard.serving import Page
from tests.dashboard.folders import client, start, step, write_run
from tests.dashboard.folders import lines as lines_of


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A server with room for 8 connections, 4 of them from here, in which everything happens soon."""
    patched = pytest.MonkeyPatch()
    for name, seconds in (("RECEIVE_S", 0.8), ("STALLED_S", 0.3), ("LINGER_S", 0.2)):
        patched.setattr(connections, name, seconds)
    patched.setattr(connections, "MOST", 16)
    root = tmp_path_factory.mktemp("root")
    write_run(root / "long", start(9), *(step(n, words="x" * 15_000) for n in range(1, 600)))
    page = Page(open_runs(str(root)), host="127.0.0.1", port=0)
    page.start()
    yield page.port
    page.close()
    patched.undo()


def connect(port: int, sent: str = "", received: int = 0) -> socket.socket:
    made = socket.socket()
    if received:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, received)
    made.settimeout(10)
    made.connect(("127.0.0.1", port))
    with contextlib.suppress(OSError):
        made.sendall(sent.replace("HOST", f"Host: 127.0.0.1:{port}").encode())
    return made


def answer(stream: socket.socket) -> bytes:
    """All that comes until the server closes."""
    found = b""
    with stream, contextlib.suppress(ConnectionError):
        while piece := stream.recv(65536):
            found += piece
    return found


POST = "POST /api/chat HTTP/1.1\r\nHOST\r\nContent-Type: application/json\r\n"


def test_a_request_that_does_not_arrive_ends(port: int) -> None:
    sent = {
        "nothing": "",
        "no line": "GET / HT",
        "no header": "GET / HTTP/1.1\r\nHOST\r\nX: ",
        "no body": POST + "Content-Length: 9\r\n\r\n{",
        "no end": POST + "Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n",
    }
    opened = {name: connect(port, text) for name, text in sent.items()}
    with connect(port, "GET / HTTP/1.1\r\nHOST\r\nX: ") as drips, pytest.raises(ConnectionError):
        for _ in range(40):  # a byte at a time does not put off the end
            drips.sendall(b"x")
            time.sleep(0.05)
    assert {name: answer(stream) for name, stream in opened.items()} == dict.fromkeys(sent, b"")


def test_a_second_request_that_does_not_arrive_ends(port: int) -> None:
    stream = connect(port, "GET /static/icon.svg HTTP/1.1\r\nHOST\r\n\r\n")
    assert stream.recv(65536).startswith(b"HTTP/1.1 200")
    stream.sendall(b"G")
    assert b"HTTP" not in answer(stream)


def test_silent_connections_keep_nobody_out(port: int) -> None:
    silent = [connect(port) for _ in range(40)]
    time.sleep(0.05)
    assert answer(connect(port, "GET / HTTP/1.1\r\nHOST\r\nConnection: close\r\n\r\n")).startswith(b"HTTP/1.1 200")
    for stream in silent:
        stream.close()


def test_a_reader_that_does_not_read_ends(port: int) -> None:
    stream = connect(port, "GET /api/runs/long/events?since=0 HTTP/1.1\r\nHOST\r\n\r\n", received=4096)
    with stream, pytest.raises(ConnectionError):  # the log has 9 MB
        for _ in range(100):
            time.sleep(0.1)
            stream.sendall(b"\r\n")


def test_no_request_is_read_in_two_ways(port: int) -> None:
    inner = "GET /api/runs HTTP/1.1\r\nHOST\r\n\r\n"
    for sent in (
        POST + f"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n{inner}",
        POST + f"Content-Length: 0\r\nContent-Length: 40\r\n\r\n{inner}",
        POST + f"Content-Length: 99999999\r\n\r\n{inner}",
        f"GET /api/runs HTTP/1.1\r\nHOST\r\nHost: evil.example\r\n\r\n{inner}",
        f"GET /api/runs HTTP/1.1\r\nHOST\r\nOrigin: http://evil.example\r\nOrigin: http://127.0.0.1:{port}\r\n\r\n{inner}",
    ):
        found = answer(connect(port, sent))
        assert re.findall(rb"HTTP/1.1 (\d+)", found) in ([b"400"], [b"413"]), sent
    assert answer(connect(port, inner + inner * 400)).count(b"HTTP/1.1 200") < 100, "nobody may ask far ahead"
    assert answer(connect(port, f"GET / HTTP/1.1\r\nHOST\r\nX: {'y' * 99999}\r\n\r\n")).startswith(b"HTTP/1.1 431")


def test_room_for_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    class Transport:
        aborted = False

        def abort(self) -> None:
            self.aborted = True

    room, made = Connections(4), [Transport() for _ in range(5)]
    enter: Any = room.enter
    asked: Any = room.asked
    leave: Any = room.leave
    assert enter(made[0], "a") and enter(made[1], "a") and enter(made[2], "a")
    assert [one.aborted for one in made] == [True, False, False, False, False], "the one that waited longest"
    leave(made[0], "a")
    asked(made[1])
    asked(made[2])
    assert not enter(made[3], "a"), "half of the room, and all of them are asking"
    leave(made[3], "a")
    assert enter(made[4], "b")
    monkeypatch.setattr(connections, "MOST", 1000)
    monkeypatch.setattr(connections.resource, "getrlimit", lambda which: (256, 4096))
    assert most_connections() == 128


def test_so_many_answers_at_once() -> None:
    now = most = streams = 0

    async def answers(scope: Any, receive: Any, send: Any) -> None:
        nonlocal now, most, streams
        if scope["path"].endswith("/events"):
            streams += 1
            return await asyncio.sleep(0.02)
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.001)
        now -= 1

    async def ask() -> None:
        limited = AtMost(answers, 3)
        paths = ["/api/runs/r", "/api/runs/r/events"] * 9
        await asyncio.gather(*(limited({"type": "http", "path": path}, None, None) for path in paths))

    asyncio.run(asyncio.wait_for(ask(), 10))
    assert most == 3 and streams == 9


def strict(text: str | bytes) -> Any:
    """As a browser reads JSON."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_a_strangers_events_are_shown_as_far_as_they_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs_module, "FRESH", 0.0)
    run = write_run(tmp_path / "r", start(9), step(1))
    with open(run / "metrics.jsonl", "ab") as file:
        for depth in (50, 200, 900, 5000):
            file.write(b'{"event": "warning", "text": ' + b"[" * depth + b"]" * depth + b"}\n")
        file.write(b'{"event": "eval", "step": 1, "loss": NaN}\n{"event": "eval", "step": 2, "loss": 1e999}\n')
        file.write(b'{"event": "step", "step": 2, "__proto__": 1, "constructor": NaN}\n{"event": "__proto__"}\n')
        file.write(b'{"event": "step", "step": 3, ' + b", ".join(b'"n%d": 1' % n for n in range(9000)) + b"}\n")
        file.write(b'{"event": "memory", "step": 3, "owners": {' + b'"a": 1, ' * 9000 + b'"b": [1, 2]}}\n')
        file.write(b'{"event": "warning", "text": "' + b"x" * (2 * lines.LONGEST) + b'"}\n')
        file.write(lines_of(step(4)))
    (run / "plan.json").write_text('{"expected": NaN, "deep": ' + "[" * 500 + "]" * 500 + "}")
    page = client(tmp_path)
    found = strict(page.get("/api/runs/r").text)
    assert found["steps"] == 4 and [e["loss"] for e in found["evals"]] == [None, None]
    assert found["warnings"][0]["text"].startswith("[[[") and "cannot be read" in found["warnings"][-1]["text"]
    assert found["plan"]["expected"] is None and CUT in str(found["plan"]["deep"])
    assert len(page.get("/api/runs").text) < 9999
    curves = strict(page.get("/api/runs/r/series").text)
    assert curves["steps"] == [1, 2, 3, 4] and len(curves["available"]) == log.MOST_NAMES
    seen, place, path = [], 0, run / "metrics.jsonl"
    while place < path.stat().st_size:  # as a stream goes through the file
        piece, began, after = appended(path, place)
        assert began == place < after and len(piece) <= lines.LONGEST
        seen, place = [*seen, piece], after
    assert lines_of(step(4)) in seen[-1]


def test_what_is_kept_of_a_log_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "MOST_FIGURES", 6 * 400)
    monkeypatch.setattr(log, "MOST_BYTES", 10_000)
    monkeypatch.setattr(lines, "CHUNK", 4096)
    monkeypatch.setattr(log, "MOST_DISPLACED", 3)
    warned = [{"event": "warning", "step": n, "text": "w" * 600} for n in range(1, 100)]
    evals = [{"event": "eval", "step": n, "loss": 9.0 - n % 7} for n in range(1, 300)]
    steps = [step(n, loss=900.0 if n == 333 else 1.0, falling=-n) for n in range(1, 3000)]
    run = write_run(tmp_path / "r", start(9), *warned, *evals, *steps, *(step(5, falling=-5) for _ in range(9)))
    found = Log(run / "metrics.jsonl")
    found.advance()
    assert 100 < len(found.steps) < 900 and max(found.values["loss"]) == 900.0 and found.steps[-1] == 2999
    assert list(found.steps) == sorted(set(found.steps)) and found.bad == 9 - 3
    assert list(found.values["falling"]) == sorted(found.values["falling"], reverse=True), "in the order of the steps"
    assert {len(column) for column in found.values.values()} == {len(found.steps)}
    assert [e["step"] for e in found.of("warning")][-1] == 99 and len(found.of("warning")) < 20
    monkeypatch.setattr("graftune.dashboard.glance.MOST_EVALS", 20)
    glance = Glance(run / "metrics.jsonl")
    glance.advance()
    assert len(glance.evals) <= 40 and glance.best() == (3.0, 6) and glance.steps == 5
    monkeypatch.setattr(Glance, "SECONDS", -1.0)
    slow, looks = Glance(run / "metrics.jsonl"), 0
    while not looks or slow.behind:
        slow.advance()
        looks += 1
    assert looks > 10 and slow.evals == glance.evals and slow.step == glance.step


def test_a_document_that_is_too_long_is_none(tmp_path: Path) -> None:
    """Not its beginning, which would be another document."""
    (tmp_path / "x").write_bytes(b"[1, 2]")
    assert read_bytes(tmp_path / "x", 6) == b"[1, 2]" and read_bytes(tmp_path / "x", 5) is None


HOSTILE_LOGS = {
    "resumes over evaluations out of order": lambda i: (
        f'{{"event":"eval","step":{10**7 - i},"loss":1}}\n{{"event":"eval","step":{i},"loss":1}}\n'
        f'{{"event":"resume","step":{i}}}\n'
    ),
    "another name in every step": lambda i: f'{{"event":"step","step":{i},"n{i}":1}}\n',
    "blank lines": lambda i: "\n",
}


@pytest.mark.parametrize("name", HOSTILE_LOGS)
def test_a_megabyte_of_a_strangers_lines_takes_no_minute(name: str, tmp_path: Path) -> None:
    """Each took 8 to 35 s, by the square of the lines or by an exception a line."""
    path = tmp_path / "metrics.jsonl"
    size = len(HOSTILE_LOGS[name](10**4))
    path.write_text("".join(map(HOSTILE_LOGS[name], range((1 << 20) // size))))
    began = time.process_time()
    for reader in (Glance(path), Log(path)):
        reader.advance()
        while reader.behind:  # a look ends after half a second, which a busy machine may take
            reader.advance()
    assert time.process_time() - began < 5


def test_evaluations_that_a_resume_took_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the definition, over logs made up at random; the oldest go where there are too many."""
    monkeypatch.setattr(log, "MOST_EVENTS", 8)
    draw = random.Random(5)
    for case in range(50):
        path, kept = tmp_path / f"{case}.jsonl", list[tuple[int, int]]()
        written = []
        for number in range(draw.randrange(60)):
            at = draw.randrange(12)
            if draw.random() < 0.25:
                written.append({"event": "resume", "step": at})
                kept = [each for each in kept if each[0] <= at]
            else:
                written.append({"event": "eval", "step": at, "loss": number})
                kept = [*kept, (at, number)][-8:]
        path.write_text("".join(json.dumps(event) + "\n" for event in written))
        found, glance = Log(path), Glance(path)
        found.advance()
        glance.advance()
        assert [(event["step"], event["loss"]) for event in found.of("eval")] == kept
        assert {at: glance.evals[at] for at, _ in kept} == dict(kept)


def test_cut() -> None:
    whole = {"a": [1, True, None, "x", 2.5], "b": {"c": 1}}
    assert cut(whole) == whole
    short = {"a": None, "b": None, "c": f"{'x' * 10} {CUT}"}
    assert cut({"a": float("nan"), "b": 10**30, "c": "x" * 20, "d": 1}, characters=13) == short
    assert cut(list(range(100)), values=4) == [0, 1, 2]
    assert cut({str(n): n for n in range(9)}, values=3) == {"0": 0, "1": 1}
