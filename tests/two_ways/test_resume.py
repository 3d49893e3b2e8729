"""Resumed = straight. A run that is killed anywhere and taken up again ends in the same adapter, byte for byte.

Killed from outside at a dozen random moments (tests/soak/soak_kills.py: hundreds), and from inside at the places that
matter: before the first checkpoint, amid writing one, between its renames, half-way through an evaluation, in the
middle of a log line and while the adapter itself is saved. The run has dropout, two micro-batches a step, evaluations
and checkpoints at different steps, and stops early, so every counter of `Progress` has to survive.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from graftune.errors import GraftuneError
from graftune.model.arena import Arena, Slot
from graftune.observe.events import evals, read_events, steps
from graftune.settings.sections import LoraConfig
from graftune.weights import adapter, checkpoint, safetensors_io
from graftune.weights.checkpoint import Progress
from tests.support import oracle
from tests.support.dying import Deaths
from tests.support.thorough import THOROUGH
from tests.training.kills import Lives
from tests.training.runs import SETTINGS, Processes, adapter_bytes, wait_for_step, write_data


class Bench:
    """One straight run, and the means to repeat it with interruptions."""

    def __init__(self, root: Path, base: Path, processes: Processes):
        self.root, self.processes, self.seconds = root, processes, 0.6  # of a run; measured by the first test
        self.data = write_data(root / "data.jsonl")
        self.line = ["train", str(base), str(self.data), *SETTINGS]
        self.straight = root / "straight"
        assert self.start_run(self.straight, here=True) == 0, self.said()
        self.want = adapter_bytes(self.straight)
        events = read_events(self.straight / "metrics.jsonl")
        self.want_steps = figures(steps(events))
        self.want_evals = figures(evals(events))
        self.end = next(e for e in events if e["event"] == "run_end")
        self.total = len(self.want_steps)

    def start_run(self, out: Path, die_at: tuple[str, int] | None = None, here: bool = False) -> int:
        return self.processes.run(*self.line, "--out", str(out), die_at=die_at, log=self.root / "log", here=here)

    def resume(self, run: Path, *more: str, die_at: tuple[str, int] | None = None) -> int:
        return self.processes.run("train", "--resume", str(run), *more, die_at=die_at, log=self.root / "log")

    def said(self) -> str:
        return (self.root / "log").read_text()

    def check(self, run: Path) -> None:
        """The same adapter, and a log that tells the same run."""
        assert adapter_bytes(run) == self.want
        events = read_events(run / "metrics.jsonl")
        assert figures(steps(events)) == self.want_steps
        assert figures(evals(events)) == self.want_evals
        assert events[-1]["event"] == "run_end" and events[-1]["stopped"] == self.end["stopped"]
        left = [p.name for p in run.rglob("*") if p.name.endswith((".part", ".old"))]
        assert not left, left


def figures(events: list[dict[str, object]]) -> list[tuple[object, ...]]:
    return [tuple(e.get(k) for k in ("step", "epoch", "loss", "grad_norm", "lr", "response_tokens")) for e in events]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, tiny_folder, processes: Processes) -> Bench:
    return Bench(tmp_path_factory.mktemp("resume"), tiny_folder("llama-shallow"), processes)


def test_the_straight_run_takes_every_path(bench: Bench) -> None:
    """Or the rest of this file proves less than it says. Where it stops early hangs on the last bits of the sums, so
    only what every machine must see is asked for: several evaluations, checkpoints between them, an end."""
    assert bench.end["stopped"] in ("early stop", "finished"), bench.end
    assert [s[0] for s in bench.want_steps] == list(range(1, bench.total + 1))
    assert bench.total >= 6 and bench.end["best_step"] > 0
    assert {0, 3, 6} <= {e[0] for e in bench.want_evals}
    again, began = bench.root / "again", time.monotonic()
    assert bench.start_run(again) == 0
    bench.seconds = time.monotonic() - began
    bench.check(again)


@pytest.mark.thorough  # test_killed_at has chosen moments
def test_kill_nine_at_random_moments(bench: Bench) -> None:
    """The short form of tests/soak/soak_kills.py: about half of the kills hit a resume, some an export. On a busy
    machine five kills may hit one phase only; every phase is hit on purpose below."""
    lives = Lives(bench.processes, bench.line, bench.straight, bench.root / "lives", bench.seconds, seed=20240917)
    wanted = 10 if THOROUGH else 5
    tally = lives.until(wanted)
    assert tally.kills >= wanted, tally


PLACES = {
    "before the first checkpoint": [("micro_step", 1)],
    "amid the first answers' log line, then in the first evaluation": [("emit", 2), ("evaluation", 1)],
    "first checkpoint: written, then not yet renamed": [("fsync", 5), ("rename", 1)],
    "a later checkpoint, then at once again": [("fsync", 24), ("fsync", 8), ("rename", 1)],
    "between the micro-batches of a step": [("micro_step", 10), ("micro_step", 2)],
    "after backward, before the update": [("update_step", 8)],
    "amid a step's log line": [("emit", 9)],
    "while an old checkpoint is deleted": [("rmtree", 2)],
}


@pytest.mark.few(4)
@pytest.mark.parametrize("place", PLACES)
def test_killed_at(bench: Bench, place: str) -> None:
    run = bench.root / "at" / place.replace(" ", "-")
    first, *rest = PLACES[place]
    assert bench.start_run(run, die_at=first) == -signal.SIGKILL
    assert not (run / "adapter").exists()
    for die_at in rest:
        assert bench.resume(run, die_at=die_at) == -signal.SIGKILL
    if place == "before the first checkpoint":
        shutil.rmtree(run / "checkpoints")  # the evaluation before step 1 saves one: as if killed before that
    assert bench.resume(run) == 0, bench.said()
    if place == "before the first checkpoint":
        assert "no checkpoint had been written" in bench.said()
    bench.check(run)


def test_killed_while_the_adapter_is_saved(bench: Bench, tmp_path: Path) -> None:
    """From a copy of the run without its last words, whose resume only finishes: at each of its writes in turn."""
    run = unfinished(bench.straight, tmp_path / "finished")
    for die_at in [("fsync", 1), ("fsync", 3), ("exchange", 1), ("rmtree", 1), ("emit", 2)]:
        assert bench.resume(run, die_at=die_at) == -signal.SIGKILL, die_at
    assert bench.resume(run) == 0, bench.said()
    bench.check(run)


def unfinished(run: Path, copy: Path) -> Path:
    """A copy of a run as it was when everything but its last line was written."""
    shutil.copytree(run, copy)
    log = copy / "metrics.jsonl"
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:-1]))
    return copy


def test_resuming_a_finished_run_is_harmless(bench: Bench, tmp_path: Path) -> None:
    run = tmp_path / "finished"
    shutil.copytree(bench.straight, run)
    before = sorted((p.name, p.read_bytes()) for p in (run / "checkpoints").rglob("*") if p.is_file())
    # Settings that change nothing about the result may be other ones: here the number of sample answers.
    for more in ([], ["--samples", "1", "--keep-last", "1", "--threads", "1"]):
        assert bench.resume(run, *more) == 0, bench.said()
        assert f"this run is finished ({bench.end['stopped']} at step {bench.total}); to train it" in bench.said()
        bench.check(run)
    after = sorted((p.name, p.read_bytes()) for p in (run / "checkpoints").rglob("*") if p.is_file())
    assert before == after


@pytest.mark.few(2)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves_and_says_how_to_go_on(bench: Bench, number: signal.Signals) -> None:
    run = bench.root / f"signal {number.name}"
    pid = bench.processes.start(*bench.line, "--out", str(run), log=bench.root / "log")
    wait_for_step(run, 5, pid)
    os.kill(pid, number)
    assert bench.processes.wait() == 128 + number
    said = bench.said()
    assert f"graftune train --resume '{run}'" in said and "Traceback" not in said
    events = read_events(run / "metrics.jsonl")
    assert events[-1]["event"] == "run_end" and events[-1]["stopped"] == "interrupted"
    saved = max(checkpoint.steps(run / "checkpoints"))
    assert saved == events[-1]["step"] == max(s["step"] for s in steps(events))
    if number == signal.SIGTERM or THOROUGH:  # all three leave the same behind
        assert bench.resume(run) == 0, bench.said()
        bench.check(run)


def test_a_weighted_anchored_run_resumes_as_it_would_have_gone_on(bench: Bench, tmp_path: Path) -> None:
    """Killed and resumed, to the bit; its log has the loss's figures; another anchor is refused."""
    data, log, processes = write_data(tmp_path / "data.jsonl"), bench.root / "log", bench.processes
    rows = [json.loads(line) | {"loss_weight": 0.5 + i % 3} for i, line in enumerate(data.read_text().splitlines())]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = [*bench.line[:2], str(data), *SETTINGS, "--loss", "anchored", "--anchor", "0.2",
            "--max-steps", "5"]  # fmt: skip
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    assert processes.run(*line, "--out", str(straight), log=log) == 0, log.read_text()
    assert processes.run(*line, "--out", str(killed), die_at=("update_step", 4), log=log) == -signal.SIGKILL
    assert processes.run("train", "--resume", str(killed), "--anchor", "0.3", log=log) == 2
    assert "anchor was 0.2 in this run and is 0.3 now" in re.sub(r"\s+", " ", log.read_text())
    assert processes.run("train", "--resume", str(killed), log=log) == 0, log.read_text()
    assert adapter_bytes(straight) == adapter_bytes(killed)
    events = read_events(straight / "metrics.jsonl")
    for event in (e for e in events if e["event"] in ("step", "eval")):
        assert event["loss"] == pytest.approx(event["cross_entropy"] + 0.2 * event["drift"], rel=1e-4)
    assert max(e["drift"] for e in events if e["event"] == "step") > 0
    first = next(e for e in events if e["event"] == "eval")
    assert first["step"] == 0 and first["drift"] == pytest.approx(0, abs=1e-9)


