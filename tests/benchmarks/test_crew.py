"""Workers at once: whoever is timed is alone, whoever dies or hangs with the turn blocks nobody, and limits count only
the time in which a worker could run. The workers here are small programs that write down when they ran."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks import cases, crew, peers, step, turns

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux's /proc")

WORKER = """
import os, sys, time
sys.path.insert(0, {root!r})
from benchmarks import turns

def run(seconds, what):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        print(what, time.monotonic(), flush=True)
        time.sleep(0.005)

run({boot}, "boots")
with turns.turn():
    run({turn}, "timed")
    {within}
run(0.1, "boots")
"""
BACKGROUND = "import time\nwhile True: print('boots', time.monotonic(), flush=True); time.sleep(0.005)"


def job(folder: Path, name: str, *, boot: float = 0.3, turn: float = 0.4, within: str = "pass", **more) -> crew.Job:
    code = WORKER.format(root=str(ROOT), boot=boot, turn=turn, within=within)
    settings = {"limit": 60.0, "alone": False} | more
    return crew.Job(
        name, lambda: [sys.executable, "-c", code], folder / f"{name}.log", folder, dict(os.environ), **settings
    )


def ticks(log: Path, what: str = "") -> list[float]:
    lines = [line.split() for line in log.read_text().splitlines()]
    return [float(words[1]) for words in lines if len(words) == 2 and words[0] in ((what,) if what else WHAT)]


WHAT = ("boots", "timed")


def test_while_one_is_timed_nobody_else_runs(tmp_path):
    pause, log = tmp_path / "pause", tmp_path / "background.log"
    with log.open("w") as handle:
        background = subprocess.Popen([sys.executable, "-c", BACKGROUND], stdout=handle, start_new_session=True)
    try:
        pause.write_text(f"not a number\n{background.pid}\n")
        jobs = [job(tmp_path, name) for name in "abc"]
        assert {done.name for done in crew.Crew(tmp_path, 3, pause_file=pause).run(jobs)} == set("abc")
        time.sleep(0.3)  # it goes on afterwards
    finally:
        os.killpg(background.pid, signal.SIGKILL)
        background.wait()
    assert [done.problem for done in jobs] == ["", "", ""]
    logs = {done.name: done.log for done in jobs} | {"background": log}
    windows = {name: ticks(logs[name], "timed") for name in "abc"}
    for name, timed in windows.items():
        for other in set(logs) - {name}:
            beside = [at for at in ticks(logs[other]) if timed[0] <= at <= timed[-1]]
            assert not beside, f"{other} ran while {name} was timed"
    assert ticks(log)[0] < min(timed[0] for timed in windows.values())
    assert ticks(log)[-1] > max(timed[-1] for timed in windows.values())
    began = {name: ticks(logs[name])[0] for name in "abc"}
    assert max(began.values()) < min(timed[-1] for timed in windows.values()), "they boot beside each other"


def test_who_dies_or_hangs_with_the_turn_blocks_nobody(tmp_path):
    jobs = [
        job(tmp_path, "dies", boot=0.0, within="os._exit(3)"),
        job(tmp_path, "hangs", boot=0.1, within="time.sleep(60)", limit=3.0),
        job(tmp_path, "well", boot=1.5),
    ]
    list(crew.Crew(tmp_path, 3).run(jobs))
    problems = {done.name: done.problem or "" for done in jobs}
    assert problems["dies"].endswith("(exit 3)") and problems["hangs"].startswith("stopped after 3 s")
    assert problems["well"] == "" and ticks(jobs[2].log, "timed")


def test_a_limit_does_not_count_the_time_that_others_took(tmp_path):
    jobs = [job(tmp_path, f"j{i}", boot=0.2, turn=1.3, limit=4.0) for i in range(4)]
    began = time.monotonic()
    list(crew.Crew(tmp_path, 4).run(jobs))
    assert [done.problem for done in jobs] == [""] * 4 and time.monotonic() - began > 5.0


def test_the_deadline_is_the_wall_clocks(tmp_path):
    jobs = [job(tmp_path, "long", turn=60.0), job(tmp_path, "beside", boot=60.0), job(tmp_path, "never")]
    list(crew.Crew(tmp_path, 2, deadline=time.monotonic() + 2.0).run(jobs))
    assert [done.problem.partition(":")[0] for done in jobs] == ["stopped", "stopped", "not run"]


def lives(*jobs: crew.Job) -> list[tuple[float, float]]:
    return [(found[0], found[-1]) for one in jobs if (found := ticks(one.log))]


def apart(first: tuple[float, float], second: tuple[float, float]) -> bool:
    return first[1] < second[0] or second[1] < first[0]


def test_the_cards_room_is_kept_and_who_runs_alone_is_alone(tmp_path):
    alone = job(tmp_path, "alone", turn=0.2, alone=True)
    large = [job(tmp_path, f"large{i}", boot=1.0, turn=0.1, gib=70.0) for i in range(2)]
    small = job(tmp_path, "small", boot=1.0, turn=0.1, gib=40.0)
    list(crew.Crew(tmp_path, 4, room=120.0).run([alone, *large, small]))
    (own,), (first, second, third) = lives(alone), lives(*large, small)
    assert all(apart(own, other) and own[1] < other[0] for other in (first, second, third))
    assert apart(first, second) and not apart(first, third), "what fits does not wait for what does not"


def test_a_large_one_is_not_kept_out_by_small_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(crew, "PATIENCE_S", 0.5)
    small = [job(tmp_path, f"small{i}", boot=1.0, turn=0.1, gib=70.0) for i in range(4)]
    large = job(tmp_path, "large", boot=0.2, turn=0.1, gib=100.0)
    list(crew.Crew(tmp_path, 2, room=140.0).run([small[0], large, *small[1:]]))
    (own,), others = lives(large), lives(*small)
    assert sum(other[0] > own[0] for other in others) >= 2, "it had not to wait for the last of them"


def test_what_has_to_be_there_first_is(tmp_path):
    first = job(tmp_path, "first", turn=0.0)
    ok = job(tmp_path, "ok", boot=0.1, turn=0.0, after=first)
    bad = job(tmp_path, "bad", turn=0.0, within="raise ValueError('no room')")
    lost = job(tmp_path, "lost", after=bad)
    list(crew.Crew(tmp_path, 4).run([first, ok, bad, lost]))
    assert ok.problem == "" and ticks(ok.log)[0] > ticks(first.log)[-1]
    assert bad.problem == lost.problem == "ValueError: no room (exit 1)" and not lost.log.exists()


def test_a_stopped_group_that_is_not_ours_stays_stopped():
    process = subprocess.Popen([sys.executable, "-c", BACKGROUND], stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        os.kill(process.pid, signal.SIGSTOP)
        while turns.processes()[process.pid].state not in turns.STILL:
            time.sleep(0.01)
        quiet = turns.Quiet()
        assert quiet.hold([process.pid]) and not quiet.stopped
        quiet.release()
        assert turns.processes()[process.pid].state in turns.STILL
    finally:
        process.kill()
        process.wait()


class Recorded:
    """A crew that runs nobody."""

    def __init__(self):
        self.jobs: list[crew.Job] = []

    def run(self, jobs):
        self.jobs += jobs
        for one in jobs:
            one.problem = "not really"
            yield one


@pytest.fixture
def run(tmp_path, monkeypatch) -> step.Run:
    monkeypatch.setattr(
        sys, "argv", ["step.py", "--device", "cpu", "--at-once", "4", "--json", str(tmp_path / "r.json")]
    )
    made = step.Run(step.arguments(), tmp_path)
    made.crew = Recorded()  # type: ignore[assignment]
    return made


def test_a_folder_of_weights_is_made_once_for_all_who_read_it(run):
    """And one process is for all cases of one model that a peer has."""
    pairs = [("tiny-2x32", "unsloth"), ("tiny-1x32", "unsloth"), ("tiny-nf4-1x32", "unsloth"), ("tiny-1x32", "peft")]
    run.pairs([*pairs, ("tiny-2x32", "ours"), ("tiny-1x32", "ours")])
    first, second, folder, *others = run.crew.jobs
    assert [one.name for one in (folder, *others)] == [
        "tiny-2x32-folder", "tiny-2x32-unsloth", "tiny-nf4-1x32-unsloth", "tiny-1x32-peft",
    ]  # fmt: skip
    assert [first.name, second.name] == ["tiny-2x32-ours", "tiny-1x32-ours"] and first.alone and second.alone
    assert not any(one.alone for one in (folder, *others))
    assert [one.after for one in (folder, *others)] == [None, folder, folder, None]
    place = folder.words()[-1]
    assert others[0].words()[-2:] == others[1].words()[-2:] == ["--folder", place] and place not in others[2].words()
    assert "tiny-2x32,tiny-1x32" in others[0].words()
    found = run.result["cases"]["tiny-1x32"]["participants"]
    assert list(found) == ["ours", "peft", "unsloth"] and all(figures["error"] for figures in found.values())


def test_who_runs_a_case_may_be_said_with_it(monkeypatch):
    def pairs(*words: str) -> list[tuple[str, str]]:
        monkeypatch.setattr(sys, "argv", ["step.py", *words])
        options: Namespace = step.arguments()
        return options.pairs

    assert pairs("--cases", "8b-4x2048:unsloth,1b-1x512:liger+peft,8b-4x2048:peft+unsloth") == [
        ("8b-4x2048", "unsloth"), ("1b-1x512", "peft"), ("1b-1x512", "liger"), ("8b-4x2048", "peft"),
    ]  # fmt: skip
    assert pairs("--cases", "1b-1x512,8b-fp8-4x2048:ours", "--who", "floor") == [
        ("1b-1x512", "floor"), ("8b-fp8-4x2048", "ours"),
    ]  # fmt: skip
    with pytest.raises(SystemExit):
        pairs("--cases", "1b-1x512:nobody")


def test_estimates_are_those_measured_or_a_high_guess():
    assert peers.gib("peft", cases.parse("8b-4x2048")) == 82 and peers.gib("unsloth", cases.parse("1b-4x2048")) == 13
    for name, known in peers.GIB.items():
        for who, gib in known.items():
            assert who in cases.participants(cases.parse(name), [who]) and gib <= step.ROOM_GIB
    assert peers.gib("peft", cases.parse("8b-8x2048")) > 82 + 60
    assert 8 < peers.gib("liger", cases.parse("1b-2x512")) < 16


def test_what_an_error_came_of_is_said_with_it(tmp_path):
    log = tmp_path / "log"
    log.write_text(
        "ValueError: long ago, and got over\nTraceback\nRuntimeError: not permitted while capturing\n\n"
        "During handling of the above exception, another exception occurred:\n\nTraceback\n"
        "torch.AcceleratorError: a previous error\nbye\n"
    )
    assert (
        crew.last_line(log)
        == "RuntimeError: not permitted while capturing; then torch.AcceleratorError: a previous error"
    )
    log.write_text("ValueError: long ago\nbye\nKeyError: 'x'\nbye\n")
    assert crew.last_line(log) == "KeyError: 'x'"
    log.write_text("hello\nbye\n")
    assert crew.last_line(log) == "bye"
