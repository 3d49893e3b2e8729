"""Packed micro-batches, a step at a time, one step ahead of the trainer.

The position in the data is (epoch, step) and nothing else: the plan of an epoch follows from the seed, so a resumed run
plans it again and starts at its step, with no generator state to store. A thread packs the next step while the current
one trains, and `stage` starts its copy to the device; the thread's errors are raised where the step is asked for.

With several ranks, each plans the whole epoch and packs its share of every step's bins. Counts and divisors are those
of the whole step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from graftune.batch import PLAIN, BatchLayout, Example, PackedBatch
from graftune.data.encoded import lengths_of, responses_of, take
from graftune.data.pack import Capacities, ahead_capacities, capacities, divided, pack_ahead, pack_bins, plan_epoch
from graftune.ranks import WHOLE, Share


class Loader:
    """Plans and packs the micro-batches of each epoch. They have exact shapes until `fix` gives all of them one shape,
    which a captured step needs. `layout`: what the loss asks of the batches. `share`: this rank's part of a step."""

    def __init__(
        self,
        examples: Sequence[Example],
        *,
        tokens_per_step: int,
        micro_capacity: int,
        seed: int,
        layout: BatchLayout = PLAIN,
        share: Share = WHOLE,
    ):
        assert examples, "a loader needs examples"
        self.examples, self.layout, self.share = examples, layout, share
        self.tokens_per_step, self.micro_capacity, self.seed = tokens_per_step, micro_capacity, seed
        self.lengths, self.responses = lengths_of(examples), responses_of(examples)
        self.shares = self.responses if layout.shares is None else layout.shares(examples)
        self.groups = None if layout.groups is None else layout.groups(examples)
        self.shape: Capacities | None = None  # of every micro-batch, once it is fixed
        self.ahead_shape: Capacities | None = None  # of the batches ahead of a step
        self._planned: tuple[int, list[list[list[int]]]] | None = None
        self._steps: dict[int, int] = {}

    def plan(self, epoch: int) -> list[list[list[int]]]:
        """Steps -> micro-batches -> example indices of one epoch; the last one asked for is kept."""
        if self._planned is None or self._planned[0] != epoch:
            steps = plan_epoch(
                self.lengths,
                tokens_per_step=self.tokens_per_step,
                micro_capacity=self.micro_capacity,
                seed=self.seed,
                epoch=epoch,
                groups=self.groups,
            )
            self._planned, self._steps[epoch] = (epoch, steps), len(steps)
        return self._planned[1]

    def steps_per_epoch(self, epoch: int = 0) -> int:
        """Optimizer steps of that epoch; epochs may differ by a step, since each is shuffled and packed anew."""
        return self._steps[epoch] if epoch in self._steps else len(self.plan(epoch))

    def bins(self, epoch: int, step: int) -> list[int]:
        """The numbers, within the whole step, of the micro-batches that are this rank's."""
        return divided(self.plan(epoch)[step], self.lengths, self.share)

    def counts(self, epoch: int, step: int) -> tuple[int, int]:
        """(tokens, response tokens) of a step, padding left out."""
        indices = list(itertools.chain.from_iterable(self.plan(epoch)[step]))
        return int(self.lengths[indices].sum()), int(self.responses[indices].sum())

    def divisor(self, epoch: int, step: int) -> float:
        """The number that divides the loss's sums of that step; 1 if the examples' shares add up to 0."""
        indices = list(itertools.chain.from_iterable(self.plan(epoch)[step]))
        return float(self.shares[indices].sum()) or 1.0

    def used(self, steps: int) -> list[int]:
        """The numbers of the examples that the first `steps` steps of a run read, in the order of the data."""
        found, epoch = set[int](), 0
        while steps > 0 and len(found) < len(self.examples):
            for step in self.plan(epoch)[:steps]:
                found.update(itertools.chain.from_iterable(step))
            steps, epoch = steps - len(self.plan(epoch)), epoch + 1
        return sorted(found)

    def capacities(self, epochs: int) -> Capacities:
        """The least capacities that hold every micro-batch of the first `epochs` epochs."""
        bins = (indices for epoch in range(epochs) for step in self.plan(epoch) for indices in step)
        return capacities(bins, self.lengths, self.responses)

    def fix(self, shape: Capacities) -> None:
        """Fix the shapes to one that holds every micro-batch."""
        self.shape = shape
        if self.layout.ahead is not None:
            self.ahead_shape = ahead_capacities(shape, self.layout.ahead.longest(self.examples))

    def epoch(
        self, epoch: int, start_step: int = 0, stage: Callable[[PackedBatch], Any] = lambda batch: batch
    ) -> Iterator[list[Any]]:
        """Yields this rank's micro-batches of each step from `start_step` on, as returned by `stage`, which runs in the
        packing thread."""
        steps = self.plan(epoch)
        assert 0 <= start_step <= len(steps), (start_step, len(steps))
        # Leaving the loop early closes the generator, which waits for the one step being packed and ends the thread.
        with ThreadPoolExecutor(1, thread_name_prefix="graftune-pack") as worker:
            coming = worker.submit(self._staged, steps[start_step], stage) if start_step < len(steps) else None
            for following in range(start_step + 1, len(steps) + 1):
                assert coming is not None
                batches = coming.result()
                coming = worker.submit(self._staged, steps[following], stage) if following < len(steps) else None
                yield batches

    def _staged(self, step: list[list[int]], stage: Callable[[PackedBatch], Any]) -> list[Any]:
        packed = pack_bins(self.examples, step, self.lengths, self.layout, self.share, self.shape)
        if self.layout.ahead is not None:
            # In the order of the data, which does not depend on how the step is divided.
            whole = take(self.examples, sorted(itertools.chain.from_iterable(step)))
            packed[0].ahead = pack_ahead(whole, self.layout, self.micro_capacity, self.share, self.ahead_shape)
        return [stage(batch) for batch in packed]
