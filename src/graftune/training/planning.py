"""The memory plan of training: one function makes the job of a run, of `graftune plan` and of a session of the Python
API, so that all of them resolve `auto` alike and find each other's rehearsals.

On several ranks rank 0 rehearses first (reserve.py); the others find its rehearsals in the user's cache.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from graftune.batch import BatchLayout, Example
from graftune.data.dataset import Dataset
from graftune.data.encoded import distinct_tokens
from graftune.data.pack import largest
from graftune.data.summary import counted
from graftune.kernels.rehearsal import Launched
from graftune.kernels.warm import Warming
from graftune.losses import Loss, choose
from graftune.observe.memory import human_bytes
from graftune.plan import Card, Job, any_data, resolve_auto
from graftune.runtime import Runtime
from graftune.session import Parts, loader_of
from graftune.settings.config import Config
from graftune.weights.base import Base, open_base

PLANNED_ON = ("cuda", "cpu")  # kinds of devices


def training_job(
    config: Config,
    base: Base,
    runtime: Runtime,
    card: Card | None,
    memory: int,
    longest: int,
    training: Sequence[Example] | None,
    *,
    loss: Loss | None = None,
    layout: BatchLayout | None = None,
    validation: Sequence[Example] = (),
    ranks: int = 0,
    **more: Any,
) -> Job:
    """Training as something to plan: in the shapes of its data, or (None) in the largest that the settings allow.
    `longest`: tokens that a micro-batch has to hold at least. `more` are fields of the job."""
    loss = loss or choose(config.train)
    layout = layout or loss.layout(() if training is None else training)
    shapes, tokens = any_data(longest), 0
    if training is not None:
        epochs, tokens = math.ceil(config.train.epochs), distinct_tokens(training, validation)
        shapes = functools.cache(lambda size: loader_of(config, training, size, layout=layout).capacities(epochs))
    job = Job(config, base, runtime, longest, shapes, card, memory, tokens=tokens, ranks=ranks, **more)
    job.loss, job.layout = loss, layout
    # A rehearsal takes seconds. A run of one process on a CPU takes far longer than that, so its cache is not filled.
    job.keeps = runtime.device.type == "cuda" or ranks > 1
    return job


def plan_session(session: Parts, data: Dataset | None, layout: BatchLayout, *, card: Card | None, free: int) -> None:
    """Resolve recompute and the size of a micro-batch of an open session, for this data or (None) for any. `card` and
    `free`: the device before the base was loaded, since a plan counts the base too."""
    config, device = session.config, session.runtime.device
    if device.type not in PLANNED_ON:
        return
    base = open_base(config.base.base, config.base.revision, weights=config.train.method != "scratch")
    training = None if data is None else data.examples
    longest = config.data.max_seq_len if training is None else largest(training, layout)
    job = training_job(config, base, session.runtime, card, free, longest, training, loss=session.loss, layout=layout)
    job.loaded(session.placement.fixed)
    with compiled_ahead(device, session.say) as job.launched:
        plan = resolve_auto(job)
    asked = config.train.tokens_per_micro_batch  # a longer example has a micro-batch of its own
    session.config = config.replace(recompute=plan.recompute, tokens_per_micro_batch=asked or plan.capacity)
    session.say(
        f"planned: recompute {plan.recompute}, micro-batches of {asked or plan.capacity} tokens; "
        f"training needs {human_bytes(plan.needed)} of {human_bytes(plan.free)}"
    )
    for note in plan.notes:
        session.say(note)


@contextmanager
def compiled_ahead(device: torch.device, tell: Callable[[str], None]) -> Iterator[Launched | None]:
    """Yields a callback that compiles each planned kernel. At the end all of them are compiled."""
    if device.type != "cuda":
        yield None
        return
    with Warming(device) as launched:
        yield launched
    if failures := launched.failures:
        tell(f"{counted(len(failures), 'kernel')} could not be compiled ahead, the first by {failures[0]}")
