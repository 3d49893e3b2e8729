"""One optimizer step on a GPU: ours beside PEFT, PEFT with Liger, Unsloth and the floor, in one run.

    python benchmarks/step.py [--cases 8b-4x2048,1b-1x512:liger+peft,...] [--who ours,peft,liger,unsloth,floor]
                              [--sweep tokens|rank|layers|documents|all] [--at-once N] [--json FILE] [--plot FILE]

Every participant runs in a process of its own, one after another, under a time limit: one that crashes or is not
installed is reported with its last line, and the others go on. cases.py says what a case is, measure.py how it is timed
and when a time is refused, peers.py how the others are set up, ours.py how we are, floor.py what nobody can beat.
With --at-once N the peers boot beside each other, N at a time and as many as the card has room for, after ours and the
floor, which are always alone; whoever is timed is timed alone: the others, and the process groups in --pause-file, are
stopped meanwhile (crew.py, turns.py). A peer then has one process for its cases of one model: most of its time is boot.

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
import dataclasses
import datetime
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import cases, crew, peers, report  # peers: imports none of them before it is asked to

ROOT = Path(__file__).resolve().parents[1]
LIMITS = {"floor": 150, "ours": 240, "unsloth": 420, "hf-compiled": 420, "folder": 240}  # seconds; others: 300
ALONE = ("floor", "ours")  # for their whole life: ours chooses its products by timing them when it starts
SWEPT_S = 1.0  # seconds of load before a point of a sweep is timed
ROOM_GIB = 120.0  # of an H200's 139: the estimates are rough, and each process takes some for itself


def main() -> int:
    options = arguments()
    if options.worker:
        from benchmarks.worker import work

        work(options)
        return 0
    with tempfile.TemporaryDirectory(prefix="step-") as folder:
        run = Run(options, Path(folder))
        run.pairs(options.pairs)
        for axis in options.sweep:
            run.sweep(axis)
        run.finish()
        return int(run.failed)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    told = f"CASE or CASE:WHO+WHO, in this order; default, without --sweep: {','.join(cases.DEFAULT)}"
    parser.add_argument("--cases", default="", help=told)
    parser.add_argument("--who", default="", help="participants, of those a case has: " + ", ".join(cases.PEERS))
    parser.add_argument("--steps", type=int, default=10, help="timed steps, after 3 or more that warm up")
    parser.add_argument("--sweep", default="", help=", ".join(cases.SWEEPS) + " or all")
    parser.add_argument("--at-once", type=int, default=1, help="peers that boot beside each other")
    parser.add_argument("--plain-floor", action="store_true", help="without the floor of what our own step computes")
    parser.add_argument("--room", type=float, default=ROOM_GIB, help="GiB of the card that they may take together")
    parser.add_argument("--pause-file", default="", help="process groups, one a line, stopped while somebody is timed")
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
    named = [name for name in options.cases.split(",") if name] or ([] if options.sweep else list(cases.DEFAULT))
    options.cases = [name.partition(":")[0] for name in named]
    options.who = [name for name in options.who.split(",") if name]
    asked = [[who for who in name.partition(":")[2].split("+") if who] or options.who for name in named]
    try:
        pairs = [(n, w) for n, who in zip(options.cases, asked, strict=True) for w in _able(n, who)]
        options.pairs = list(dict.fromkeys(pairs))
        for axis in options.sweep:
            cases.sweep(axis)
    except ValueError as error:
        parser.error(str(error))
    if unknown := {name for who in asked for name in who} - {*ALONE, *cases.PEERS}:
        parser.error(f"--who: unknown {', '.join(sorted(unknown))}")
    if options.at_once > 1 and not Path("/proc/self/stat").exists():
        parser.error("--at-once: only on Linux, where the processes of a worker can be found")
    return options


def _able(name: str, asked: list[str]) -> list[str]:
    return cases.participants(cases.parse(name), asked)


@dataclasses.dataclass
class Model:
    """A folder of weights of one shape: made once, by a worker, and there as long as somebody is to read it."""

    job: crew.Job
    place: Path
    users: int = 0


class Run:
    """The parent: starts the participants, collects what they leave, and never touches the GPU itself."""

    def __init__(self, options: argparse.Namespace, folder: Path):
        self.options, self.folder = options, folder
        deadline = time.monotonic() + options.total if options.total else float("inf")
        pause_file = Path(options.pause_file) if options.pause_file else None
        self.crew = crew.Crew(folder, options.at_once, options.room, pause_file, deadline)
        self.logs = Path(options.logs or folder / "logs").resolve()
        self.logs.mkdir(parents=True, exist_ok=True)
        self.models: dict[cases.Shape, Model] = {}
        self.environment = environment(options, folder)
        self.result: dict[str, Any] = facts(options) | {"cases": {}, "sweeps": {}, "swept": {}}
        self.old: dict[str, Any] | None = None
        self.failed = False

    def pairs(self, pairs: list[tuple[str, str]]) -> None:
        """Everyone of every case, as they end; with several at once those that run alone come first."""
        if self.options.at_once > 1:
            pairs = sorted(pairs, key=lambda pair: pair[1] not in ALONE)
        jobs: list[crew.Job] = []
        asked: dict[crew.Job, tuple[list[str], str]] = {}
        for names, who in self.grouped(pairs):
            case = cases.parse(names[0])
            model = self.model(case, jobs) if peers.needs_folder(who, case) else None
            jobs.append(self.job(who, names, model=model))
            asked[jobs[-1]] = names, who
        try:
            for job in self.crew.run(jobs):
                if job in asked:
                    self.ended(job, *asked[job])
                elif job.problem not in ("", crew.NOT_RUN):
                    job.problem = f"its folder of weights could not be written: {job.problem}"
        finally:
            for model in self.models.values():
                shutil.rmtree(model.place, ignore_errors=True)
            self.models.clear()
        self.save()

    def grouped(self, pairs: list[tuple[str, str]]) -> list[tuple[list[str], str]]:
        """(cases, participant) of each process to be, without what this run has already."""
        found: dict[tuple[Any, ...], tuple[list[str], str]] = {}
        for name, who in pairs:
            if "ms" in self.measured(name).get(who, {}):
                self.record(name)
                print(f"{name:24}{who:13}measured in this run already", flush=True)
                continue
            case = cases.parse(name)
            shared = self.options.at_once > 1 and who not in ALONE
            found.setdefault((who, case.shape, case.base) if shared else (who, name), ([], who))[0].append(name)
        return list(found.values())

    def ended(self, job: crew.Job, names: list[str], who: str) -> None:
        left, problem = self.left(job), job.problem
        for name in names:
            record = self.record(name)
            for part, figures in left.get(name, {who: {"error": problem or "not reached"}}).items():
                record["participants"][part] = figures
                self.failed |= "ms" not in figures
                print(f"{name:24}{part:13}{report.line(figures)}", flush=True)
        model = self.models.get(cases.parse(names[0]).shape)
        if model is not None and job.after is model.job:
            model.users -= 1
            if not model.users:  # an 8B takes 16 GB
                shutil.rmtree(model.place, ignore_errors=True)
        self.save()

    def record(self, name: str) -> dict[str, Any]:
        """The case's, from when the first of it is known: an older one stays until then."""
        case = cases.parse(name)
        if self.result["cases"].get(name, {}).get("run") != self.result["run"]:
            self.result["cases"][name] = {
                "tokens": case.tokens,
                "rank": case.rank if case.method == "lora" else None,
                "date": self.result["date"],
                "run": self.result["run"],
                "commit": self.result["commit"],
                "participants": self.measured(name),
            }
        found: dict[str, Any] = self.result["cases"][name]
        return found

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
        self.result["swept"][axis] = {key: self.result[key] for key in ("commit", "date", "run")}
        for curve, points in cases.sweep(axis).items():
            names = [name for _, name in points]
            # Adapters are no part of the floor: one point serves a sweep of ranks.
            floors = self.figures("floor", names[:1] if axis == "rank" else names)
            own = self.figures("ours", names)
            curves[curve] = []
            for x, name in points:
                found = own.get(name, {}) | floors.get(names[0] if axis == "rank" else name, {})
                point = {"x": x, "case": name, "participants": found, "ratios": report.ratios(found)}
                curves[curve].append(point)
                self.failed |= any("ms" not in figures for figures in found.values())
                print(f"{axis:10}{curve:22}{x:7} " + _point(found), flush=True)
            self.save()

    def figures(self, who: str, names: list[str]) -> dict[str, Any]:
        """Of a sweep: case -> participant -> figures, after a second of load that falls on the floor and on ours alike;
        a case that was not reached has the error that ended the worker."""
        job = self.job(who, names, "--sustain", str(SWEPT_S), "--swept")
        list(self.crew.run([job]))
        found, problem = self.left(job), job.problem
        for name in names:
            if name not in found:
                found[name] = {who: {"error": problem}}
                problem = "not reached" if problem != crew.NOT_RUN else problem
        return found

    def model(self, case: cases.Case, jobs: list[crew.Job]) -> Model:
        """The folder of the case's shape; who writes it is put before the first who reads it."""
        found = self.models.get(case.shape)
        if found is None:
            found = self.models[case.shape] = Model(self.job("folder", [case.name]), self.folder / "unmade")
            number, words = len(self.models), found.job.words

            def placed() -> list[str]:
                found.place = roomy(self.folder, case.shape.parameters * 2.2) / f"step-model-{os.getpid()}-{number}"
                return [*words(), "--folder", str(found.place)]

            found.job.words = placed
            jobs.append(found.job)
        found.users += 1
        return found

    def job(self, who: str, names: list[str], *more: str, model: Model | None = None) -> crew.Job:
        name = f"{names[0]}-{who}"
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", who, "--case", ",".join(names)]
        command += ["--plain-floor"] if self.options.plain_floor else []
        command += ["--out", str(self.out(name)), "--steps", str(self.options.steps), "--device", self.options.device]
        large = max(peers.FOLDER_GIB if who == "folder" else peers.gib(who, cases.parse(each)) for each in names)

        def words() -> list[str]:
            self.out(name).unlink(missing_ok=True)
            return [*command, *more, *(["--folder", str(model.place)] if model else [])]

        return crew.Job(
            name,
            words,
            self.logs / f"{name}.log",
            self.folder / name,  # of its own: Unsloth compiles into where it stands
            self.environment,
            (self.options.limit or LIMITS.get(who, 300)) * (1 if len(names) == 1 else 3),
            alone=self.options.at_once <= 1 or who in ALONE,
            gib=large,
            after=model.job if model else None,
        )

    def out(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def left(self, job: crew.Job) -> dict[str, Any]:
        """What a worker has written: case -> participant -> figures."""
        path = self.out(job.name)
        left = json.loads(path.read_text()) if path.exists() else {}
        self.learn(left.get("facts", {}))
        found: dict[str, Any] = left.get("cases", {})
        return found

    def learn(self, told: dict[str, Any]) -> None:
        """Versions and the GPU, as the workers saw them."""
        self.result["peers"] |= told.pop("peers", {})
        self.result |= told

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
        "gpu": "" if options.device == "cpu" else smi("name"),
        "driver": smi("driver_version"),
        "torch": "",
        "triton": "",
        "cudnn": "",
        "python": platform.python_version(),
        "peers": {},
        "commit": options.commit or report.commit(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "run": options.run or datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S"),
        "settings": {"warm_up": "3 or more", "clock": "wall, synchronised around each step"} | cases.HYPER,
    }


def smi(what: str) -> str:
    if shutil.which("nvidia-smi") is None:
        return ""
    query = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True).stdout.partition("\n")[0].strip()


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower().replace("nvidia", "")).strip("-")


def _point(found: dict[str, Any]) -> str:
    times = {who: report.time_of(found, who) for who in ("ours", "floor", "floor_own")}
    shown = "  ".join(f"{who} {ms:.2f} ms" for who, ms in times.items() if ms is not None)
    return shown + "".join(f"  {who}: {report.line(f)[:90]}" for who, f in found.items() if "ms" not in f)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # not at once: whoever is stopped is to go on
    sys.exit(main())
