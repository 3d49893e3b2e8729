"""A run that stops by itself, because its numbers went wrong: what is written, and the sentence that says why.

Skipped updates leave weights and moments untouched, so the state from before the first of them is still there: it is
written as the checkpoint of that step, and checkpoints of the steps since, which hold the same weights, are removed. A
resume then begins where all was well. Where a weight itself is not finite (in fp16, beyond 65504) it is not written,
and the last checkpoint from before is what a resume finds.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from graftune.data.encoded import take
from graftune.data.pack import pack, pack_nothing
from graftune.errors import GraftuneError
from graftune.files import remove_at_once
from graftune.mixture import label
from graftune.model.context import dropout_seed
from graftune.step.not_finite import first_not_finite
from graftune.step.tail import bit_sum
from graftune.weights import checkpoint

if TYPE_CHECKING:
    from graftune.training.loop import Run

SHOWN = 8  # rows of the data that a sentence names
NOT_FINITE, WARNING = "not finite", "warning"  # in the log, as the reason why a run stopped


class Halted(Exception):
    """The run's guard has stopped it: every rank raises this at the same step."""


def look_at_weights(run: Run) -> None:
    """Where the host has waited for the device, and on all ranks at the same step."""
    run.guard.weights(run.progress.step, int(run.step.count), int(bit_sum(run.session.arena.weights)))


def halted(run: Run) -> GraftuneError:
    """Leaves the run so that it can be resumed; returns what to say. All ranks call it together."""
    run.step.discard()
    with run.crew.busy("stopping"):
        if run.guard.too_many:
            found = _first_of_ranks(run, _not_finite(run))
            what, where, mend = run.crew.from_lead(lambda: _too_many_skipped(run, found))
        else:
            what, where, mend = run.crew.from_lead(lambda: _stopped_by_warning(run))
    return GraftuneError(what, where=where, mend=mend)


def _too_many_skipped(run: Run, found: str) -> list[str]:
    guard, place, before = run.guard, run.guard.first_skipped, _before(run)
    count, last = guard.skipped, place["step"] + guard.skipped - 1
    if bool(run.session.arena.compute.isfinite().all()):
        checkpoint.save(run.checkpoints, run.session.arena, before, run.identity(), run.step.scaler)
    for step, path in checkpoint.steps(run.checkpoints).items():
        if step > before.step:
            remove_at_once(path)
    checkpoint.prune(run.checkpoints, run.config.train.keep_last, before.best_step)
    kept = max(checkpoint.steps(run.checkpoints), default=None)
    _end(run, NOT_FINITE)
    again = f"graftune train --resume {shlex.quote(str(run.folder))}"
    return [
        f"{count} updates in a row (steps {place['step']} to {last}) were skipped because numbers were not finite: "
        f"{found}; "
        + ("there is no checkpoint from before them" if kept is None else f"step {kept}, from before them, is saved"),
        str(run.folder),
        f"start anew with a lower lr or without these rows, or go on from there with {again} (with max_skipped 0 it "
        "never stops for this)",
    ]


def _stopped_by_warning(run: Run) -> list[str]:
    run.save()
    _end(run, WARNING)
    again = f"graftune train --resume {shlex.quote(str(run.folder))}"
    what = f"stopped at step {run.progress.step}, as stop_on_warning asks: {run.guard.warning}"
    return [what, str(run.folder), f"a checkpoint was saved; go on with {again}"]


def _end(run: Run, stopped: str) -> None:
    run.log.emit("run_end", step=run.progress.step, stopped=stopped, **run.cost())
    run.reporter.plot()


def _before(run: Run) -> checkpoint.Progress:
    """The place ahead of the first skipped step. What was evaluated since then were the weights of that place."""
    p, first = run.progress, run.guard.first_skipped
    step, epoch = first["step"] - 1, first["epoch"]
    return replace(
        p,
        step=step,
        epoch=epoch,
        epoch_step=step - sum(run.epoch_steps[:epoch]),
        updates=int(run.step.count),
        last_eval=min(p.last_eval, step),
        best_step=min(p.best_step, step),
    )


def _not_finite(run: Run) -> str:
    """Of this rank's micro-batches of the first skipped step, computed again: what is not finite first, and in which
    rows of the data. Empty: nothing."""
    place, said = _before(run), ""
    bins = run.loader.plan(place.epoch)[place.epoch_step]
    for number in run.loader.bins(place.epoch, place.epoch_step):
        indices = bins[number] if number < len(bins) else []
        examples = take(run.loader.examples, indices)
        layout = run.loader.layout
        batch = pack(examples, layout=layout) if indices else pack_nothing(layout)
        found = first_not_finite(run.step, batch.to(run.session.runtime.device), dropout_seed(place.step, number))
        if found is not None and not said:
            chosen = examples if found.documents is None else [examples[i] for i in found.documents if i < len(indices)]
            said = f"{found.what} is the first, {_rows(run, [example.row for example in chosen])}"
    return said


def _rows(run: Run, rows: list[int]) -> str:
    """Example rows of the data, of which a micro-batch may have many. Of several files they are counted through."""
    numbers = sorted(set(rows))
    shown = ", ".join(map(str, numbers[:SHOWN])) + (f" and {len(numbers) - SHOWN} more" if numbers[SHOWN:] else "")
    return f"in row{'s' * (len(numbers) > 1)} {shown} of {label(run.config.data.data) or 'the data'}"


def _first_of_ranks(run: Run, found: str) -> str:
    world = run.crew.world
    everyone = [found] if world is None else world.gather(found)
    for rank, one in enumerate(everyone):
        if one:
            return one if world is None else f"{one}, on rank {rank}"
    return "computed again, step by step and without a graph, everything is finite"
