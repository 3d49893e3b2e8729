"""Reference log-probabilities that are stored before the first step: the runs are those that compute them in each step,
a resumed run finds them again, and nothing that decides them is missing in their key."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graftune
from graftune.api import train
from graftune.data import cached
from graftune.losses import interface
from graftune.observe.console import Console
from graftune.observe.events import evals, read_events, steps
from graftune.session import references
from tests.training.runs import adapter_bytes
from tests.training.test_loop import settings, stopped_copy

QUIET = Console(quiet=True)
MORE = {"lr": 0.003, "val_split": 0.4, "max_steps": 6, "epochs": 9, "tokens_per_step": 256}


def rows_of(loss: str) -> list[dict[str, Any]]:
    rows = [{"prompt": f"say {i}", "chosen": "z" * (1 + i % 5), "rejected": "a" * (1 + i % 3)} for i in range(12)]
    if loss == "anchored":
        return [{"prompt": row["prompt"], "response": row["chosen"]} for row in rows]
    if loss.startswith("kto"):
        return [{"prompt": r["prompt"], "completion": r["chosen"], "label": i % 2} for i, r in enumerate(rows)]
    return rows


@pytest.fixture
def trained(tiny_folder, tmp_path: Path) -> Callable[..., Path]:
    def run(name: str, loss: str, **more: Any) -> Path:
        (tmp_path / f"{loss}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of(loss)))
        own = {"loss": loss, "data": str(tmp_path / f"{loss}.jsonl")} | MORE | more
        train(settings(tiny_folder("llama-shallow"), tmp_path / name, **own), console=QUIET)
        return tmp_path / name

    return run


def numbers(run: Path) -> list[dict[str, float]]:
    names = ("loss", "grad_norm", "chosen", "rejected", "margin", "drift", "kl")
    events = read_events(run / "metrics.jsonl")
    return [{n: e[n] for n in names if e.get(n) is not None} for e in (*steps(events), *evals(events))]


def fail(*_: Any, **__: Any) -> None:
    raise AssertionError("computed again")


@pytest.mark.few(1)
@pytest.mark.parametrize("loss", ["dpo", "anchored", "kto"])
def test_stored_is_each(loss: str, trained: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """In steps and evaluations; only KTO, whose answers change places, computes a reference in them."""
    each = numbers(trained("each", loss, reference_pass="each"))
    if loss != "kto":
        monkeypatch.setattr(interface, "reference_log_probs", fail)
    stored = numbers(trained("stored", loss))
    assert len(each) == len(stored) > 6 and set(each[0]) >= {"loss", "grad_norm"}
    for one, other in zip(each, stored, strict=True):
        assert one == pytest.approx(other, rel=1e-5, abs=1e-6, nan_ok=True)
    assert abs(each[5]["loss"] - each[0]["loss"]) > 0.01, "the adapters have moved away from the reference"


@pytest.mark.few(1)
@pytest.mark.parametrize(("loss", "reference_pass"), [("dpo", "stored"), ("kto", "each")])
def test_resumed_is_straight(
    loss: str, reference_pass: str, trained: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Compared with an adapter that the run continues."""
    first = trained("first", loss, max_steps=2)
    more = {"adapter": str(first), "reference": "start", "reference_pass": reference_pass, "dropout": 0.2}
    straight = trained("straight", loss, **more)
    (begun, *_) = evals(read_events(straight / "metrics.jsonl"))
    assert abs(begun["margin"]) < 1e-6, "nothing has moved away from the start"
    copy = stopped_copy(straight, tmp_path / "copy", after=2)
    monkeypatch.setattr(references, "reference_pass", fail)
    train(resume=copy, console=QUIET)
    assert adapter_bytes(copy) == adapter_bytes(straight) and numbers(copy) == numbers(straight)


def test_what_decides_them_is_in_their_key(tiny_folder) -> None:
    def key(loss: str = "dpo", rows: slice = slice(None), weights: float = 0.0, **more: Any) -> str:
        with graftune.open(tiny_folder("llama-shallow"), loss=loss, rank=4, quiet=True, **more) as session:
            if session.parts.start is not None:
                session.parts.start.values.fill_(weights)
            return references._key(session.parts, session.prepare(rows_of(loss)[rows]).examples)

    keys = [
        key(),
        key(rows=slice(5)),
        key("anchored"),
        key("dpo", reference="start"),
        key("dpo", reference="start", weights=1.0),
        key(compute_dtype="bf16"),
        key(base_dtype="nf4"),
    ]
    assert len(set(keys)) == len(keys) and key(seed=5, lr=0.1) == keys[0]


def test_a_damaged_file_is_computed_again(opened_dpo, monkeypatch: pytest.MonkeyPatch) -> None:
    session, examples = opened_dpo
    for path in cached.folder().glob(f"*{references.SUFFIX}"):
        path.unlink()
    assert references.fill(session.parts, examples).endswith("are stored")
    want = examples.store.reference.copy()
    assert np.isfinite(want).all() and (want < 0).all()
    (path,) = cached.folder().glob(f"*{references.SUFFIX}")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    for damaged in (bytes(content), content[:40]):
        path.write_bytes(damaged)
        assert references.fill(session.parts, examples).endswith("are stored")
    examples.store.reference[:] = 0
    assert references.fill(session.parts, examples).endswith("computed earlier")
    assert np.array_equal(examples.store.reference, want)
    path.unlink()
    monkeypatch.setattr(cached, "folder", lambda: Path("/proc/none"))
    assert "for this run only (" in references.fill(session.parts, examples)


@pytest.fixture
def opened_dpo(tiny_folder):
    with graftune.open(tiny_folder("llama-shallow"), loss="dpo", rank=4, quiet=True) as session:
        data = session.prepare([*rows_of("dpo"), *rows_of("dpo")[:3]])  # some of them twice
        yield session, references.with_references(data.examples, session.loss, session.config.train)


@pytest.mark.few(1)
@pytest.mark.parametrize("which", ["", "@best"])
def test_a_finished_run_is_evaluated_against_its_start(which: str, trained: Callable[..., Path]) -> None:
    """As its last evaluation was, from the adapter or from a checkpoint; the base gives other figures."""
    first = trained("first", "dpo", max_steps=2)
    run = trained("run", "dpo", adapter=str(first), reference="start", best="margin", max_steps=3)
    last = evals(read_events(run / "metrics.jsonl"))[-1]
    rows = rows_of("dpo")
    with graftune.open(f"{run}{which}", quiet=True) as session:
        own = session.evaluate(rows)
        session._use_loss(type(session.loss)(session.loss.beta))  # type: ignore[attr-defined]
        base = session.evaluate(rows)
    with graftune.open(str(first), quiet=True) as session:
        begun = session.evaluate(rows)
    assert last["margin"] > 0 and own.figures["prefers"] == base.figures["prefers"]
    assert base.figures["margin"] - own.figures["margin"] == pytest.approx(begun.figures["margin"], abs=1e-5)
    assert abs(begun.figures["margin"]) > 1e-3
