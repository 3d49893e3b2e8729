"""loss.png is drawn from the log alone, whole or not at all."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from graftune.errors import GraftuneError
from graftune.observe import plot, report
from graftune.observe.events import EventLog
from graftune.observe.plot import EVERY, LivePlot, _figure, loss_plot, running_mean


def log_of(path: Path, count: int) -> Path:
    with EventLog(path) as log:
        log.emit("run_start")
        log.emit("eval", step=0, epoch=0, loss=2.4)
        for step in range(1, count + 1):
            log.emit("step", step=step, loss=float("nan") if step == 2 else 2.0 / step, lr=1e-4)
    return path


@pytest.mark.parametrize("count", [0, 1, 2, 60])
def test_draws_any_number_of_steps(tmp_path: Path, count: int) -> None:
    png = tmp_path / "loss.png"
    loss_plot(log_of(tmp_path / "m.jsonl", count), png, "a $title_^{ [x]")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["loss.png", "m.jsonl"], "nothing left beside it"


def evaluated(*at: int) -> Any:
    return _figure(
        [{"step": i, "loss": 1.2 + 1.0 / i, "lr": 1e-4} for i in range(1, 31)],
        [{"step": i, "loss": 1.3 + 1.0 / (i + 1)} for i in at],
        "t",
    )


@pytest.mark.parametrize("at", [(0,), (30,), (0, 10, 30)])
def test_evaluations_are_points_joined_by_a_dotted_line(at: tuple[int, ...]) -> None:
    lines = evaluated(*at).axes[0].lines
    points = next(line for line in lines if line.get_label() == "validation")
    assert list(points.get_xdata()) == list(at) and points.get_linestyle() == "None", "also the one before step 1"
    dotted = [list(line.get_xdata()) for line in lines if line.get_linestyle() == ":"]
    assert dotted == ([list(at)] if len(at) > 1 else [])


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


def test_a_run_that_goes_on_is_drawn_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now, drawn, busy = [0.0], [], threading.Event()
    busy.set()

    def draw() -> None:
        drawn.append(threading.current_thread().name)
        assert busy.wait(10)

    first = list[float]()
    monkeypatch.setattr(plot, "prepare", lambda: first.append(now[0]))
    picture = LivePlot(draw, clock=lambda: now[0])
    picture.update()
    assert not drawn and not first, "a short run is drawn once, at its end, without a process of its own"
    busy.clear()
    now[0] = EVERY
    picture.update()  # returns while it is being drawn
    now[0] = 2 * EVERY
    picture.update()
    busy.set()
    assert picture.finish() == ""
    assert drawn == ["graftune-plot", threading.current_thread().name] and first == [EVERY]


def test_a_plot_that_cannot_be_written_does_not_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot, "prepare", lambda: None)

    def draw() -> None:
        raise OSError(28, "No space left on device")

    picture = LivePlot(draw, clock=iter(range(0, 10**6, 1000)).__next__)
    picture.update()
    assert "No space left" in picture.finish()


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


@pytest.fixture
def helper(monkeypatch: pytest.MonkeyPatch) -> Iterator[plot.PlotProcess]:
    monkeypatch.setattr(plot, "_helper", None)
    plot.prepare()
    assert plot._helper is not None
    yield plot._helper
    process = plot._helper.process
    process.communicate()
    assert process.wait(10) == 0, "it ends when its input does"


def test_another_process_draws(tmp_path: Path, helper: plot.PlotProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    here: list[object] = []
    monkeypatch.setattr(plot, "_plot", lambda *what: here.append(what))
    first, png = helper.process.pid, tmp_path / "loss.png"
    loss_plot(log_of(tmp_path / "m.jsonl", 3), png, "a title")
    assert png.read_bytes().startswith(b"\x89PNG") and not here
    with pytest.raises(OSError, match="nowhere"):
        loss_plot(tmp_path / "m.jsonl", tmp_path / "nowhere" / "loss.png", "a title")
    plot.prepare()
    assert plot._helper is helper and helper.process.pid == first, "there is one, and it goes on"


def test_without_that_process_it_is_drawn_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = plot.PlotProcess()
    ended.process.kill()
    ended.process.wait()
    monkeypatch.setattr(plot, "_helper", ended)
    loss_plot(log_of(tmp_path / "m.jsonl", 3), tmp_path / "loss.png", "a title")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG") and not ended.alive


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
    plot._plot(log, tmp_path / "loss.png", "a title")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
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
