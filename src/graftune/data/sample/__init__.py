"""The bundled sample data: a small task that an untuned model fails and a tuned one does, with its own scorer."""

from graftune.data.sample.score import ScoreReport, is_sample_hash, sample_path, score_all, score_answer

__all__ = ["ScoreReport", "is_sample_hash", "sample_path", "score_all", "score_answer"]
