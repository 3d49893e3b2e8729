"""What the page costs: how quickly it opens, how smoothly it pans, what its server takes, and what a run loses by it.

    python benchmarks/page.py [--json FILE] [--only open,list,readers,training] [--steps 100000] [--runs 1000]
    python benchmarks/page.py --only training --device cuda --base BASE --training-steps 1000

In a real Chromium without a window (its drawing is done by the CPU), over run folders that are written by hand.

`open`      a run of 100,000 steps: seconds from the address to drawn charts, the server reading the log for the first
            time; then zoomed in to a tenth, panned by the mouse for two seconds, all charts at once: frames per second.
`list`      1,000 runs: seconds from the address to the sorted table, the server having just started; and to filter it.
`readers`   resident memory of the server with 100 streams of events open, on a run that grows and one of 100,000 steps.
`training`  tokens/s of short runs of a tiny model (or of --base, on --device), five that are watched alternating with
            five that are not, by their medians. The server runs on the same machine; the reader takes the streams
            that a page takes, as a browser on another machine does, or is a browser on the same cores (--in-browser).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import platform
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.page.folders import RunFolder
from tests.support.tiny import make_folder

if TYPE_CHECKING:
    from playwright.sync_api import Browser

GOALS = {"open_s": 2.0, "pan_fps": 30.0, "list_s": 1.0, "server_mib": 150.0, "training": 0.98}
READERS = 100
PAIRS = 5


@contextmanager
def server(folder: Path) -> Iterator[tuple[str, int]]:
    """`graftune watch` in a process of its own: its address and its number."""
    words = [sys.executable, "-m", "graftune", "watch", str(folder), "--port", "0", "--quiet"]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        said = process.stderr.readline()
        found = re.search(r"http://\S+/", said)
        assert found, said + process.stderr.read()
        yield found[0], process.pid
    finally:
        process.terminate()
        process.wait()


def resident_mib(pid: int) -> float:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found
    return int(found[1]) / 1024


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def opening(browser: Browser, folder: Path, steps: int) -> dict[str, Any]:
    RunFolder(folder / "long", steps=steps).start().train(steps, every=steps // 100).ended()
    with server(folder) as (address, _):
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        began = time.monotonic()
        page.goto(f"{address}#/run/long")
        page.wait_for_selector("main[aria-busy=false] figure[data-name=loss] canvas")
        open_s = time.monotonic() - began
        again = time.monotonic()
        page.reload()
        page.wait_for_selector("main[aria-busy=false] figure[data-name=loss] canvas")
        again_s = time.monotonic() - again
        box = page.locator("figure[data-name=loss] .u-over").bounding_box()
        assert box is not None
        across = box["y"] + box["height"] / 2
        page.mouse.move(box["x"] + 0.45 * box["width"], across)
        page.mouse.down()
        page.mouse.move(box["x"] + 0.55 * box["width"], across, steps=5)
        page.mouse.up()
        page.wait_for_timeout(1500)  # the finer part has arrived
        return {"open_s": open_s, "open_again_s": again_s, **page.evaluate(PAN)}


# Drags with Shift held for two seconds, a mouse event a frame, and counts the frames in which charts were drawn. The
# events are made in the page: from outside each would wait for the answer to the one before.
PAN = """async () => {
  const over = document.querySelector("figure[data-name=loss] .u-over");
  const box = over.getBoundingClientRect();
  const [middle, y] = [box.left + box.width / 2, box.top + box.height / 2];
  const send = (target, type, x) =>
    target.dispatchEvent(new MouseEvent(type, { clientX: x, clientY: y, shiftKey: true, bubbles: true, button: 0 }));
  let drawn = false;
  const original = CanvasRenderingContext2D.prototype.clearRect;
  CanvasRenderingContext2D.prototype.clearRect = function (...all) {
    drawn = true;
    return original.apply(this, all);
  };
  const frame = () => new Promise(requestAnimationFrame);
  send(over, "mousedown", middle);
  const began = await frame();
  let [now, last, frames, longest] = [began, began, 0, 0];
  for (let turn = 0; now - began < 2000; turn++) {
    send(over, "mousemove", middle + 0.3 * box.width * Math.sin(turn / 20));
    now = await frame();
    if (!drawn) continue;
    drawn = false;
    frames++;
    longest = Math.max(longest, now - last);
    last = now;
  }
  send(over, "mouseup", middle);
  return { pan_fps: (1000 * frames) / (now - began), pan_longest_ms: longest };
}"""


def listing(browser: Browser, folder: Path, runs: int) -> dict[str, Any]:
    for number in range(runs):
        lr, rank = (1e-4, 2e-4, 5e-4)[number % 3], (8, 16, 32, 64)[number % 4]
        RunFolder(folder / f"run-{number:04}", steps=60, lr=lr, rank=rank, seed=number).start().train(60).ended()
    with server(folder) as (address, pid):
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        began = time.monotonic()
        page.goto(address)
        page.wait_for_selector("tbody tr")
        first_s = time.monotonic() - began
        assert f"{runs:,} runs" in page.inner_text(".summary")
        again = time.monotonic()
        page.fill("#filter", "lr=5e-4 rank=32")
        page.wait_for_function(f"() => document.querySelector('.summary').innerText.includes('of {runs:,} runs')")
        return {"list_s": first_s, "filter_s": time.monotonic() - again, "list_server_mib": resident_mib(pid)}


def reading(folder: Path, steps: int) -> dict[str, Any]:
    live = RunFolder(folder / "live", steps=steps).start().train(1000).held()
    RunFolder(folder / "long", steps=steps).start().train(steps, every=steps // 100).ended()
    with server(folder) as (address, pid), ExitStack() as open_streams:
        empty = resident_mib(pid)
        urllib.request.urlopen(f"{address}api/runs/long/series?names=loss,lr").read()
        received = [0] * READERS
        behind = (folder / "long" / "metrics.jsonl").stat().st_size  # as the page asks: for what comes after its curves
        paths = ["api/events", "api/runs/live/events?since=0", f"api/runs/long/events?since={behind}"]
        for number in range(READERS):
            stream = open_streams.enter_context(asking(address, paths[number % 3]))
            threading.Thread(target=drain, args=(stream, received, number), daemon=True).start()
        most, began, since = 0.0, time.monotonic(), 1000
        while time.monotonic() - began < 20:
            live.train(since + 20, since=since)
            since += 20
            time.sleep(0.5)
            most = max(most, resident_mib(pid))
        return {"server_mib": most, "server_empty_mib": empty, "bytes_received": sum(received)}


@contextmanager
def asking(address: str, path: str) -> Iterator[socket.socket]:
    """A connection on which a stream was asked for."""
    host = address.removeprefix("http://").rstrip("/")
    name, _, port = host.partition(":")
    with socket.create_connection((name, int(port))) as stream:
        stream.sendall(f"GET /{path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        yield stream
        stream.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads it


def drain(stream: socket.socket, received: list[int], number: int) -> None:
    with contextlib.suppress(OSError):  # closed, because the measurement is over
        while piece := stream.recv(65536):
            received[number] += len(piece)


def training(browser: Browser | None, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Alternating, so that whatever else the machine does slows both alike."""
    folder.mkdir()
    base = given.base or str(make_folder("llama", folder / "base"))
    speeds: dict[str, list[float]] = {"alone": [], "watched": []}
    taken: list[float] = []  # of a core, by the server
    for number in range(PAIRS):
        for kind in ("alone", "watched") if number % 2 == 0 else ("watched", "alone"):
            with ExitStack() as stack:
                out = folder / "runs" / f"{kind}-{number}"
                out.parent.mkdir(exist_ok=True)
                if kind == "watched":
                    address, pid = stack.enter_context(server(out.parent))
                    watching = functools.partial(watch, stack, browser, address, out.name)
                began = time.monotonic()
                speeds[kind].append(trained(base, out, given, watching if kind == "watched" else lambda: None))
                if kind == "watched":
                    taken.append(cpu_seconds(pid) / (time.monotonic() - began))
            print(f"{kind} {number}: {speeds[kind][-1]:.1f} tokens/s", file=sys.stderr)
    medians = {kind: statistics.median(each) for kind, each in speeds.items()}
    where = "streams, as for a browser elsewhere" if browser is None else "a browser on the same cores"
    ratio = medians["watched"] / medians["alone"]
    # A machine whose speed changes from minute to minute: what is watched against what ran right before or after it.
    pairs = statistics.median(b / a for a, b in zip(speeds["alone"], speeds["watched"], strict=True))
    found = {"training": ratio, "training_pairs": pairs, "training_on": given.device}
    found |= {"server_cores": statistics.median(taken)}
    return found | {"watched_by": where, "speeds": speeds}


