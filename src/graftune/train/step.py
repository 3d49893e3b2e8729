"""One optimizer step: the hot path.

    micro_step   forward, response-only loss, backward; adapter gradients add up in the arena      (N times)
    update_step  norm, clip, AdamW, zero                                                           (once)

Losses and gradients are sums over response tokens; the one division, by the tokens of the whole optimizer step, is
folded into the clip's factor. So N micro-batches equal one N-times batch exactly, whatever their sizes.

Nothing here reads a device value: hyperparameters and the divisor are a row of device scalars, the update count lives
beside them, a non-finite gradient skips the update on the device, and the figures of the step are left in `report` for
the loop to fetch when it likes. Both callables take fixed-shape tensors and can be captured as they stand.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from graftune.batch import PackedBatch
from graftune.kernels import adamw, grad_norm
from graftune.model.block import Dropout
from graftune.model.decoder import Decoder, PackedDocuments
from graftune.model.lora import Arena

# On a CPU the update goes over the arena piece by piece, as fast and with the same values: the temporaries of the whole
# would be as large as the arena itself. A device prefers one launch.
CPU_PIECE = 1 << 20


class Span(NamedTuple):
    """A run of the arena that is clipped and decayed alike."""

    place: slice
    segment: int
    decay: bool


class Step:
    def __init__(
        self, decoder: Decoder, arena: Arena, *, clip_mode: str = "global", dropout: float = 0.0, seed: int = 0
    ):
        self.decoder, self.arena = decoder, arena
        self.dropout, self.seed = dropout, seed
        self.segments = arena.segments(clip_mode)
        piece = CPU_PIECE if arena.device.type == "cpu" else max(1, len(arena.weights))
        self.spans = [part for span in _spans(self.segments, arena.decayed) for part in _pieces(span, piece)]
        self.row = torch.zeros(len(adamw.Hyper._fields), device=arena.device)
        self.hyper = adamw.Hyper(*self.row.unbind())
        self.loss_sum = torch.zeros((), device=arena.device)
        self.count = torch.zeros((), dtype=torch.int64, device=arena.device)  # updates made; a skipped one is none
        self.report = torch.zeros(3, device=arena.device)  # mean loss, gradient norm before clipping, skipped

    def set_hyper(self, values: Mapping[str, float]) -> None:
        """Upload the live row: lr, betas, eps, decay, divisor (response tokens of the step), clip."""
        row = torch.tensor([values[name] for name in adamw.Hyper._fields])
        self.row.copy_(row, non_blocking=True)

    def micro_step(self, batch: PackedBatch, draw: int = 0) -> None:
        """Adds the batch's loss and gradients to what is there. `draw` numbers the dropout mask."""
        dropout = Dropout(self.dropout, self.seed * 1_000_003 + draw) if self.dropout else None
        run = self.decoder.begin(batch.positions, PackedDocuments(batch.lengths), dropout=dropout)
        x = self.decoder.hidden(batch.tokens, run, batch.rows)
        loss, grad = self.decoder.loss(x.detach(), batch.labels)
        self.loss_sum += loss
        x.backward(grad)

    def update_step(self) -> torch.Tensor:
        """Clip and apply what has added up; leaves the arena's gradients zero. Returns `report`."""
        arena, hyper = self.arena, self.hyper
        norms = grad_norm.norms(arena.grads, self.segments)
        norm, factors = grad_norm.clip_factors(norms, hyper.divisor, hyper.clip)
        loss = self.loss_sum / hyper.divisor
        ok = torch.isfinite(norm) & torch.isfinite(loss)
        self.count += ok
        for place, segment, decay in self.spans:
            weights, grads, m, v = (buffer[place] for buffer in (arena.weights, arena.grads, arena.m, arena.v))
            adamw.update(weights, grads, m, v, factors[segment], hyper, self.count, ok, decay)
        arena.publish()
        torch.stack((loss, norm, (~ok).float()), out=self.report)
        self.discard()
        return self.report

    def discard(self) -> None:
        """Forget what has added up since the last update."""
        self.arena.grads.zero_()
        self.loss_sum.zero_()


def _spans(segments: list[list[slice]], decayed: int) -> list[Span]:
    spans = []
    for index, segment in enumerate(segments):
        for part in segment:
            edge = min(max(decayed, part.start), part.stop)
            if edge > part.start:
                spans.append(Span(slice(part.start, edge), index, True))
            if edge < part.stop:
                spans.append(Span(slice(edge, part.stop), index, False))
    return spans


def _pieces(span: Span, size: int) -> list[Span]:
    starts = range(span.place.start, span.place.stop, size)
    return [span._replace(place=slice(at, min(at + size, span.place.stop))) for at in starts]
