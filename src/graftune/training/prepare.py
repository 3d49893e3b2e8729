"""Prepares a run before its first step: data, plan, folder and session, in an order that finds mistakes early.

Data comes first, because its mistakes are the common ones; then the folder, so that a read-only disk shows before the
model is loaded. Files made for a run that does not start are removed again.

`training_job` describes what to plan for a run, for `graftune plan` and for a session of the Python API, so that all of
them resolve `auto` alike from the same rehearsal (the step, run on meta tensors: plan/). On several ranks each one
rehearses for itself.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from graftune.batch import BatchLayout, Example
from graftune.data.dataset import Dataset, prepare, split
from graftune.data.encoded import distinct_tokens, lengths_of
from graftune.data.pack import largest
from graftune.data.sample import sample_for
from graftune.data.summary import Summary, counted
from graftune.errors import GraftuneError
from graftune.infer.cache import CacheSize, Request
from graftune.kernels.rehearsal import Launched
from graftune.kernels.warm import Warming
from graftune.losses import LOSSES, Loss, choose
from graftune.observe.console import Console
from graftune.observe.memory import forget_earlier_runs, forget_peak, human_bytes
from graftune.plan import Card, Job, Plan, any_data, is_absent, resolve_auto, round_data, runtime_for
from graftune.run_folder import adapter_folder, with_adapter
from graftune.runtime import Runtime, set_up
from graftune.session import SessionParts, check_method, check_recompute, loader_of, open_session, reader_of
from graftune.session.parts import UNPLANNED
from graftune.session.references import with_references
from graftune.settings import auto
from graftune.settings.config import Config
from graftune.settings.sources import DataValue, label
from graftune.step.evaluate import shape_of
from graftune.tokenizer.template import today
from graftune.training.metric import USUAL_RECORDS, Metric, check_best, check_metric, metric_of
from graftune.training.ranks import SingleProcess
from graftune.training.reserve import Reserver, left_by_others
from graftune.training.resume import stretched, with_full_paths
from graftune.training.run import PreparedRun
from graftune.training.samples import SampleQuestions
from graftune.weights.adapter import load_adapter
from graftune.weights.adapter_fit import Adapter
from graftune.weights.base import Base, open_base

PLANNED_ON = ("cuda", "cpu")  # kinds of devices


class RunData(NamedTuple):
    """The data of a run, encoded."""

    training: Dataset
    validation: Dataset
    examples_sha256: str  # of both, as tokens; validation without `eval_examples`, which may change on a resume
    largest: int  # the fewest tokens that a micro-batch must hold
    questions: SampleQuestions
    metric: Metric | None = None


@dataclass(frozen=True)
class Prepared(PreparedRun):
    """A run over data, ready for its first step. The trainer uses a session's parts, not the verbs of the API."""

    data: RunData


def prepare_run(
    config: Config,
    console: Console,
    held: ExitStack,
    folder_for: Callable[[Config, DataValue], Path],
    ranks: SingleProcess,
    before: Config | None = None,
) -> Prepared:
    """Prepare a run. `folder_for` makes or finds the run folder, once the data was read; memory stays reserved until
    `held` is closed. `before`: the settings of a resumed run before this resume."""
    if before is None and not config.data.date:
        config = config.replace(date=ranks.from_lead(lambda: today().isoformat()))
    if before is None and (unused := config.not_default(vars(config.rl))):
        console.warn(f"settings that only a run with rewards uses: {', '.join(unused)}")
    ranks.from_lead(lambda: check_metric(config))
    device = ranks.device(config.base.device)
    for note in set_up(device):  # a missing package is reported before data is read
        console.note(note)
    line = ranks.attach(device)
    if line:
        console.note(line)
    forget_earlier_runs()
    with console.working("opening the base"):
        config, base, adapter = ranks.in_turn(lambda: opened(config))  # it may be downloaded
    path: DataValue = config.data.data or str(sample_for(choose(config.train).data.name))
    with console.working("reading the data"):
        data = ranks.in_turn(lambda: _read(config, base, adapter, path, console))
        ranks.in_turn(lambda: base.sha256)  # one rank of a machine reads the whole file; the digest is cached
    ranks.same(
        {"training data": data.training.sha256, "validation data": data.validation.sha256, "base": base.sha256}
        | {"tokenizer or chat template": data.examples_sha256},
        "give every rank the same files",
    )
    config = with_auto(config, base, data, console)
    if before is not None and config.train.max_steps != before.train.max_steps:
        loader = loader_of(config, data.training.examples, max(config.train.tokens_per_micro_batch, data.largest))
        config = config.replace(epochs=stretched(config.train, loader))
    asked, config = config.base.device, config.replace(device=str(device))
    with compiled_ahead(device, console.warn) as launched:  # kernels compile while the base is loaded
        config, plan, job = _planned(config, base, data, console, ranks, held, before is not None, launched)
        folder = Path(ranks.from_lead(lambda: str(folder_for(config, path))))
        forget_peak()
        with console.working("loading the base"):
            parts = open_session(config, base=base, placement=job.placement if job else None, world=ranks.world).parts
            parts.keeps_to_plan = True
    # Store `cuda` instead of this rank's `cuda:N`: a resume may have other ranks.
    stored = device.type if ranks.world is not None and asked in ("auto", "cuda") else parts.config.base.device
    parts.config = parts.config.replace(out=str(folder), device=stored)
    return Prepared(folder, parts, plan, before, ranks, data)


