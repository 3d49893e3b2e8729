"""Damaged files by the million: `python tests/soak/soak_fuzz.py --count 1130000 --jobs 14 --seconds 400`.

Every input is a function of (seed, format, number): `--only FORMAT --number N` makes and reads a single one again. Each
worker is a process that reads its inputs one after another in itself, under limits: of time by a timer of its own CPU
seconds, of memory by the resident set's peak (judge.py) and by a limit on its address space. What it is at stands in a
shared file, so that a worker that dies leaves its input's name; another takes its place behind it.

Prints a table, writes it as JSON to `--out`, keeps inputs that failed below `--keep`, and exits with 1 if there is any.
Needs no pytest.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

STUCK = 10  # CPU seconds after which a worker ends itself; 1 is a failure already
SILENT = 180.0  # seconds without a new input after which a worker waits for something that never comes
ADDRESSES = 3 << 30  # bytes of address space beyond what a worker has when it begins
BLOCK = 25  # inputs of a format before the next format's turn
MOST_KEPT = 200  # failures with their files, per worker
HEAD = struct.Struct("<qq")  # format and number under way
CELL = struct.Struct("<qqqdq")  # of a format: inputs, refused, failed, slowest seconds, most bytes
PLACES = 64  # formats that there is room for


class Board:
    """What a worker is at and has counted, where another process can see it."""

    def __init__(self, path: Path):
        size = HEAD.size + PLACES * CELL.size
        if not path.exists():
            path.write_bytes(HEAD.pack(-1, -1) + bytes(PLACES * CELL.size))
        with path.open("r+b") as file:
            self.held = mmap.mmap(file.fileno(), size)

    @property
    def at(self) -> tuple[int, int]:
        return HEAD.unpack_from(self.held, 0)

    def go(self, place: int, number: int) -> None:
        HEAD.pack_into(self.held, 0, place, number)

    def cell(self, place: int) -> tuple[int, int, int, float, int]:
        return CELL.unpack_from(self.held, HEAD.size + place * CELL.size)

    def count(
        self, place: int, *, refused: bool = False, failed: bool = False, seconds: float = 0.0, grown: int = 0
    ) -> None:
        inputs, was_refused, was_failed, slowest, most = self.cell(place)
        now = (inputs + 1, was_refused + refused, was_failed + failed, max(slowest, seconds), max(most, grown))
        CELL.pack_into(self.held, HEAD.size + place * CELL.size, *now)


def divided(count: int, shares: list[int]) -> list[int]:
    """`count` inputs by the formats' shares, the last taking what is left."""
    found = [count * share // sum(shares) for share in shares]
    found[-1] += count - sum(found)
    return found


def turns(counts: list[int], worker: int, jobs: int) -> Any:
    """(format, number) of a worker's inputs, some of each format in turn, so that all of them get equally far."""
    rounds = max(1, max(counts) // (BLOCK * jobs))
    for turn in range(rounds):
        for place, count in enumerate(counts):
            for number in range(count * turn // rounds, count * (turn + 1) // rounds):
                if number % jobs == worker:
                    yield place, number


def draw_of(seed: int, name: str, number: int) -> random.Random:
    return random.Random(f"{seed}/{name}/{number}")


def work(args: argparse.Namespace) -> None:
    """One worker: from the input behind the one on the board to the last."""
    _limit()
    from graftune.tokenizer import examine
    from tests.fuzz import formats
    from tests.fuzz.judge import judged

    examine.faults_of = formats.examined_here
    home = Path(args.home)
    place = Path(tempfile.mkdtemp(dir=home, prefix=f"worker{args.worker}-"))
    known = _chosen(formats.all_formats(place / "seeds"), args.only)
    scratch = place / "input"
    scratch.mkdir()
    _warm(known, scratch, args.seed)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ADDRESSES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    board, log = Board(home / f"board{args.worker}"), (home / f"faults{args.worker}.jsonl").open("a")
    behind, skipping, kept = board.at, board.at != (-1, -1), 0
    for at, number in turns(divided(args.count, [one.share for one in known]), args.worker, args.jobs):
        if skipping:
            skipping = (at, number) != behind
            continue
        if time.time() > args.until:
            break
        board.go(at, number)
        one = known[at]
        signal.setitimer(signal.ITIMER_PROF, STUCK)
        files = one.made(draw_of(args.seed, one.name, number))
        size = formats.write(scratch, files)
        verdict = judged(lambda: one.read(scratch), size, one.factor)  # noqa: B023 (called at once)
        failed = bool(verdict.fault)
        board.count(
            at, refused=not verdict.accepted and not failed, failed=failed, seconds=verdict.seconds, grown=verdict.grown
        )
        if failed and kept < MOST_KEPT:
            kept += 1
            log.write(
                json.dumps({"format": one.name, "number": number, "fault": verdict.fault, "detail": verdict.detail})
                + "\n"
            )
            log.flush()
    board.go(-2, -2)
    signal.setitimer(signal.ITIMER_PROF, 0)
    shutil.rmtree(place)


def _limit() -> None:
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "RUST_BACKTRACE": "0"}
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    import torch

    torch.set_num_threads(1)


def _chosen(known: list[Any], only: str) -> list[Any]:
    wanted = only.split(",") if only else [one.name for one in known]
    return [one for one in known if one.name in wanted]


def _warm(known: list[Any], scratch: Path, seed: int) -> None:
    """What is imported and made at first use is no input's."""
    from tests.fuzz import formats
    from tests.fuzz.judge import judged

    for one in known:
        for number in range(12):
            size = formats.write(scratch, one.made(draw_of(seed + 1, one.name, number)))
            judged(lambda: one.read(scratch), size, one.factor)  # noqa: B023 (called at once)


class Worker:
    """A process, and the ones that take its place."""

    def __init__(self, number: int, args: argparse.Namespace, home: Path):
        self.number, self.args, self.home, self.deaths = number, args, home, []
        self.board = Board(home / f"board{number}")
        self.seen, self.since = self.board.at, time.time()
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        given = {name: getattr(self.args, name) for name in ("count", "jobs", "seed", "only", "until")}
        words = [f"--{name}={value}" for name, value in given.items()]
        here = [sys.executable, str(Path(__file__).resolve()), f"--worker={self.number}", f"--home={self.home}", *words]
        return subprocess.Popen(here, stdout=subprocess.DEVNULL, stderr=(self.home / f"err{self.number}").open("ab"))

    def _judge(self, at: int, number: int, how: str) -> None:
        """An input that ended its worker. Where a library did it that the package keeps in a process of its own, and
        the harness does not, the package is asked, too."""
        asked = [sys.executable, str(Path(__file__).resolve()), f"--place={at}", f"--number={number}", "--alone"]
        asked += [f"--seed={self.args.seed}", f"--only={self.args.only}"]
        refused = subprocess.run(asked, capture_output=True, timeout=600).returncode == 0
        self.board.count(at, refused=refused, failed=not refused)
        if not refused:
            self.deaths.append((at, number, how))

    def over(self) -> bool:
        """Whether it is done; one that died is followed by another behind the input it died of."""
        if self.board.at != self.seen:
            self.seen, self.since = self.board.at, time.time()
        ended = self.process.poll()
        if ended is None:
            if time.time() - self.since > SILENT:
                self.process.kill()
            return False
        if ended == 0:
            return True
        at, number = self.board.at
        if at < 0 or len(self.deaths) > 200:
            raise SystemExit(
                f"worker {self.number} ended with {ended} before its first input: see {self.home}/err{self.number}"
            )
        self._judge(at, number, signal.Signals(-ended).name if ended < 0 else f"exit {ended}")
        self.process, self.since = self._start(), time.time()
        return False


def main() -> int:
    args = _arguments()
    if args.worker >= 0:
        work(args)
        return 0
    if args.number >= 0:
        return one_input(args)
    home = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None, prefix="fuzz-"))
    began, args.until = time.time(), time.time() + args.seconds
    workers = [Worker(number, args, home) for number in range(args.jobs)]
    try:
        while sum(worker.over() for worker in workers) < len(workers):  # each is looked at
            time.sleep(0.2)
        return report(args, workers, home, time.time() - began)
    finally:
        for worker in workers:
            worker.process.kill()
        shutil.rmtree(home)


