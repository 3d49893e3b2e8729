"""Answers to a few validation prompts, before and after training, so that a person sees what changed; and their score
where the data set brings a scorer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from graftune.config import Config
from graftune.data.dataset import Dataset
from graftune.data.sample import ScoreReport, is_sample_hash, score_all
from graftune.data.template import chat_format, stop_ids
from graftune.infer.generate import generate
from graftune.infer.sample import Sampling
from graftune.observe.console import Answer, Console
from graftune.tokenizer import Tokenizer
from graftune.train.engine import Engine


@dataclass(frozen=True)
class Question:
    prompt: str  # rendered, ready to continue
    asked: str  # what a person would recognise of it
    reference: str


class Answers:
    """The questions of a run, the same before and after, and what was answered to them."""

    def __init__(self, validation: Dataset, whole: Config, tokenizer: Tokenizer):
        """The first records of the validation set: it is a seeded random subset of the data already."""
        config = whole.run
        self.stops = stop_ids(tokenizer, chat_format(tokenizer, whole.data))
        self.scored = bool(config.score and len(validation) and is_sample_hash(validation.sha256))
        count = max(config.samples, config.score_records if self.scored else 0)
        records = zip(validation.prompts, validation.messages, validation.references, strict=True)
        chosen = [r for r in records if r[0]][:count]
        self.questions = [Question(prompt, _asked(turns, prompt), reference) for prompt, turns, reference in chosen]
        self.shown = min(config.samples, len(self.questions))
        self.length = config.sample_tokens

    def ask(self, engine: Engine, *, adapted: bool, between: Callable[[], None]) -> list[str]:
        """All questions in one batch, greedily."""
        tokenizer = engine.tokenizer
        prompts = [tokenizer.encode(q.prompt) for q in self.questions]
        answers = generate(
            engine.decoder,
            prompts,
            Sampling(max_new_tokens=self.length),
            self.stops,
            adapted=adapted,
            on_tokens=lambda _: between(),
        )
        return [tokenizer.decode(a, skip_special=True) for a in answers]

    def show(self, console: Console, before: Sequence[str], after: Sequence[str]) -> dict[str, Any]:
        """Base and tuned answers side by side, and their scores; the scores are returned. `before` may be empty."""
        bases: Sequence[str | None] = before or [None] * len(after)
        triples = zip(self.questions, bases, after, strict=True)
        rows = [Answer(q.asked, base, tuned, q.reference) for q, base, tuned in triples]
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
