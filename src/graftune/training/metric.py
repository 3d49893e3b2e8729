"""Metrics: answers to held-out records are compared with their references, by `exact`, by the bundled sample's scorer,
or by a function of the user's own.

The user's function runs in a process of its own (user_function.py) with a time limit per call. A call that raises,
hangs, ends its process or returns something else than finite numbers is counted; the run goes on, and the means are
over the calls that worked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from graftune.data.dataset import Dataset
from graftune.data.format import stop_ids
from graftune.data.row import Refusal
from graftune.data.sample import score_sample
from graftune.data.source import rows, sources
from graftune.data.summary import counted
from graftune.data.template import usable_format
from graftune.errors import GraftuneError, one_line
from graftune.infer.sample import Sampling
from graftune.losses import choose
from graftune.session import SessionParts, text
from graftune.settings.config import Config
from graftune.settings.sources import DataValue
from graftune.tokenizer import Tokenizer
from graftune.training.user_function import Between, CallFailed, FunctionName, UserFunction

USUAL_RECORDS = 24  # records that a run's metric uses, unless `metric_records` is set


def _exact(answer: str, reference: str) -> dict[str, float]:
    return {"exact": float(answer.strip() == reference.strip())}


BUILT_IN: dict[str, Callable[[str, str], dict[str, float]]] = {"exact": _exact, "sample": score_sample}


@dataclass(frozen=True)
class Question:
    """The prompt of a held-out record."""

    prompt: str  # the text that the model continues
    tokens: list[int]
    reference: str
    row: int  # its key in the data
    asked: str = ""  # what is shown of the prompt: its last turn, or all of a plain text
    record: dict[str, Any] = field(default_factory=dict)  # its columns


class Questions:
    """Held-out prompts that are answered greedily."""

    def __init__(self, questions: Sequence[Question], length: int, stops: Sequence[int]):
        """`length`: tokens of the longest answer. `stops`: tokens that end one."""
        self.questions, self.length, self.stops = questions, length, tuple(stops)

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(len(question.tokens) for question in self.questions)

    def answers(
        self, parts: SessionParts, count: int | None = None, *, adapted: bool, between: Callable[[int], None]
    ) -> list[text.Sample]:
        """Answer the first `count` questions (None: all), as many at once as fit the cache. `between` is called with
        the number of answers so far."""
        how = Sampling(max_new_tokens=self.length, stop_ids=self.stops)
        prompts = [question.tokens for question in self.questions[:count]]
        return text.sampled(parts, prompts, how, adapted=adapted, on_progress=between)


def fitting_questions(chosen: Dataset, config: Config, tokenizer: Tokenizer, positions: int) -> Iterator[Question]:
    """The records with a prompt that is no longer than an example may be and leaves one of the model's `positions`."""
    most = min(config.data.longest(positions), positions - 1)
    rows = chosen.examples.column("row").tolist()
    for prompt, turns, reference, row in zip(chosen.prompts, chosen.messages, chosen.references, rows, strict=True):
        tokens = tokenizer.encode(prompt) if prompt else []
        if 0 < len(tokens) <= most:
            asked = str(turns[-1]["content"]) if turns else prompt  # the last turn before the answer, or plain text
            yield Question(prompt, tokens, reference, row, asked.strip())


@dataclass(frozen=True)
class Scores:
    """The means of a metric over the calls that worked."""

    means: dict[str, float]  # by name; the first one chooses the best checkpoint. Empty: every call failed
    records: int  # answers that were scored
    failed: int = 0
    error: str = ""  # of the first call that failed, with its row
    cut: int = 0  # answers that ended at sample_tokens

    @property
    def value(self) -> float | None:
        return next(iter(self.means.values()), None)

    @property
    def failures(self) -> str:
        """What failed, in one sentence; empty if nothing did."""
        if not self.failed:
            return ""
        rest = f"the means are over the other {self.records - self.failed}" if self.means else "there is no mean"
        return f"the metric failed for {self.failed} of {counted(self.records, 'answer')}; {rest}; first {self.error}"

    def document(self) -> dict[str, Any]:
        failed = {"metric_failed": self.failed, "metric_error": self.error} if self.failed else {}
        return {"metrics": self.means, "metric_records": self.records, **failed}


