"""Reinforcement learning: the model answers prompts, functions of the user's reward the answers, and a policy loss
trains on them. The loop is written over the verbs of a Session (run.py); a whole round is one object (rounds.py)."""

from __future__ import annotations

from graftune.rl.prepare import prepare_rl
from graftune.rl.run import PolicyRun
from graftune.training.launch import RunKind

RL = RunKind(prepare_rl, PolicyRun)

__all__ = ["RL", "PolicyRun", "prepare_rl"]
