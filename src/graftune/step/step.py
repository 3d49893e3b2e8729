"""One optimizer step: the hot path.

    micro_step   forward, loss, backward; gradients add up in the arena     (N times)
    update_step  norm, clip, AdamW, zero                                    (once)

Losses and gradients are sums; the one division, by the loss's divisor of the whole optimizer step (response tokens or
their weights), is folded into the clip's factor. So N micro-batches equal one N-times batch exactly, whatever their
sizes.

Nothing here reads a device value: hyperparameters and the divisor are a row of device scalars, the update count lives
beside them, a non-finite gradient skips the update on the device, and the figures of the step are left in `report` for
the loop to fetch when it likes. Both callables take fixed-shape tensors and can be captured as they stand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from graftune import spans
from graftune.batch import PackedBatch
from graftune.kernels import adamw, grad_norm, launch, matmul, rehearsal
from graftune.kernels.blocks import BlockTable, spans_of
from graftune.kernels.rehearsal import LOGITS
from graftune.losses import CrossEntropy, Loss, reference_log_probs
from graftune.model.arena import Arena
from graftune.model.block import Stream
from graftune.model.context import Dropout, SideStreams
from graftune.model.decoder import Decoder
from graftune.model.frozen import row_stride
from graftune.model.mixers.attention import Attention
from graftune.model.start import Start
from graftune.model.tape import Tapes
from graftune.step.scaler import LossScaler
from graftune.step.tail import CONTROL_FLAGS, RankSignals, Reduce, Tail, signals

# In fp16 sums are kept in this unit: the gradient of a sum over thousands of tokens, times the loss scale, would be
# beyond fp16 where the mean's is not. A power of two, so nothing is rounded.
FP16_UNIT = 2.0**-12
REPORTED = 5  # numbers of every step's report, ahead of the loss's own


class Step:
    def __init__(
        self,
        decoder: Decoder,
        arena: Arena,
        *,
        clip_mode: str = "global",
        dropout: float = 0.0,
        seed: int = 0,
        recompute: str = "none",
        attention_backend: str = "cpu",
        longest: int | None = None,
        tuned: bool = False,
        other_backends: tuple[str, ...] = (),
        loss: Loss | None = None,
        eager_backend: str = "",
        reduce: Reduce | None = None,
        start: Start | None = None,
    ):
        """`longest` bounds the documents of every batch of a fixed shape to come; a captured step needs it, an eager
        one can look. `eager_backend` is the attention for batches of any shape. `tuned` times cuBLAS's algorithms at
        the first batch of a shape, and attention's backends at the first batch: for shapes that will be used often.
        `reduce` adds gradients and sums up over the ranks of a run, ahead of the update. `start` is what a
        loss compares with that goes by the start of the run."""
        self.decoder, self.arena, self.loss = decoder, arena, loss or CrossEntropy()
        self.dropout, self.tapes, self.start = dropout, Tapes(recompute), start
        self.backend, self.longest, self.tuned = attention_backend, longest, tuned
        self.other_backends = other_backends if tuned else ()
        self.eager_backend = eager_backend or attention_backend
        device = arena.device
        segments = arena.segments(clip_mode)
        self.table = BlockTable.of(spans_of(segments, arena.decayed), device=device)
        self.width = len(adamw.Hyper._fields)
        self.live = torch.zeros(self.width + CONTROL_FLAGS, device=device)
        self.row = self.live[: self.width]  # lr, betas, eps, decay, divisor, clip; behind it what a rank has to say
        self.dropout_seed = torch.zeros((), dtype=torch.int64, device=device)  # live: seeds the dropout masks
        self.seed = seed
        # Alone, a step's sums are its own; with ranks they lie behind the gradients, which they travel with.
        sums = torch.zeros_like(arena.tail) if reduce is None else arena.tail.zero_()
        self.reduce, self.tail = reduce, Tail(sums, self.live[self.width :], len(self.loss.figures))
        self.loss_sum, self.token_sum, self.figure_sums = self.tail.loss_sum, self.tail.token_sum, self.tail.figure_sums
        self.count = torch.zeros((), dtype=torch.int64, device=device)  # updates made; a skipped one is none
        # Mean loss, gradient norm before clipping, skipped; response tokens, as counted on the device, and fp16's loss
        # scale; the loss's own figures; with ranks, what they said.
        self.own_figures = slice(REPORTED, REPORTED + len(self.figure_sums))
        self.report = torch.zeros(self.own_figures.stop + (2 * CONTROL_FLAGS if reduce else 0), device=device)
        self.factors = torch.zeros(len(segments), device=device)
        self.ok = torch.zeros((), dtype=torch.bool, device=device)
        # What is queued for other streams stays in memory until it has run: not where memory is what counts.
        self.side_streams = (
            SideStreams(device) if launch.on_gpu(device) and recompute in ("none", "selective") else None
        )
        self.partials = torch.empty(len(self.table), device=device)
        self.scaler = LossScaler(device) if arena.compute_dtype == torch.float16 else None
        self.unit = FP16_UNIT if self.scaler else 1.0

    def set_hyper(self, values: Mapping[str, float]) -> None:
        """Upload the live row: lr, betas, eps, decay, divisor (the loss's, of the whole step), clip."""
        self.uploaded.copy_(torch.tensor(self.row_of(values)), non_blocking=True)

    @property
    def uploaded(self) -> torch.Tensor:
        """What comes from the host with every step: the live row, and whether this rank wants to stop."""
        return self.live[: self.width + 1]

    def row_of(self, values: Mapping[str, float]) -> list[float]:
        """What is uploaded, in its order, the divisor in the unit of the sums."""
        row = [values[name] * (self.unit if name == "divisor" else 1.0) for name in adamw.Hyper._fields]
        return [*row, float(values.get("stop", 0))]

    def set_dropout_seed(self, number: int) -> None:
        """Seed the masks of the run's micro-batch `number`, within 63 bits: the run's seed may be as large as that."""
        self.dropout_seed.fill_((self.seed * 1_000_003 + number) & (2**63 - 1))

    def micro_step(self, batch: PackedBatch, *, any_shape: bool = False) -> None:
        """Adds the batch's loss and gradients to the sums. `any_shape`: this shape is not expected again, so nothing is
        planned or timed for it."""
        decoder = self.decoder
        spans.phase("forward", operation="rotary tables")
        if self.side_streams is not None:
            self.side_streams.forget()
        dropout = Dropout(self.dropout, self.dropout_seed) if self.dropout else None
        if self.other_backends and not any_shape:
            self._choose_attention(batch)
        backend, longest = (self.eager_backend, None) if any_shape else (self.backend, self.longest)
        run = decoder.begin_batch(batch, backend, longest, dropout=dropout, side_streams=self.side_streams)
        tape = self.tapes.new(
            len(decoder.blocks), len(batch.tokens), decoder.spec.width, decoder.compute, decoder.device
        )

        with matmul.tuned(self.tuned and not any_shape):
            if self.loss.reference:
                spans.phase("reference")
            reference = reference_log_probs(self.loss, decoder, batch, run, self.start)
            spans.phase("forward")
            # Handed on, not named: a name here would hold the stream, then its gradient, through the whole backward.
            decoder.backward(
                self.grad_of_loss(decoder.forward(batch.tokens, run, batch.rows, tape), batch, reference),
                batch.tokens,
                run,
                batch.rows,
                tape,
            )

    def grad_of_loss(self, stream: Stream, batch: PackedBatch, reference: torch.Tensor | None) -> torch.Tensor:
        """Adds the loss and its figures to their sums; returns the gradient of the stream's rows."""
        spans.phase("loss")
        scale = self.scaler.scale * self.unit if self.scaler else None
        with rehearsal.owned(LOGITS):
            output = self.decoder.read_out(stream)
            total, grad, figures = self.loss(output, batch, reference, scale=scale)
            self.loss_sum.add_(total, alpha=self.unit)
            self.token_sum.add_((batch.labels >= 0).sum())
            if figures is not None:
                self.figure_sums.add_(figures, alpha=self.unit)
            assert grad is not None
            return output.backward(grad)

    def _choose_attention(self, batch: PackedBatch) -> None:
        """Time the backends with a block's own scale and row strides, so that the plans built here serve the step. A
        model without attention has nothing to choose."""
        from graftune.kernels.attention import timing

        names, self.other_backends = (self.backend, *self.other_backends), ()
        parts = (part for block in self.decoder.blocks for part in block.parts)
        one = next((part for part in parts if isinstance(part, Attention) and part.own is None), None)
        if one is None:
            return
        longest = max(batch.lengths) if self.longest is None else self.longest
        rows = row_stride(one.o.width_in, one.o.adapter_columns), row_stride(one.qkv.width_out, one.qkv.adapter_columns)
        case = timing.Case(len(batch.tokens), longest, one.heads, self.decoder.compute, one.score_scale, *rows)
        self.backend = timing.fastest(names, batch.cu_seqlens, case)

    def update_step(self) -> torch.Tensor:
        """Clip and apply what has added up; leaves the arena's gradients zero. Returns `report`."""
        arena, state = self.arena, self.scaler.state if self.scaler else None
        if self.reduce is not None and self.reduce.captured:
            self._add_up_ranks(self.reduce)
        spans.phase("update", operation="gradient norm")
        if self.loss.figures:
            torch.div(self.figure_sums, adamw.Hyper(*self.row).divisor, out=self.report[self.own_figures])
            self.figure_sums.zero_()
        decided = self.report[:3], self.factors, self.ok
        grad_norm.clip(arena.grads, self.table, self.row, self.loss_sum, self.count, *decided, state, self.partials)
        buffers = arena.weights, arena.grads, arena.m, arena.v, arena.compute
        self.report[3].copy_(self.token_sum)
        self.token_sum.zero_()
        if self.scaler is not None:
            self.report[4].copy_(self.scaler.scale)
        adamw.step(*buffers, self.table, self.row, self.count, self.ok, self.factors)
        arena.publish(cast=False)
        return self.report

    def reduce_outside_graph(self) -> None:
        """Add up over ranks ahead of `update_step`, where that cannot be a part of it."""
        if self.reduce is not None and not self.reduce.captured:
            self._add_up_ranks(self.reduce)

    def _add_up_ranks(self, reduce: Reduce) -> None:
        spans.phase("update", operation="sum over ranks")
        self.tail.fill()
        reduce(self.arena.sums)
        self.tail.report(self.report[self.own_figures.stop :])

    def signals(self, report: Sequence[float]) -> RankSignals:
        """What the ranks said to each other with a step, from its report."""
        return RankSignals() if self.reduce is None else signals(report[self.own_figures.stop :], self.reduce.size)

    def discard(self) -> None:
        """Forget what has added up since the last update."""
        self.arena.grads.zero_()
        self.tail.zero()
