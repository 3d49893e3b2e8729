"""Before the first step: the data, the folder and the session of a run, each mistake found as early as it can be.

Data comes first, because its mistakes are the common ones; then the folder, so that a read-only disk shows before the
model is loaded. What was made for a run that does not come to its start is taken away again.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import itertools
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from graftune.data.dataset import Dataset, prepare, split
from graftune.data.encoded import distinct_tokens
from graftune.data.pack import Capacities, largest
from graftune.data.sample import sample_path
from graftune.data.summary import Summary, counted
from graftune.errors import GraftuneError
from graftune.io.files import open_own
from graftune.io.lock import LOCK, FolderLock
from graftune.kernels.rehearsal import Launched
from graftune.kernels.warm import Warming
from graftune.losses import choose
from graftune.observe import plot
from graftune.observe.console import Console
from graftune.observe.memory import forget_earlier_runs, forget_peak, human_bytes
from graftune.plan import CardModel, Job, Plan, any_data, is_absent, runtime_for
from graftune.run_folder import adapter_folder, with_adapter
from graftune.runtime import set_up
from graftune.session import Session, check_method, check_recompute, loader_of, open_session, with_template
from graftune.session.parts import UNPLANNED
from graftune.settings.config import Config
from graftune.settings.sources import DataValue, label, slug
from graftune.step.evaluate import shape_of
from graftune.tokenizer.template import today
from graftune.training.folder import sweep, sweep_unstarted
from graftune.training.ranks import SingleProcess
from graftune.training.reserve import Reserver, left_by_others
from graftune.training.resume import stretched, with_full_paths
from graftune.training.samples import Answers
from graftune.weights.adapter import Adapter, load_adapter
from graftune.weights.base import Base, open_base, with_new_tokens


@dataclass(frozen=True)
class Prepared:
    folder: Path
    session: Session
    training: Dataset
    validation: Dataset
    examples_sha256: str
    answers: Answers
    plan: Plan | None = None  # where memory is planned: on CUDA and on CPUs
    before: Config | None = None  # of a run that is resumed: its settings so far
    ranks: SingleProcess = field(default_factory=SingleProcess)


def prepare_run(
    config: Config,
    console: Console,
    made: list[Path] | None = None,
    held: ExitStack | None = None,
    ranks: SingleProcess | None = None,
) -> Prepared:
    """Everything a new run needs. Its folder is made, noted in `made`, and locked while `held` is open; so long its
    memory is reserved."""
    ranks, held = ranks or SingleProcess(), held or ExitStack()
    date = config.data.date or ranks.from_lead(lambda: today().isoformat())
    new = [] if made is None else made
    config = config.replace(date=date)
    return _prepare(config, console, lambda config, path: _new_folder(config, path, new, held), ranks, held)


def prepare_resume(
    config: Config, console: Console, folder: Path, before: Config, held: ExitStack, ranks: SingleProcess | None = None
) -> Prepared:
    """Everything that a run in its folder needs to go on with `config`, where it had `before`."""
    return _prepare(config, console, lambda config, path: folder, ranks or SingleProcess(), held, before)


def prepare_profile(config: Config, console: Console, held: ExitStack) -> Prepared:
    """Everything that the steps of a run need, without a folder: nothing is asked, and nothing is written."""
    date = config.data.date or today().isoformat()
    quiet = config.replace(date=date, samples=0, score=False)
    return _prepare(quiet, console, lambda config, path: Path(config.run.out or "."), SingleProcess(), held)


class Opened(NamedTuple):
    base: Base
    data: Read
    path: DataValue


def _prepare(
    config: Config,
    console: Console,
    folder_for: Callable[[Config, DataValue], Path],
    ranks: SingleProcess,
    held: ExitStack,
    before: Config | None = None,
) -> Prepared:
    device = ranks.device(config.base.device)
    for note in set_up(device):  # what is not there is said before data is read
        console.note(note)
    if device.type == "cuda":
        plot.prepare()  # drawing would be a good part of a short run
    line = ranks.attach(device)
    if line:
        console.note(line)
    forget_earlier_runs()
    with console.working("opening the base"):
        config, base, adapter = ranks.in_turn(lambda: _opened(config))  # it may be downloaded
    path: DataValue = config.data.data or str(sample_path())
    with console.working("reading the data"):
        data = ranks.in_turn(lambda: _read(config, base, adapter, path, console))
        ranks.in_turn(lambda: base.sha256)  # which is kept: one rank of a machine reads the whole file for it
    ranks.same(
        {"training data": data.training.sha256, "validation data": data.validation.sha256, "base": base.sha256}
        | {"tokenizer or chat template": data.examples_sha256},
        "give every rank the same files",
    )
    if before is not None and config.train.max_steps != before.train.max_steps:
        loader = loader_of(config, data.training.examples, max(config.train.tokens_per_micro_batch, data.largest))
        config = config.replace(epochs=stretched(config.train, loader))
    with compiled_ahead(device, console.warn) as launched:
        return _placed(config, console, folder_for, before, Opened(base, data, path), launched, ranks, device, held)


@contextmanager
def compiled_ahead(device: torch.device, tell: Callable[[str], None]) -> Iterator[Launched | None]:
    """To be told, while a run is planned, of the kernels that it will launch. At the end all of them are compiled."""
    if device.type != "cuda":
        yield None
        return
    with Warming(device) as launched:
        yield launched
    if failures := launched.failures:
        tell(f"{counted(len(failures), 'kernel')} could not be compiled ahead, the first by {failures[0]}")


def _placed(
    config: Config,
    console: Console,
    folder_for: Callable[[Config, DataValue], Path],
    before: Config | None,
    opened: Opened,
    launched: Launched | None,
    ranks: SingleProcess,
    device: torch.device,
    held: ExitStack,
) -> Prepared:
    """Planned, and loaded as planned. `launched` is called for every kernel that the plan foresees."""
    (base, data, path), asked = opened, config.base.device
    config = config.replace(device=str(device))
    job: Job | None = None
    plan: Plan | None = None

    def make(config: Config, memory: int) -> Job:
        job = plan_job(config, base, data, resuming=before is not None, memory=memory, ranks=ranks.size)
        assert job is not None, "asked only for devices that are planned for"
        job.launched = launched
        return job

    if device.type in ("cuda", "cpu"):
        with console.working("planning memory"):
            reserver = Reserver(config, device, console, held, task=f"train {Path(base.name).name}", ranks=ranks)
            config, job, plan = reserver.planned(config, make)
    if plan is not None:
        if plan.transfer:
            console.note(plan.transfer)
        capacity, config = plan.capacity, config.replace(recompute=plan.recompute)
        for note in plan.notes:
            console.note(note)
    else:
        console.note(f"memory is planned on CUDA and on CPUs, not on {config.base.device}")
        capacity = config.train.tokens_per_micro_batch or min(config.train.tokens_per_step, UNPLANNED)
        config = config.replace(recompute="none" if config.train.recompute == "auto" else config.train.recompute)
    folder = Path(ranks.from_lead(lambda: str(folder_for(config, path))))
    forget_peak()
    with console.working("loading the base"):
        session = open_session(config, base=base, placement=job.placement if job else None, world=ranks.world)
    # A rank's own number is no part of what is stored: whoever resumes has other ranks.
    stored = device.type if ranks.world is not None and asked in ("auto", "cuda") else session.config.base.device
    session.config = session.config.replace(
        tokens_per_micro_batch=max(capacity, data.largest), out=str(folder), device=stored
    )
    read = data.training, data.validation, data.examples_sha256, data.answers
    return Prepared(folder, session, *read, plan, before, ranks)


def _opened(config: Config) -> tuple[Config, Base, Adapter | None]:
    """Settings with full paths and what an adapter to go on from brings, and the base, of which headers are read."""
    check_method(config)
    adapter = load_adapter(adapter_folder(Path(config.lora.adapter))) if config.lora.adapter else None
    config = with_full_paths(with_adapter(config, adapter) if adapter else config)
    base = open_base(config.base.base, config.base.revision, weights=config.train.method != "scratch")
    return config.replace(max_seq_len=config.data.longest(base.spec.max_positions)), base, adapter


class Read(NamedTuple):
    training: Dataset
    validation: Dataset
    examples_sha256: str  # of both, and of validation without its limit, which may change on a resume
    largest: int  # tokens that a micro-batch has to hold at least
    answers: Answers


def _read(config: Config, base: Base, adapter: Adapter | None, path: DataValue, console: Console) -> Read:
    new_tokens = config.lora.new_tokens
    reader = with_template(with_new_tokens(base, new_tokens) if new_tokens else base, config, adapter).tokenizer
    if reader.template is not None:
        reader.template.checked_source()  # refused now, not where the first adapter is saved with it
    console.note(f"reading {label(path)}")
    loss = choose(config.train)
    whole = prepare(path, reader, config.data, console, loss.data)
    if config.data.eval_data:
        training, validation = whole, prepare(config.data.eval_data, reader, config.data, console, loss.data)
    else:
        training, validation = split(whole, config.data.val_split, config.train.seed)
    examples_sha256 = hashlib.sha256((training.digest + validation.digest).encode()).hexdigest()
    validation = validation.at_most(config.data.eval_examples, config.train.seed)
    _report_data(console, whole, training, validation)
    longest = max(training.longest, validation.longest)
    if longest > base.spec.max_positions:
        raise GraftuneError(
            f"an example has {longest} tokens and {base.name} takes {base.spec.max_positions}",
            where=label(path),
            fix=f"set max_seq_len to {base.spec.max_positions} or less",
        )
    answers = Answers(validation, config, reader, base.spec.max_positions)
    parts = training.examples, validation.examples
    least = max(largest(part, loss.layout(part)) for part in parts)
    return Read(training, validation, examples_sha256, least, answers)


def job_of(config: Config, console: Console, memory: int = 0, model: CardModel | None = None) -> Job:
    """A run that is only planned: in the shapes of its data, or without data in the largest that settings allow."""
    if is_absent(config) and not memory and model is None:
        raise GraftuneError(
            f"device is {config.base.device} and there is no GPU here to ask for its memory",
            fix="name it, as in --gpu 4090, or say how much it has, as in --memory 24GiB",
        )
    if not memory and model is None:
        memory = left_by_others(config, console)
    config, base, adapter = _opened(config)
    if config.data.data:
        data = _read(config, base, adapter, config.data.data, console)
        job = plan_job(config, base, data, memory=memory, model=model)
    else:
        runtime, card = runtime_for(config, memory, model)
        longest = min(config.data.longest(), base.spec.max_positions)
        planned = runtime.device.type in ("cuda", "cpu")
        shapes, asked = any_data(longest), (longest,) * config.run.samples
        job = Job(config, base, runtime, longest, shapes, card, memory, asked=asked) if planned else None
    if job is None:
        raise GraftuneError(
            f"memory is planned on CUDA and on CPUs, not on {config.base.device}", fix="set device to cuda or cpu"
        )
    return job


def plan_job(
    config: Config,
    base: Base,
    data: Read,
    *,
    resuming: bool = False,
    memory: int = 0,
    model: CardModel | None = None,
    ranks: int = 0,
) -> Job | None:
    """The run as something to plan, in the shapes that its data comes to; None on devices that are not planned for."""
    runtime, card = runtime_for(config, memory, model)
    check_recompute(config.train.recompute, runtime.device)
    if runtime.device.type not in ("cuda", "cpu"):
        return None

    held_out, loss = data.validation.examples, choose(config.train)

    @functools.cache
    def shapes(capacity: int) -> Capacities:
        return loader_of(config, data.training.examples, capacity).capacities(math.ceil(config.train.epochs))

    return Job(
        config,
        base,
        runtime,
        longest=data.largest,
        shapes=shapes,
        card=card,
        memory=memory,
        evaluates=bool(held_out),
        evaluated=functools.cache(lambda capacity: shape_of(held_out, capacity, loss.layout(held_out)))
        if held_out
        else None,
        tokens=distinct_tokens(data.training.examples, held_out),
        asked=data.answers.lengths,
        resuming=resuming,
        layout=loss.layout(data.training.examples),
        keeps=runtime.device.type == "cuda",  # a run on a CPU is longer than its plan by far
        ranks=ranks,
    )


def _report_data(console: Console, whole: Dataset, training: Dataset, validation: Dataset) -> None:
    summary = whole.summary
    console.note(
        f"data: {counted(len(training), 'example')} to train on, {len(validation)} to validate, "
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
    """Nothing is left out silently: a number for every reason."""
    for reason, count in summary.refused.items():
        console.warn(f"{prefix}{counted(count, 'row')} left out: {reason}")
    for reason, count in summary.dropped.items():
        console.warn(f"{prefix}{counted(count, 'example')} left out: {reason}")
    for reason, count in summary.truncated.items():
        console.warn(f"{prefix}{counted(count, 'example')} shortened: {reason}")
    for warning in summary.warnings():
        console.warn(f"{prefix}{warning}")
    for text in summary.says():
        console.note(f"{prefix}{text}")
    for text, count in summary.notes.items():
        console.note(f"{prefix}{text} ({counted(count, 'row')})" if count else f"{prefix}{text}")


def report_start(
    console: Console, session: Session, folder: Path, steps: int, shape: Capacities | None, graph: bool
) -> None:
    """What was found and chosen, before the first step. `shape`: of every micro-batch, where it is fixed."""
    spec, arena, settings = session.base.spec, session.arena, session.config.train
    console.note(f"base: {session.base.name} ({spec.family}, {spec.parameters / 1e6:.0f}M parameters)")
    console.note(f"device: {session.runtime.describe()}")
    console.note(f"attention: {session.attention.backend} ({session.attention.why})")
    console.note(f"frozen weights: {session.placement.describe()}")
    console.note(
        f"trained: {len(arena.weights) / 1e6:.2f}M values, {human_bytes(arena.nbytes)} with gradients and moments"
    )
    ranks = f", divided among {session.share.size} ranks" if session.share.size > 1 else ""
    console.note(
        f"{counted(steps, 'step')} of up to {settings.tokens_per_step} tokens in micro-batches of "
        f"{settings.tokens_per_micro_batch}{ranks}; run folder {folder}"
    )
    if shape is not None:
        how = "replayed from CUDA graphs" if graph else "not captured (graph is off)"
        console.note(
            f"shape: {shape.capacity} tokens, {shape.max_docs} documents of up to {shape.longest}, "
            f"{shape.max_rows} response rows; steps are {how}"
        )


@contextmanager
def removed_unless_started() -> Iterator[list[Path]]:
    """What is put into the list is taken away again if the run does not come to its start."""
    made: list[Path] = []
    try:
        yield made
    except BaseException:
        remove_made(made)
        raise


def remove_made(made: list[Path]) -> None:
    for path in reversed(made):
        with suppress(OSError):  # somebody else's file in the folder, or one that was never written
            path.rmdir() if path.is_dir() else path.unlink()


def _new_folder(config: Config, data: DataValue, made: list[Path], held: ExitStack | None) -> Path:
    """Made before the model is loaded, so that a read-only disk shows at once. `made` takes down what is new."""
    folder = Path(config.run.out) if config.run.out else _unused_folder(Path("runs"), slug(data))
    if (folder / "config.yaml").exists():
        raise GraftuneError(
            "there is a run in this folder", where=str(folder), fix="resume it, or set out to another folder"
        )
    try:
        for path in (*reversed(folder.parents), folder):
            if not path.is_dir():
                path.mkdir()
                made.append(path)
        new = [name for name in (LOCK, "metrics.jsonl", "plan.json", "config.yaml") if not (folder / name).exists()]
        if held is not None:
            held.enter_context(FolderLock(folder))
        made.extend(folder / name for name in new)
        sweep(folder)  # of a run that was killed before its first step
        os.close(open_own(folder / "metrics.jsonl"))
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):  # of this process or machine: no other folder helps
            raise
        raise GraftuneError(
            f"cannot be written to ({error.strerror})", where=str(folder), fix="set out to another folder"
        ) from None
    return folder


def _unused_folder(parent: Path, name: str) -> Path:
    """Named by the data and the clock, and by a number where the clock was set back or two runs start in one second."""
    sweep_unstarted(parent)
    name = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    numbered = (parent / (name if number == 1 else f"{name}-{number}") for number in itertools.count(1))
    return next(folder for folder in numbered if not folder.exists())
