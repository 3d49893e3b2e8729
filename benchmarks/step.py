"""One optimizer step on a GPU: ours beside PEFT, PEFT with Liger, Unsloth and the floor, in one run.

    python benchmarks/step.py [--cases 8b-4x2048,1b-1x512,...] [--who ours,peft,liger,unsloth,floor]
                              [--sweep tokens|rank|layers|documents|all] [--json FILE] [--plot FILE]

Every participant runs in a process of its own, one after another, under a time limit: one that crashes or is not
installed is reported with its last line, and the others go on. cases.py says what a case is, measure.py how it is timed
and when a time is refused, peers.py how the others are set up, ours.py how we are, floor.py what nobody can beat.

The peers are found on PYTHONPATH or in --peers (a folder, or a .tar.xz that is unpacked first). Without --sweep the
cases run; with it, the curves (ours beside the floor), and cases only where --cases names them. The record goes to
benchmarks/results/step-GPU.json unless --json says otherwise, after every participant, so that a run that is cut short
keeps what it has; --merge keeps the other cases of an earlier record. Several calls on one machine, one after the
other, are one run where they say the same --run: a participant that the record has from that run is not timed again,
and the goals that compare two cases hold between them. The exit code is 0 where everything asked for was measured (what
the goals came to is in the table and the record), 1 where someone failed.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import cases, measure, peers, report  # peers: imports none of them before it is asked to

ROOT = Path(__file__).resolve().parents[1]
LIMITS = {"floor": 150, "ours": 240, "unsloth": 420, "hf-compiled": 420, "folder": 240}  # seconds; others: 300
NOT_RUN = "not run: the run's time is up"


def main() -> int:
    options = arguments()
    if options.worker:
        work(options)
        return 0
    with tempfile.TemporaryDirectory(prefix="step-") as folder:
        run = Run(options, Path(folder))
        for name in options.cases:
            run.case(name)
        for axis in options.sweep:
            run.sweep(axis)
        run.finish()
        return int(run.failed)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="", help=f"default, without --sweep: {','.join(cases.DEFAULT)}")
    parser.add_argument("--who", default="", help="participants, of those a case has: " + ", ".join(cases.PEERS))
    parser.add_argument("--steps", type=int, default=10, help="timed steps, after 3 or more that warm up")
    parser.add_argument("--sweep", default="", help=", ".join(cases.SWEEPS) + " or all")
    parser.add_argument("--json", default="", help="where the record goes")
    parser.add_argument("--merge", action="store_true", help="keep the other cases of the record that is there")
    parser.add_argument("--plot", default="", help="a .png; sweeps are drawn beside it, one file an axis")
    parser.add_argument("--peers", default="", help="folder or .tar.xz of the peers' packages")
    parser.add_argument("--commit", default="", help="where there is no .git to ask")
    parser.add_argument("--run", default="", help="a name that several calls share, to be one run")
    parser.add_argument("--total", type=float, default=0.0, help="seconds after which no participant is started")
    parser.add_argument("--limit", type=float, default=0.0, help="seconds for each participant instead of its own")
    parser.add_argument("--device", default="", help="cuda, or cpu (for the tests)")
    parser.add_argument("--logs", default="", help="folder that keeps what each participant printed")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    parser.add_argument("--out", default="", help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    parser.add_argument("--sustain", type=float, default=2.0, help=argparse.SUPPRESS)
    parser.add_argument("--swept", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--case", dest="cases", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.sweep = list(cases.SWEEPS) if options.sweep == "all" else [s for s in options.sweep.split(",") if s]
    names = [name for name in options.cases.split(",") if name]
    options.cases = names or ([] if options.sweep else list(cases.DEFAULT))
    options.who = [name for name in options.who.split(",") if name]
    try:
        for name in options.cases:
            cases.parse(name)
        for axis in options.sweep:
            cases.sweep(axis)
    except ValueError as error:
        parser.error(str(error))
    if unknown := set(options.who) - {"ours", "floor", *cases.PEERS}:
        parser.error(f"--who: unknown {', '.join(sorted(unknown))}")
    return options


class Run:
    """The parent: starts the participants, collects what they leave, and never touches the GPU itself."""

    def __init__(self, options: argparse.Namespace, folder: Path):
        self.options, self.folder = options, folder
        self.began = time.monotonic()
        self.logs = Path(options.logs or folder / "logs").resolve()
        self.logs.mkdir(parents=True, exist_ok=True)
        self.models: dict[cases.Shape, Path] = {}
        self.environment = environment(options, folder)
        self.result: dict[str, Any] = facts(options) | {"cases": {}, "sweeps": {}}
        self.old: dict[str, Any] | None = None
        self.failed = False

    def case(self, name: str) -> None:
        case = cases.parse(name)
        record: dict[str, Any] = {
            "tokens": case.tokens,
            "rank": case.rank if case.method == "lora" else None,
            "date": self.result["date"],
            "run": self.result["run"],
            "commit": self.result["commit"],
            "participants": self.measured(name),
        }
        self.result["cases"][name] = record
        for who in cases.participants(case, self.options.who):
            if "ms" in record["participants"].get(who, {}):
                print(f"{name:24}{who:13}measured in this run already", flush=True)
                continue
            for part, figures in self.figures(who, [name])[name].items():
                record["participants"][part] = figures
                self.failed |= "ms" not in figures
                print(f"{name:24}{part:13}{report.line(figures)}", flush=True)
            self.save()
        self.save()

    def measured(self, name: str) -> dict[str, Any]:
        """What this run has of the case from an earlier call."""
        found = self.earlier().get("cases", {}).get(name, {})
        return dict(found["participants"]) if self.options.run and found.get("run") == self.options.run else {}

    def earlier(self) -> dict[str, Any]:
        """The record that is there, where it is to be kept."""
        path = self.path()
        if self.old is None and path is not None and str(path) != "-":
            self.old = json.loads(path.read_text()) if self.options.merge and path.exists() else {}
        return self.old or {}

    def sweep(self, axis: str) -> None:
        curves: dict[str, Any] = {}
        self.result["sweeps"][axis] = curves
        for curve, points in cases.sweep(axis).items():
            names = [name for _, name in points]
            # Adapters are no part of the floor: one point serves a sweep of ranks.
            floors = self.figures("floor", names[:1] if axis == "rank" else names, sustain=1.0, swept=True)
            own = self.figures("ours", names)
            curves[curve] = []
            for x, name in points:
                found = own.get(name, {}) | floors.get(names[0] if axis == "rank" else name, {})
                point = {"x": x, "case": name, "participants": found, "ratios": report.ratios(found)}
                curves[curve].append(point)
                self.failed |= any("ms" not in figures for figures in found.values())
                print(f"{axis:10}{curve:22}{x:7} " + _point(found), flush=True)
            self.save()

    def figures(self, who: str, names: list[str], sustain: float = 2.0, swept: bool = False) -> dict[str, Any]:
        """case -> participant -> figures; a case that was not reached has the error that ended the worker."""
        problem = NOT_RUN
        found: dict[str, Any] = {}
        if not self.late():
            arguments = ["--sustain", str(sustain), *(["--swept"] if swept else [])]
            case = cases.parse(names[0])
            problem = ""
            if peers.needs_folder(who, case):
                problem, model = self.model(case)
                arguments += ["--folder", str(model)]
            if not problem:
                problem, found = self.start(who, names, arguments)
        for name in names:
            if name not in found:
                found[name] = {who: {"error": problem}}
                problem = "not reached" if problem != NOT_RUN else NOT_RUN
        return found

    def model(self, case: cases.Case) -> tuple[str, Path]:
        """The folder of the case's shape: one at a time, an 8B takes 16 GB."""
        if case.shape not in self.models:
            for old in self.models.values():
                shutil.rmtree(old, ignore_errors=True)
            self.models.clear()
            place = roomy(self.folder, case.shape.parameters * 2.2) / f"step-model-{os.getpid()}"
            self.models[case.shape] = place
            problem, _ = self.start("folder", [case.name], ["--folder", str(place)])
            if problem:
                shutil.rmtree(self.models.pop(case.shape), ignore_errors=True)
                return f"its folder of weights could not be written: {problem}", place
        return "", self.models[case.shape]

    def start(self, who: str, names: list[str], arguments: list[str]) -> tuple[str, dict[str, Any]]:
        """(what went wrong, what it left)."""
        out = self.folder / f"{who}.json"
        out.unlink(missing_ok=True)
        log = self.logs / f"{names[0]}-{who}.log"
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", who, "--case", ",".join(names)]
        command += ["--out", str(out), "--steps", str(self.options.steps), "--device", self.options.device, *arguments]
        limit = (self.options.limit or LIMITS.get(who, 300)) * (1 if len(names) == 1 else 3)
        if self.options.total:
            limit = max(1.0, min(limit, self.options.total - (time.monotonic() - self.began)))
        problem = watched(command, log, limit, self.folder, self.environment | {measure.STARTED: str(time.time())})
        left = json.loads(out.read_text()) if out.exists() else {}
        self.learn(left.get("facts", {}))
        return problem, left.get("cases", {})

    def learn(self, told: dict[str, Any]) -> None:
        """Versions and the GPU, as the workers saw them."""
        self.result["peers"] |= told.pop("peers", {})
        self.result |= told

    def late(self) -> bool:
        return bool(self.options.total) and time.monotonic() - self.began > self.options.total

    def path(self) -> Path | None:
        if self.options.json:
            return Path(self.options.json)
        gpu = self.result["gpu"]
        return ROOT / "benchmarks" / "results" / f"step-{slug(gpu)}.json" if gpu else None

    def save(self) -> None:
        path = self.path()
        old = self.earlier()
        self.result = report.merged(old, self.result) if old else self.result
        report.close(self.result)
        if path is not None and str(path) != "-":
            report.write(path, self.result)

    def finish(self) -> None:
        for place in self.models.values():
            shutil.rmtree(place, ignore_errors=True)
        if self.options.plot:
            self.plot(Path(self.options.plot))
        if self.options.json == "-":
            print(json.dumps(self.result))
        print("\n" + report.table(self.result), flush=True)
        if (path := self.path()) is not None and str(path) != "-":
            print(f"record: {path}", flush=True)

    def plot(self, target: Path) -> None:
        if importlib.util.find_spec("matplotlib") is None:
            print("no matplotlib here; draw it elsewhere with: python benchmarks/plots.py RECORD.json FILE.png")
            return
        from benchmarks import plots

        for made in plots.draw(self.result, target):
            print(f"drawn: {made}")


