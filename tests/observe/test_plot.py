"""loss.png is drawn from the log alone, whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from graftune.errors import GraftuneError
from graftune.observe.events import EventLog
from graftune.observe.plot import _figure, loss_plot, running_mean


def log_of(path: Path, count: int) -> Path:
    with EventLog(path) as log:
        log.emit("run_start")
        log.emit("eval", step=0, epoch=0, loss=2.4)
        for step in range(1, count + 1):
            log.emit("step", step=step, loss=float("nan") if step == 2 else 2.0 / step, lr=1e-4)
    return path


@pytest.mark.parametrize("count", [0, 1, 2, 3, 60])
def test_draws_any_number_of_steps(tmp_path: Path, count: int) -> None:
    png = tmp_path / "loss.png"
    loss_plot(log_of(tmp_path / "m.jsonl", count), png, "a $title_^{ [x]")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["loss.png", "m.jsonl"], "nothing left beside it"


def test_first_validation_point_lies_before_step_one() -> None:
    figure = _figure([{"step": 1, "loss": 2.0, "lr": 1e-4}], [{"step": 0, "loss": 2.4}, {"step": 1, "loss": 2.0}], "t")
    line = next(line for line in figure.axes[0].lines if line.get_label() == "validation")
    assert list(line.get_xdata()) == [0, 1]


def test_an_unreadable_log_leaves_the_old_picture(tmp_path: Path) -> None:
    bad = tmp_path / "m.jsonl"
    bad.write_text("x\ny\n{}\n")
    (tmp_path / "loss.png").write_bytes(b"old")
    with pytest.raises(GraftuneError):
        loss_plot(bad, tmp_path / "loss.png", "t")
    assert (tmp_path / "loss.png").read_bytes() == b"old"


def test_running_mean_is_centred_and_keeps_the_ends() -> None:
    assert running_mean([1.0, 2.0, 3.0, 4.0, 10.0], 3) == [1.0, 2.0, 3.0, 17 / 3, 10.0]
    assert running_mean([], 3) == []
