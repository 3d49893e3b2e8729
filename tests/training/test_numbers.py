"""Numbers that are not finite, and what else a run notices about its own figures."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graftune.api import train
from graftune.cli import main
from graftune.errors import GraftuneError
from graftune.model.frozen import Dense
from graftune.observe.console import Console
from graftune.observe.events import read_events, steps
from graftune.session import parts
from graftune.settings.config import Config
from graftune.settings.sections import LoraConfig
from graftune.step.not_finite import NotFinite, _CheckingTape, first_not_finite
from graftune.step.pipeline import Figures, HostPipeline
from graftune.step.step import Step
from graftune.training import guard
from graftune.training.guard import Guard
from graftune.training.trainer import Trainer
from graftune.weights import checkpoint
from tests.support import injected, oracle
from tests.training.runs import adapter_bytes
from tests.training.test_loop import LatePipeline, figures, settings

QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def made(tiny_folder):
    """A step over a model whose head is not its embedding."""
    folder = tiny_folder("llama-untied")

    def make():
        ours = oracle.ours(folder, LoraConfig(rank=4, alpha=8.0, dropout=0.1))
        step = Step(ours.decoder, ours.arena, dropout=0.1)
        return ours, step, HostPipeline(step)

    return make


def test_an_inf_in_one_micro_batch_skips_exactly_that_update(made) -> None:
    injected.skips_exactly_that_update(made, fixed=False)
    injected.counts_its_tokens(made, fixed=False)


def test_the_first_layer_that_is_not_finite_is_found(made, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, step, _ = made()
    good, bad = injected.batches(0, fixed=False)[0], injected.batches(injected.BAD_STEP, fixed=False)[1]
    assert first_not_finite(step, good, 3) is None and not ours.arena.grads.any() and not step.loss_sum
    injected.poison(ours)
    assert first_not_finite(step, bad, 3) == NotFinite("the output of the embedding", [1])
    assert first_not_finite(step, good, 3) is None

    down = ours.decoder.blocks[1].feed_forward.down.frozen
    assert isinstance(down, Dense)
    kept = down.weight[0, 0].clone()
    down.weight[0, 0] = math.nan
    assert first_not_finite(step, good, 3) == NotFinite("the output of layers.1.mlp", [0, 1])
    down.weight[0, 0] = kept

    name = "layers.2.mlp.down_proj.lora_B.weight"
    view = ours.arena.view(name, ours.arena.weights)
    kept = view[0, 0].clone()
    view[0, 0] = math.inf
    assert first_not_finite(step, good, 3) == NotFinite(f"the weight {name}")
    view[0, 0] = kept

    head = ours.decoder.head.frozen
    assert isinstance(head, Dense)
    kept = head.weight[0, 0].clone()
    head.weight[0, 0] = math.nan
    assert first_not_finite(step, good, 3) == NotFinite("the loss, after the head")
    head.weight[0, 0] = kept

    spoil = step.grad_of_loss
    monkeypatch.setattr(step, "grad_of_loss", lambda *args: spoil(*args).mul_(math.inf))
    found = first_not_finite(step, good, 3)
    assert found is not None and found.what.startswith("the gradient of layers.2.")
    assert not ours.arena.grads.any()


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", [HostPipeline, LatePipeline])
def test_skipped_updates_in_a_row_stop_the_run_and_a_resume_goes_on_from_before(
    kind: type[HostPipeline], tiny_folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(name: str) -> Config:
        folder = tiny_folder("llama-untied")
        return settings(folder, tmp_path / name, max_skipped=3, keep_last=1, save_every=1, max_steps=9)

    straight = train(asked("straight"), console=QUIET).folder
    send = Trainer._send

    def poisoned(self: Trainer, micro_batches: list[Any]) -> None:
        table = self.parts.decoder.embedding
        assert isinstance(table, Dense)
        if self.state.progress.step == 4:
            table.weight[3 + 64 :] = math.inf  # every letter's
        send(self, micro_batches)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "_send", poisoned)
        patched.setattr(parts, "pipeline_for", lambda step, graph: kind(step))
        if kind is LatePipeline:
            patched.setattr(LatePipeline, "steps_ahead", 2)
        with pytest.raises(GraftuneError) as stopped:
            train(asked("run"), console=QUIET)
    run, said = tmp_path / "run", str(stopped.value)
    skipped = 3 if kind is HostPipeline else 4  # by step 9, but for the evaluation at the end of an epoch, at 8
    assert f"{skipped} updates in a row (steps 5 to {4 + skipped}) were skipped" in said, said
    assert "the output of the embedding is the first, in rows " in said and "data.jsonl" in said
    assert "step 4, from before them, is saved" in said and f"--resume {run}" in said and "\n" not in said
    events = read_events(run / "metrics.jsonl")
    assert events[-1]["event"] == "run_end" and events[-1]["stopped"] == "not finite"
    assert max(checkpoint.steps(run / "checkpoints")) == 4
    train(Config.load(run / "config.yaml"), console=QUIET, resume=str(run))
    assert figures(run) == figures(straight) and adapter_bytes(run) == adapter_bytes(straight)


def test_a_weight_that_is_not_finite_is_named_and_not_saved(
    tiny_folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    update, name = Step.update_step, "layers.0.mlp.down_proj.lora_A.weight"

    def overflowing(self: Step) -> torch.Tensor:
        report = update(self)
        if not self.arena.grads.is_meta and int(self.count) == 3:
            self.arena.view(name, self.arena.weights)[0, 0] = math.inf
        return report

    monkeypatch.setattr(Step, "update_step", overflowing)
    asked = settings(tiny_folder("llama-shallow"), tmp_path / "run", save_every=1, keep_last=1, eval_every=0)
    asked.save(tmp_path / "run.yaml")
    assert main(["train", "-c", str(tmp_path / "run.yaml"), "--max-skipped", "2", "--epochs", "9"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"the weight {name} is the first" in last and "step 2, from before them, is saved" in last
    assert list(checkpoint.steps(tmp_path / "run" / "checkpoints")) == [2], "the one that step 3 would replace"
    ends = asked.replace(out=str(tmp_path / "ends"), max_steps=3, val_split=0.0)
    with pytest.raises(GraftuneError, match=r"at the end, after step 3, .* not finite; the last checkpoint is step 2"):
        train(ends, console=QUIET)
    assert not (tmp_path / "ends" / "adapter").exists()


def test_a_row_of_the_last_layer_is_its_own_documents() -> None:
    """That layer computes only the rows that are learnt from: their numbers are not those of the tokens."""
    batch = injected.batches(0, fixed=False)[0]
    assert batch.rows is not None and len(batch.rows) < len(batch.tokens)
    starts = batch.cu_seqlens.tolist()[:-1]
    for number, token in enumerate(batch.rows.tolist()):
        stream = torch.zeros(len(batch.rows), 2)
        stream[number, 1] = math.nan
        tape = _CheckingTape(batch, None)  # type: ignore[arg-type]
        tape.check(stream, "it", batch.rows)
        assert tape.found == [NotFinite("the output of it", [max(d for d, at in enumerate(starts) if at <= token)])]


# What is noticed


def kinds(run: Path) -> list[str]:
    events = read_events(run / "metrics.jsonl")
    return [event["kind"] for event in events if event["event"] == "warning" and "kind" in event]


class Noted:
    """A guard that is told of made-up steps."""

    def __init__(self, stop_on_warning: bool = False):
        self.said = list[tuple[int, str]]()
        self.guard = Guard(Any, Any, 3, stop_on_warning)  # type: ignore[arg-type]
        warn = SimpleNamespace(warn=lambda text, step, kind: self.said.append((step, kind)))
        self.state: Any = SimpleNamespace(report=warn, progress=checkpoint.Progress())
        self.at = 0

    def step(
        self, loss: float = 2.0, norm: float = 1.0, skipped: bool = False, tokens: int = 90, scale: float = 0.0,
        planned: int = 90,
    ):  # fmt: skip
        self.at += 1
        tag = {"step": self.at, "epoch": 0, "response_tokens": planned}
        self.guard.step_done(self.state, Figures(tag, loss, norm, skipped, float(tokens), scale, {}))
        return self.guard

    def evaluation(self, step: int, loss: float, first: float | None) -> None:
        self.state.progress = checkpoint.Progress(step=step, first_loss=first)
        self.guard.check_evaluation(self.state, loss)

    def weights(self, step: int, updates: int, bits: int) -> None:
        self.state.progress = checkpoint.Progress(step=step)
        self.guard.check_moved(self.state, updates, bits)


def test_a_loss_spike_is_said_once() -> None:
    drawn = torch.Generator().manual_seed(3)
    noted = Noted()
    for loss in (2.0 + 0.4 * torch.randn(400, generator=drawn)).tolist():
        noted.step(loss)
    assert noted.said == [], "noise is no spike"
    noted.step(4.9)
    assert noted.said == [(401, guard.SPIKE)]
    noted.step(9.0)
    assert len(noted.said) == 1
    early, falling, small = Noted(), Noted(), Noted()
    for step in range(60):
        early.step(30.0 if step == 5 else 1.0)
        falling.step(8.0 / (1 + step))
        small.step(0.3 if step == 40 else 0.001)
    assert early.said == falling.said == small.said == []


def test_a_gradient_of_zero_is_said_when_it_stays() -> None:
    noted = Noted()
    for norm in (0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0):
        noted.step(norm=norm)
    assert noted.said == [(6, guard.NO_GRADIENT)]
    empty = Noted()
    for _ in range(9):
        empty.step(norm=0.0, planned=0, tokens=0)
    assert empty.said == [], "without a token that is learnt from there is none"


def test_one_token_too_few_is_noticed_and_a_sum_that_rounds_is_not() -> None:
    for planned, counted, wrong in (
        (5000, 4999, True),
        (5000, 5001, True),
        (0, 1, True),
        (1 << 25, (1 << 25) + 2, False),
    ):
        noted = Noted()
        noted.step(planned=planned, tokens=counted)
        assert noted.said == [(1, guard.TOKENS)] * wrong, (planned, counted)


@pytest.mark.parametrize("stops", [False, True])
def test_each_warning_stops_a_run_that_asks_for_it(stops: bool) -> None:
    for kind in (guard.SPIKE, guard.NO_GRADIENT, guard.TOKENS, guard.NOT_MOVED, guard.WORSE):
        noted = Noted(stops)
        for step in range(40):
            noted.step(9.0 if (kind, step) == (guard.SPIKE, 39) else 2.0, norm=float(kind != guard.NO_GRADIENT))
        noted.step(tokens=89 if kind == guard.TOKENS else 90)
        for updates in (3, 4):
            noted.weights(updates, updates, 7 if kind == guard.NOT_MOVED else updates)
        noted.evaluation(4, 3.0 if kind == guard.WORSE else 1.0, 2.0)
        assert [said for _, said in noted.said] == [kind] and noted.guard.stops == stops


def test_a_validation_loss_above_the_first_is_worse_and_so_is_none_at_all() -> None:
    for loss, said in ((1.005, []), (1.02, [(3, guard.WORSE)]), (math.nan, [(3, guard.WORSE)]), (0.5, [])):
        noted = Noted()
        noted.evaluation(0, 9.0, 1.0)
        noted.evaluation(2, loss, None)
        noted.evaluation(3, loss, 1.0)
        assert noted.said == said, loss


def test_skips_count_in_a_row_and_not_while_the_loss_scale_falls() -> None:
    noted, scale = Noted(), 65536.0
    while scale > 1:
        scale /= 2
        assert not noted.step(math.nan, math.nan, True, scale=scale).stops or scale == 1
    assert noted.guard.skipped == 1, "the halving to 1 is the first that counts"
    noted.step(scale=1.0)
    assert not any(noted.step(math.nan, math.inf, True, scale=1.0).stops for _ in range(2))
    assert noted.step(math.nan, math.inf, True, scale=1.0).too_many and noted.guard.first_skipped["step"] == 18
    assert noted.said == []
    never = Noted()
    never.guard.max_skipped = 0
    assert not any(never.step(math.nan, math.nan, skipped).stops for skipped in [False, *[True] * 20])


def test_an_ordinary_run_warns_of_nothing_and_one_that_goes_wrong_does(
    tiny_folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tiny_folder("llama-shallow")
    # Validation data that is not the training data may well get worse: here it is the same.
    data = settings(base, tmp_path / "x").data.data
    fine = train(settings(base, tmp_path / "fine", eval_data=data, epochs=9, patience=0), console=QUIET).folder
    assert kinds(fine) == [] and len(steps(read_events(fine / "metrics.jsonl"))) > 40

    still = train(settings(base, tmp_path / "still", lr=0.0, min_lr=0.0, max_steps=5), console=Console()).folder
    assert kinds(still) == [guard.NOT_MOVED]
    assert "3 updates were made between steps 0 and 3 and not one trainable weight" in capsys.readouterr().err
    for epochs, more in ((1, []), (2, [])):  # no validation data: looked at by the end, and said once
        out = tmp_path / f"unseen {epochs}"
        ended = train(settings(base, out, val_split=0.0, lr=0.0, min_lr=0.0, epochs=epochs), console=QUIET)
        assert kinds(ended.folder) == [guard.NOT_MOVED, *more]


@pytest.mark.thorough
def test_a_warning_stops_the_run_where_that_is_asked_for(
    tiny_folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tiny_folder("llama-untied")
    other = {"lr": 0.05, "eval_data": str(tmp_path / "other.jsonl")}  # words that the training data speaks against
    (tmp_path / "other.jsonl").write_text('{"prompt": "AB", "response": "XYZXYZXYZ"}\n')
    with pytest.raises(GraftuneError, match=r"stopped at step 3, as stop_on_warning asks: the validation loss") as said:
        train(settings(base, tmp_path / "worse", **other, stop_on_warning=True, save_every=0), console=QUIET)
    run = tmp_path / "worse"
    assert kinds(run) == [guard.WORSE] and f"go on with graftune train --resume {run}" in str(said.value)
    assert read_events(run / "metrics.jsonl")[-1]["stopped"] == "warning"
    assert max(checkpoint.steps(run / "checkpoints")) == 3
    stored = Config.load(run / "config.yaml")
    assert train(stored, console=QUIET, resume=str(run)).stopped in ("finished", "early stop")  # said before: goes on
    assert kinds(run) == [guard.WORSE]

    class Losing(HostPipeline):
        def stage(self, batch: Any) -> Any:
            batch.labels[-1] = -1
            return super().stage(batch)

    monkeypatch.setattr(parts, "pipeline_for", lambda step, graph: Losing(step))
    with pytest.raises(GraftuneError, match=r"stopped at step 1, .* \d+ response tokens on the device where \d+ were"):
        train(settings(base, tmp_path / "lost", stop_on_warning=True, save_every=0), console=QUIET)
    assert kinds(tmp_path / "lost") == [guard.TOKENS]
    assert max(checkpoint.steps(tmp_path / "lost" / "checkpoints")) == 1