def watched(command: list[str], log: Path, limit: float, folder: Path, environment: dict[str, str]) -> str:
    """Runs it to its end or its limit; "" or why it failed: the limit, or its last line."""
    with log.open("w") as handle:
        process = subprocess.Popen(
            command, stdout=handle, stderr=subprocess.STDOUT, cwd=folder, env=environment, start_new_session=True
        )
        try:
            code = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # a session of its own: its children go with it
            process.wait()
            return f"stopped after {limit:.0f} s; last line: {last_line(log)}"
    return "" if code == 0 else f"{last_line(log)} (exit {code})"


def last_line(log: Path) -> str:
    """The last line that is an error, or the last line."""
    lines = [text.strip() for text in log.read_text(errors="replace").splitlines() if text.strip()]
    errors = [text for text in lines if re.match(r"[\w.]*(Error|Exception|Exit|Interrupt)\b", text)]
    return ((errors or lines or ["(it printed nothing)"])[-1])[:300]


def environment(options: argparse.Namespace, folder: Path) -> dict[str, str]:
    """Offline, with every path absolute: workers run in a scratch folder, because Unsloth writes where it stands."""
    paths = [str(ROOT), str(ROOT / "src")]
    if options.peers:
        paths.append(str(unpacked(Path(options.peers), folder)))
    paths += [str(Path(p).resolve()) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "UNSLOTH_DISABLE_STATISTICS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def unpacked(peers: Path, folder: Path) -> Path:
    if peers.is_dir():
        return peers.resolve()
    site = folder / "peers"
    site.mkdir()
    subprocess.run(["tar", "xJf", str(peers.resolve()), "-C", str(site)], check=True)
    return site


def roomy(default: Path, wanted: float) -> Path:
    """Memory-backed where it has the room: a 16 GB folder is then written and read in seconds."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() and shutil.disk_usage(shm).free > 1.2 * wanted else default


def facts(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "gpu": "",
        "driver": driver(),
        "torch": "",
        "triton": "",
        "cudnn": "",
        "python": platform.python_version(),
        "peers": {},
        "commit": options.commit or report.commit(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "run": options.run or datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S"),
        "settings": {"steps": options.steps, "warm_up": "3 or more", "clock": "wall, synchronised around each step"}
        | cases.HYPER,
    }


def driver() -> str:
    if shutil.which("nvidia-smi") is None:
        return ""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True).stdout.partition("\n")[0].strip()


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower().replace("nvidia", "")).strip("-")


def _point(found: dict[str, Any]) -> str:
    times = {who: report.time_of(found, who) for who in ("ours", "floor", "floor_own")}
    shown = "  ".join(f"{who} {ms:.2f} ms" for who, ms in times.items() if ms is not None)
    return shown + "".join(f"  {who}: {report.line(f)[:90]}" for who, f in found.items() if "ms" not in f)


def work(options: argparse.Namespace) -> None:
    """A worker: one participant, one or more cases; what it has goes to disk after each."""
    out = Path(options.out)
    started = measure.process_start()
    left: dict[str, Any] = {"facts": {}, "cases": {}}
    for name in options.cases:
        found = one_case(options, cases.parse(name), started)
        left["facts"] = versions()
        left["cases"][name] = found
        report.write(out, left)
        gc.collect()
        started = time.time()


def one_case(options: argparse.Namespace, case: cases.Case, started: float) -> dict[str, Any]:
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if options.worker == "floor":
        from benchmarks.floor import measure_floor

        return measure_floor(case, device, options.steps, options.sustain, own=not options.swept)
    folder, imported_s = Path(options.folder) if options.folder else None, time.time() - started
    if options.worker == "folder":
        assert folder is not None
        peers.write_folder(case.shape, folder, device)
        return {}
    if options.worker == "ours":
        from benchmarks.ours import ours

        runner = ours(case, device)
    else:
        runner = peers.build(options.worker, case, peers.Place(device, folder))
    figures = measure.measure(runner, case.tokens, device, options.steps, started)
    return {options.worker: figures | {"imports_s": round(imported_s, 1)}}


def versions() -> dict[str, Any]:
    found: dict[str, Any] = {"torch": torch.__version__, "peers": peers.versions()}
    if torch.cuda.is_available():
        found |= {"gpu": torch.cuda.get_device_name(), "cudnn": str(torch.backends.cudnn.version())}
    if importlib.util.find_spec("triton") is not None:
        import triton

        found["triton"] = triton.__version__
    return found


if __name__ == "__main__":
    sys.exit(main())
