"""What signals and lost readers do to a run in every phase, and to an export. Signals between micro-batches and before
the first step are in test_going_on.py and tests/two_ways/test_resume.py; the table is in docs/reliability.md."""

from __future__ import annotations

import hashlib
import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from graftune.api import train
from graftune.cli import main
from graftune.dist.watch import Watch
from graftune.observe.console import Console
from graftune.observe.events import read_events
from graftune.ranks import Ranks
from graftune.session import text
from graftune.session.parts import SessionParts
from graftune.step.pipeline import HostPipeline
from graftune.training.checkpoints import Checkpoints
from graftune.training.signals import Interrupted, SignalWatch, StopRequest, noted_signals
from graftune.training.trainer import Trainer
from graftune.weights import checkpoint, safetensors_io
from tests.training.runs import ROOT, adapter_bytes
from tests.training.test_loop import settings

QUIET = Console(quiet=True)


def asked_to_stop_and_hangs(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    limit = time.monotonic() + 60
    while time.monotonic() < limit:
        time.sleep(0.01)
    raise AssertionError("it was not given up")


@pytest.fixture(scope="module")
def straight(tiny_folder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = settings(tiny_folder("llama-shallow"), tmp_path_factory.mktemp("straight") / "run", max_steps=4, samples=1)
    return train(config, console=QUIET).folder


@pytest.mark.few(1)
@pytest.mark.parametrize("phase", ["micro-batch", "evaluation", "answers"])
def test_what_takes_too_long_after_a_signal_is_given_up(
    phase: str, straight: Path, tiny_folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SignalWatch, "TICK", 0.02)
    with monkeypatch.context() as patch:
        if phase == "micro-batch":
            real, calls = HostPipeline.micro, iter(range(99))

            def micro(self: HostPipeline, *args: Any) -> None:
                return asked_to_stop_and_hangs() if next(calls) == 5 else real(self, *args)

            patch.setattr(HostPipeline, "micro", micro)
        else:
            place = (SessionParts, "evaluated") if phase == "evaluation" else (text, "sampled")
            patch.setattr(*place, asked_to_stop_and_hangs)
        config = settings(
            tiny_folder("llama-shallow"), tmp_path / "run", max_steps=4, samples=1, stop_within=0.05, save_every=0
        )
        result = train(config, console=QUIET)
    assert (result.stopped, result.signal) == ("interrupted", signal.SIGTERM)
    saved = max(checkpoint.steps(result.folder / "checkpoints"))
    assert saved == result.steps == {"micro-batch": 2, "evaluation": 0, "answers": 4}[phase]
    train(config, console=QUIET, resume=str(result.folder))
    assert adapter_bytes(result.folder) == adapter_bytes(straight)


def test_a_signal_that_is_sent_twice_does_not_end_the_checkpoint(
    tiny_folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, save = HostPipeline.step, checkpoint.save

    def step(self: HostPipeline, *args: Any, **named: Any) -> None:
        real(self, *args, **named)
        os.kill(os.getpid(), signal.SIGINT)

    def saving(*args: Any, **named: Any) -> Path:
        os.kill(os.getpid(), signal.SIGINT)
        return save(*args, **named)

    config = settings(tiny_folder("llama-shallow"), tmp_path / "run", val_split=0.0, samples=0, save_every=0)
    monkeypatch.setattr(HostPipeline, "step", step)
    monkeypatch.setattr(checkpoint, "save", saving)
    monkeypatch.setattr(SignalWatch, "SAME", 60.0)
    result = train(config, console=QUIET)
    assert (result.stopped, result.steps) == ("interrupted", 1)
    assert list(checkpoint.steps(result.folder / "checkpoints")) == [1]


def test_an_update_and_a_checkpoint_are_finished() -> None:
    stop = StopRequest()
    run: Any = SimpleNamespace(pipeline=HostPipeline.__new__(HostPipeline), state=SimpleNamespace(stop=stop))
    Trainer._give_up(run)
    with stop.interruptible(), pytest.raises(Interrupted):
        Trainer._give_up(run)


@pytest.mark.parametrize("closing", [False, True])
def test_a_run_that_is_told_to_stop_saves_unless_it_holds_the_best_steps_weights(closing: bool) -> None:
    """While a run finishes, its weights may be those of its best step: saved as the last one's, a resume would go on
    from them."""
    done = list[str]()

    def noted(name: str) -> Any:
        return lambda *_, **__: done.append(name) or {}

    state = SimpleNamespace(
        stop=SimpleNamespace(signal=signal.SIGTERM), ranks=SimpleNamespace(leads=True),
        progress=checkpoint.Progress(step=7), report=SimpleNamespace(end=noted("end")),
    )  # fmt: skip
    run: Any = SimpleNamespace(
        closing=closing, step=SimpleNamespace(discard=noted("discard")), state=state, parts=None,
        finish_steps=noted("finish steps"), checkpoints=SimpleNamespace(save=noted("save")),
    )  # fmt: skip
    Trainer._save_and_stop(run)
    assert done == ["discard", "finish steps", *([] if closing else ["save"]), "end"]


def test_a_second_ctrl_c_ends_at_once_and_says_what_is_lost() -> None:
    """Not one in the same moment, nor SIGTERM or SIGHUP again: terminals, wrappers and schedulers send them twice."""
    code = (
        "import os, signal, time; from graftune.training.signals import SignalWatch\n"
        "with SignalWatch(lambda number: print('noted', number, flush=True), lost=lambda: '3 steps are lost'):\n"
        "    for same, kind in ((99, 'INT'), (99, 'INT'), (99, 'HUP'), (0, 'TERM'), (0, 'HUP'), (0, 'INT')):\n"
        "        SignalWatch.SAME = same; os.kill(os.getpid(), getattr(signal, 'SIG' + kind)); time.sleep(0.3)\n"
        "        print('after', kind, flush=True)\n"
        "    time.sleep(60)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 130 and done.stderr == "\ngraftune: stopped at once; 3 steps are lost\n"
    assert done.stdout.split("\n")[:6] == [
        "noted 2", "after INT", "after INT", "after HUP", "after TERM", "after HUP"
    ]  # fmt: skip


def test_a_signal_is_confirmed_while_the_main_thread_is_busy() -> None:
    """Python runs a handler only between two instructions of the main thread: a long product delays it."""
    order = list[str]()
    with SignalWatch(lambda _: order.append("noted"), confirm=lambda _: order.append("confirmed")):
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000)
        time.sleep(0.01)
    assert order == ["confirmed", "noted"]


@pytest.mark.parametrize(
    ("number", "world", "said"),
    [
        (signal.SIGINT, None, ["stopping and saving the last whole step; Ctrl-C again ends at once"]),
        (signal.SIGINT, object(), ["stopping and saving the last whole step"]),
        (signal.SIGTERM, None, ["stopping and saving the last whole step"]),
        (signal.SIGHUP, None, []),
    ],
)
def test_what_a_signal_is_answered_with(number: int, world: Any, said: list[str]) -> None:
    notes = list[str]()
    report = SimpleNamespace(console=SimpleNamespace(note=notes.append))
    run: Any = SimpleNamespace(state=SimpleNamespace(ranks=SimpleNamespace(world=world), report=report))
    Trainer._confirm_stop(run, number)
    assert notes == said


@pytest.mark.parametrize("once", [False, True])
def test_of_several_ranks_none_acts_on_a_second_signal(once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher passes signals on to processes that may have had them already."""
    ended, first = list[int](), list[int]()
    monkeypatch.setattr(SignalWatch, "_end", lambda self, number: ended.append(number))
    monkeypatch.setattr(SignalWatch, "SAME", 0.0)
    with SignalWatch(first.append, once=once):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
    assert first == [signal.SIGINT] and ended == ([] if once else [signal.SIGINT])
    with noted_signals(first.append, once=once):  # before the first step
        os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is (signal.SIG_IGN if once else signal.SIG_DFL)
    assert first == [signal.SIGINT, signal.SIGTERM]


def test_what_is_lost() -> None:
    state: Any = SimpleNamespace(folder=Path("runs/my run"), progress=checkpoint.Progress(step=7))
    hook = Checkpoints(Path("runs/my run/checkpoints"), {})
    assert "no checkpoint has been written" in hook.lost(state)
    for saved, words in ((7, "nothing is lost"), (6, "1 step is lost"), (4, "3 steps are lost")):
        hook.saved = saved
        text = (
            f"the last checkpoint is that of step {saved}, {words}; go on with: graftune train --resume 'runs/my run'"
        )
        assert hook.lost(state) == text


def test_ranks_that_were_stopped_together_do_not_blame_each_other() -> None:
    watch = Watch(Ranks(0, 2, 0, 2, "127.0.0.1", 1), print, 1)
    now = time.monotonic()
    watch._pulses, watch._since = {1: ([5, 3, 2, ""], now - 100)}, now - 100
    watch._leave_out(99.0)
    assert now - watch._pulses[1][1] == pytest.approx(1) == now - watch._since


class Reader(io.StringIO):
    """Goes away after its first line."""

    def write(self, text: str) -> int:
        if self.getvalue():
            raise BrokenPipeError(32, "Broken pipe")
        return super().write(text)


def test_a_run_goes_on_when_nobody_reads(straight: Path, tiny_folder, tmp_path: Path) -> None:
    """`graftune train 2>&1 | head -1`"""
    pipe = Reader()
    config = settings(tiny_folder("llama-shallow"), tmp_path / "run", max_steps=4, samples=1)
    assert train(config, console=Console(stdout=pipe, stderr=pipe)).stopped == "finished"
    assert adapter_bytes(tmp_path / "run") == adapter_bytes(straight)
    warnings = [e["text"] for e in read_events(tmp_path / "run" / "metrics.jsonl") if e["event"] == "warning"]
    assert warnings == ["the run goes on without a console (stdout: Broken pipe)"]
    with pytest.raises(BrokenPipeError):
        Console(stdout=pipe, stderr=pipe).note("other commands end")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_an_export_that_is_ended_leaves_nothing(
    number: signal.Signals, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    write = safetensors_io.save_file

    def ended(*args: Any, **named: Any) -> None:
        write(*args, **named)
        os.kill(os.getpid(), number)

    monkeypatch.setattr(safetensors_io, "save_file", ended)
    assert main(["export", str(straight), "--to", "peft", "--out", str(tmp_path / "deep" / "out")]) == 128 + number
    assert f"graftune: stopped by {number.name}" in capsys.readouterr().err
    assert not list((tmp_path / "deep").iterdir()) and signal.getsignal(number) is signal.SIG_DFL


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = [signal.getsignal(kind) for kind in signal.valid_signals() if kind not in (9, 19)]
    yield
    assert [signal.getsignal(kind) for kind in signal.valid_signals() if kind not in (9, 19)] == before
