"""A session on a GPU that is there for minutes only: named stages of benchmarks, each within one call, nothing to edit.

    python benchmarks/session.py --list
    python benchmarks/session.py ours issue3-graph --out FOLDER [--peers FOLDER] [--base FILE] [--data FILE] ...
    python benchmarks/session.py --keep FOLDER          afterwards, at home: its records into benchmarks/results

A stage is a list of commands with a time limit each; one that fails, is stopped or lacks what it needs is reported, and
the others go on. FOLDER gets a log and a JSON for each stage (STAGE.log, STAGE.json), written after every command, and
while it runs the live record of the steps (step.json): at most eight files. The table printed last has each command's
seconds and exit code and how many goals it reached and missed, and under it every goal that was missed.

Stages of one call are one run, and those of several calls on one machine that say the same --run: steps timed for one
are not timed again for another of the same --out, and ratios between their cases hold. With --total no command is begun
that would not end in time. Two sessions may run side by side, one that times and one of tests, where they name the same
--pause-file: the tests stand still while somebody is timed. stages.py has the stages and their seconds.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.stages import CALL_S, ROOT, STAGES, Command, Stage

from benchmarks import report

RESULTS = ROOT / "benchmarks" / "results"
MOST_FILES = 8
STOPPED, NOT_RUN = 124, None
WITH_COMMIT = (  # take --commit
    "step", "graph", "breakdown", "gsm8k", "bases-fp8", "bases-quantised", "plan", "kernels", "refusal",
)  # fmt: skip


@dataclass
class Done:
    """One command that was run, or why it was not."""

    name: str
    seconds: float = 0.0
    exit: int | None = NOT_RUN
    said: str = ""
    goals: list[dict[str, Any]] = field(default_factory=list)
    record: Any = None
    result: str = ""

    def counted(self, met: bool | None) -> int:
        return sum(goal["met"] is met for goal in self.goals)


class Session:
    def __init__(self, options: argparse.Namespace, stages: dict[str, Stage], work: Path):
        self.options, self.stages, self.work = options, stages, work
        self.out = Path(options.out).resolve()
        self.out.mkdir(parents=True, exist_ok=True)
        self.began, self.lock = time.monotonic(), threading.Lock()
        now = datetime.datetime.now(datetime.UTC)
        self.date = now.strftime("%Y-%m-%d %H:%M UTC")
        self.run_name = options.run or now.strftime("%Y%m%d-%H%M%S")
        live = 2 * len(options.stages) + 1 <= MOST_FILES
        self.step_record = (self.out if live else work) / "step.json"
        self.peers = self._peers()
        paths = [ROOT, ROOT / "src", self.peers, os.environ.get("PYTHONPATH")]
        self.environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(str(path) for path in paths if path),
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        self.done: dict[str, list[Done]] = {}

    def _peers(self) -> Path | None:
        """Unpacked once, for all commands."""
        if not self.options.peers:
            return None
        given = Path(self.options.peers).resolve()
        if given.is_dir():
            return given
        site = self.work / "peers"
        site.mkdir()
        subprocess.run(["tar", "xJf", str(given), "-C", str(site)], check=True)
        return site

    def go(self) -> int:
        for name in self.options.stages:
            self.stage(self.stages[name])
        print("\n" + self.table(), flush=True)
        return int(any(done.exit != 0 for stage in self.done.values() for done in stage))

    def stage(self, stage: Stage) -> None:
        self.done[stage.name] = []
        (self.out / f"{stage.name}.log").write_text("")
        if stage.at_once == 1:
            for number, command in enumerate(stage.commands):
                self._finish(stage, self.command(stage, command, number))
            return
        with ThreadPoolExecutor(stage.at_once) as pool:
            work = [pool.submit(self.command, stage, c, i) for i, c in enumerate(stage.commands)]
            for each in work:
                self._finish(stage, each.result())

    def command(self, stage: Stage, command: Command, number: int) -> Done:
        done = Done(command.name, result=command.result)
        missing = [name for name in command.needs if not self._given(name)]
        left = self.options.total - (time.monotonic() - self.began) if self.options.total else float("inf")
        if missing:
            done.said = f"not run: needs --{missing[0]}, a file that is there"
        elif left < (expected := 5 if self._timed_already(command) else command.least):
            done.said = f"not run: takes about {expected} s and {max(0.0, left):.0f} are left"
        if done.said:
            return done
        own = self.work / f"{stage.name}-{number}"
        limit = min(command.limit, left)
        words = [sys.executable, *self._words(command, own.with_suffix(".json"), limit)]
        print(f"{stage.name}: {command.name} (about {command.seconds} s)", flush=True)
        # Alone it writes where it is read, so that a session that is cut off has it; beside others into one of its own.
        shared = self.out / f"{stage.name}.log"
        log = shared if stage.at_once == 1 else own.with_suffix(".log")
        start = time.monotonic()
        with log.open("a") as handle:
            handle.write(f"\n=== {command.name}: {' '.join(words[1:])}\n")
            handle.flush()
            begin = handle.tell()
            done.exit = self._run(words, handle, limit, stage.at_once)
        done.seconds = round(time.monotonic() - start, 1)
        text = log.read_bytes()[begin:].decode(errors="replace")
        done.said = self._last(text, done.exit, command.is_test)
        if log is not shared:
            with self.lock, shared.open("a") as handle:
                handle.write(log.read_text(errors="replace"))
        done.record = self._record(command, own.with_suffix(".json"))
        done.goals = report.every_goal(done.record)
        return done

    def _timed_already(self, command: Command) -> bool:
        """Cases of which this session has everyone's time."""
        if command.result != "step" or not command.timed or not self.step_record.exists():
            return False
        found = json.loads(self.step_record.read_text())["cases"]
        own = {name: case["participants"] for name, case in found.items() if case.get("run") == self.run_name}
        return all("ms" in own.get(name, {}).get(who, {}) for name, who in command.timed)

    def _words(self, command: Command, record: Path, limit: float) -> list[str]:
        settings = ("data", "base", "scratch", "reference", "device")
        given = {f"{{{name}}}": str(getattr(self.options, name)) for name in settings} | {"{json}": str(record)}
        words = [given.get(word, word) for word in command.words]
        if words[0] == "benchmarks/step.py":
            # A record of its own where none is kept: what such a command is for is the caches it leaves.
            path = self.step_record if command.result else record
            words += ["--json", str(path), "--merge", "--run", self.run_name, "--device", self.options.device]
            words += ["--peers", str(self.peers)] if self.peers else []
            words += ["--pause-file", str(Path(self.options.pause_file).resolve())] if self.options.pause_file else []
            # It ends by itself in time: its participants have sessions of their own, and would outlive it.
            words += ["--total", f"{max(1.0, limit - 10):.0f}"]
        if self.options.commit and command.result in WITH_COMMIT:
            words += ["--commit", self.options.commit]
        return words

    def _run(self, words: list[str], handle: Any, limit: float, at_once: int) -> int:
        # Beside others one thread each: threads of several pools on the same cores wait for each other, spinning.
        environment = self.environment if at_once == 1 else {"OMP_NUM_THREADS": "1"} | self.environment
        process = subprocess.Popen(
            words, stdout=handle, stderr=subprocess.STDOUT, cwd=ROOT, env=environment, start_new_session=True
        )
        if self.options.pause_file and words[1] != "benchmarks/step.py":
            with self.lock, Path(self.options.pause_file).open("a") as listed:
                listed.write(f"{process.pid}\n")
        try:
            return process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # a session of its own: its children go with it
            process.wait()
            return STOPPED

    def _last(self, text: str, code: int | None, is_test: bool) -> str:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        telling = [each for each in lines if re.search(r"\w(Error|Exception)\b|failed|NOT reached", each)]
        last = (telling or lines or ["(it printed nothing)"])[-1][:200]
        if code == 0:
            return lines[-1].strip("= ") if is_test and lines else ""
        return f"stopped at its limit; last line: {last}" if code == STOPPED else last

    def _record(self, command: Command, path: Path) -> Any:
        """What the command left; of a step's record the cases and sweeps that it was about."""
        if command.words[0] != "benchmarks/step.py":
            return json.loads(path.read_text()) if path.exists() else None
        if not command.result or not self.step_record.exists():
            return None
        record = json.loads(self.step_record.read_text())
        for key, asked in (("cases", dict(command.timed)), ("sweeps", command.after("--sweep").split(","))):
            record[key] = {name: value for name, value in record.get(key, {}).items() if name in asked}
        return record

    def _given(self, name: str) -> bool:
        value = getattr(self.options, name)
        return bool(value) and Path(value).exists()

    def _finish(self, stage: Stage, done: Done) -> None:
        self.done[stage.name].append(done)
        print(line(stage.name, done), flush=True)
        document = {
            "stage": stage.name,
            "run": self.run_name,
            "date": self.date,
            "gpu": gpu_name(),
            "commit": self.options.commit or report.commit(),
            "commands": [vars(one) for one in self.done[stage.name]],
        }
        report.write(self.out / f"{stage.name}.json", document)

    def table(self) -> str:
        lines = [f"{'stage':16}{'command':40}{'seconds':>8}{'exit':>6}{'reached':>9}{'missed':>8}{'open':>6}"]
        missed: list[str] = []
        for stage, found in self.done.items():
            lines += [line(stage, done) for done in found]
            for done in found:
                missed += [f"{goal['where']:24}{report.said(goal)}" for goal in done.goals if goal["met"] is not True]
        total = sum(done.seconds for found in self.done.values() for done in found)
        lines.append(f"{total:.0f} s of commands, {time.monotonic() - self.began:.0f} s in all")
        return "\n".join([*lines, *(["\nnot reached or not measured:"] if missed else []), *dict.fromkeys(missed)])


