"""loss.png: what a run's losses and learning rate did, drawn from its metrics.jsonl.

Drawn from the file and not from memory, so that a resumed run, or a run made last week, gives the same picture.
matplotlib's object interface on the Agg canvas: no pyplot, hence no global state, no display and no backend to choose.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from graftune.files import new_file
from graftune.observe.events import Event, evals, read_events, steps

_STEP, _MEAN, _EVAL, _LR, _INK, _GRID = "#9db8d9", "#1f4e8c", "#d1495b", "#2e8b6f", "#2b2f36", "#e4e7ec"


def loss_plot(events_path: Path, png: Path, title: str) -> None:
    """Draw the run logged in `events_path` to `png`, written aside and renamed. Without steps: empty axes."""
    events = read_events(events_path)
    figure = _figure(steps(events), evals(events), title)
    with new_file(png, unique=True) as aside:
        figure.savefig(aside, format="png", dpi=150)


def running_mean(values: list[float], window: int) -> list[float]:
    """Mean over a centred window that shrinks at both ends, so that the line neither lags nor begins late."""
    half = window // 2
    return [
        math.fsum(part) / len(part)
        for i in range(len(values))
        for part in [values[max(0, i - min(half, len(values) - 1 - i)) : i + min(half, i) + 1]]
    ]


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
    # Names of files and models are shown as they are: a dollar sign is not the start of a formula.
    upper.set_title(title, loc="left", fontsize=12, fontweight="bold", color=_INK, parse_math=False)
    _losses(upper, step_events, eval_events)
    _learning_rate(lower, step_events)
    return figure


def _losses(axes: Any, step_events: list[Event], eval_events: list[Event]) -> None:
    # A skipped or non-finite step has no loss to draw; it is left out, not drawn as a zero.
    trained = [e for e in step_events if e.get("loss") is not None]
    xs, ys = [e["step"] for e in trained], [e["loss"] for e in trained]
    if len(xs) > 1:
        window = max(3, len(xs) // 15)
        axes.plot(xs, ys, color=_STEP, linewidth=1.0, label="training, each step")
        axes.plot(xs, running_mean(ys, window), color=_MEAN, linewidth=2.0, label="training, running mean")
    elif xs:
        axes.plot(xs, ys, "o", color=_MEAN, markersize=4, label="training")
    measured = [e for e in eval_events if e.get("loss") is not None]
    if measured:
        vx, vy = [e["step"] for e in measured], [e["loss"] for e in measured]
        axes.plot(
            vx, vy, "o:", color=_EVAL, linewidth=1.6, markersize=5.5, markeredgecolor="white", label="validation",
            zorder=4,
        )  # fmt: skip
        best = min(range(len(vy)), key=vy.__getitem__)
        for i in sorted({0, best}):
            axes.annotate(
                f"{vy[i]:.3f}", (vx[i], vy[i]), xytext=(7, 7), textcoords="offset points", fontsize=9, color=_EVAL,
                fontweight="bold", path_effects=_halo(), zorder=5,
            )  # fmt: skip
    axes.set_ylabel("loss per response token", fontsize=9.5, color=_INK)
    axes.set_ylim(bottom=0)
    axes.margins(x=0.02)
    if xs or measured:
        axes.legend(frameon=False, fontsize=9, labelcolor=_INK, loc="upper right")


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
