"""The end of a run: the best weights are taken, the adapter is written, base and tuned model answer the same questions.

Rank 0 does all of it while the others wait. Where the base lies in parts on the ranks, no forward pass works without
all of them: then every rank does the same, and what it writes goes nowhere.
"""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graftune.errors import GraftuneError
from graftune.observe.memory import peak_resident_bytes
from graftune.spans import marked
from graftune.training.stop import may_give_up
from graftune.weights import checkpoint

if TYPE_CHECKING:
    from graftune.training.trainer import Run


def finish(run: Run, stopped: str) -> dict[str, Any]:
    """The run's summary; empty on ranks that only wait."""
    together = run.session.placement.ranks > 0
    if not run.ranks.leads and not together:
        return {}
    p, console = run.progress, run.console
    if run.ranks.leads:
        _take_best(run)
    if together:
        run.ranks.spread(run.session, p)
    if p.step and not p.updates:
        console.warn("every update was skipped, because no gradient was finite: nothing was trained")
    elif p.first_loss is not None and p.best_loss is not None and p.best_loss >= p.first_loss:
        console.warn("validation loss did not fall below where it started: training does not help on this data")
    if run.pipeline.captures > 1:
        console.warn(f"the step was captured {run.pipeline.captures} times, for batches of as many shapes")
    # The others of several ranks compute the same, and keep nothing.
    place = nullcontext(run.folder) if run.ranks.leads else tempfile.TemporaryDirectory()
    with console.working(f"writing the {run.session.product}"), place as folder:
        run.session.write(Path(folder) / run.session.product)
    summary: dict[str, Any] = {
        "trained": _trained(run),
        "best_step": p.best_step,
        "validation_loss": {"start": p.first_loss, "best": p.best_loss},
    }
    if run.answers.questions:
        summary |= _compare(run, together)
    if not run.ranks.leads:
        return {}
    summary |= run.cost() | {"peak_memory": peak_resident_bytes()}
    run.reporter.memory_in_all(p.step)
    run.log.emit("run_end", step=p.step, stopped=stopped, **summary)
    run.reporter.plot()
    return summary


def _trained(run: Run) -> str:
    """What was trained, in a few words."""
    session, lora = run.session, run.session.lora
    values = f"{len(session.arena.weights) / 1e6:.2f}M values"
    if session.config.train.method != "lora":
        start = "from scratch" if session.config.train.method == "scratch" else "every weight"
        return f"{session.base.name}, {start}, {values}"
    return f"LoRA of rank {lora.rank} on {session.base.name}, {values}"


def ask_base(run: Run) -> None:
    run.base_answers = _ask(run, "the base", len(run.answers.questions), adapted=False)
    asked = [question.asked for question in run.answers.questions]
    facts = {"questions": run.answers.digest, "prompts": asked, "shown": run.answers.shown}
    run.log.emit("sample", step=0, answers=run.base_answers, **facts)


def answer_samples(run: Run) -> None:
    """For `sample_every`: the answers at this step, to the prompts that are shown. The base is asked with the first of
    them, so that they can be compared before the run ends; and all that is scored then, since it is asked once."""
    together = run.session.placement.ranks > 0
    if not run.ranks.leads and not together:
        return
    with run.ranks.busy("answering sample prompts"):
        _ask_both(run, run.answers.shown, together)


def _take_best(run: Run) -> None:
    p = run.progress
    if p.best_step < 0 or p.best_step == p.step:
        return
    best = checkpoint.steps(run.checkpoints).get(p.best_step)
    if best is None:
        raise GraftuneError(
            f"the checkpoint of step {p.best_step}, the best one, is gone",
            where=str(run.checkpoints),
            fix="restore it, or start a new run",
        )
    checkpoint.read_weights(best, run.session.arena)
    run.console.note(f"keeping step {p.best_step}, the best on validation")


def _compare(run: Run, together: bool) -> dict[str, Any]:
    """Base and tuned answers side by side, and their scores."""
    tuned = _ask_both(run, len(run.answers.questions), together)
    if not run.base_answers:  # from scratch there is none, and where every weight trains it is gone by now
        run.console.note("there is no base to ask: the answers are the trained model's alone")
    return run.answers.show(run.console, run.base_answers, tuned)


def _ask_both(run: Run, count: int, together: bool) -> list[str]:
    """The tuned model's answers to the first `count` questions, and before them the base's to all, if nobody has asked
    it and it can be asked."""
    missing = not run.base_answers and run.config.train.method == "lora"
    if run.ranks.from_lead(lambda: missing) if together else missing:
        ask_base(run)
    tuned = _ask(run, "the tuned model", count, adapted=True)
    more = {} if run.base_answers else {"prompts": [question.asked for question in run.answers.questions]}
    run.log.emit("sample", step=run.progress.step, answers=tuned, shown=run.answers.shown, **more)
    return tuned


def _ask(run: Run, whom: str, count: int, *, adapted: bool) -> list[str]:
    """Answers to the first `count` of the run's questions, by the base or by what was trained."""
    label = f"asking {whom} about unseen prompts"
    counted = run.reporter.counted(label, count, "answers", run.between_answers)
    with marked("samples"), counted as between, may_give_up(run):
        return run.answers.ask(run.session, count, adapted=adapted, between=between)
