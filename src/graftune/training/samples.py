"""Answers to a few validation prompts, before and after training, so that a person sees what changed; and their score
where the data set brings a scorer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from graftune.data.dataset import Dataset
from graftune.data.sample import ScoreReport, is_sample_hash, score_all
from graftune.data.template import stop_ids, usable_format
from graftune.infer.sample import Sampling
from graftune.observe.console import AnswerRow, Console
from graftune.session import Session
from graftune.settings.config import Config, RunConfig
from graftune.tokenizer import Tokenizer

SCORED = 24  # records, unless the settings say how many


def scored_records(config: RunConfig) -> int:
    """Without a number, the usual one; but whoever wants no samples is not asked for scores behind their back."""
    usual = SCORED if config.samples else 0
    return (config.score_records or usual) if config.score else 0


@dataclass(frozen=True)
class Question:
    prompt: list[int]  # rendered, ready to continue
    asked: str  # what a person would recognise of it
    reference: str


class Answers:
    """The questions of a run, the same before and after, and what was answered to them."""

    def __init__(self, validation: Dataset, whole: Config, tokenizer: Tokenizer, positions: int):
        """The first records of the validation set: it is a seeded random subset of the data already. A prompt that is
        longer than an example may be, or than the model's `positions`, is left out."""
        config = whole.run
        self.stops = stop_ids(tokenizer, usable_format(tokenizer, whole.data))
        self.scored = bool(scored_records(config) and len(validation) and is_sample_hash(validation.sha256))
        count = max(config.samples, scored_records(config) if self.scored else 0)
        most = min(whole.data.longest(positions), positions - 1)
        records = zip(validation.prompts, validation.messages, validation.references, strict=True)
        asked = (Question(tokenizer.encode(p), _asked(turns, p), reference) for p, turns, reference in records if p)
        self.questions = list(islice((q for q in asked if len(q.prompt) <= most), count))
        self.shown = min(config.samples, len(self.questions))
        self.length = config.sample_tokens

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of the prompts, in tokens."""
        return tuple(len(q.prompt) for q in self.questions)

    @property
    def digest(self) -> str:
        """Of the prompts and of how long an answer may be: what was answered to others is no answer to these."""
        return hashlib.sha256(json.dumps([self.length, *(q.prompt for q in self.questions)]).encode()).hexdigest()

    def ask(self, session: Session, count: int, *, adapted: bool, between: Callable[[int], None]) -> list[str]:
        """The first `count` questions, greedily, as many at once as fit the cache. `between` gets the count of those
        answered."""
        prompts, how = [question.prompt for question in self.questions[:count]], Sampling(max_new_tokens=self.length)
        answers = session.continued(prompts, how, self.stops, adapted=adapted, on_progress=between)
        return [session.tokenizer.decode(answer, skip_special=True) for answer in answers]

    def known(self, event: Mapping[str, Any]) -> list[str]:
        """The answers in a log's event to just these questions; none if it holds others."""
        found, asked = event.get("answers"), event.get("questions")
        if asked != self.digest or not isinstance(found, list) or len(found) != len(self.questions):
            return []
        return found if all(isinstance(answer, str) for answer in found) else []

    def show(self, console: Console, before: Sequence[str], after: Sequence[str]) -> dict[str, Any]:
        """Base and tuned answers side by side, and their scores; the scores are returned. `before` may be empty."""
        bases: Sequence[str | None] = before or [None] * len(after)
        triples = zip(self.questions, bases, after, strict=True)
        rows = [AnswerRow(q.asked, base, tuned, q.reference) for q, base, tuned in triples]
        console.side_by_side("answers to unseen prompts", rows[: self.shown])
        if not self.scored:
            return {}
        references = [q.reference for q in self.questions]
        asked = {"base": before, "tuned": after} if before else {"tuned": after}
        scores = {name: score_all(zip(references, answers, strict=True)) for name, answers in asked.items()}
        shares = ", ".join(f"{name} {score.share:.0%}" for name, score in scores.items())
        console.line(f"score on {len(references)} unseen records: {shares} exactly right")
        return {"score": {name: _figures(score) for name, score in scores.items()}}


def _figures(report: ScoreReport) -> dict[str, Any]:
    return {"exact": report.share, "valid_json": report.valid_json, "total": report.total, "fields": report.fields}


def _asked(messages: list[dict[str, Any]], prompt: str) -> str:
    """What a person would recognise of a prompt: the last turn before the answer; plain text is its own."""
    return str(messages[-1]["content"]).strip() if messages else prompt.strip()
