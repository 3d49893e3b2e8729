"""Disks that fill up, and other things that run out: `make soak`, or `python -m tests.soak.soak_disk`.

Each case trains, meets its trouble, has to end with exit code 0 or with one sentence and exit code 2, and must then be
whole: no unfinished file, every checkpoint as it was written. Without the trouble the run is taken up again and has to
end in the adapter of an undisturbed run. The cases:

    writes      a full disk from the n-th write on, for every n; and at the n-th write only
    tmpfs       a real file system of a megabyte with 0, 4, 8 ... KiB free (root may mount one; others are told)
    export      the same for `graftune export`
    read-only   that file system, mounted read-only
    handles     0, 1, 2 ... file handles more than are open
    small files files may have 16, 20, 24 ... KiB (RLIMIT_FSIZE)
    clock       set back by a day amid the run, and again at the resume
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.soak.runner import run

KIB = 1024


class Bench:
    def __init__(self, root: Path):
        from tests.support import tiny
        from tests.training.kills import names
        from tests.training.runs import SETTINGS, Processes, write_data

        self.root, self.log, self.processes = root, root / "log", Processes(draws=True)
        base, data = tiny.make_folder("llama-shallow", root / "base"), write_data(root / "data.jsonl")
        settings = [*SETTINGS, "--max-steps", "5"]
        self.line, self.straight = ["train", str(base), str(data), *settings], root / "straight"
        assert self.processes.run(*self.line, "--out", str(root / "warm"), log=self.log, here=True) == 0, self.said()
        assert self.run(*self.line, "--out", str(self.straight)) == 0, self.said()
        self.names = names(self.straight)

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def run(self, *line: str, trouble: dict[str, Any] | None = None) -> int:
        self.processes.start(*line, log=self.log, trouble=trouble)
        return self.processes.wait()

    def meets(self, run: Path, *line: str, trouble: dict[str, Any] | None = None) -> str:
        """What the trouble came to: "finished", or the sentence."""
        from graftune.weights import checkpoint

        code, said = self.run(*(line or self.next(run)), trouble=trouble), self.said()
        ours = [text for text in said.splitlines() if text.startswith("graftune: ")]
        assert "Traceback" not in said and code in (0, 2) and len(ours) == (code == 2), (code, said)
        for path in checkpoint.steps(run / "checkpoints").values():
            checkpoint.check_whole(path)
        return ours[0] if ours else "finished"

    def recovers(self, run: Path) -> None:
        from tests.training.kills import names
        from tests.training.runs import adapter_bytes

        assert self.run(*self.next(run)) == 0, self.said()
        assert adapter_bytes(run) == adapter_bytes(self.straight) and names(run) == self.names, names(run)

    def next(self, run: Path) -> list[str]:
        begun = (run / "config.yaml").exists()
        return ["train", "--resume", str(run)] if begun else [*self.line, "--out", str(run)]


@contextmanager
def small_disk(root: Path, size: int) -> Iterator[Path | None]:
    """A file system of its own; None where this user may not mount one."""
    place = root / "small"
    place.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    try:
        mounted = subprocess.run(words, capture_output=True).returncode == 0
    except OSError:
        mounted = False
    try:
        yield place if mounted else None
    finally:
        if mounted:
            subprocess.run(["umount", str(place)], check=True)
        place.rmdir()


def fill(disk: Path, free: int) -> Path:
    """A file that leaves so many bytes."""
    filler, found = disk / "filler", os.statvfs(disk)
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, found.f_bavail * found.f_bsize - free))
    return filler


def full_at_every_write(bench: Bench, once: bool, every: int) -> str:
    run, listed, ends = bench.root / "run", bench.root / "writes", Counter[bool]()
    none = {"full_at": 0, "once": once, "folder": str(run), "list": str(listed)}
    assert bench.meets(run, trouble=none) == "finished"
    shutil.rmtree(run)
    total = len(listed.read_text().splitlines())
    for at in range(1, total + 1, every):
        end = bench.meets(run, trouble={**none, "full_at": at})
        assert end == "finished" or "space" in end, (at, end)
        ends[end == "finished"] += 1
        bench.recovers(run)
        shutil.rmtree(run)
    return (
        f"{total} writes, {ends.total()} tried: {ends[False]} ended in one sentence, {ends[True]} finished and warned"
    )


def sizes(bench: Bench, disk: Path, every: int) -> str:
    """A run in a file system with ever more room, until it finishes without a word."""
    run, tried, ends = disk / "run", 0, Counter[str]()
    for free in range(0, 1 << 20, every * 4 * KIB):
        filler = fill(disk, free)
        end = bench.meets(run)
        ends["finished" if end == "finished" else "one sentence"] += 1
        tried, done = tried + 1, end == "finished" and "warning" not in bench.said()
        assert end == "finished" or "space" in end, end
        filler.unlink()
        bench.recovers(run)
        shutil.rmtree(run)
        if done:
            return f"{tried} sizes up to {free // KIB} KiB: {dict(ends)}"
    raise AssertionError("a megabyte was not enough")


def exports(bench: Bench, disk: Path, every: int) -> str:
    tried = 0
    for to, name in (("merged", "merged"), ("gguf-lora", "adapter.gguf"), ("peft", "peft")):
        line = ["export", str(bench.straight), "--to", to, "--out", str(disk / "out" / name)]
        for free in range(0, 1 << 20, every * 4 * KIB):
            filler = fill(disk, free)
            code, said = bench.run(*line), bench.said()
            filler.unlink()
            tried += 1
            assert "Traceback" not in said and code in (0, 2) and said.count("graftune: ") == (code == 2), said
            if code == 0:
                break
            left = [path.name for path in (disk / "out").glob("*")] if (disk / "out").exists() else []
            assert not left or left == ["adapter.gguf"], left  # whole, but for its Modelfile
            shutil.rmtree(disk / "out", ignore_errors=True)
        assert code == 0, said
        shutil.rmtree(disk / "out")
    return f"{tried} sizes of three formats: one sentence each, nothing unfinished, then a whole export"


def read_only(bench: Bench, disk: Path, every: int) -> str:
    run, ends = disk / "run", []
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    ends.append(bench.meets(run))
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    assert "space" in (end := bench.meets(run, trouble={"full_at": 60, "once": False, "folder": str(run)})), end
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    ends.append(bench.meets(run))
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    assert all("read-only" in end.lower() for end in ends), ends
    bench.recovers(run)
    return "a start and a resume: one sentence each, then resumed"


def limited(bench: Bench, what: str, values: range) -> str:
    run, ends = bench.root / "run", Counter[str]()
    for value in values:
        if run.exists():
            shutil.rmtree(run)
        end = bench.meets(run, trouble={what: value})
        ends["finished" if end == "finished" else "one sentence"] += 1
        warned = "warning" in bench.said()
        bench.recovers(run)
        if end == "finished" and not warned:
            shutil.rmtree(run)
            return f"up to {value}: {dict(ends)}"
    raise AssertionError(f"{what}: {values} was not enough")


def clock(bench: Bench) -> str:
    run = bench.root / "run"
    trouble = {"clock": 86400.0, "full_at": 70, "once": False, "folder": str(run)}
    assert "space" in bench.meets(run, trouble=trouble)
    assert bench.meets(run, trouble={"clock": 2 * 86400.0}) == "finished"
    bench.recovers(run)
    shutil.rmtree(run)
    return "set back a day amid the run and another at the resume: the same adapter"


def soak(root: Path, every: int = 1, only: str = "") -> None:
    """`every`: try every so many-th write and size; `only`: one of the cases."""
    began, bench = time.monotonic(), Bench(root)
    cases: dict[str, Callable[[], str]] = {
        "clock": lambda: clock(bench),
        "read-only": lambda: on_small_disk(bench, read_only, every),
        "tmpfs": lambda: on_small_disk(bench, sizes, every),
        "export": lambda: on_small_disk(bench, exports, every),
        "handles": lambda: limited(bench, "handles", range(0, 200, every)),
        "small files": lambda: limited(bench, "largest_file", range(16 * KIB, 1 << 20, every * 4 * KIB)),
        "full from the n-th write on": lambda: full_at_every_write(bench, False, every),
        "full at the n-th write only": lambda: full_at_every_write(bench, True, every),
    }
    try:
        for name, case in cases.items():
            if only in name:
                print(f"{name}: {case()} ({time.monotonic() - began:.0f} s so far)", flush=True)
    except AssertionError:
        print(bench.said(), file=sys.stderr)
        raise
    finally:
        bench.processes.close()


def on_small_disk(bench: Bench, case: Callable[[Bench, Path, int], str], every: int) -> str:
    with small_disk(bench.root, 4 << 20) as disk:
        return "not tried: this user may not mount a file system" if disk is None else case(bench, disk, every)


if __name__ == "__main__":
    run(soak)
