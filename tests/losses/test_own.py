"""A loss of one's own: the example of docs/extending.md runs, and what a loss returns is checked."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import graftune
from graftune.errors import GraftuneError
from graftune.losses import Computed, LogProbLoss, checked
from tests.training.runs import write_data

DOCUMENT = Path(__file__).parents[2] / "docs" / "extending.md"


def test_the_example_of_the_documents_runs(tiny_folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = next(s for s in re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.S) if "class Focal" in s)
    monkeypatch.chdir(tmp_path)
    write_data(tmp_path / "data.jsonl")
    source = source.replace('"BASE"', f"{str(tiny_folder('llama-shallow'))!r}, device='cpu', quiet=True")
    names: dict[str, Any] = {}
    exec(source, names)
    stats = names["stats"]
    assert 0 < stats.loss < stats.figures["cross_entropy"]


class Returning(LogProbLoss):
    """Returns what it is told to."""

    figures = ("drift", "moved")

    def __init__(self, *found: Any):
        self.found = found[0] if len(found) == 1 else found

    def of_log_probs(self, log_probs: Any, reference: Any, batch: Any) -> Any:
        given = {"total": -log_probs.sum(), "detached": -log_probs.detach().sum()}
        return tuple(given.get(one, one) if isinstance(one, str) else one for one in self.found)


TWO = torch.zeros(2)


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (("total", {"drift": 1.0}), r"dict as its figures and declares 2 of them \(drift, moved\)"),
        (("total", None), "returned nothing as its figures and declares 2"),
        (("total", torch.zeros(3)), r"a tensor of the shape \[3\] as its figures"),
        ((1.0, TWO), "type float as its total"),
        ((TWO, TWO), r"a tensor of the shape \[2\] as its total"),
        (("total", None, TWO), "type tuple from of_log_probs; return two values"),
    ],
)  # fmt: skip
def test_what_a_loss_returns_is_checked(tiny_folder, tmp_path: Path, found: tuple[Any, ...], why: str) -> None:
    data = write_data(tmp_path / "data.jsonl", rows=4)
    loss = Returning(*found)
    with graftune.open(str(tiny_folder("llama-shallow")), device="cpu", quiet=True, loss=loss) as session:
        examples = session.prepare(str(data))
        with pytest.raises(GraftuneError, match=why):
            session.forward_backward(next(iter(session.batches(examples))))
        with pytest.raises(GraftuneError, match=why):
            session.evaluate(examples)


def test_a_sum_without_a_derivative_is_refused(tiny_folder, tmp_path: Path) -> None:
    data = write_data(tmp_path / "data.jsonl", rows=4)
    base = str(tiny_folder("llama-shallow"))
    with graftune.open(base, device="cpu", quiet=True, loss=Returning("detached", TWO)) as session:
        examples = session.prepare(str(data))
        with pytest.raises(GraftuneError, match="Returning has no derivative by the log-probabilities"):
            session.forward_backward(next(iter(session.batches(examples))))
        assert session.evaluate(examples).loss > 0, "an evaluation needs none"


def test_a_loss_without_a_gradient_is_refused() -> None:
    rows, loss = torch.zeros(3, 4), Returning("total", TWO)
    with pytest.raises(GraftuneError, match=r"returned nothing as its gradient; return a tensor of the shape \[3, 4\]"):
        checked(loss, Computed(torch.zeros(()), None, TWO), rows)
    assert checked(loss, Computed(torch.zeros(()), None, TWO), rows, need_grad=False).grad is None
    with pytest.raises(GraftuneError, match=r"returned an object of the type float; return Computed"):
        checked(loss, 0.5, rows)  # type: ignore[arg-type]
