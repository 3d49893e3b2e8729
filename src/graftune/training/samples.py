"""Answers to a few validation prompts, by the base and by the model that trains, so that a person sees what changed;
and their score where the data set has a scorer.

Rank 0 asks while the others wait. Where the base is sharded over the ranks, no forward pass works without all of them:
then every rank does the same, and only rank 0 logs the answers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from graftune.data.dataset import Dataset
from graftune.data.format import stop_ids
from graftune.data.sample import is_sample_hash, score_all
from graftune.data.template import usable_format
from graftune.observe.console import AnswerRow, Console
from graftune.observe.events import Event
from graftune.settings.config import Config
from graftune.settings.sections import RunConfig
from graftune.tokenizer import Tokenizer
from graftune.training.hooks import Hook, RunState
from graftune.training.metric import Questions, fitting_questions

SCORED = 24  # records, unless the settings name a number


def scored_records(config: RunConfig) -> int:
    """How many records are scored. Without a number it is the usual one, but none if no samples are wanted."""
    usual = SCORED if config.samples else 0
    return (config.score_records or usual) if config.score else 0


class SampleQuestions(Questions):
    """The questions of a run, the same before and after training."""

    def __init__(self, validation: Dataset, whole: Config, tokenizer: Tokenizer, positions: int):
        """The first records of the validation set, which is a seeded random subset of the data already."""
        config, validation = whole.run, validation.leading()
        self.scored = bool(scored_records(config) and len(validation) and is_sample_hash(validation.sha256))
        count = max(config.samples, scored_records(config) if self.scored else 0)
        found = list(islice(fitting_questions(validation, whole, tokenizer, positions), count))
        super().__init__(found, config.sample_tokens, stop_ids(tokenizer, usable_format(tokenizer, whole.data)))
        self.shown = min(config.samples, len(found))

    @property
    def texts(self) -> dict[str, list[str]]:
        """The prompts and references that the log keeps."""
        return {"prompts": [q.asked for q in self.questions], "references": [q.reference for q in self.questions]}

    @property
    def digest(self) -> str:
        """Identifies the prompts and the longest answer: stored answers are used for exactly these."""
        return hashlib.sha256(json.dumps([self.length, *(q.tokens for q in self.questions)]).encode()).hexdigest()

    def known(self, event: Mapping[str, Any]) -> list[str]:
        """The answers to exactly these questions in an event of the log; none if it holds others."""
        answers = event.get("answers") if event.get("questions") == self.digest else None
        return answers if isinstance(answers, list) and len(answers) == len(self.questions) else []

    def show(self, console: Console, before: Sequence[str], after: Sequence[str]) -> dict[str, Any]:
        """Print base and tuned answers side by side, and return their scores. `before` may be empty."""
        bases: Sequence[str | None] = before or [None] * len(after)
        triples = zip(self.questions, bases, after, strict=True)
        rows = [AnswerRow(q.asked, base, tuned, q.reference) for q, base, tuned in triples]
        console.side_by_side("answers to unseen prompts", rows[: self.shown])
        if not self.scored:
            return {}
        references = [q.reference for q in self.questions]
        asked = {"base": before, "tuned": after} if before else {"tuned": after}
        scores = {name: score_all(zip(references, answers, strict=True)) for name, answers in asked.items()}
        shares = ", ".join(f"{name} {score['exact']:.0%}" for name, score in scores.items())
        console.line(f"score on {len(references)} unseen records: {shares} exactly right")
        return {"score": scores}


class Samples(Hook):
    """Asks the questions at the end of a run, and every `sample_every` steps. The base is asked once: with the first
    samples, where the adapters can be switched off; before the first step, where training overwrites it."""

    def __init__(self, questions: SampleQuestions):
        self.questions = questions
        self.base_answers: list[str] = []
        self.asked_at = 0  # the step of the last samples

    def resumed(self, state: RunState, events: Sequence[Event]) -> None:
        for event in events:
            if event["event"] == "sample" and event.get("step") == 0:
                self.base_answers = self.questions.known(event)

    def start(self, state: RunState) -> None:
        self.asked_at = state.progress.step
        full = state.config.train.method == "full" and state.ranks.leads
        if full and not self.base_answers and not state.progress.step:
            with state.ranks.busy("asking the base"):
                self._ask_base(state)
                state.parts.free_cache()

    def due(self, state: RunState) -> bool:
        every, step = state.config.run.sample_every, state.progress.step
        return bool(every and self.questions.shown) and self.asked_at < step < state.total and step % every == 0

    def run(self, state: RunState) -> None:
        self.asked_at = state.progress.step
        if state.ranks.leads or state.together:
            with state.ranks.busy("answering sample prompts"):
                self._ask_both(state, self.questions.shown)

    def finish(self, state: RunState) -> dict[str, Any]:
        console, tuned = state.report.console, self._ask_both(state, len(self.questions.questions))
        if not self.base_answers:  # there is none where all weights began at random, or were trained before this resume
            console.note("there is no base to ask: the answers are the trained model's alone")
        return self.questions.show(console, self.base_answers, tuned)

    def _ask_both(self, state: RunState, count: int) -> list[str]:
        """The tuned model's answers to the first `count` questions. Before them the base answers all questions, if it
        has not yet and still can."""
        missing = not self.base_answers and state.config.train.method == "lora"
        if state.ranks.from_lead(lambda: missing) if state.together else missing:
            self._ask_base(state)
        tuned = self._ask(state, "the tuned model", count, adapted=True)
        more = {} if self.base_answers else self.questions.texts
        log = state.report.log
        log.emit("sample", step=state.progress.step, answers=tuned, shown=self.questions.shown, **more)
        state.parts.free_cache()
        return tuned

    def _ask_base(self, state: RunState) -> None:
        questions = self.questions
        self.base_answers = self._ask(state, "the base", len(questions.questions), adapted=False)
        facts = {"questions": questions.digest, "shown": questions.shown, **questions.texts}
        state.report.log.emit("sample", step=0, answers=self.base_answers, **facts)

    def _ask(self, state: RunState, whom: str, count: int, *, adapted: bool) -> list[str]:
        label = f"asking {whom} about unseen prompts"
        check = state.check_stop_alone if state.together else state.check_stop
        with state.counting("samples", label, count, "answers", check) as between:
            answers = self.questions.answers(state.parts, count, adapted=adapted, between=between)
        return [answer.text for answer in answers]
