"""RUN@step-N, RUN@best, RUN@last and a run that goes on, for chat, eval, export and open."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import graftune
from graftune import run_folder as target
from graftune.api import export, train
from graftune.cli import main
from graftune.errors import GraftuneError
from graftune.observe.console import Console
from graftune.settings.config import Config
from graftune.weights import checkpoint
from graftune.weights.adapter import load_adapter
from tests.training.runs import write_data
from tests.training.test_loop import settings, stopped_copy

QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_folder) -> Path:
    """Validated at steps 3 and 6, saved at every second one too, with new tokens and norms in its arena."""
    more = {"new_tokens": ["<a>", "<b>"], "train_norms": True, "max_steps": 6, "lr": 0.005}
    out = tmp_path_factory.mktemp("targets") / "run"
    return train(settings(tiny_folder("gemma3"), out, **more), console=QUIET).folder


def weights(name: str | Path, **more: Any) -> torch.Tensor:
    return graftune.open(str(name), device="cpu", compute_dtype="fp32", **more).parts.arena.weights


def stored(run: Path, step: int) -> torch.Tensor:
    return checkpoint.weights_of(checkpoint.steps(run / "checkpoints")[step])


def best_step(run: Path) -> int:
    last = checkpoint.latest(run / "checkpoints")
    assert last is not None
    return checkpoint.read_state(last)[0].best_step


def test_names(run: Path) -> None:
    assert weights(f"{run}@step-2").equal(stored(run, 2)) and not stored(run, 2).equal(stored(run, 6))
    assert weights(f"{run}@last").equal(stored(run, 6))
    assert weights(f"{run}@best").equal(stored(run, best_step(run)))
    assert torch.allclose(weights(run), weights(f"{run}@best"), atol=1e-6)  # Gemma's norms are stored less one
    there = ", ".join(f"step-{step}" for step in sorted(checkpoint.steps(run / "checkpoints")))
    for name, what in {
        "step-1": f"has no checkpoint of step 1; there are {there}",
        "step-²": f"@step-² is not a state of this run; use @best, @last or one of {there}",
        "first": "@first is not a state of this run",
    }.items():
        with pytest.raises(GraftuneError) as caught:
            graftune.open(f"{run}@{name}")
        assert what in str(caught.value)


def test_a_run_that_goes_on(run: Path, tmp_path: Path) -> None:
    """Without an adapter it is its best state so far, or before any evaluation its last one."""
    going = stopped_copy(run, tmp_path / "a@b")  # which is no name of a state
    assert weights(going).equal(stored(run, best_step(going)))
    early = stopped_copy(run, tmp_path / "early", after=0)
    assert weights(early).equal(stored(run, 0))
    with pytest.raises(GraftuneError, match=r"has no best checkpoint, since nothing has been .*early@last"):
        graftune.open(f"{early}@best")
    shutil.rmtree(early / "checkpoints")
    with pytest.raises(GraftuneError, match="this run has no checkpoint yet"):
        graftune.open(str(early))


@pytest.mark.parametrize("when", ["before it is opened", "between its two files"])
def test_what_is_deleted_while_it_is_read(
    when: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    going, real, listed = stopped_copy(run, tmp_path / "going", after=6), checkpoint.weights_of, []

    def pruned(path: Path) -> Any:
        listed.append(path.name)
        if len(listed) == 1:
            if when == "before it is opened":
                shutil.rmtree(path)
            else:
                (path / checkpoint.STATE).unlink()
        return real(path)

    monkeypatch.setattr(checkpoint, "weights_of", pruned)
    state = target.find_state(f"{going}@last")
    assert state is not None and listed == ["step-6", "step-4"] and state.step == 4
    shutil.rmtree(going / "checkpoints")
    assert state.weights.equal(stored(run, 4)), "an open file stays readable"


def test_every_command_takes_them(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_data(tmp_path / "data.jsonl", rows=4)
    for line in (
        ["eval", f"{run}@step-2", str(data), "--device", "cpu"],
        ["chat", f"{run}@step-2", "--prompt", "hi", "--max-new-tokens", "2", "--compare", "--device", "cpu"],
    ):
        assert main(line) == 0
        assert "taking the checkpoint of step 2" in capsys.readouterr().err
    assert main(["export", f"{run}@step-2", "--to", "peft", "--out", str(tmp_path / "peft")]) == 0
    base = Config.load(run / "config.yaml").base.base
    assert main(["eval", f"{run}@best", str(data), "--base", base, "--device", "cpu"]) == 0
    assert main(["train", "--resume", f"{run}@step-2"]) == 2
    capsys.readouterr()
    line = ["train", base, str(data), "--adapter", f"{run}@step-2", "--device", "cpu", "--out", str(tmp_path / "run")]
    assert main(line) == 2
    assert (
        "names a checkpoint, and training continues from an adapter; export it to peft and give that folder"
        in capsys.readouterr().err
    )


def test_an_export_is_what_the_run_would_have_left(run: Path, tmp_path: Path) -> None:
    best = f"{run}@best"
    made = export(best, "peft", out=str(tmp_path / "best"), console=QUIET).path
    ours, theirs = load_adapter(made), load_adapter(run / "adapter")
    assert ours.tensors.keys() == theirs.tensors.keys()
    assert all(torch.equal(tensor, theirs.tensors[name]) for name, tensor in ours.tensors.items())
    kept = ("rank", "alpha", "targets", "rslora", "train_norms", "new_tokens")
    assert [getattr(ours.lora, name) for name in kept] == [getattr(theirs.lora, name) for name in kept]
    kept = ("base_name", "base_sha256", "template", "append_eos", "revision")
    assert [getattr(ours, name) for name in kept] == [getattr(theirs, name) for name in kept]
    assert (made / "chat_template.jinja").read_text() == (run / "adapter" / "chat_template.jinja").read_text()
    with pytest.raises(GraftuneError, match=r"step-6: the adapter also holds embed_tokens.weight"):
        export(best, "peft", out=str(tmp_path / "sum"), add=[f"{run}@step-2=-1"], console=QUIET)
    assert export(f"{run}@step-2", "apr", console=QUIET).path == run / "export" / "run-step-2.apr"


def test_a_whole_model(tiny_folder, tmp_path: Path) -> None:
    values = settings(tiny_folder("llama"), tmp_path / "run", max_steps=3, dropout=0.0).flat()
    config = Config.of(values | {"method": "full", "rank": Config().lora.rank})
    run = train(config, console=QUIET).folder
    assert weights(f"{run}@step-2").equal(stored(run, 2))
    with pytest.raises(GraftuneError, match="trained the whole model, and only what such a run has left is exported"):
        export(f"{run}@step-2", "merged", console=QUIET)
