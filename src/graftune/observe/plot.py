"""loss.png: the losses and the learning rate of a run, plotted from its metrics.jsonl.

The log is the only source, so a resumed or an old run gives the same picture. The plot uses matplotlib's object
interface on the Agg canvas: pyplot would add global state, a display and a choice of backends.

Evaluations are points joined by a dotted line, also the one before step 1: nothing was measured between two points, and
a solid line above the training curve would look like overfitting. A run that goes on is plotted now and then by a
separate process, so that training steps do not wait for it. On a GPU the process of the last plot is started early
(`prepare`): importing matplotlib takes a second, a good part of a short run.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from graftune.io.files import new_file
from graftune.observe.events import Event, evals, read_events, steps

_STEP, _MEAN, _EVAL, _LR, _INK, _GRID = "#9db8d9", "#1f4e8c", "#d1495b", "#2e8b6f", "#2b2f36", "#e4e7ec"

EVERY = 60.0  # seconds between two plots


def loss_plot(folder: Path) -> None:
    """Plot a run from its log to its loss.png, which is replaced by rename. Without steps: empty axes."""
    events = read_events(folder / "metrics.jsonl")
    figure = _figure(steps(events), evals(events), folder.resolve().name)
    with new_file(folder / "loss.png", unique=True) as aside:
        figure.savefig(aside, format="png", dpi=150)


class LivePlot:
    """Plots a run while it trains and at its end. A failure to plot does not stop the run.

    Each plot of a run that goes on has its own process: the memory of a long log would stay in this one."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock, self._last = folder, clock, clock()
        self._process: subprocess.Popen[str] | None = None

    def prepare(self) -> None:
        """Start the process of the next plot, which imports matplotlib and then waits. It ends with this process."""
        if self._process is None or self._input.closed:
            words = [sys.executable, "-m", "graftune.observe.plot", str(self._folder)]
            # Ctrl-C is meant for the run, so the process has its own session.
            self._process = subprocess.Popen(
                words, text=True, stdin=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
            )

    @property
    def _input(self) -> IO[str]:
        assert self._process is not None and self._process.stdin is not None
        return self._process.stdin

    def update(self) -> None:
        """Plot in the background, at most once a minute."""
        plotting = self._process is not None and self._input.closed and self._process.poll() is None
        if plotting or self._clock() - self._last < EVERY:
            return
        self._last = self._clock()
        self.prepare()
        with suppress(OSError):  # it has ended; the last plot says why
            self._input.write("plot\n")
            self._input.close()

    def finish(self) -> str:
        """Plot now, in this process unless there is another. Returns the reason if that failed, or an empty string."""
        if self._process is None:
            try:
                loss_plot(self._folder)
            except (OSError, ValueError) as error:  # a full disk, a log that was edited
                return str(error)
            return ""
        if self._input.closed:
            self._process.wait()
        self.prepare()
        _, why = self._process.communicate("plot\n")
        return (why.strip() or "its process was killed") if self._process.returncode else ""


def main(folder: str) -> None:
    """Runs in the plotting process."""
    import matplotlib.backends.backend_agg
    import matplotlib.figure  # noqa: F401

    if sys.stdin.readline():
        try:
            loss_plot(Path(folder))
        except (OSError, ValueError) as error:
            sys.exit(str(error))


def running_mean(values: list[float], window: int) -> list[float]:
    """Mean over a centred window that shrinks at both ends, so that the line has no lag and covers all steps."""
    half, sums, last = window // 2, [0.0, *itertools.accumulate(values)], len(values) - 1
    ends = [(max(0, i - min(half, last - i)), min(last, i + min(half, i)) + 1) for i in range(len(values))]
    return [(sums[stop] - sums[start]) / (stop - start) for start, stop in ends]


def _figure(step_events: list[Event], eval_events: list[Event], title: str) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 5.4), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    for axes in (upper, lower):
        axes.grid(True, color=_GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color("#b5bac4")
        axes.tick_params(colors=_INK, labelsize=9, length=3)
    # A dollar sign in a name does not start a formula.
    upper.set_title(title, loc="left", fontsize=12, fontweight="bold", color=_INK, parse_math=False)
    _losses(upper, step_events, eval_events)
    _learning_rate(lower, step_events)
    if upper.get_legend_handles_labels()[0]:  # below both axes, where it covers no label
        figure.legend(frameon=False, fontsize=9, labelcolor=_INK, loc="outside lower center", ncols=3)
    return figure


def _losses(axes: Any, step_events: list[Event], eval_events: list[Event]) -> None:
    # A skipped or non-finite step has no loss and is left out.
    trained = [e for e in step_events if e.get("loss") is not None]
    xs, ys = [e["step"] for e in trained], [e["loss"] for e in trained]
    if len(xs) > 1:
        window = max(3, len(xs) // 15)
        axes.plot(xs, ys, color=_STEP, linewidth=1.0, label="training, each step")
        axes.plot(xs, running_mean(ys, window), color=_MEAN, linewidth=2.0, label="training, running mean")
    elif xs:
        axes.plot(xs, ys, "o", color=_MEAN, markersize=4, label="training")
    measured = [(e["step"], e["loss"]) for e in eval_events if e.get("loss") is not None]
    if measured:
        _validation(axes, measured)
    axes.set_ylabel("loss per response token", fontsize=9.5, color=_INK)
    axes.margins(x=0.02, y=0.12)  # with a margin for the labels
    axes.set_ylim(bottom=max(0.0, axes.get_ylim()[0]))


def _validation(axes: Any, measured: list[tuple[int, float]]) -> None:
    xs, ys = zip(*measured, strict=True)
    if len(measured) > 1:
        axes.plot(xs, ys, ":", color=_EVAL, linewidth=1.6, zorder=4)
    axes.plot(
        xs, ys, "o", color=_EVAL, markersize=6.5, markeredgecolor="white", label="validation", zorder=4
    )  # fmt: skip
    best = min(range(len(ys)), key=ys.__getitem__)
    for i in sorted({0, best, len(ys) - 1}):
        right = xs[i] > 0.85 * max(xs) and i > 0  # a label to the right of the last point would be cut off
        axes.annotate(
            f"{ys[i]:.3f}", (xs[i], ys[i]), xytext=(-7 if right else 7, 7), textcoords="offset points", fontsize=9,
            color=_EVAL, fontweight="bold", path_effects=_halo(), zorder=5, ha="right" if right else "left",
        )  # fmt: skip


def _learning_rate(axes: Any, step_events: list[Event]) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

    rated = [e for e in step_events if e.get("lr") is not None]
    if rated:
        xs, ys = [e["step"] for e in rated], [e["lr"] for e in rated]
        axes.plot(xs, ys, color=_LR, linewidth=1.5, marker="o" if len(xs) == 1 else "")
        axes.fill_between(xs, ys, color=_LR, alpha=0.12, linewidth=0)
        axes.yaxis.set_major_locator(FixedLocator([0, max(ys)]))  # the peak is the number people set
    axes.set_ylim(bottom=0)
    axes.set_ylabel("learning rate", fontsize=9.5, color=_INK)
    axes.set_xlabel("step", fontsize=9.5, color=_INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.1e}" if value else "0"))


def _halo() -> list[Any]:
    from matplotlib.patheffects import withStroke

    return [withStroke(linewidth=3, foreground="white")]


if __name__ == "__main__":
    main(sys.argv[1])