def _planned(
    config: Config,
    base: Base,
    data: RunData,
    console: Console,
    ranks: SingleProcess,
    held: ExitStack,
    resuming: bool,
    launched: Launched | None,
) -> tuple[Config, Plan | None, Job | None]:
    """The settings with `auto` resolved, the plan and its job; reserves the planned memory. `launched` is called for
    every kernel of the rehearsed step."""
    device = torch.device(config.base.device)
    if device.type not in PLANNED_ON:
        console.note(f"memory is planned on CUDA and on CPUs, not on {device}")
        size = config.train.tokens_per_micro_batch or min(config.train.step_tokens, UNPLANNED)
        recompute = "none" if config.train.recompute == "auto" else config.train.recompute
        return config.replace(tokens_per_micro_batch=max(size, data.largest), recompute=recompute), None, None

    def make(config: Config, memory: int) -> Job:
        runtime, card = runtime_for(config, memory)
        job = run_job(config, base, runtime, card, memory, data, resuming=resuming, ranks=ranks.size)
        job.launched = launched
        return job

    with console.working("planning memory"):
        reserver = Reserver(config, device, console, held, task=f"train {Path(base.name).name}", ranks=ranks)
        config, job, plan = reserver.planned(config, make)
    if plan.transfer:
        console.note(plan.transfer)
    for note in plan.notes:
        console.note(note)
    size = max(plan.capacity, data.largest)
    return config.replace(tokens_per_micro_batch=size, recompute=plan.recompute), plan, job


def opened(config: Config) -> tuple[Config, Base, Adapter | None]:
    """Open the base, reading only headers, and the adapter to continue from, if any. The settings come back with full
    paths and with those of the adapter."""
    check_method(config)
    check_best(config)
    adapter = load_adapter(adapter_folder(Path(config.lora.adapter))) if config.lora.adapter else None
    config = with_full_paths(with_adapter(config, adapter) if adapter else config)
    base = open_base(config.base.base, config.base.revision, weights=config.train.method != "scratch")
    return config.replace(max_seq_len=config.data.longest(base.spec.max_positions)), base, adapter


def with_auto(config: Config, base: Base, data: RunData | None, console: Console) -> Config:
    """Resolve an `auto` learning rate and `auto` tokens per step for this data (None: as for plenty of data)."""
    parameters, examples = base.spec.parameters, data.training.examples if data else ()
    own = LOSSES[config.train.loss].lr
    found = auto.with_lr(config, parameters, own)
    found = auto.with_step_tokens(found, parameters, int(lengths_of(examples).sum()), len(examples))
    if line := auto.explanation(config, found, parameters, own):
        console.note(line)
    return found


