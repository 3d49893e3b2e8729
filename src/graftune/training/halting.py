"""A run that stops by itself, because its numbers went wrong: what is written, and the sentence that says why.

Skipped updates leave weights and moments untouched, so the state from before the first of them is still there: it is
written as the checkpoint of that step, and checkpoints of the steps since, which hold the same weights, are removed. A
resume then begins where all was well. Where the update before the skipped ones has made a weight that is not finite (in
fp16, one beyond 65504), nothing is written any more, and the last checkpoint from before is what a resume finds.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from graftune.data.encoded import take
from graftune.data.pack import pack, pack_nothing
from graftune.errors import GraftuneError
from graftune.io.files import remove_at_once
from graftune.model.context import dropout_seed
from graftune.settings.sources import label
from graftune.step.not_finite import first_not_finite
from graftune.step.tail import bit_sum
from graftune.weights import checkpoint

if TYPE_CHECKING:
    from graftune.training.trainer import Run

SHOWN = 8  # rows of the data that a sentence names
NOT_FINITE, WARNING = "not finite", "warning"  # in the log, as the reason why a run stopped


class Halted(Exception):
    """The run's guard has stopped it: every rank raises this at the same step."""


def look_at_weights(run: Run) -> None:
    """Where the host has waited for the device, and on all ranks at the same step."""
    run.guard.weights(run.progress.step, int(run.step.count), int(bit_sum(run.session.arena.weights)))


def look_at_end(run: Run) -> None:
    """Whether there is something to hand over: the last weights, or better ones from before. On all ranks alike."""
    if run.progress.best_step < 0 and not checkpoint.is_sound(run.session.arena):
        run.guard.ends_not_finite = True
        raise Halted


def halted(run: Run) -> GraftuneError:
    """Leaves the run so that it can be resumed; returns what to say. All ranks call it together."""
    run.step.discard()
    with run.ranks.busy("stopping"):
        if run.guard.too_many:
            found = _first_of_ranks(run, _not_finite(run))
            what, where, fix = run.ranks.from_lead(lambda: _too_many_skipped(run, found))
        elif run.guard.ends_not_finite:
            what, where, fix = run.ranks.from_lead(lambda: _ends_not_finite(run))
        else:
            what, where, fix = run.ranks.from_lead(lambda: _stopped_by_warning(run))
    return GraftuneError(what, where=where, fix=fix)


def _too_many_skipped(run: Run, found: str) -> list[str]:
    guard, place, before = run.guard, run.guard.first_skipped, _before(run)
    count, last = guard.skipped, place["step"] + guard.skipped - 1
    if checkpoint.is_sound(run.session.arena):
        checkpoint.save(run.checkpoints, run.session.arena, before, run.identity(), run.step.scaler)
    for step, path in checkpoint.steps(run.checkpoints).items():
        if step > before.step:
            remove_at_once(path)
    checkpoint.prune(run.checkpoints, run.config.train.keep_last, before.best_step)
    _end(run, NOT_FINITE)
    kept = _newest(run)
    what = f"{count} updates in a row (steps {place['step']} to {last}) were skipped because numbers were not finite: "
    none = "there is no checkpoint from before them"
    what += f"{found}; " + (none if kept is None else f"step {kept}, from before them, is saved")
    fix = "start anew with a lower lr or without these rows"
    fix += "" if kept is None else f", or go on from there with {_again(run)}"
    return [what, str(run.folder), f"{fix} (with max_skipped 0 it never stops for this)"]


def _ends_not_finite(run: Run) -> list[str]:
    _end(run, NOT_FINITE)
    kept = _newest(run)
    what = f"at the end, after step {run.progress.step}, the trained weights are not finite; "
    what += "there is no checkpoint" if kept is None else f"the last checkpoint is step {kept}"
    return [what, str(run.folder), "start anew with a lower lr"]


def _stopped_by_warning(run: Run) -> list[str]:
    run.save()
    _end(run, WARNING)
    what, kept = f"stopped at step {run.progress.step}, as stop_on_warning asks: {run.guard.warning}", _newest(run)
    saved = f"the last checkpoint is step {kept}; go on with {_again(run)}"
    return [what, str(run.folder), "start anew: there is no checkpoint" if kept is None else saved]


def _newest(run: Run) -> int | None:
    """The step of the newest checkpoint."""
    return max(checkpoint.steps(run.checkpoints), default=None)


def _again(run: Run) -> str:
    return f"graftune train --resume {shlex.quote(str(run.folder))}"


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
    world = run.ranks.world
    everyone = [found] if world is None else world.gather(found)
    for rank, one in enumerate(everyone):
        if one:
            return one if world is None else f"{one}, on rank {rank}"
    return "computed again, step by step and without a graph, everything is finite"
