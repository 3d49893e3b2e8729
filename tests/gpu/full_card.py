"""A run that does not fit, on a card that really has too little memory: refused before anything is loaded, and what the
refusal suggests then runs there.

`graftune train FOLDER DATA --recompute none --tokens-per-micro-batch TOKENS` is started in a process of its own, while
this one holds so much of the card that what is left lies halfway between what the plan needs without recomputing and
what it needs with the next policy. Nothing is patched: the driver tells the other process what is free. It has to end
with exit code 2 and one sentence, torch having allocated nothing; the settings of that sentence have to train, within
what was free. `taken` is how far the card's free memory fell meanwhile, by the driver: the CUDA context is in it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
STEPS = 2
LENGTH = 400  # tokens of an example


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
    """Settings that a refusal names, as flags, and their values; none where it names no way."""
    fix = said.rpartition(";")[2]
    found = (
        re.findall(r"(base_dtype|base_on|shard_base|recompute|tokens_per_micro_batch) (\w+)", fix)
        if "would need" in fix
        else []
    )
    return {f"--{name.replace('_', '-')}": value for name, value in found}


# In a process of its own


def child(file: Path, line: Sequence[str]) -> int:
    """Runs `graftune LINE` and notes down what torch took for it."""
    from graftune.cli import main

    code, used = main(line), torch.cuda.is_initialized()
    facts = {
        "exit": code,
        "allocated": torch.cuda.max_memory_allocated() if used else 0,
        "reserved": torch.cuda.max_memory_reserved() if used else 0,
    }
    file.write_text(json.dumps(facts))
    return code


def apart(line: Sequence[str], work: Path, device: torch.device) -> dict[str, Any]:
    file = work / "child.json"
    file.unlink(missing_ok=True)
    words = [sys.executable, "-m", "tests.gpu.full_card", str(file), *line]
    began = time.monotonic()
    with watched(device) as lowest:
        done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
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
    from graftune.observe.console import Console
    from graftune.plan import policies_of
    from graftune.settings.config import Config
    from graftune.training.prepare import job_of

    config = Config.of(settings_of(line))
    job = job_of(config, Console(quiet=True))
    return {policy: job.plan(policy, config.train.tokens_per_micro_batch).needed for policy in policies_of(job)}


def measure(base: Path, work: Path, device: torch.device, tokens: int) -> dict[str, Any]:
    data = work / "data.jsonl"
    write_data(data, tokens)
    line = line_of(base, data, device, tokens)
    needed = needs(line)
    free = (needed["none"] + needed["selective"]) // 2
    found: dict[str, Any] = {"tokens": tokens, "needed": needed, "free": free}
    with ballast(device, free):
        refused = apart([*line, "--out", str(work / "refused")], work, device)
        refused["folder"] = (work / "refused").exists()
        found |= {"refused": refused, "suggestion": suggested(refused["said"])}
        if found["suggestion"]:
            again = with_settings(line, found["suggestion"])
            found["suggested"] = apart([*again, "--out", str(work / "suggested")], work, device)
            plan = work / "suggested" / "plan.json"
            if plan.exists():
                document = json.loads(plan.read_text())
                found["suggested"] |= {name: document[name] for name in ("settings", "expected", "needed", "free")}
    return found


if __name__ == "__main__":
    sys.exit(child(Path(sys.argv[1]), sys.argv[2:]))