def report(args: argparse.Namespace, workers: list[Worker], home: Path, seconds: float) -> int:
    from tests.fuzz import formats

    known = _chosen(formats.all_formats(home / "named"), args.only)
    rows, faults = (
        [],
        [
            json.loads(line)
            for worker in workers
            for line in (home / f"faults{worker.number}.jsonl").read_text().splitlines()
        ],
    )
    for worker in workers:
        faults += [
            {"format": known[at].name, "number": number, "fault": word, "detail": ""}
            for at, number, word in worker.deaths
        ]
    for place, one in enumerate(known):
        cells = [worker.board.cell(place) for worker in workers]
        inputs, refused, failed = (sum(cell[i] for cell in cells) for i in range(3))
        row = {
            "format": one.name,
            "inputs": inputs,
            "refused": refused,
            "accepted": inputs - refused - failed,
            "failures": failed,
        }
        rows.append(
            row
            | {
                "slowest_s": round(max(c[3] for c in cells), 3),
                "peak_mib": round(max(c[4] for c in cells) / 2**20, 1),
                "factor": one.factor,
            }
        )
    total = sum(row["inputs"] for row in rows)
    print(f"{'format':14}{'inputs':>9}{'refused':>9}{'accepted':>9}{'slowest':>9}{'peak MiB':>9}{'failures':>9}")
    for row in rows:
        shown = [row[key] for key in ("inputs", "refused", "accepted", "slowest_s", "peak_mib", "failures")]
        print(f"{row['format']:14}" + "".join(f"{value:9}" for value in shown))
    print(f"{total} inputs in {seconds:.0f} s by {args.jobs} workers, {len(faults)} failures listed, seed {args.seed}")
    if args.out:
        Path(args.out).write_text(
            json.dumps(
                {
                    "seed": args.seed,
                    "seconds": round(seconds, 1),
                    "jobs": args.jobs,
                    "inputs": total,
                    "formats": rows,
                    "faults": faults,
                },
                indent=1,
            )
        )
    keep(args, faults, known)
    return 1 if faults else 0


