"""What is minimised: one file per loss, and the choice among them (`choose`)."""

from __future__ import annotations

from graftune.losses.cross_entropy import CrossEntropy
from graftune.losses.interface import Computed, LogProbLoss, Loss, base_log_probs

__all__ = ["Computed", "CrossEntropy", "LogProbLoss", "Loss", "base_log_probs"]
