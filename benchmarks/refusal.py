"""A run that does not fit, on a card that really has too little memory: refused before anything is loaded, and what the
refusal suggests then runs there.

    python -m benchmarks.refusal [--json FILE] [--size 1b] [--tokens 8192] [--device cuda]

A folder of random weights of that size is written, and `graftune train FOLDER DATA --recompute none
--tokens-per-micro-batch TOKENS` started in a process of its own, while this one holds so much of the card that what is
left lies halfway between what the plan needs without recomputing and what it needs with the next policy. Nothing is
patched: the driver tells the other process what is free. It has to end with exit code 2 and one sentence, torch having
allocated nothing; the settings of that sentence have to train, within what was free. `taken` is how far the card's free
memory fell meanwhile, by the driver: the CUDA context is in it. Wants the card for itself.

Where the command line's packages are missing the same settings go to `graftune.api.train`, and a GraftuneError becomes
the sentence and exit code that the command line makes of it; the record says which way it went (`through`).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from benchmarks.cases import SHAPES
from benchmarks.peers import write_folder

from benchmarks import report

STEPS = 2
LENGTH = 400  # tokens of an example
Attempt = Callable[[Sequence[str], Path, torch.device], dict[str, Any]]
Holding = Callable[[torch.device, int], AbstractContextManager[None]]


def write_data(path: Path, tokens: int) -> None:
    """Rows of equal length, enough for two micro-batches beside what is held out for validation."""
    rows = 1 + 3 * tokens // LENGTH
    row = {"prompt": "w5 " * (LENGTH // 2), "response": "w6 " * (LENGTH // 2)}  # words of the folder's tokenizer
    path.write_text((json.dumps(row) + "\n") * rows)


def line_of(base: Path, data: Path, device: torch.device, tokens: int) -> list[str]:
    """The command line, flags and values in turn."""
    line = ["train", str(base), str(data), "--device", str(device), "--recompute", "none", "--epochs", "1"]
    line += ["--tokens-per-step", str(tokens), "--tokens-per-micro-batch", str(tokens)]
    return [*line, "--max-steps", str(STEPS), "--samples", "0", "--template", "none"]


def settings_of(line: Sequence[str]) -> dict[str, Any]:
    """The same as settings of a run."""
    _, base, data, *flags = line
    found: dict[str, Any] = {"base": base, "data": data}
    for flag, value in zip(flags[::2], flags[1::2], strict=True):
        whole = re.fullmatch(r"\d+", value)
        found[flag.removeprefix("--").replace("-", "_")] = int(value) if whole else value
    return found


def with_settings(line: Sequence[str], changed: dict[str, str]) -> list[str]:
    """Those of the line in place of its own, others behind it."""
    found = list(line)
    for flag, value in changed.items():
        if flag in found:
            found[found.index(flag) + 1] = value
        else:
            found += [flag, value]
    return found


def suggested(said: str) -> dict[str, str]:
    """Flags and values that a refusal names; none where it names no way."""
    mend = said.rpartition(";")[2]
    return dict(re.findall(r"(--[\w-]+) (\S+)", mend)) if "would need" in mend else {}


# In a process of its own


def command(line: Sequence[str]) -> int:
    """The exit code of `graftune LINE`."""
    if importlib.util.find_spec("cyclopts") is None:
        return through_api(line)
    from graftune.cli import main

    return main(line)


def through_api(line: Sequence[str]) -> int:
    from graftune import api
    from graftune.config import Config
    from graftune.errors import GraftuneError
    from graftune.observe.console import Console

    try:
        api.train(Config.of(settings_of(line)), console=Console())
    except GraftuneError as error:
        print(f"graftune: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def child(file: Path, line: Sequence[str]) -> int:
    """Runs the line and notes down what torch took for it."""
    code, used = command(line), torch.cuda.is_initialized()
    facts = {
        "exit": code,
        "allocated": torch.cuda.max_memory_allocated() if used else 0,
        "reserved": torch.cuda.max_memory_reserved() if used else 0,
        "through": "graftune.cli" if importlib.util.find_spec("cyclopts") else "graftune.api",
    }
    file.write_text(json.dumps(facts))
    return code


def apart(line: Sequence[str], work: Path, device: torch.device) -> dict[str, Any]:
    file = work / "child.json"
    file.unlink(missing_ok=True)
    words = [sys.executable, "-m", "benchmarks.refusal", "--child", str(file), *line]
    began = time.monotonic()
    with watched(device) as lowest:
        done = subprocess.run(words, capture_output=True, text=True, cwd=report.ROOT)
    lines = done.stderr.strip().splitlines() or ["no word"]
    found = {"exit": done.returncode, "said": lines[-1], "seconds": round(time.monotonic() - began, 1)} | lowest
    return found | (json.loads(file.read_text()) if file.exists() else {"error": lines[-1]})


@contextmanager
def watched(device: torch.device) -> Iterator[dict[str, int]]:
    """`taken`: how far the device's free memory falls, by its driver."""
    found: dict[str, int] = {}
    if device.type != "cuda":
        yield found
        return
    before, over = torch.cuda.mem_get_info(device)[0], threading.Event()
    found["taken"] = 0

    def look() -> None:
        while not over.wait(0.005):
            found["taken"] = max(found["taken"], before - torch.cuda.mem_get_info(device)[0])

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