class Metric(Questions):
    """The metric of a run or of `graftune eval`, with the records that it is computed on."""

    def __init__(self, config: Config, questions: Sequence[Question], stops: Sequence[int]):
        run = config.run
        super().__init__(questions, run.sample_tokens, stops)
        self.name = run.metric
        self.keys: tuple[str, ...] = ()  # names in the first successful result; later results must have the same
        self.process: UserFunction | None = None
        if run.metric not in BUILT_IN:
            self.process = UserFunction(FunctionName.of(run.metric, "metric"), run.metric_seconds, "metric")

    def scores(self, answers: Sequence[text.Sample], between: Between = lambda: None) -> Scores:
        """Call the metric for each answer. `between` is called while it computes."""
        sums: dict[str, list[float]] = {}
        errors = list[str]()
        if self.process is not None:
            self.process.hangs = 0
        for asked, answer in zip(self.questions, answers, strict=True):
            try:
                found = self._call(asked, answer.text, between)
            except CallFailed as error:
                errors.append(f"in row {asked.row}: {one_line(str(error), longest=300)}")
                continue
            self.keys = self.keys or tuple(found)
            if set(found) != set(self.keys):
                names = f"it returned {_listed(found)}, and {_listed(self.keys)} before"
                errors.append(f"in row {asked.row}: {one_line(names, longest=300)}")
                continue
            for key in self.keys:
                sums.setdefault(key, []).append(found[key])
        means = {key: sum(values) / len(values) for key, values in sums.items()}
        cut = sum(answer.stopped == "length" for answer in answers)
        return Scores(means, len(answers), len(errors), errors[0] if errors else "", cut)

    def _call(self, asked: Question, answer: str, between: Between) -> dict[str, float]:
        if self.process is None:
            return BUILT_IN[self.name](answer, asked.reference)
        given = {"prompt": asked.prompt, "answer": answer, "reference": asked.reference, "record": asked.record}
        return dict(self.process(given, between)["numbers"])

    def close(self) -> None:
        if self.process is not None:
            self.process.close()


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "nothing"


def check_metric(config: Config) -> None:
    """Refuse a metric that cannot be imported. Called before anything is loaded."""
    if config.run.metric and config.run.metric not in BUILT_IN:
        function = FunctionName.of(config.run.metric, "metric")
        with closing(UserFunction(function, config.run.metric_seconds, "metric")) as process:
            process.check(function.name)


def check_best(config: Config) -> None:
    """Refuse a `best` that the loss does not compute, or that is set together with a metric."""
    best, loss = config.run.best, choose(config.train)
    if best != "loss" and config.run.metric:
        what = f"best is {best} and metric is {config.run.metric}, and each of them chooses the best checkpoint"
        raise GraftuneError(what, fix="leave one of them out")
    if best != "loss" and best not in loss.better:
        names = ", ".join(("loss", *loss.better))
        raise GraftuneError(f"best is {best!r} and loss is {config.train.loss}", fix=f"it must be one of: {names}")


def metric_of(
    config: Config, held_out: Dataset, data: DataValue, tokenizer: Tokenizer, positions: int, usual: int
) -> tuple[Metric | None, str]:
    """The metric that the settings name, on at most `usual` records unless they name a number (0: all); and a
    sentence about records that were left out because they have no prompt or one that is too long. `data`: where
    `held_out` is from."""
    run = config.run
    if not run.metric:
        return None, ""
    chosen = held_out.leading().at_most(run.metric_records or usual, config.train.seed)
    found = list(fitting_questions(chosen, config, tokenizer, positions))
    if not found:
        raise GraftuneError(
            "metric is set, and there is no held-out record with a prompt to answer",
            fix="set val_split or eval_data and give records with prompts, or leave metric out",
        )
    if run.metric not in BUILT_IN:
        columns = _columns(data, {asked.row for asked in found}, config)
        found = [dataclasses.replace(asked, record=columns.get(asked.row, {})) for asked in found]
    stops = stop_ids(tokenizer, usable_format(tokenizer, config.data))
    left = len(chosen) - len(found)
    note = f"the metric leaves out {counted(left, 'held-out record')} without a prompt that fits" if left else ""
    return Metric(config, found, stops), note


def _columns(data: DataValue, keys: set[int], config: Config) -> dict[int, dict[str, Any]]:
    """The columns of these rows, as the files have them: encoded data keeps only texts."""
    files = [dataclasses.replace(file, map=()) for file in sources(data)]
    found: dict[int, dict[str, Any]] = {}
    for row in rows(files, max_unpacked=config.data.max_unpacked):
        if row.key in keys and not isinstance(row.value, Refusal):
            found[row.key] = row.value
            if len(found) == len(keys):
                break
    return found