# Refusals


def refused(bench: Bench, run: Path, *more: str) -> str:
    assert bench.resume(run, *more) == 2, bench.said()
    lines = [line for line in bench.said().splitlines() if line.startswith("graftune: ")]
    assert len(lines) == 1 and bench.said().endswith(lines[0] + "\n") and "Traceback" not in bench.said()
    return lines[0]


@pytest.fixture
def stopped(bench: Bench, tmp_path: Path) -> Path:
    """A copy of a run as a kill leaves it."""
    run = tmp_path / "stopped"
    shutil.copytree(bench.straight, run)
    shutil.rmtree(run / "adapter")
    return run


@pytest.mark.parametrize("with_checkpoint", [True, False])
def test_other_data(bench: Bench, stopped: Path, with_checkpoint: bool) -> None:
    if not with_checkpoint:
        shutil.rmtree(stopped / "checkpoints")
    before = bench.data.read_bytes()
    try:
        bench.data.write_bytes(before + b'{"prompt": "x", "response": "yes"}\n')
        assert "the data has changed" in refused(bench, stopped)
    finally:
        bench.data.write_bytes(before)
    assert not (stopped / "adapter").exists()


def test_other_base(bench: Bench, stopped: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    base, mine = Path(bench.line[1]), tmp_path / "base"
    shutil.copytree(base, mine)
    config = stopped / "config.yaml"
    config.write_text(config.read_text().replace(str(base), str(mine)))
    tensors = load_file(mine / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, mine / "model.safetensors", {"format": "pt"})
    assert "the base has changed" in refused(bench, stopped)


def test_other_tokenizer(bench: Bench, stopped: Path, tmp_path: Path) -> None:
    base, mine = Path(bench.line[1]), tmp_path / "base"
    shutil.copytree(base, mine)
    config = stopped / "config.yaml"
    config.write_text(config.read_text().replace(str(base), str(mine)))
    template = mine / "chat_template.jinja"
    template.write_text(template.read_text().replace("'\n' + m['content']", "'\n\n' + m['content']"))
    assert "the tokenizer or template has changed" in refused(bench, stopped)


def test_other_settings(bench: Bench, stopped: Path) -> None:
    assert "rank was 4 in this run and is 8 now" in refused(bench, stopped, "--rank", "8")
    config = stopped / "config.yaml"
    config.write_text(config.read_text().replace("dropout: 0.2", "dropout: 0.1"))
    assert "when the run started, and config.yaml now has" in refused(bench, stopped)


@pytest.mark.parametrize("damage", ["one bit", "not json", "text for a number", "gone"])
def test_damaged_checkpoint(bench: Bench, stopped: Path, damage: str) -> None:
    last = checkpoint.latest(stopped / "checkpoints")
    assert last is not None
    tensors, state = last / checkpoint.TENSORS, last / checkpoint.STATE
    if damage == "one bit":
        content = bytearray(tensors.read_bytes())
        content[-1] ^= 1
        tensors.write_bytes(content)
    elif damage == "not json":
        state.write_text(state.read_text()[:40])
    elif damage == "text for a number":
        state.write_text(state.read_text().replace('"stale": ', '"stale": "2", "odd": '))
    else:
        tensors.unlink()
    assert bench.resume(stopped) == 0, bench.said()
    assert f"{last}: this checkpoint is damaged" in bench.said() and f"renamed to {last.name}.damaged" in bench.said()
    bench.check(stopped)
    if damage == "gone":
        shutil.rmtree(stopped / "adapter")
        for path in checkpoint.steps(stopped / "checkpoints").values():
            (path / checkpoint.TENSORS).unlink()
        assert "none of its checkpoints is whole" in refused(bench, stopped)


def test_not_a_run(bench: Bench, tmp_path: Path) -> None:
    assert "is not a run folder" in refused(bench, tmp_path)
    assert "no such run folder" in refused(bench, tmp_path / "nowhere")
    (tmp_path / "config.yaml").write_text("rank: [\n")
    assert "is not valid YAML" in refused(bench, tmp_path)


# Every write of a checkpoint and of an adapter, one by one, inside this process


def arena(value: float) -> Arena:
    made = Arena({"a": Slot("a", (5,), 0, 0, True)}, torch.device("cpu"), torch.float32)
    for buffer in (made.weights, made.m, made.v):
        buffer.fill_(value)
    return made


WRITES = [(os, "open"), (shutil, "rmtree"), (Path, "mkdir"), (Path, "write_text"), (safetensors_io, "save_file")]


@pytest.mark.parametrize("same_step", [False, True])
def test_a_checkpoint_is_whole_or_absent(same_step: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, root = Progress(step=3, stale=1), Progress(step=3 if same_step else 4, stale=2), tmp_path / "checkpoints"
    checkpoint.save(root, arena(1.0), old, {"data": "x"})
    shutil.copytree(root, tmp_path / "before")
    tried = 0

    def work() -> None:
        checkpoint.save(root, arena(2.0), new, {"data": "x"})
        checkpoint.prune(root, 2, -1)

    for whole in Deaths(monkeypatch, *WRITES).each(work):
        tried += 1
        found, place = checkpoint.latest(root), arena(0.0)
        assert found is not None
        checkpoint.check_whole(found, {"data": "x"})
        progress = checkpoint.load(found, place)
        assert (progress, float(place.v[0])) in [(new, 2.0), (old, 1.0)]
        assert not whole or progress == new
        checkpoint.save(root, arena(3.0), Progress(step=5), {"data": "x"})
        checkpoint.prune(root, 1, -1)
        assert [p.name for p in root.iterdir()] == ["step-5"]
        shutil.rmtree(root)
        shutil.copytree(tmp_path / "before", root)
    assert tried > 8


@pytest.mark.few(1)
@pytest.mark.parametrize("there_is_one", [False, True])
def test_an_adapter_is_the_old_or_the_new(
    there_is_one: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_folder
) -> None:
    made, folder = oracle.ours(tiny_folder("llama"), LoraConfig(rank=2, targets=("qv",))), tmp_path / "here" / "adapter"
    _ = made.base.sha256
    tried = 0

    def save(value: float) -> None:
        made.arena.weights.fill_(value)
        tensors = adapter.adapter_tensors(made.arena, made.base, {})
        facts = {"template": "auto", "append_eos": False, "revision": ""}
        adapter.write_adapter(folder, tensors, made.lora, made.base, facts)

    def values() -> list[float]:
        return next(iter(adapter.load_adapter(folder).tensors.values())).unique().tolist()

    if there_is_one:
        save(3.0)
    for whole in Deaths(monkeypatch, *WRITES).each(lambda: save(2.0)):
        tried += 1
        assert folder.exists() or not there_is_one, "there was a moment with neither"
        assert not folder.exists() or values() in ([2.0], [3.0])
        assert not whole or values() == [2.0]
        save(3.0)
        assert values() == [3.0] and [p.name for p in folder.parent.iterdir()] == ["adapter"]
        if not there_is_one:
            shutil.rmtree(folder)
    assert tried > 6


def test_checkpoint_of_another_run(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, arena(1.0), Progress(step=1), {"data": "x"})
    with pytest.raises(GraftuneError, match="the data has changed"):
        checkpoint.check_whole(path, {"data": "y"})
    wide = Arena({"a": Slot("a", (6,), 0, 0, True)}, torch.device("cpu"), torch.float32)
    with pytest.raises(GraftuneError, match="other adapters"):
        checkpoint.load(path, wide)
    assert not wide.weights.any()
