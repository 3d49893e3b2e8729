"""The Python API: the README's lines as they stand there, a loop that equals a run, a state that goes on."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import typing
from pathlib import Path

import pytest
import torch

import graftune
from graftune.errors import GraftuneError
from graftune.plan import resolve_auto
from graftune.settings.config import Config, leaves
from graftune.settings.keywords import Settings
from graftune.settings.sections import TrainConfig
from graftune.training import prepare
from tests.training.runs import adapter_bytes

README = Path(__file__).resolve().parents[1] / "README.md"
ROWS = [{"prompt": f"Say {i}", "response": f"It is {i}."} for i in range(12)]


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    return path


@pytest.fixture
def opened(tiny_folder):
    def get(**settings):
        return graftune.open(tiny_folder("llama"), quiet=True, **{"rank": 4, "compute_dtype": "fp32"} | settings)

    return get


def test_the_readme_example_runs(tiny_folder, data, tmp_path, monkeypatch, capsys):
    code = re.search(r"```python\n(import graftune\n.*?)```", README.read_text(), re.S)[1]
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    monkeypatch.chdir(tmp_path)
    code = code.replace('"model.gguf"', repr(str(tiny_folder("llama")))).replace("data.jsonl", str(data))
    exec(compile(code, "README.md", "exec"), {})
    assert (tmp_path / "my-adapter" / "adapter_model.safetensors").exists()
    assert capsys.readouterr().out.strip()


def test_train_and_export_are_functions_however_often_they_are_called(tiny_folder, tmp_path):
    events = []
    for name in ("first", "second"):
        result = graftune.train(
            base=tiny_folder("llama"), data=ROWS, out=tmp_path / name, max_steps=1, rank=2, samples=0, device="cpu",
            callbacks=[events.append],
        )  # fmt: skip
        assert (result.steps, result.stopped) == (1, "finished")
        importlib.import_module("graftune.training.trainer")
        made = graftune.export(result.folder, "peft", out=tmp_path / f"{name}-peft")
        importlib.import_module("graftune.exporting.write")
        assert (made.path / "adapter_model.safetensors").exists()
    assert callable(graftune.train) and callable(graftune.export)
    assert adapter_bytes(tmp_path / "first") == adapter_bytes(tmp_path / "second")
    assert [e["event"] for e in events].count("run_end") == 2 and any(e["event"] == "step" for e in events)


def test_a_callback_stops_a_run(tiny_folder, tmp_path):
    config = Config.of({"base": str(tiny_folder("llama")), "rank": 2, "samples": 0, "device": "cpu", "lr": 1e-3})
    stop = graftune.train(
        config, data=ROWS, out=tmp_path / "run", tokens_per_step=64, val_split=0.0,
        callbacks=[lambda event: "stop" if event["event"] == "step" and event["step"] == 2 else None],
    )  # fmt: skip
    assert stop.stopped == "interrupted" and 2 <= stop.steps <= 3
    more = graftune.train(resume=tmp_path / "run", max_steps=stop.steps + 1)
    assert more.stopped == "finished" and more.steps == stop.steps + 1


def test_a_loop_equals_a_run(tiny_folder, tmp_path):
    """Same batches, same schedule, same numbers: the adapters are equal, bit for bit."""
    made = {"rank": 4, "epochs": 2.0, "val_split": 0.0, "dropout": 0.1, "device": "cpu", "compute_dtype": "fp32"}
    made |= {"tokens_per_step": 128, "tokens_per_micro_batch": 64, "lr": 1e-2}
    run = graftune.train(base=tiny_folder("llama"), data=ROWS, out=tmp_path / "run", samples=0, **made)
    session = graftune.open(tiny_folder("llama"), quiet=True, **made)
    data = session.prepare(ROWS)
    total = session.steps_per_epoch(data, 0) + session.steps_per_epoch(data, 1)
    rates, losses = iter(session.schedule(total)), []
    for epoch in range(2):
        for batch in session.batches(data, epoch):
            assert len(batch) == 2 or batch.tokens <= 64
            session.forward_backward(batch)
            losses.append(session.optim_step(lr=next(rates)))
    session.save_adapter(tmp_path / "looped" / "adapter")
    assert run.steps == total == len(losses)
    assert adapter_bytes(tmp_path / "looped") == adapter_bytes(tmp_path / "run")


def test_loss_falls_and_the_adapter_comes_back(opened, data, tmp_path):
    session = opened(alpha=8.0, lr=1e-2, tokens_per_step=4096)
    examples = session.prepare(data)
    before = session.evaluate(examples)
    losses = []
    for epoch in range(8):
        for batch in session.batches(examples, epoch):
            session.forward_backward(batch)
        stats = session.optim_step()
        losses.append(stats.loss)
    assert losses[-1] < losses[0] * 0.9 and stats.grad_norm > 0 and stats.response_tokens == before.response_tokens
    tuned = session.evaluate(examples)
    session.save(tmp_path / "adapter")
    again = graftune.open(tmp_path / "adapter", compute_dtype="fp32", quiet=True)
    assert again.evaluate(examples) == tuned
    assert again.evaluate(examples, adapted=False).loss == pytest.approx(before.loss, rel=1e-6)
    assert again.describe()["adapter"]


def test_figures_are_fetched_when_they_are_read(opened):
    session = opened()
    fetched = []
    session.forward_backward(ROWS)
    real = session.parts.pipeline.next
    session.parts.pipeline.finished = lambda wait=False: []  # as on a device that has not come so far
    session.parts.pipeline.next = lambda: fetched.append(1) or real()
    first = session.optim_step()
    session.forward_backward(ROWS)
    second = session.optim_step()
    assert not first.ready and not fetched
    assert second.loss > 0 and first.ready and len(fetched) == 2 and first.step == 1
    assert "loss=" in repr(second) and len(repr(second)) < 160


def test_auto_is_planned_and_said(tiny_folder, capsys):
    session = graftune.open(tiny_folder("llama"), rank=2, tokens_per_micro_batch=48, tokens_per_step=96)
    assert "frozen weights: " in capsys.readouterr().err
    data = session.prepare(ROWS)
    batches = list(session.batches(data))
    assert all(len(micro.tokens) <= 48 for batch in batches for micro in batch.packed) and len(batches[0]) == 2
    assert session.config.train.recompute == "none" and "planned: recompute none" in capsys.readouterr().err


def test_a_plan_counts_the_cache_of_earlier_samples(opened, monkeypatch):
    plans = []
    monkeypatch.setattr(prepare, "resolve_auto", lambda job: plans.append(resolve_auto(job)) or plans[-1])
    for samples in (0, 4):
        session = opened(device="cpu")
        if samples:
            session.sample("word", n=samples, max_new_tokens=8)
        session.feed.planner.keywords["free"] = 1 << 33
        session.forward_backward(ROWS)
        assert (session.parts.cache_held > 0) == bool(samples) and plans[-1].free == (
            1 << 33
        ) - session.parts.cache_held


def test_logprobs_are_the_loss(opened):
    session = opened()
    torch.nn.init.normal_(session.parts.arena.weights, std=0.05)
    session.parts.arena.publish()
    data = session.prepare(ROWS)
    found = session.logprobs(data)
    counts = [example.response_tokens for example in data.examples]
    assert [len(one) for one in found] == counts
    assert float(-torch.cat(found).mean()) == pytest.approx(session.evaluate(data).loss, rel=1e-5)
    assert not torch.allclose(found[0], session.logprobs(data, adapted=False)[0])


def test_samples(opened):
    session = opened()
    first, second = session.sample(["Say 1", "Say 22"], n=3, max_new_tokens=6, seed=5, temperature=20.0)
    assert len(first) == len(second) == 3 and len({tuple(s.tokens) for s in (*first, *second)}) > 3
    (alone,) = session.sample("Say 22", n=2, max_new_tokens=6, seed=5, temperature=20.0)  # no matter what else is drawn
    assert [one.tokens for one in alone] == [one.tokens for one in second[:2]]
    for sample in first:
        assert len(sample.logprobs) == len(sample.tokens) and all(value <= 0 for value in sample.logprobs)
    again = session.sample(["Say 1", "Say 22"], n=3, max_new_tokens=6, seed=5, temperature=20.0)
    assert [first, second] == again
    ((greedy,),) = session.sample("Say 1", temperature=0.0, max_new_tokens=8)
    assert greedy.text == session.generate("Say 1", max_new_tokens=8)[0]
    assert "".join(session.stream("Say 1", max_new_tokens=8)) == greedy.text
    assert not any(greedy.sampling_logprobs)


def test_stop_strings_end_a_sample(opened):
    session, pieces = opened(), []
    how = {"temperature": 20.0, "max_new_tokens": 24, "seed": 3}
    ((whole,),) = session.sample("Say 3", **how)
    stop = whole.text[8:10]
    assert whole.text.index(stop) > 2
    ((sample,),) = session.sample("Say 3", stop=[stop, "never"], on_text=lambda _, text: pieces.append(text), **how)
    assert sample.text == whole.text[: whole.text.index(stop)] == "".join(pieces) and sample.stopped == "stop"
    assert sample.tokens == whole.tokens[: len(sample.tokens)] and len(sample.tokens) < 24
    assert session.generate("Say 3", stop=[stop], **how) == [sample.text]
    assert "".join(session.stream("Say 3", stop=stop, **how)) == sample.text


def test_data_in_memory(opened, data):
    session = opened()
    from_file = session.prepare(data)

    class HuggingFace:
        """What is asked of a Dataset: columns and iteration."""

        column_names = ("prompt", "response")

        def __iter__(self):
            return iter(ROWS)

    for given in (ROWS, tuple(ROWS), iter(ROWS), HuggingFace()):
        assert session.prepare(given).digest == from_file.digest
    for bad, said in (
        ([], "no records"),
        ([3], "record 1 is a int"),
        ([{"prompt": {1}}], "JSON"),
        ({"a": 1}, "single"),
    ):
        with pytest.raises(GraftuneError, match=said):
            session.prepare(bad)


def test_the_mask_is_shown_in_a_notebook(opened):
    shown = opened().prepare(ROWS)._repr_html_()
    assert "<mark>It is 0.</mark>" in re.sub(r"&lt;.*?&gt;", "", shown)


def test_keywords_are_the_settings():
    """For type checkers (Settings), for help() and for completion (the signatures)."""
    names = {leaf.name for leaf in leaves()}
    assert set(Settings.__annotations__) == names - {"base", "adapter", "loss"}
    assert typing.get_args(graftune.api.LossName) == typing.get_args(typing.get_type_hints(TrainConfig)["loss"])
    for verb in (graftune.open, graftune.train):
        assert names <= set(inspect.signature(verb).parameters)
        assert "Example:" in verb.__doc__
    assert {"open", "train", "export", "Session"} <= set(dir(graftune))
