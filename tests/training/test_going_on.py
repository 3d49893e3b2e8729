"""Runs that lose nothing and go on: dates, checkpoints by epoch and by the clock, hang-ups, locks, longer runs, and the
identity by which a checkpoint is taken back. Kills are in tests/two_ways/test_resume.py."""

from __future__ import annotations

import datetime
import json
import os
import shutil
import signal
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from graftune.api import train
from graftune.cli import main
from graftune.errors import GraftuneError
from graftune.io.lock import FolderLock
from graftune.observe.console import Console
from graftune.observe.events import evals, read_events, steps
from graftune.session import parts
from graftune.settings.config import Config
from graftune.step.pipeline import HostPipeline
from graftune.step.schedule import learning_rate
from graftune.tokenizer import template
from graftune.training import checkpoints, prepare, resume
from graftune.weights import checkpoint
from graftune.weights.base import open_base
from graftune.weights.checkpoint import Progress
from tests.training.runs import adapter_bytes, write_data
from tests.training.test_loop import figures, settings, stopped_copy

QUIET = Console(quiet=True)
DATED = (
    "{{ strftime_now('%d %B %Y') }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def again(run: Path, **overrides: Any) -> Any:
    return train(Config.load(run / "config.yaml"), console=QUIET, resume=str(run), overrides=overrides)


def end(run: Path) -> dict[str, Any]:
    return read_events(run / "metrics.jsonl")[-1]


# Dates (A1)


def test_a_run_keeps_its_date(tiny_folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = shutil.copytree(tiny_folder("llama-shallow"), tmp_path / "base")
    (base / "chat_template.jinja").write_text(DATED)
    day = datetime.date(2026, 5, 9)
    for module in (template, prepare):
        monkeypatch.setattr(module, "today", lambda: day)
    config = settings(base, tmp_path / "runs" / "straight", max_steps=6)
    straight = train(config, console=QUIET).folder
    assert Config.load(straight / "config.yaml").data.date == "2026-05-09"
    day = datetime.date(2027, 12, 24)
    run = stopped_copy(straight, tmp_path / "runs" / "resumed")
    again(run)
    assert figures(run) == figures(straight) and adapter_bytes(run) == adapter_bytes(straight)
    import graftune

    opened = graftune.open(str(run), device="cpu")
    assert opened.tokenizer.template.render([]) == "09 May 2026"
    assert graftune.open(str(run / "adapter"), device="cpu").tokenizer.template.render([]) == "24 December 2027"


# Checkpoints by epoch and by the clock (A2, U7)


def saves(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    made, save = [], checkpoint.save

    def watched(root: Path, arena: Any, progress: Progress, *more: Any) -> Path:
        made.append(progress.step)
        return save(root, arena, progress, *more)

    monkeypatch.setattr(checkpoint, "save", watched)
    return made


def test_each_epoch_is_saved_without_validation(tiny_folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = saves(monkeypatch)
    config = settings(tiny_folder("llama-shallow"), tmp_path / "run", val_split=0.0, save_every=0)
    run = train(config, console=QUIET).folder
    logged = steps(read_events(run / "metrics.jsonl"))
    last = [max(e["step"] for e in logged if e["epoch"] == epoch) for epoch in range(3)]
    assert made == last


def test_the_log_is_on_the_disk_before_a_checkpoint_and_old_ones_go_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a checkpoint could hold steps that the log has lost, or the last good one go for one that fails."""
    done: list[Any] = []
    monkeypatch.setattr(checkpoint, "is_sound", lambda arena: True)
    monkeypatch.setattr(checkpoint, "save", lambda *_: done.append("save"))
    monkeypatch.setattr(checkpoint, "prune", lambda root, keep_last, best: done.append((keep_last, best)))
    log = SimpleNamespace(sync=lambda: done.append("log"))
    state: Any = SimpleNamespace(
        progress=Progress(step=7, best_step=4),
        parts=SimpleNamespace(arena=1, step=SimpleNamespace(count=6, scaler=None), own_shape=[]),
        ranks=SimpleNamespace(leads=True, busy=lambda what: nullcontext()),
        pausing_steps=lambda what: nullcontext(),
        config=Config.of({"keep_last": 3}),
        report=SimpleNamespace(log=log, live_plot=SimpleNamespace(update=int)),
    )
    hook = checkpoints.Checkpoints(Path("checkpoints"), {})
    hook.save(state)
    assert done == ["log", "save", (3, 4)] and (hook.saved, state.progress.updates) == (7, 6)


# Signals


class Hangs(HostPipeline):
    """Sends a signal to this process in the second step."""

    number, sent = signal.SIGHUP, 0

    def step(self, *args: Any, **named: Any) -> None:
        super().step(*args, **named)
        self.sent += 1
        if self.sent == 2:
            os.kill(os.getpid(), self.number)


class Gone(Console):
    """A terminal that is closed when the signal comes."""

    closed = False

    def _write(self, *args: Any, **named: Any) -> None:
        if self.closed:
            raise OSError(5, "Input/output error")


def test_a_closed_terminal_saves(tiny_folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    console = Gone()

    class Closing(Hangs):
        def step(self, *args: Any, **named: Any) -> None:
            super().step(*args, **named)
            console.closed = self.sent >= 2

    monkeypatch.setattr(parts, "pipeline_for", lambda step, graph: Closing(step))
    config = settings(tiny_folder("llama-shallow"), tmp_path / "run", save_every=0, eval_every=0)
    result = train(config, console=console)
    assert (result.stopped, result.signal) == ("interrupted", signal.SIGHUP)
    assert max(checkpoint.steps(result.folder / "checkpoints")) == result.steps == 2
    assert end(result.folder)["stopped"] == "interrupted"
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


def test_nohup_is_respected(tiny_folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "pipeline_for", lambda step, graph: Hangs(step))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        config = settings(tiny_folder("llama-shallow"), tmp_path / "run", max_steps=4)
        assert train(config, console=QUIET).stopped == "finished"
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_the_first_step(
    number: signal.Signals, tiny_folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    data = write_data(tmp_path / "data.jsonl")
    open_session = prepare.open_session

    def interrupted(*args: Any, **named: Any) -> Any:
        os.kill(os.getpid(), number)
        return open_session(*args, **named)

    monkeypatch.setattr(prepare, "open_session", interrupted)
    out = tmp_path / "deep" / "run"
    line = ["train", str(tiny_folder("llama-shallow")), str(data), "--device", "cpu", "--out", str(out)]
    assert main(line) == 128 + number
    assert "stopped before the first step; nothing was written" in capsys.readouterr().err
    assert not (tmp_path / "deep").exists()


# One process in a folder (U10)


def test_a_second_process_is_told_who_is_there(tiny_folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    straight = train(settings(tiny_folder("llama-shallow"), tmp_path / "straight", max_steps=6), console=QUIET).folder
    run = stopped_copy(straight, tmp_path / "run")
    before = (run / "metrics.jsonl").read_bytes()
    with FolderLock(run):
        assert main(["train", "--resume", str(run)]) == 2
    said = capsys.readouterr().err
    assert f"{run}: process {os.getpid()} is training in this folder; wait until it is done, or stop it" in said
    assert (run / "metrics.jsonl").read_bytes() == before
    assert again(run).stopped == "finished"  # and the lock is free again


# Longer and shorter (U9)


def test_longer_is_as_if_it_had_been_so(tiny_folder, tmp_path: Path) -> None:
    """With a constant learning rate nothing but the evaluation at the first end tells them apart."""
    more = {"warmup": 0.0, "patience": 0, "eval_every": 1}
    long = train(settings(tiny_folder("llama-shallow"), tmp_path / "long", epochs=2, **more), console=QUIET).folder
    short = train(settings(tiny_folder("llama-shallow"), tmp_path / "short", epochs=0.75, **more), console=QUIET).folder
    assert len(figures(short)) < len(figures(long))
    again(short, epochs=2)
    assert figures(short) == figures(long) and adapter_bytes(short) == adapter_bytes(long)
    assert Config.load(short / "config.yaml").train.epochs == 2
    extended = next(e for e in read_events(short / "metrics.jsonl") if e["event"] == "extend")
    assert (extended["epochs"], extended["steps"]) == (2, end(long)["step"])


def test_another_number_of_validation_examples(tiny_folder, tmp_path: Path) -> None:
    config = settings(tiny_folder("llama-shallow"), tmp_path / "run", max_steps=2, eval_examples=1, patience=0)
    run = train(config, console=QUIET).folder
    again(run, max_steps=3, eval_examples=2)
    assert end(run)["step"] == 3 and Config.load(run / "config.yaml").data.eval_examples == 2


def test_a_finished_run_says_what_to_type(tiny_folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = settings(
        tiny_folder("llama-shallow"), tmp_path / "run", schedule="cosine", max_steps=5, lr=0.01, patience=1
    )
    run = train(config, console=QUIET).folder
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    stopped = end(run)["stopped"]
    assert main(["train", "--resume", str(run)]) == 0
    said = capsys.readouterr().err
    at = end(run)["step"]
    assert f"this run is finished ({stopped} at step {at}); to train it further" in said
    assert f"graftune train --resume {run} --epochs 6" in said
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before

    # max_steps decides, for more epochs than were set; the schedule goes on as that of the longer run.
    assert main(["train", "--resume", str(run), "--max-steps", "16", "--patience", "0"]) == 0
    optim, said = config.optim, capsys.readouterr().err
    now = learning_rate(at, 16, optim)
    assert f"extended from 5 to 16 steps: from step {at + 1} on the cosine schedule is the one over 16 steps" in said
    assert f"goes on at {now:.2e}" in said and f"ends at {learning_rate(15, 16, optim):.2e}" in said
    logged = steps(read_events(run / "metrics.jsonl"))
    assert [e["lr"] for e in logged] == [learning_rate(step, 5 if step < at else 16, optim) for step in range(16)]
    stored = Config.load(run / "config.yaml").train
    assert (stored.max_steps, stored.patience) == (16, 0) and stored.epochs > 3
    assert main(["train", "--resume", str(run)]) == 0 and "finished at step 16" in capsys.readouterr().err

    # Shorter than what is done is refused; epochs decide over an earlier max_steps.
    assert main(["train", "--resume", str(run), "--max-steps", "10"]) == 2
    assert "the run has done 16 steps and max_steps 10 makes 10" in capsys.readouterr().err
    assert main(["train", "--resume", str(run), "--epochs", "1"]) == 2
    assert "the run has done 16 steps and epochs 1 makes" in capsys.readouterr().err
    assert Config.load(run / "config.yaml").train == stored


def test_an_early_stop_is_no_end_for_who_wants_more(tiny_folder, tmp_path: Path) -> None:
    config = settings(tiny_folder("llama-shallow"), tmp_path / "run", lr=0.5, patience=1, eval_every=1)
    run = train(config, console=QUIET).folder
    assert end(run)["stopped"] == "early stop"
    at = end(run)["step"]
    again(run, epochs=5)
    assert end(run)["step"] > at
    assert evals(read_events(run / "metrics.jsonl"))[-1]["step"] > at


@pytest.mark.parametrize(("epochs", "want"), [(0.5, (3,)), (1.0, (5,)), (1.25, (5, 2)), (0.01, (1,)), (2.9, (5, 6, 5))])
def test_parts_of_an_epoch(epochs: float, want: tuple[int, ...]) -> None:
    length = resume.run_length((5, 6, 5).__getitem__, Config.of({"epochs": epochs}).train)
    assert length.total == sum(want) and len(length.epoch_steps) == len(want)


# What a run is (A4)


def test_a_run_of_an_earlier_format_is_refused_with_that_reason(finished: Path, tmp_path: Path) -> None:
    """Nothing is written: neither an event nor the end of a line that a kill has torn."""
    run = stopped_copy(finished, tmp_path / "run")
    shutil.rmtree(run / "checkpoints")
    log = run / "metrics.jsonl"
    log.write_bytes(log.read_bytes().replace(b'"format": 2, ', b"") + b'{"event": "ste')
    before = log.read_bytes()
    with pytest.raises(GraftuneError, match="was written by an earlier version of graftune"):
        again(run)
    assert log.read_bytes() == before


# A checkpoint's own numbers (R1), and what else lies in its folder (R9)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_folder) -> Path:
    out = tmp_path_factory.mktemp("finished") / "run"
    return train(settings(tiny_folder("llama-shallow"), out), console=QUIET).folder


@pytest.mark.parametrize("numbers", [{"step": 10**9}, {"epoch": 99}, {"epoch_step": 10**9}], ids=str)
def test_numbers_that_the_run_does_not_have(numbers: dict[str, Any], finished: Path, tmp_path: Path) -> None:
    run = stopped_copy(finished, tmp_path / "run")
    path = checkpoint.latest(run / "checkpoints")
    assert path is not None
    state = json.loads((path / checkpoint.STATE).read_text())
    state["progress"] |= numbers
    state["sha256"] = checkpoint._checksum(state)
    (path / checkpoint.STATE).write_text(json.dumps(state))
    (path / checkpoint.TENSORS).write_bytes(b"")  # which is not looked at before
    with pytest.raises(checkpoint.DamagedCheckpoint, match="which this run does not have"):
        checkpoint.check_whole(path, {}, [5, 5, 5])


def test_another_machine_is_said_and_not_refused(finished: Path, tmp_path: Path) -> None:
    run = stopped_copy(finished, tmp_path / "run")
    log = run / "metrics.jsonl"
    events = [json.loads(line) for line in log.read_text().splitlines()]
    here = events[0]["device"], events[0]["torch"]
    events[0] |= {"torch": "2.11.0", "device": "x86_64 CPU, 64 threads, products in fp32"}
    log.write_text("".join(json.dumps(event) + "\n" for event in events))
    again(run)
    said = [event["text"] for event in read_events(log) if event["event"] == "warning" and event["step"]]
    assert len(said) == 1 and f"torch was 2.11.0 and is {here[1]}" in said[0] and "the run goes on" in said[0]
    assert f"device was x86_64 CPU, 64 threads, products in fp32 and is {here[0]}" in said[0]
    assert adapter_bytes(run) == adapter_bytes(finished)
    assert resume.changed_since({"torch": "2.13.0"}, [{"event": "run_start"}]) == "", "an older version did not note it"
    since = [{"event": "run_start", "torch": "2"}, {"event": "resume", "torch": "3"}]
    assert resume.changed_since({"torch": "3"}, since) == ""
    forged = resume.changed_since({"torch": "3"}, [{"event": "run_start", "torch": "2\nall is well"}])
    assert "torch was 2 all is well and is 3" in forged, "a line break in a log cannot forge a line of the console"


def test_another_gpu_is_the_same_kind_of_device(finished: Path, tmp_path: Path) -> None:
    run = stopped_copy(finished, tmp_path / "run")
    config = Config.load(run / "config.yaml").replace(device="cuda:1")
    config.save(run / "config.yaml")
    assert resume.stored_config(run, {"device": "cuda:0"}).base.device == "cuda:0"
    with pytest.raises(GraftuneError, match="device was 'cuda:1' in this run and is 'cpu' now"):
        resume.stored_config(run, {"device": "cpu"})


DECIDES: dict[str, Any] = {
    "lr": 0.3, "min_lr": 0.01, "warmup": 0.4, "beta1": 0.5, "beta2": 0.5, "eps": 1e-3, "weight_decay": 0.7, "clip": 9.0,
    "rank": 9, "alpha": 3.5, "dropout": 0.33, "seed": 99, "tokens_per_step": 96, "max_seq_len": 24, "val_split": 0.33,
    "deterministic": True, "rslora": True, "train_norms": True,
}  # fmt: skip


def test_what_decides_the_numbers_may_not_change_with_a_resume(finished: Path) -> None:
    """Neither by the command line nor in config.yaml; nor may what the model's own settings say of its structure."""
    config = Config.load(finished / "config.yaml")
    base = open_base(config.base.base)
    before = resume.identity(config, base, "data", "examples")
    for name, value in DECIDES.items():
        with pytest.raises(GraftuneError, match=f"{name} was .* in this run and is"):
            resume.stored_config(finished, {name: value})
        with pytest.raises(GraftuneError, match=f"{name} was .* when the run started"):
            now = resume.identity(config.replace(**{name: value}), base, "data", "examples")
            checkpoint.check_identity(now, before, finished)
    norm = base.spec.head.norm
    head = replace(base.spec.head, norm=replace(norm, eps=2 * norm.eps))
    other = replace(base, spec=replace(base.spec, head=head))
    with pytest.raises(GraftuneError, match="the base has changed"):
        checkpoint.check_identity(resume.identity(config, other, "data", "examples"), before, finished)


def test_what_only_watches_a_run_may_change_with_a_resume(finished: Path, tmp_path: Path) -> None:
    """`--trace-steps` was refused, because a list of such settings had an earlier name of it."""
    run = stopped_copy(finished, tmp_path / "run")
    result = train(Config.of_run(run), console=QUIET, resume=str(run), overrides={"trace_steps": 1, "keep_last": 4})
    assert result.stopped == "finished" and adapter_bytes(run) == adapter_bytes(finished)
    stored = Config.of_run(run)
    assert (stored.run.trace_steps, stored.train.keep_last) == (0, 4), "free: for this time; stored: from now on"