def watch(stack: ExitStack, browser: Browser | None, address: str, name: str) -> None:
    """Open the run's page, or ask for what the page asks for."""
    if browser is not None:
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        stack.callback(page.close)
        page.goto(f"{address}#/run/{name}")
        return
    urllib.request.urlopen(f"{address}api/runs/{name}").read()
    for path in (f"api/runs/{name}/events?since=0", "api/events"):
        stream = stack.enter_context(asking(address, path))
        threading.Thread(target=drain, args=(stream, [0], 0), daemon=True).start()


def trained(base: str, out: Path, given: argparse.Namespace, watching: Callable[[], None]) -> float:
    """Tokens/s of one run: all steps but the first ten."""
    steps, limits = given.training_steps, "--epochs 1000 --tokens-per-step 1024 --max-seq-len 256"
    words = [sys.executable, "-m", "graftune", "train", base, "--out", str(out), "--device", given.device]
    words += f"--max-steps {steps} {limits} --samples 0 --val-split 0".split()
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (out / "metrics.jsonl").exists():
        assert process.poll() is None
        time.sleep(0.05)
    watching()
    assert process.wait() == 0
    events = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    done = [event for event in events if event["event"] == "step"]
    assert len(done) == steps
    return sum(event["tokens"] for event in done[10:]) / (done[-1]["time"] - done[9]["time"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", default="-", help="where to write the record (-: stdout)")
    parser.add_argument("--only", default="open,list,readers,training")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--training-steps", type=int, default=150)
    parser.add_argument("--device", default="cpu", help="what to train on")
    parser.add_argument("--base", default="", help="what to train (default: a tiny model of random weights)")
    parser.add_argument("--in-browser", action="store_true", help="watch the training by a browser on the same cores")
    given = parser.parse_args()
    asked = given.only.split(",")
    record: dict[str, Any] = {"cores": os.cpu_count(), "machine": platform.machine(), "goals": GOALS}
    with tempfile.TemporaryDirectory() as at, ExitStack() as stack:
        folder = Path(at)
        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "open": lambda: opening(opened(), folder / "open", given.steps),
            "list": lambda: listing(opened(), folder / "list", given.runs),
            "readers": lambda: reading(folder / "readers", given.steps),
            "training": lambda: training(opened() if given.in_browser else None, folder / "training", given),
        }

        @functools.cache
        def opened() -> Browser:
            """The machine's own Chromium; a machine that only trains needs none."""
            from playwright.sync_api import sync_playwright
            from tests.page.conftest import chromium

            driver = stack.enter_context(sync_playwright())
            browser = driver.chromium.launch(executable_path=chromium(), args=["--no-sandbox", "--disable-gpu"])
            stack.callback(browser.close)
            record["browser"] = browser.version
            return browser

        for name in asked:
            record |= {"load": os.getloadavg()[0]} | parts[name]()
            print(f"{name}: {json.dumps(record)}", file=sys.stderr)
    text = json.dumps(record, indent=1)
    if given.json == "-":
        print(text)
    else:
        Path(given.json).write_text(text + "\n")


if __name__ == "__main__":
    main()
