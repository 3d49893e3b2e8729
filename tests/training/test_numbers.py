"""Numbers that are not finite, and what else a run notices about its own figures."""

from __future__ import annotations

from graftune.config import LoraConfig
from graftune.step.pipeline import HostLoop
from graftune.step.step import Step
from tests import injected, oracle


def test_an_inf_in_one_micro_batch_skips_exactly_that_update(tiny_folder) -> None:
    folder = tiny_folder("llama-untied")

    def make():
        ours = oracle.ours(folder, LoraConfig(rank=4, alpha=8.0, dropout=0.1))
        step = Step(ours.decoder, ours.arena, dropout=0.1)
        return ours, step, HostLoop(step)

    injected.skips_exactly_that_update(make, fixed=False)
    injected.counts_its_tokens(make, fixed=False)
