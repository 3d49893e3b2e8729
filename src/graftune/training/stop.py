"""A run that is told to stop: the last whole step is saved first, everything else comes after it.

What may be given up halfway are micro-batches, evaluations and answers, since none of them changes a weight: what a
resume does again is the same. An update, a checkpoint and the adapter are always finished.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from graftune.training.signals import HANGUP, Stopping

if TYPE_CHECKING:
    from graftune.training.trainer import Run


class Interrupted(Exception):
    """A signal was seen between two micro-batches, or too long ago."""


def stopping(run: Run) -> Stopping:
    """What signals do while the run trains. On a GPU the host only sends work, and what it sends takes no time to speak
    of; where several ranks train, a step that others have begun is not left."""

    def noted(number: int) -> None:
        run.signal = number  # said between micro-batches: a handler must not write to a stream that is being written to

    alone = run.ranks.world is None
    return Stopping(
        noted,
        within=run.config.run.stop_within if alone and run.session.runtime.device.type == "cpu" else 0.0,
        overdue=lambda: _overdue(run),
        lost=lambda: lost(run),
        continued=lambda seconds: run.reporter.meter.leave_out(seconds),
        once=not alone,
    )


@contextmanager
def may_give_up(run: Run) -> Iterator[None]:
    """Work that a signal may end anywhere within."""
    run.may_give_up = True
    try:
        yield
    finally:
        run.may_give_up = False


def _overdue(run: Run) -> None:
    if run.pipeline.in_micro or run.may_give_up:
        run.pipeline.in_micro = run.may_give_up = False
        raise Interrupted


def stop(run: Run) -> None:
    """Save, then say so. A terminal that has gone fails whatever writes to it."""
    if run.signal == HANGUP:
        run.console = run.reporter.silenced()
    run.step.discard()
    run.finish_steps()
    if not run.closing:  # by then the arena may hold the best step's weights
        run.save()
    run.log.emit("run_end", step=run.progress.step, stopped="interrupted", signal=int(run.signal), **run.cost())
    if run.ranks.leads:
        run.reporter.plot()


def lost(run: Run) -> str:
    """What the run loses if it ends now, and how to go on."""
    again = f"go on with: graftune train --resume {shlex.quote(str(run.folder))}"
    if run.saved < 0:
        return f"no checkpoint has been written, so the run begins anew; {again}"
    count = run.progress.step - run.saved
    what = "nothing is lost" if count <= 0 else "1 step is lost" if count == 1 else f"{count} steps are lost"
    return f"the last checkpoint is that of step {run.saved}, {what}; {again}"
