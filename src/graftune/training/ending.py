"""The end of a run: the best weights are taken, the adapter or model is written, the hooks add to the summary.

Rank 0 does all of it while the others wait. Where the base is sharded over the ranks, no forward pass works without all
of them: then every rank does the same, and what the others write goes nowhere.
"""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from graftune.observe.memory import peak_resident_bytes
from graftune.session import Parts
from graftune.training.checkpoints import Checkpoints
from graftune.training.hooks import RunState


def finish(state: RunState, checkpoints: Checkpoints, stopped: str) -> dict[str, Any]:
    """The run's summary; empty on ranks that only wait."""
    parts, ranks, p, console = state.parts, state.ranks, state.progress, state.report.console
    together = parts.placement.ranks > 0
    if not ranks.leads and not together:
        return {}
    if ranks.leads:
        checkpoints.take_best(state)
    if together:
        ranks.spread(parts, p)
    if p.step and not p.updates:
        why = "every update was skipped, because no gradient was finite"
        if state.config.rl.reward:
            why = "no update was made, because no group had two different rewards, or no gradient was finite"
        console.warn(f"{why}: nothing was trained")
    elif p.first_loss is not None and p.best_loss is not None and p.best_loss >= p.first_loss and p.best_metric is None:
        console.warn("validation loss did not fall below where it started: training does not help on this data")
    if parts.pipeline.captures > 1:
        console.warn(f"the step was captured {parts.pipeline.captures} times, for batches of as many shapes")
    place = nullcontext(state.folder) if ranks.leads else tempfile.TemporaryDirectory()
    with console.working(f"writing the {parts.product}"), place as folder:
        parts.write(Path(folder) / parts.product)
    summary: dict[str, Any] = {
        "trained": _trained(parts),
        "best_step": p.best_step,
        "validation_loss": {"start": p.first_loss, "best": p.best_loss},
    }
    for hook in state.hooks:
        summary |= hook.finish(state)
    if not ranks.leads:
        return {}
    summary |= state.report.cost(parts) | {"peak_memory": peak_resident_bytes()}
    state.report.memory_in_all(p.step)
    state.report.log.emit("run_end", step=p.step, stopped=stopped, **summary)
    state.report.plot()
    return summary


def _trained(parts: Parts) -> str:
    """What was trained, in a few words."""
    values = f"{len(parts.arena.weights) / 1e6:.2f}M values"
    if parts.config.train.method != "lora":
        start = "from scratch" if parts.config.train.method == "scratch" else "every weight"
        return f"{parts.base.name}, {start}, {values}"
    return f"LoRA of rank {parts.lora.rank} on {parts.base.name}, {values}"
