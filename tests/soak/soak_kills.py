"""Kills (-9) at random moments: `make soak`, or `python -m tests.soak.soak_kills --kills 500 --seed 1`.

Half of them kill a resume, an eighth or so an export. What has to hold is in tests/training/kills.py. On a CPU children
are forked from a process that has imported torch, so that a kill takes half a second; with --device cuda (or --fresh)
each is a process of its own, and a run replays its steps from CUDA graphs:

    python -m tests.soak.soak_kills --device cuda --deterministic --kills 20
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

ON_CUDA = [
    *("--device", "cuda", "--compute-dtype", "bf16", "--rank", "8", "--dropout", "0.1", "--lr", "0.01"),
    *("--epochs", "300", "--tokens-per-step", "256", "--tokens-per-micro-batch", "128", "--eval-every", "30"),
    *("--save-every", "20", "--schedule", "constant", "--patience", "0", "--samples", "2", "--sample-tokens", "3"),
]


def main() -> int:
    asked = arguments()
    root = Path(tempfile.mkdtemp(prefix="graftune-kills-", dir=asked.folder or None))
    os.environ |= {"GRAFTUNE_CACHE": str(root / "cache of the first"), "OMP_NUM_THREADS": "1"}
    try:
        return soak(asked, root)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def soak(asked: argparse.Namespace, root: Path) -> int:
    from tests.support import tiny
    from tests.training.kills import Fresh, Lives
    from tests.training.runs import SETTINGS, Processes, write_data

    on_cuda = asked.device == "cuda"
    base = tiny.make_folder("llama" if on_cuda else "llama-shallow", root / "base")
    data = write_data(root / "data.jsonl", rows=40)
    settings = [*(ON_CUDA if on_cuda else SETTINGS), *(["--deterministic"] if asked.deterministic else [])]
    line, straight, log = ["train", str(base), str(data), *settings], root / "straight", root / "first.log"
    forks = None if on_cuda or asked.fresh else Processes(draws=True)
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
    lives = Lives(starts, line, straight, root / "lives", min(seconds), asked.seed)
    again = lives.same_adapter(root / "again")
    assert again, "two undisturbed runs differ: nothing can be said of those that were killed"
    try:
        tally = lives.until(asked.kills)
    except AssertionError:
        print(lives.said(), file=sys.stderr)
        raise
    finally:
        if forks is not None:
            forks.close()
    took = time.monotonic() - began
    print(
        f"{tally.kills} kills in {tally.lives} runs, {tally.resumes} of them of a resume, seed {asked.seed}, "
        f"{took:.0f} s: every run finished, every adapter and export is the undisturbed one's to the bit, no stray file"
    )
    for where, count in sorted(tally.phases.items(), key=lambda item: -item[1]):
        print(f"  {count:4d}  {where}")
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=int(os.environ.get("GRAFTUNE_KILLS", "500")))
    parser.add_argument("--seed", type=int, default=int(os.environ.get("GRAFTUNE_SEED", "20261117")))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--fresh", action="store_true", help="processes of their own on a CPU, too")
    parser.add_argument("--folder", default="", help="where to put the runs; the temporary folder by default")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
