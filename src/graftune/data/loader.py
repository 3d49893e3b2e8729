"""Packed micro-batches, a step at a time, one step ahead of the trainer.

The place in the data is (epoch, step) and nothing else: the plan of an epoch follows from the seed, so a resumed run
plans it again and starts at its step, with no generator state to store. A thread packs the next step while the current
one trains; what goes wrong in it is raised where the step is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from graftune.batch import Example, PackedBatch
from graftune.data.pack import pack, plan_epoch


class Loader:
    """`fixed`: every micro-batch has the shapes of `capacities`, which a captured step needs; otherwise exact ones."""

    def __init__(
        self, examples: Sequence[Example], *, tokens_per_step: int, micro_capacity: int, seed: int, fixed: bool
    ):
        assert examples, "a loader needs examples"
        self.examples, self.fixed = examples, fixed
        self.tokens_per_step, self.micro_capacity, self.seed = tokens_per_step, micro_capacity, seed
        self.lengths = [len(example.tokens) for example in examples]
        self._limits: tuple[int, int, int] | None = None
        self._planned: tuple[int, list[list[list[int]]]] | None = None

    def plan(self, epoch: int) -> list[list[list[int]]]:
        """Steps -> micro-batches -> example indices of one epoch; the last one asked for is kept."""
        if self._planned is None or self._planned[0] != epoch:
            steps = plan_epoch(
                self.lengths,
                tokens_per_step=self.tokens_per_step,
                micro_capacity=self.micro_capacity,
                seed=self.seed,
                epoch=epoch,
            )
            self._planned = (epoch, steps)
        return self._planned[1]

    def steps_per_epoch(self, epoch: int = 0) -> int:
        """Optimizer steps of that epoch; epochs may differ by a step, since each is shuffled and packed anew."""
        return len(self.plan(epoch))

    def capacities(self, epochs: int) -> tuple[int, int, int]:
        """(tokens, documents, rows) that hold every micro-batch of the first `epochs` epochs; fixes the shapes."""
        responses = [example.response_tokens for example in self.examples]
        bins = [held for epoch in range(epochs) for step in self.plan(epoch) for held in step]
        rows = max(sum(responses[i] for i in held) for held in bins)
        self._limits = (self.micro_capacity, max(map(len, bins)) + 1, max(1, rows))  # + 1: the padding
        return self._limits

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[list[PackedBatch]]:
        """The micro-batches of each step from `start_step` on."""
        steps = self.plan(epoch)
        assert 0 <= start_step <= len(steps), (start_step, len(steps))
        if self.fixed:
            assert self._limits is not None, "ask for capacities(epochs) first: they fix the shapes"
        # Leaving the loop early closes the generator, which waits for the one step being packed and ends the thread.
        with ThreadPoolExecutor(1, thread_name_prefix="graftune-pack") as worker:
            coming = worker.submit(self._packed, steps[start_step]) if start_step < len(steps) else None
            for following in range(start_step + 1, len(steps) + 1):
                assert coming is not None
                batches = coming.result()
                coming = worker.submit(self._packed, steps[following]) if following < len(steps) else None
                yield batches

    def _packed(self, step: list[list[int]]) -> list[PackedBatch]:
        tokens, docs, rows = self._limits if self.fixed and self._limits is not None else (None, None, None)
        return [pack([self.examples[i] for i in held], capacity=tokens, max_docs=docs, max_rows=rows) for held in step]