# In this one


def fresh_bytes(device: torch.device) -> int:
    """What a process that has just begun sees free: without its own context."""
    ask = "import sys, torch; print(torch.cuda.mem_get_info(torch.device(sys.argv[1]))[0])"
    done = subprocess.run([sys.executable, "-c", ask, str(device)], capture_output=True, text=True, check=True)
    return int(done.stdout)


@contextmanager
def ballast(device: torch.device, free: int) -> Iterator[None]:
    """All of the device but what leaves a process that begins now `free` bytes."""
    torch.cuda.empty_cache()
    size = fresh_bytes(device) - free
    if size <= 0:
        raise SystemExit(f"{free / 2**30:.1f} GiB are to be left free, and there are {(free + size) / 2**30:.1f}")
    held = torch.empty(size, dtype=torch.uint8, device=device)
    try:
        yield
    finally:
        del held
        torch.cuda.empty_cache()


def needs(line: Sequence[str]) -> dict[str, int]:
    """Bytes that a plan wants free, by policy."""
    from graftune.config import Config
    from graftune.observe.console import Console
    from graftune.plan import policies_of
    from graftune.training.prepare import job_of

    config = Config.of(settings_of(line))
    job = job_of(config, Console(quiet=True))
    return {policy: job.plan(policy, config.train.tokens_per_micro_batch).needed for policy in policies_of(job)}


def measure(
    base: Path, work: Path, device: torch.device, tokens: int, attempt: Attempt = apart, holding: Holding = ballast
) -> dict[str, Any]:
    data = work / "data.jsonl"
    write_data(data, tokens)
    line = line_of(base, data, device, tokens)
    needed = needs(line)
    free = (needed["none"] + needed["selective"]) // 2
    found: dict[str, Any] = {"tokens": tokens, "needed": needed, "free": free}
    with holding(device, free):
        refused = attempt([*line, "--out", str(work / "refused")], work, device)
        refused["folder"] = (work / "refused").exists()
        found |= {"refused": refused, "suggestion": suggested(refused["said"])}
        if found["suggestion"]:
            again = with_settings(line, found["suggestion"])
            found["suggested"] = attempt([*again, "--out", str(work / "suggested")], work, device)
            plan = work / "suggested" / "plan.json"
            if plan.exists():
                document = json.loads(plan.read_text())
                found["suggested"] |= {name: document[name] for name in ("settings", "expected", "needed", "free")}
    return found | {"goals": goals(found)}


def goals(found: dict[str, Any]) -> list[dict[str, Any]]:
    refused, ran = found["refused"], found.get("suggested", {})
    said = refused["exit"] == 2 and "training needs" in refused["said"]
    share = round(ran["reserved"] / ran["free"], 4) if ran.get("reserved") and ran.get("free") else None
    return [
        report.goal("refused with exit code 2", "at least", 1, int(said)),
        report.goal("bytes allocated when refused", "at most", 0, refused.get("allocated")),
        report.goal("folders left by the refused run", "at most", 0, int(refused["folder"])),
        report.goal("suggested run ended well", "at least", 1, int(ran.get("exit") == 0)),
        report.goal("reserved by it / free", "at most", 1.0, share),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="a run that does not fit, refused, and the suggested one")
    parser.add_argument("--json", default="")
    parser.add_argument("--size", default="1b", choices=list(SHAPES))
    parser.add_argument("--tokens", type=int, default=8192, help="of a micro-batch")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", default="", help="of the code that runs, where there is no repository")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() or not arguments.device.startswith("cuda"):
        raise SystemExit("this fills a CUDA device, and there is none here")
    device = torch.device(arguments.device)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        write_folder(SHAPES[arguments.size], work / "base", device)
        found = measure(work / "base", work, device, arguments.tokens)
    facts = {
        "gpu": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "commit": arguments.commit or report.commit(),
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "size": arguments.size,
    }
    print(found["refused"]["said"])
    print("\n".join(map(report.said, found["goals"])))
    if arguments.json == "-":
        print(json.dumps(facts | found))
    elif arguments.json:
        report.write(Path(arguments.json), facts | found)
    return 0 if all(goal["met"] for goal in found["goals"]) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        sys.exit(child(Path(sys.argv[2]), sys.argv[3:]))
    sys.exit(main())