def line(stage: str, done: Done) -> str:
    code = "-" if done.exit is None else str(done.exit)
    counts = "".join(f"{done.counted(met):>{n}}" for met, n in ((True, 9), (False, 8), (None, 6)))
    said = f"  {done.said[:110]}" if done.said else ""
    return f"{stage:16}{done.name[:39]:40}{done.seconds:8.0f}{code:>6}{counts}{said}"


def gpu_name() -> str:
    if shutil.which("nvidia-smi") is None:
        return ""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True).stdout.partition("\n")[0].strip()


def keep(folder: Path, results: Path = RESULTS) -> list[Path]:
    """The records that a session left, under the names that the README and the plots read. Steps are merged into what
    is there, case by case; everything else takes its place, with the session's commit, date and run where the script
    that made it has none."""
    from benchmarks.step import slug

    made: dict[Path, Any] = {}
    for path in sorted(folder.glob("*.json"), key=lambda path: path.name != "step.json"):
        document = json.loads(path.read_text())
        if "stage" in document:
            found = [(c["result"], c["record"]) for c in document["commands"] if c["result"] and c["record"]]
            found += [("tests", tests_of(document))] if document["stage"] == "tests" else []
        else:
            found = [("step", document)] if "cases" in document else []
        for result, record in found:
            machine = slug(record.get("gpu") or document.get("gpu") or "") or "cpu"
            target = results / f"{result}-{machine}.json"
            if result == "step":
                old = made.get(target) or (json.loads(target.read_text()) if target.exists() else {})
                record = report.merged(old, record) if old else record
                report.close(record)
            elif result == "tests":
                record["files"] = _earlier_tests(target) | record["files"]
            else:
                told = {key: document[key] for key in ("commit", "date", "run") if document.get(key)}
                record = record | {key: value for key, value in told.items() if not record.get(key)}
            made[target] = record
    for target, record in made.items():
        report.write(target, record)
    return list(made)


