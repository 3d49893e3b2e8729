"""Finds where the first NaN or Inf comes from, by recomputing one micro-batch eagerly and checking each part's output.

A captured step only reports that its loss or its gradient was not finite. Its update was skipped, so the weights are
unchanged and the same micro-batch gives the same numbers. This runs at the end of a run, when time does not matter. A
flag per layer in the step itself was rejected, because every good step would pay for it.

The search checks the trainable weights first, then the forward pass from the embedding to the loss, then the gradients
from the last layer to the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from graftune.batch import PackedBatch
from graftune.losses import reference_of
from graftune.model.block import Block
from graftune.model.context import Dropout, PassContext
from graftune.model.layer_spec import BranchPart
from graftune.model.part import PartSpec
from graftune.model.spec import ModelSpec
from graftune.step.step import Step


class NotFinite(NamedTuple):
    """The first tensor with a NaN or Inf."""

    what: str  # the tensor, with its layer
    documents: list[int] | None = None  # numbers of the batch's documents that have it; None: it belongs to none


def first_not_finite(step: Step, batch: PackedBatch, micro_batch_id: int) -> NotFinite | None:
    """Recompute a micro-batch and return the first NaN or Inf; None if everything is finite. Always runs both passes,
    because ranks that share the base's weights must stay in step. Clears the gradients."""
    step.discard()
    step.set_dropout_seed(micro_batch_id)
    found = [*_weights(step), *_forward(step, batch)]
    step.micro_step(batch, any_shape=True)
    found += _gradients(step)
    step.discard()
    return found[0] if found else None


def _weights(step: Step) -> Iterator[NotFinite]:
    arena = step.arena
    for name in arena.slots:
        if not bool(arena.view(name, arena.compute).isfinite().all()):
            held = "" if arena.compute is arena.weights else f" in {str(arena.compute_dtype).removeprefix('torch.')}"
            yield NotFinite(f"the weight {name}{held}")


def _gradients(step: Step) -> Iterator[NotFinite]:
    arena = step.arena
    for name, slot in sorted(arena.slots.items(), key=lambda item: -item[1].layer):
        if not bool(arena.grads[slot.start : slot.stop].isfinite().all()):
            yield NotFinite(f"the gradient of {name}")


def _forward(step: Step, batch: PackedBatch) -> list[NotFinite]:
    decoder, tape = step.decoder, _CheckingTape(batch, step.decoder.spec)
    dropout = Dropout(step.dropout, step.dropout_seed) if step.dropout else None
    if step.loss.ahead:
        batch = replace(batch, extra={**batch.extra, "ahead": step.ahead})
    with torch.no_grad():
        ctx = decoder.begin_batch(batch, step.eager_backend, dropout=dropout)
        reference = reference_of(step.loss, decoder, batch, ctx, step.start)
        stream = decoder.forward(batch.tokens, ctx, batch.rows, tape)
        tape.check(
            stream.x if stream.pending is None else stream.x.float() + stream.pending.float(),
            tape.source_of(len(decoder.spec.layers)),
            batch.rows,
        )
        if reference is not None and not bool(reference.isfinite().all()):
            tape.found.append(NotFinite("the reference model's log-probabilities"))
        output = decoder.read_out(stream, temperature=step.loss.temperature)
        tape.check(output.normed, "the final norm", batch.rows)
        if not bool(step.loss(output, batch, reference, need_grad=False).total.isfinite()):
            tape.found.append(NotFinite("the loss, after the head"))
    return tape.found


class _CheckingTape:
    """A tape that saves nothing; it checks the residual stream that each branch of a block has read."""

    inputs_only = True

    def __init__(self, batch: PackedBatch, spec: ModelSpec):
        self.batch, self.spec, self.found = batch, spec, list[NotFinite]()

    def keep(self, block: Block, saved: list[Any]) -> None:
        """Check what each branch saved: the stream that it read, which the branch before it wrote."""
        index = block.index
        written = [self.source_of(index), *(_name(branch[0].part) for branch in self._branches(index)[:-1])]
        for number, (kept, name) in enumerate(zip(saved, written, strict=True)):
            selected = index == len(self.spec.layers) - 1 and number >= block.mixing
            self.check(kept.x, name if number == 0 else f"layers.{index}.{name}", self.batch.rows if selected else None)

    def take(self, block: Block, ctx: PassContext, rows: torch.Tensor | None) -> list[Any]:
        raise AssertionError("nothing is kept for a backward pass")

    def source_of(self, index: int) -> str:
        """The name of the part that wrote the stream that block `index` reads."""
        return f"layers.{index - 1}.{_name(self._branches(index - 1)[-1][0].part)}" if index else "the embedding"

    def _branches(self, index: int) -> list[tuple[BranchPart, ...]]:
        return [branch.parts for branch in self.spec.layers[index].branches]

    def check(self, stream: torch.Tensor, name: str, rows: torch.Tensor | None = None) -> None:
        """Note the first NaN or Inf. `rows`: the tokens of the stream's rows, if these are not all tokens."""
        bad = (~stream.isfinite()).any(1).nonzero()[:, 0]
        if len(bad) and not self.found:
            tokens = bad if rows is None else rows[bad]
            documents = torch.searchsorted(self.batch.cu_seqlens.long(), tokens, right=True) - 1
            self.found.append(NotFinite(f"the output of {name}", documents.unique().tolist()))


def _name(part: PartSpec) -> str:
    return part.module or part.output
