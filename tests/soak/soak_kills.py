"""Kills (-9) at random moments: `make soak`, or `python -m tests.soak.soak_kills --kills 500 --seed 1`.

Half of them kill a resume, an eighth or so an export. What has to hold is in tests/training/kills.py. On a CPU children
are forked from a process that has imported torch, so that a kill takes half a second; with --device cuda (or --fresh)
each is a process of its own, and a run replays its steps from CUDA graphs:

    python -m tests.soak.soak_kills --device cuda --deterministic --kills 20
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tests.soak.runner import run

ON_CUDA = [
    *("--device", "cuda", "--compute-dtype", "bf16", "--rank", "8", "--dropout", "0.1", "--lr", "0.01"),
    *("--epochs", "300", "--tokens-per-step", "256", "--tokens-per-micro-batch", "128", "--eval-every", "30"),
    *("--save-every", "20", "--schedule", "constant", "--patience", "0", "--samples", "2", "--sample-tokens", "3"),
]


def soak(
    root: Path,
    kills: int = 500,
    seed: int = 20261117,
    device: str = "cpu",
    deterministic: bool = False,
    fresh: bool = False,
) -> None:
    from tests.support import tiny
    from tests.training.kills import Fresh, Lives
    from tests.training.runs import SETTINGS, Processes, write_data

    on_cuda = device == "cuda"
    base = tiny.make_folder("llama" if on_cuda else "llama-shallow", root / "base")
    data = write_data(root / "data.jsonl", rows=40)
    settings = [*(ON_CUDA if on_cuda else SETTINGS), *(["--deterministic"] if deterministic else [])]
    line, straight, log = ["train", str(base), str(data), *settings], root / "straight", root / "first.log"
    forks = None if on_cuda or fresh else Processes(draws=True)
    starts = forks or Fresh()
    if forks is not None:  # what the server itself has run, its children need not import and rehearse
        assert forks.run(*line, "--out", str(root / "warm"), log=log, here=True) == 0, log.read_text()
    seconds = []
    for out in (straight, root / "again"):
        began = time.monotonic()
        starts.start(*line, "--out", str(out), log=log)
        assert starts.wait() == 0, log.read_text()
        seconds.append(time.monotonic() - began)
    began = time.monotonic()
    lives = Lives(starts, line, straight, root / "lives", min(seconds), seed)
    again = lives.same_adapter(root / "again")
    assert again, "two undisturbed runs differ: nothing can be said of those that were killed"
    try:
        tally = lives.until(kills)
    except AssertionError:
        print(lives.said(), file=sys.stderr)
        raise
    finally:
        if forks is not None:
            forks.close()
    took = time.monotonic() - began
    print(
        f"{tally.kills} kills in {tally.lives} runs, {tally.resumes} of them of a resume, seed {seed}, "
        f"{took:.0f} s: every run finished, every adapter and export is the undisturbed one's to the bit, no stray file"
    )
    for where, count in sorted(tally.phases.items(), key=lambda item: -item[1]):
        print(f"  {count:4d}  {where}")


if __name__ == "__main__":
    run(soak)
