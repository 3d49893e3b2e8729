"""One rank of tests/dist/test_own_examples.py: a loop of one's own over tokenised answers; each rank gets all of them.
`main` writes the figures of each step and the weights."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from graftune.dist.world import connect, join
from graftune.ranks import from_environment
from graftune.session import open_session
from graftune.settings.config import Config
from tests.losses import sampled

SETTINGS = {
    "loss": "ppo", "ratios": "sequence", "divide": "answers", "rank": 4, "lr": 1e-3, "device": "cpu", "seed": 3,
    "compute_dtype": "fp32", "base_dtype": "fp32", "recompute": "none", "tokens_per_micro_batch": 24,
}  # fmt: skip


def main(base: str, out: str) -> int:
    ranks, world = from_environment(), None
    if ranks is not None:
        store, attempt = connect(ranks)
        world = join(ranks, store, attempt)
        world.attach(torch.device("cpu"))
    session = open_session(Config.of(SETTINGS | {"base": base}), world=world)
    data, found = sampled.answers(), []
    for step in range(3):
        session.forward_backward(data[step:])  # 7, 6 and 5 answers: ranks have micro-batches without examples
        stats = session.optim_step()
        found.append([stats.loss, stats.grad_norm, stats.tokens, *stats.figures.values()])
    if ranks is None or ranks.leads:
        Path(out).write_text(json.dumps([found, session.parts.arena.weights.tolist()]))
    if world is not None:
        world.leave()
    return 0