def tests_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """What each file's tests said; nothing of those that were stopped or not begun."""
    files = {
        command["name"]: {key: command[key] for key in ("exit", "seconds", "said")} | {"commit": document["commit"]}
        for command in document["commands"]
        if command["exit"] not in (STOPPED, NOT_RUN)
    }
    return {"gpu": document["gpu"], "files": files}


def _earlier_tests(path: Path) -> dict[str, Any]:
    """Of an earlier session, of its commit: where the next was too short for them."""
    return dict(json.loads(path.read_text())["files"]) if path.exists() else {}


def listed(stages: dict[str, Stage]) -> str:
    lines = []
    for stage in stages.values():
        lines.append(f"{stage.name:16}{stage.seconds:5} s  {stage.about}")
        if stage.at_once > 1:
            lines.append(f"{'':20}{len(stage.commands)} commands, {stage.at_once} at once")
            continue
        lines += [f"{'':16}{c.seconds:5} s    {c.name}: {' '.join(c.words)}" for c in stage.commands]
    lines.append(f"a call should end within {CALL_S} s: choose stages that add up to less")
    return "\n".join(lines)


def arguments(stages: dict[str, Stage], words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=", ".join(stages))
    parser.add_argument("--list", action="store_true", help="the stages, their commands and expected seconds")
    parser.add_argument("--out", default="", help="folder for logs and records")
    parser.add_argument("--keep", default="", metavar="FOLDER", help="take a session's records into benchmarks/results")
    parser.add_argument("--peers", default="", help="folder or .tar.xz of the peers' packages")
    parser.add_argument("--base", default="", help="SmolLM2's GGUF, where its package is not installed")
    parser.add_argument("--data", default="", help="training data of the curves")
    parser.add_argument("--scratch", default="", help="folder of the small model that is trained from scratch")
    parser.add_argument("--reference", default=str(RESULTS / "gsm8k-cpu.json"), help="the CPU's curve")
    parser.add_argument("--commit", default="", help="of the code that runs")
    parser.add_argument("--run", default="", help="a name that several calls on one machine share, to be one run")
    parser.add_argument("--pause-file", default="", help="a file that a session of tests and one that times share")
    parser.add_argument("--total", type=float, default=0.0, help="seconds that the session has; 0: no end")
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if unknown := [name for name in options.stages if name not in stages]:
        parser.error(f"no stage {unknown[0]}; known are {', '.join(stages)}")
    if 2 * len(options.stages) > MOST_FILES:
        parser.error(f"at most {MOST_FILES // 2} stages a call: each leaves two files")
    if options.stages and not options.out:
        parser.error("say with --out where the results go")
    if not (options.stages or options.list or options.keep):
        parser.error("name a stage, or --list")
    return options


def main(words: list[str] | None = None, stages: dict[str, Stage] | None = None) -> int:
    stages = STAGES if stages is None else stages
    options = arguments(stages, words)
    if options.list:
        print(listed(stages))
    for made in keep(Path(options.keep)) if options.keep else ():
        print(f"kept: {made}")
    if not options.stages:
        return 0
    with tempfile.TemporaryDirectory(prefix="session-") as work:
        return Session(options, stages, Path(work)).go()


if __name__ == "__main__":
    sys.exit(main())