def _read(config: Config, base: Base, adapter: Adapter | None, path: DataValue, console: Console) -> RunData:
    reader = reader_of(config, base, adapter)
    if reader.template is not None:
        reader.template.checked_source()  # refused now, not when the first adapter is saved with it
    if note := reader.refused_template:
        console.note(note)
    console.note(f"reading {label(path)}")
    loss = choose(config.train)
    if loss.data.members and config.not_default(["train_on"]):
        console.warn(f"train_on does not apply to {loss.data.name}: every assistant turn after the prompt is trained")

    def encoded(value: DataValue) -> Dataset:
        made = prepare(value, reader, config.data, console, loss.data)
        return replace(made, examples=with_references(made.examples, loss, config.train))

    whole = encoded(path)
    if config.data.eval_data:
        training, validation = whole, encoded(config.data.eval_data)
    else:
        training, validation = split(whole, config.data.val_split, config.train.seed)
    examples_sha256 = hashlib.sha256((training.digest + validation.digest).encode()).hexdigest()
    validation = validation.at_most(config.data.eval_examples, config.train.seed)
    _report_data(console, whole, training, validation)
    if text := loss.data.warning(training.examples):
        console.warn(text)
    longest = max(training.longest, validation.longest)
    if longest > base.spec.max_positions:
        raise GraftuneError(
            f"an example has {longest} tokens and {base.name} takes {base.spec.max_positions}",
            where=label(path),
            fix=f"set max_seq_len to {base.spec.max_positions} or less",
        )
    questions = SampleQuestions(validation, config, reader, base.spec.max_positions)
    data = config.data.eval_data or path
    metric, left = metric_of(config, validation, data, reader, base.spec.max_positions, USUAL_RECORDS)
    if left:
        console.warn(left)
    parts = training.examples, validation.examples
    least = max(largest(part, loss.layout(part)) for part in parts)
    return RunData(training, validation, examples_sha256, least, questions, metric)


def job_of(config: Config, console: Console, memory: int = 0, named: Card | None = None) -> Job:
    """The job of a run that is only planned, with the batch shapes of its data or, without data, the largest that the
    settings allow. `named`: the card of another machine to plan for."""
    config, base, adapter, runtime, card, memory = opened_to_plan(config, console, memory, named)
    if config.data.data:
        data = _read(config, base, adapter, config.data.data, console)
        config = with_auto(config, base, data, console)
        return run_job(config, base, runtime, card, memory, data)
    config = with_auto(config, base, None, console)
    longest = min(config.data.longest(), base.spec.max_positions)
    asked = (longest,) * config.run.samples
    return training_job(config, base, runtime, card, memory, longest, None, asked=asked)


def opened_to_plan(
    config: Config, console: Console, memory: int, named: Card | None
) -> tuple[Config, Base, Adapter | None, Runtime, Card | None, int]:
    """The base and the device of a run that is only planned, and the memory that it may take."""
    if is_absent(config) and not memory and named is None:
        raise GraftuneError(
            f"device is {config.base.device} and there is no GPU here to ask for its memory",
            fix="name it, as in --gpu 4090, or say how much it has, as in --memory 24GiB",
        )
    if not memory and named is None:
        memory = left_by_others(config, console)
    config, base, adapter = opened(config)
    runtime, card = runtime_for(config, memory, named)
    if runtime.device.type not in PLANNED_ON:
        raise GraftuneError(
            f"memory is planned on CUDA and on CPUs, not on {config.base.device}", fix="set device to cuda or cpu"
        )
    return config, base, adapter, runtime, card, memory


def run_job(
    config: Config,
    base: Base,
    runtime: Runtime,
    card: Card | None,
    memory: int,
    data: RunData,
    *,
    resuming: bool = False,
    ranks: int = 0,
) -> Job:
    """The job that plans a run, with the batch shapes of its data."""
    held_out, layout = data.validation.examples, choose(config.train).layout
    evaluated = functools.cache(lambda capacity: shape_of(held_out, capacity, layout(held_out)))
    return training_job(
        config,
        base,
        runtime,
        card,
        memory,
        data.largest,
        data.training.examples,
        validation=held_out,
        ranks=ranks,
        evaluates=bool(held_out),
        evaluated=evaluated if held_out else None,
        asked=(*data.questions.lengths, *(data.metric.lengths if data.metric else ())),
        resuming=resuming,
    )


def _report_data(console: Console, whole: Dataset, training: Dataset, validation: Dataset) -> None:
    summary = whole.summary
    console.note(
        f"data: {training.count} to train on, {len(validation.leading())} to validate, "
        f"{summary.tokens} tokens, {summary.supervised_share:.0%} of them trained"
    )
    if summary.template:
        console.note(f"chat template: {summary.template}")
    report_refused(console, summary)
    if summary.duplicates or validation.path != whole.path:
        both = training.shared_with(validation)
        if both:
            console.warn(f"{both} of {len(validation)} validation examples are in the training data too, word for word")
    if validation.path != whole.path:
        report_refused(console, validation.summary, "validation data: ")


