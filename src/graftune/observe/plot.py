"""loss.png: the losses and the learning rate of a run, plotted from its metrics.jsonl.

The log is the only source, so a resumed or an old run gives the same picture. The plot uses matplotlib's object
interface on the Agg canvas: pyplot would add global state, a display and a choice of backends.

Evaluations are points joined by a dotted line, also the one before step 1: nothing was measured between two points, and
a solid line above the training curve would look like overfitting. A separate process imports matplotlib (`prepare`),
which takes a second, and plots, so that neither training steps nor the end of a short run wait for it; a run that goes
on is plotted now and then.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, cast

from graftune.io.files import new_file
from graftune.observe.events import Event, evals, read_events, steps

_STEP, _MEAN, _EVAL, _LR, _INK, _GRID = "#9db8d9", "#1f4e8c", "#d1495b", "#2e8b6f", "#2b2f36", "#e4e7ec"

EVERY = 60.0  # seconds between two plots


def loss_plot(events_path: Path, png: Path, title: str) -> None:
    """Plot the run logged in `events_path` to `png`, which is replaced by rename. Without steps: empty axes."""
    if _helper is None or not _helper.plot(events_path, png, title):
        _plot(events_path, png, title)


def _plot(events_path: Path, png: Path, title: str) -> None:
    events = read_events(events_path, ("event", "step", "loss", "lr"))
    figure = _figure(steps(events), evals(events), title)
    with new_file(png, unique=True) as aside:
        figure.savefig(aside, format="png", dpi=150)


def prepare() -> None:
    """Start the plotting process, unless it runs already."""
    global _helper
    if _helper is None or not _helper.alive:
        _helper = PlotProcess()


class PlotProcess:
    """A process that plots: one line of JSON in, one line out. It ends with this process, which closes its input. It
    has its own session, because Ctrl-C is meant for the run."""

    def __init__(self) -> None:
        words = [sys.executable, "-m", "graftune.observe.plot"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(words, text=True, start_new_session=True, **pipes)  # type: ignore[call-overload]

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def plot(self, events_path: Path, png: Path, title: str) -> bool:
        """False if the process is gone. Raises OSError if it could not plot."""
        request = json.dumps([str(events_path.resolve()), str(png.resolve()), title])
        try:
            to, back = cast(IO[str], self.process.stdin), cast(IO[str], self.process.stdout)
            to.write(request + "\n")
            to.flush()
            answer = back.readline()
        except OSError:
            return False
        if why := json.loads(answer) if answer else "":
            raise OSError(why)
        return bool(answer)


_helper: PlotProcess | None = None


def serve(requests: IO[str], answers: IO[str]) -> None:
    """Runs in the plotting process."""
    import matplotlib.backends.backend_agg
    import matplotlib.figure  # noqa: F401

    for line in requests:
        events_path, png, title = json.loads(line)
        why = ""
        try:
            _plot(Path(events_path), Path(png), title)
        except (OSError, ValueError) as error:
            why = str(error) or type(error).__name__
        answers.write(json.dumps(why) + "\n")
        answers.flush()


class LivePlot:
    """The plot of a run that is still training. `plot` writes it; a failure to write it does not stop the run."""

    def __init__(self, plot: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._plot, self._clock = plot, clock
        self._last, self._took = clock(), 0.0
        self._thread: threading.Thread | None = None

    def update(self) -> None:
        """Plot in the background, at most once a minute; long logs, which take longer to read, less often."""
        if self._clock() - self._last < max(EVERY, 100 * self._took) or (self._thread and self._thread.is_alive()):
            return
        self._last = self._clock()
        prepare()  # the memory of a long log, and the fonts opened by each thread, would stay in this process
        self._thread = threading.Thread(target=self._try, name="graftune-plot", daemon=True)
        self._thread.start()

    def finish(self) -> str:
        """Plot now. Returns the reason if that failed, otherwise an empty string."""
        if self._thread is not None:
            self._thread.join()
        return self._try()

    def _try(self) -> str:
        began = self._clock()
        try:
            self._plot()
        except (OSError, ValueError) as error:  # a full disk, a log that was edited
            return str(error)
        finally:
            self._took = self._clock() - began
        return ""


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
    serve(sys.stdin, sys.stdout)
