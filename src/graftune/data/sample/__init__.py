"""The bundled sample data: a small task that an untuned model fails and a tuned one does, and pairs of replies of which
one is preferred; each with its own scorer."""

from __future__ import annotations

from pathlib import Path

from graftune.data.sample.replies import replies_path, score_reply
from graftune.data.sample.score import ScoreReport, is_sample_hash, sample_path, score_all, score_answer
from graftune.errors import GraftuneError

__all__ = [
    "ScoreReport",
    "is_sample_hash",
    "replies_path",
    "sample_for",
    "sample_path",
    "score_all",
    "score_answer",
    "score_reply",
    "score_sample",
]


def sample_for(kind: str) -> Path:
    """The bundled data of this kind (DataKind.name)."""
    known = {"answers": sample_path, "pairs": replies_path}
    if kind not in known:
        raise GraftuneError(f"there is no bundled sample of {kind}", fix="name the data to train on")
    return known[kind]()


def score_sample(answer: str, reference: str) -> dict[str, float]:
    """As a metric: the scorer of the sample that the reference is from."""
    is_reply = score_reply(reference, reference)["in_order"]
    return score_reply(answer, reference) if is_reply else score_answer(answer, reference)
