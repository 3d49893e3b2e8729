"""What a run over an fp8 base settles by its own data, before the first step: how the weights are rounded
(model/frozen/calibrate.py has the formula), and how many codes their inputs take (codes.py).

The sample is the beginning of the run's own data: the first micro-batches of its first epoch, about `TOKENS` tokens.
It goes through the model block by block, adapters off, in two codes a value. Each block is run once to see what its
four weights read, they are rounded, and the block is run again: the next one sees what the rounded weights make of the
data, and can answer for it. Of H there is one block's at a time, and one weight in fp32. A second stream goes through
the weights as they were read, of which a block's are there at a time: where it comes to tells what rounding them costs.

Codes are a function of base, data, seed and settings, and adapters have no part in them: a resumed run makes them again
instead of storing a copy of the base. `Calibration.digest` says whether it got the same.

What is left then is the rounding of the inputs; a resumed run keeps what was chosen of it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graftune.batch import Example, PackedBatch
from graftune.config import Config, TrainConfig
from graftune.data.encoded import take
from graftune.data.loader import Loader
from graftune.data.pack import pack
from graftune.model.block import Block, attention_half, mlp_half
from graftune.model.decoder import Decoder
from graftune.model.frozen import Dense, Fp8, Frozen, RowSource
from graftune.model.frozen.calibrate import Sample
from graftune.model.projection import Projection
from graftune.model.run import Pass
from graftune.observe.marks import marked
from graftune.step.codes import Chosen, Inputs, begun, choose
from graftune.weights.placement import Placement

TOKENS = 8192

Sources = Callable[[int, str], Sequence[RowSource]]  # of a layer's group of projections


@dataclass(frozen=True)
class Calibration:
    tokens: int
    seconds: float
    digest: str  # of all codes and scales
    chosen: Chosen  # how many codes a value the weights read


def calibrates(config: Config, placement: Placement) -> bool:
    """Whether a run begins with this."""
    return placement.base_dtype == "fp8" and config.train.calibrate and config.train.method == "lora"


def most_inputs(config: Config, placement: Placement) -> int:
    """Codes a value that a run may come to read."""
    asked = config.train.fp8_inputs
    return 2 if asked == "two" or (asked == "auto" and calibrates(config, placement)) else 1


def sample(examples: Sequence[Example], settings: TrainConfig) -> list[PackedBatch]:
    """The run's first micro-batches, in exact shapes: padding is no data. As many as come near TOKENS, or all."""
    capacity = settings.tokens_per_micro_batch
    loader = Loader(
        examples, tokens_per_step=settings.tokens_per_step, micro_capacity=capacity, seed=settings.seed, fixed=False
    )
    batches: list[PackedBatch] = []
    tokens = 0
    for held in (held for step in loader.plan(0) for held in step):
        if batches and tokens + capacity // 2 > TOKENS:
            break
        batches.append(pack(take(examples, held)))
        tokens += len(batches[-1].tokens)
    return batches


def calibrate(
    decoder: Decoder,
    batches: Sequence[PackedBatch],
    sources: Sources,
    *,
    backend: str = "cpu",
    inputs: str | Inputs = "auto",
    told: Callable[[int], None] = lambda done: None,
) -> Calibration:
    """`sources`: where the rows of a weight are read again; `inputs`: as in the settings, or what was chosen before;
    `told` is called with the blocks done. Adapters have to be published afterwards, since they lie at the scales of
    the weights they are beside."""
    began = time.perf_counter()
    with torch.no_grad(), marked("calibrate"):
        decoder.set_inputs(2)
        streams = [Through.of(decoder, batch, backend) for batch in batches]
        beside = [dataclasses.replace(stream) for stream in streams] if inputs == "auto" else []
        for block in decoder.blocks:
            calibrate_block(block, streams, sources, beside)
            told(block.index + 1)
        unrounded = [stream.x for stream in beside]
        del streams, beside
        if inputs == "auto":
            chosen = choose(decoder, batches, backend, unrounded)
        elif isinstance(inputs, str):
            chosen = Chosen(({"one": 1, "two": 2}[inputs],) * len(decoder.in_fp8))
        else:
            chosen = Chosen(inputs)
        del unrounded
        decoder.set_inputs(chosen.inputs)
        digest = _digest(decoder.in_fp8)
    if decoder.device.type == "cuda":
        torch.cuda.empty_cache()  # a graph's pool could not have it
    tokens = sum(len(batch.tokens) for batch in batches)
    return Calibration(tokens, time.perf_counter() - began, digest, chosen)


@dataclass
class Through:
    """A micro-batch on its way through the blocks."""

    x: torch.Tensor  # [T, D]
    run: Pass

    @staticmethod
    def of(decoder: Decoder, batch: PackedBatch, backend: str) -> Through:
        batch = batch.to(decoder.device)
        return Through(decoder.embed(batch.tokens, adapted=False), begun(decoder, batch, backend))

    def behind(self, block: Block, watch: Callable[[torch.Tensor, Frozen], None] | None = None) -> torch.Tensor:
        """The stream after the block; `x` stays as it is."""
        run = dataclasses.replace(self.run, watch=watch)
        x, y, _ = attention_half(block, self.x, None, run)
        x, y, _ = mlp_half(block, x, y, run)
        return y.add_(x)


def calibrate_block(block: Block, streams: Sequence[Through], sources: Sources, unrounded: Sequence[Through]) -> None:
    """Rounds a block's weights by what they read of the streams, and takes these to the next block; the unrounded ones,
    where there are any, by the weights as they are read."""
    samples: dict[int, Sample] = {}
    as_read: dict[str, Any] = {}

    def watch(x: torch.Tensor, frozen: Frozen) -> None:
        if id(frozen) not in samples:
            samples[id(frozen)] = Sample(x.shape[1], x.device)
        samples[id(frozen)].add(x)

    for stream in streams:
        stream.behind(block, watch)
    for group in ("qkv", "o", "gate_up", "down"):
        frozen = getattr(block, group).frozen
        assert isinstance(frozen, Fp8), "experts are never in fp8"
        kept = torch.empty_like(frozen.weight, dtype=frozen.compute) if unrounded else None
        frozen.calibrate(sources(block.index, group), samples.pop(id(frozen)), kept)
        if kept is not None:
            as_read[group] = Projection(Dense(kept, frozen.compute))
    for stream in streams:
        stream.x = stream.behind(block)
    if unrounded:
        block = dataclasses.replace(block, **as_read)
    for stream in unrounded:
        stream.x = stream.behind(block)


def _digest(weights: Iterable[Fp8]) -> str:
    sums = torch.stack([weight.checksum for weight in weights])
    return hashlib.sha256(sums.cpu().numpy().tobytes()).hexdigest()
