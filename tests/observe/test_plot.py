"""loss.png is drawn from the log alone, whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from graftune.observe import plot, report
from graftune.observe.events import EventLog
from graftune.observe.plot import EVERY, LivePlot, _figure, running_mean

pytestmark = pytest.mark.usefixtures("draws")
PNG = b"\x89PNG"


def log_of(run: Path, count: int) -> None:
    with EventLog(run / "metrics.jsonl") as log:
        log.emit("run_start")
        log.emit("eval", step=0, epoch=0, loss=2.4)
        for step in range(1, count + 1):
            log.emit("step", step=step, loss=float("nan") if step == 2 else 2.0 / step, lr=1e-4)


@pytest.mark.few(1)
@pytest.mark.parametrize("count", [0, 1, 2, 60])
def test_draws_any_number_of_steps(tmp_path: Path, count: int) -> None:
    run = tmp_path / "a $title_^{ [x]"
    run.mkdir()
    log_of(run, count)
    plot.loss_plot(run)
    assert (run / "loss.png").read_bytes().startswith(PNG)
    assert sorted(p.name for p in run.iterdir()) == ["loss.png", "metrics.jsonl"], "nothing left beside it"


def evaluated(*at: int) -> Any:
    return _figure(
        [{"step": i, "loss": 1.2 + 1.0 / i, "lr": 1e-4} for i in range(1, 31)],
        [{"step": i, "loss": 1.3 + 1.0 / (i + 1)} for i in at],
        "t",
    )


def test_the_axis_fits_the_data_and_labels_stay_clear_of_the_legend() -> None:
    figure = evaluated(0, 10, 30)
    axes = figure.axes[0]
    low, high = axes.get_ylim()
    assert 0.5 < low < 1.2 and high < 2.7
    figure.canvas.draw()
    assert axes.get_legend() is None and len(figure.legends) == 1
    legend = figure.legends[0].get_window_extent()
    boxes = [text.get_window_extent() for text in axes.texts]
    assert len(boxes) == 2 and not any(box.overlaps(legend) for box in boxes), "first, and last, which is the best"
    assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 for box in boxes)


@pytest.mark.thorough
def test_a_run_that_goes_on_is_plotted_by_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log_of(tmp_path, 3)
    now, png = [0.0], tmp_path / "loss.png"
    plots = LivePlot(tmp_path, clock=lambda: now[0])
    plots.update()
    assert plots._process is None, "a short run is plotted once, at its end, without a process of its own"
    monkeypatch.setattr(plot, "loss_plot", lambda folder: pytest.fail("it is plotted here"))
    now[0] = EVERY
    plots.update()
    first = plots._process
    now[0] = 2 * EVERY
    plots.update()
    assert first is not None and plots._process is first, "the next plot waits for this one"
    assert first.wait(60) == 0 and png.read_bytes().startswith(PNG)
    png.unlink()
    assert plots.finish() == "" and png.read_bytes().startswith(PNG) and plots._process is not first


def test_a_plot_that_cannot_be_made_does_not_stop_the_run(tmp_path: Path) -> None:
    """The reason is the same from this process, and from another that was started early; the old picture stays."""
    (tmp_path / "metrics.jsonl").write_text("x\ny\n{}\n")
    (tmp_path / "loss.png").write_bytes(b"old")
    early = LivePlot(tmp_path)
    early.prepare()
    for plots in (LivePlot(tmp_path), early):
        assert "is not an event" in plots.finish()
        assert (tmp_path / "loss.png").read_bytes() == b"old"
    killed = LivePlot(tmp_path)
    killed.prepare()
    assert killed._process is not None
    killed._process.kill()
    assert killed.finish() == "its process was killed"


def test_running_mean_is_centred_and_keeps_the_ends() -> None:
    assert running_mean([1.0, 2.0, 3.0, 4.0, 10.0], 3) == [1.0, 2.0, 3.0, 17 / 3, 10.0]
    assert running_mean([], 3) == []


def test_figures_of_another_kind_are_left_out(tmp_path: Path) -> None:
    """A foreign log: the picture and the report are made of what is a number."""
    log = tmp_path / "metrics.jsonl"
    odd: tuple[Any, ...] = ("x", {}, [1], True, 10**400, float("nan"), float("inf"))
    events = [{"event": "run_start", "time": odd[4], "settings": {"clip": float("nan")}}]
    for step, value in enumerate((2.5, *odd, 2.0), 1):
        events += [
            {"event": kind, "step": step, "time": value, "loss": value, "lr": value} for kind in ("step", "eval")
        ]
    log.write_text("".join(json.dumps(event) + "\n" for event in events))
    (tmp_path / "plan.json").write_text('{"bytes": NaN}')
    plot.loss_plot(tmp_path)
    assert (tmp_path / "loss.png").read_bytes().startswith(PNG)
    report.write_report(tmp_path)
    curves = report.document(tmp_path)["curves"]
    assert [value for value in curves["values"]["loss"] if value is not None] == [2.5, 2.0]


def test_the_name_of_a_run_is_text_in_its_report(tmp_path: Path) -> None:
    folder = tmp_path / "r\x1b[2J\u202e<b>"
    folder.mkdir()
    (folder / "metrics.jsonl").touch()
    report.write_report(folder)
    made = (folder / "report.html").read_text()
    assert "\x1b" not in made and "\u202e" not in made and "<b>" not in made.split("<style>")[0]
