"""The bundled sample data: a small task that an untuned model fails and a tuned one does, and pairs of replies of which
one is preferred; each with its own scorer."""

from graftune.data.sample.replies import held_out_path, replies_path, score_reply
from graftune.data.sample.score import ScoreReport, is_sample_hash, sample_path, score_all, score_answer

__all__ = [
    "ScoreReport",
    "held_out_path",
    "is_sample_hash",
    "replies_path",
    "sample_path",
    "score_all",
    "score_answer",
    "score_reply",
]