def keep(args: argparse.Namespace, faults: list[dict[str, Any]], known: list[Any]) -> None:
    """The first input of each kind of failure, as files."""
    by_name = {one.name: one for one in known}
    kinds: dict[tuple[str, str], dict[str, Any]] = {}
    for fault in faults:
        kinds.setdefault((fault["format"], fault["fault"][:60]), fault)
    for (name, word), fault in sorted(kinds.items()):
        print(f"  {name} {fault['number']}: {word}  {fault['detail'][-160:]!r}")
        if args.keep:
            from tests.fuzz import formats

            place = Path(args.keep) / f"{name.replace(' ', '-')}-{fault['number']}"
            place.mkdir(parents=True, exist_ok=True)
            formats.write(place, by_name[name].made(draw_of(args.seed, name, fault["number"])))


def one_input(args: argparse.Namespace) -> int:
    _limit()
    from graftune.tokenizer import examine
    from tests.fuzz import formats
    from tests.fuzz.judge import judged

    if not args.alone:
        examine.faults_of = formats.examined_here
    with tempfile.TemporaryDirectory() as place:
        known = _chosen(formats.all_formats(Path(place) / "seeds"), args.only)
        one = known[max(0, args.place)]
        folder = Path(args.keep or f"{place}/input")
        folder.mkdir(parents=True, exist_ok=True)
        size = formats.write(folder, one.made(draw_of(args.seed, one.name, args.number)))
        signal.setitimer(signal.ITIMER_PROF, STUCK)
        verdict = judged(lambda: one.read(folder), size, one.factor)
        print(verdict)
    return 1 if verdict.fault else 0


def _arguments() -> argparse.Namespace:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--count", type=int, default=20_000)
    words.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    words.add_argument("--seconds", type=float, default=3600.0)
    words.add_argument("--seed", type=int, default=1)
    words.add_argument("--only", default="", help="names of formats, with commas between them")
    words.add_argument("--number", type=int, default=-1, help="only this input of one format, with what comes of it")
    words.add_argument("--out", default="", help="a file for the table as JSON")
    words.add_argument("--keep", default="", help="a folder for inputs that failed")
    words.add_argument("--alone", action="store_true", help="examine tokenizers in processes of their own")
    for name, kind in (
        ("worker", int),
        ("place", int),
        ("home", str),
        ("until", float),
    ):  # of the processes that this starts
        words.add_argument(f"--{name}", type=kind, default=-1 if kind is int else kind(), help=argparse.SUPPRESS)
    return words.parse_args()


if __name__ == "__main__":
    sys.exit(main())