def report_refused(console: Console, summary: Summary, prefix: str = "") -> None:
    """Report how many rows were left out or shortened for each reason."""
    kinds = (
        (summary.refused, "row", "left out"),
        (summary.dropped, "example", "left out"),
        (summary.truncated, "example", "shortened"),
    )
    for counts, what, done in kinds:
        for reason, count in counts.items():
            console.warn(f"{prefix}{counted(count, what)} {done}: {reason}")
    for warning in summary.warnings():
        console.warn(f"{prefix}{warning}")
    for text in summary.sentences():
        console.note(f"{prefix}{text}")
    for text, count in summary.notes.items():
        console.note(f"{prefix}{text} ({counted(count, 'row')})" if count else f"{prefix}{text}")


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
    sampled: tuple[Request, ...] = (),
    **more: Any,
) -> Job:
    """The job that plans training, with the batch shapes of its data or (None) those of a round's samples, else the
    largest that the settings allow. `longest`: the fewest tokens that a micro-batch must hold. `more`: further fields
    of the job."""
    check_recompute(config.train.recompute, runtime.device)
    loss = loss or choose(config.train)
    layout = layout or loss.layout(() if training is None else training)
    shapes, tokens = round_data(sampled, longest) if sampled else any_data(longest), 0
    if training is not None:
        epochs, tokens = math.ceil(config.train.epochs), distinct_tokens(training, validation)
        shapes = functools.cache(lambda size: loader_of(config, training, size, layout=layout).capacities(epochs))
    ahead = 0
    if layout.ahead is not None:
        ahead = 2 * longest if training is None else layout.ahead.longest(training)
    return Job(
        config,
        base,
        runtime,
        longest,
        shapes,
        card,
        memory,
        sampled=sampled,
        tokens=tokens,
        loss=loss,
        layout=layout,
        longest_ahead=ahead,
        ranks=ranks,
        training=training,
        validation=validation,
        **more,
    )


def plan_session(
    parts: SessionParts,
    data: Dataset | None,
    layout: BatchLayout,
    *,
    card: Card | None,
    free: int,
    process: int = 0,
    sampled: tuple[Request, ...] = (),
) -> Plan | None:
    """Resolve recompute and the size of a micro-batch of an open session, for this data or (None) for any. `card`,
    `free` and `process`: the device and the process before the base was loaded, since a plan counts the base too.
    `sampled`: the longest samples of a round, if the session samples beside training; then it also resolves how many
    of them are drawn at once."""
    config, device = parts.config, parts.runtime.device
    if device.type not in PLANNED_ON:
        return None
    cached = parts.cache_held  # the cache of samples that were drawn before the first step
    card, free = card and replace(card, free=card.free - cached), free - cached
    base = open_base(config.base.base, config.base.revision, weights=config.train.method != "scratch")
    training = None if data is None else data.examples
    longest = config.data.max_seq_len if training is None else largest(training, layout)
    planned = auto.with_step_tokens(config, base.spec.parameters)
    job = training_job(
        planned, base, parts.runtime, card, free, longest, training, loss=parts.loss, layout=layout, sampled=sampled
    )
    job.evaluates, job.process = not sampled, process  # with samples, evaluations sample too
    job.placement = placed = parts.placement.fixed  # the frozen weights are already there
    job.places = [(placed.on_host, placed.ranks)]
    with compiled_ahead(device, parts.say) as job.launched:
        plan = resolve_auto(job)
    asked = config.train.tokens_per_micro_batch  # a longer example has a micro-batch of its own
    parts.config = config.replace(recompute=plan.recompute, tokens_per_micro_batch=asked or plan.capacity)
    what = "training needs"
    if cache := job.cache:
        parts.planned_cache, parts.config = cache, parts.config.replace(samples_at_once=job.at_once)
        held = human_bytes(cache.bytes(CacheSize.of(base.spec, parts.runtime.compute)))
        what = f"a cache of {held} for {counted(job.at_once, 'sample')} at once; sampling and training need"
    parts.say(
        f"planned: recompute {plan.recompute}, micro-batches of {asked or plan.capacity} tokens; "
        f"{what} {human_bytes(plan.needed)} of {human_bytes(plan.free)}"
    )
    for note in plan.notes:
        parts.say(note)
    return plan


@contextmanager
def compiled_ahead(device: torch.device, tell: Callable[[str], None]) -> Iterator[Launched | None]:
    """Yields a callback that compiles each planned kernel. On exit, waits until all of them are compiled."""
    if device.type != "cuda":
        yield None
        return
    with Warming(device) as launched:
        yield launched
    if failures := launched.failures:
        tell(f"{counted(len(failures), 'kernel')} could not be compiled ahead, the first by {failures[0]}")
