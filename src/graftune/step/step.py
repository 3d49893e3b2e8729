"""One optimizer step: the hot path.

    micro_step   forward, loss, backward; gradients add up in the arena     (N times)
    update_step  norm, clip, AdamW, zero                                    (once)

Losses and gradients are sums. They are divided once, by the loss's divisor for the whole optimizer step (the number of
response tokens, or the sum of their weights), and that division is part of the clip factor. So N micro-batches give
exactly the result of one batch that is N times as large, whatever their sizes.

Nothing here reads a device value: hyperparameters and the divisor are a row of device scalars, the update count is a
device scalar too, a non-finite gradient skips the update on the device, and the step's figures stay in `report` until
the loop fetches them. With batches of fixed shape a CUDA graph can capture both functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from graftune import spans
from graftune.batch import PackedBatch
from graftune.kernels import adamw, grad_norm, launch, matmul, rehearsal
from graftune.kernels.blocks import BlockTable, arena_spans
from graftune.kernels.rehearsal import LOGITS
from graftune.losses import CrossEntropy, Loss, checked, reference_of, sums_ahead
from graftune.model.arena import Arena, Start
from graftune.model.block import ResidualStream
from graftune.model.context import Dropout, SideStreams
from graftune.model.decoder import Decoder
from graftune.model.feed_forward.routing import RoutingPass, RoutingSums
from graftune.model.mixers.attention import Attention
from graftune.model.tape import Tapes
from graftune.step.scaler import LossScaler
from graftune.step.tail import CONTROL_FLAGS, RankSignals, Reduce, Tail, signals

# In fp16, sums and the divisor are multiplied by this number: the gradient of a sum over thousands of tokens, times the
# loss scale, would overflow fp16 where the gradient of the mean does not. It is a power of two, so nothing is rounded.
FP16_UNIT = 2.0**-12
REPORTED = 5  # numbers that every step reports, before the loss's own figures


class Step:
    """One optimizer step over a decoder and its arena: `micro_step` adds gradients, `update_step` applies them."""

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
        """`longest`: an upper bound on the length of any document in batches of a fixed shape; a captured step needs
        it, an eager step reads it from the batch. `eager_backend`: the attention backend for batches of other shapes.
        `tuned`: time cuBLAS's algorithms at the first batch of a shape, and the attention backends at the first batch
        (worth it for shapes that are used often). `reduce`: sums gradients and figures over all ranks before the
        update. `start`: snapshot of the weights at the start of the run, for losses that compare with it."""
        self.decoder, self.arena, self.loss = decoder, arena, loss or CrossEntropy()
        self.dropout, self.tapes, self.start = dropout, Tapes(recompute), start
        self.backend, self.longest, self.tuned = attention_backend, longest, tuned
        self.other_backends = other_backends if tuned else ()
        self.eager_backend = eager_backend or attention_backend
        device = arena.device
        segments = arena.segments(clip_mode)
        self.table = BlockTable.of(arena_spans(segments, arena.decayed), device=device)
        self.width = len(adamw.Hyper._fields)
        self.live = torch.zeros(self.width + CONTROL_FLAGS, device=device)
        self.row = self.live[: self.width]  # lr, betas, eps, decay, divisor, clip; followed by this rank's flags
        self.dropout_seed = torch.zeros((), dtype=torch.int64, device=device)  # read by the dropout kernels
        self.seed = seed
        # A single process keeps the sums in a buffer of their own. With several ranks they follow the gradients in the
        # arena's buffer, so that one collective adds up both.
        sums = torch.zeros_like(arena.tail) if reduce is None else arena.tail.zero_()
        self.reduce, self.tail = reduce, Tail(sums, self.live[self.width :], self.loss.sums)
        self.loss_sum, self.token_sum, self.figure_sums = self.tail.loss_sum, self.tail.token_sum, self.tail.figure_sums
        self.ahead = torch.zeros(self.loss.ahead, device=device)  # the loss's sums before the step's micro-batches
        self.own_ahead = torch.zeros_like(self.ahead)  # those of this rank that are not in `ahead` yet
        self.longest_ahead = longest  # `longest` for the batches ahead of a step
        self.count = torch.zeros((), dtype=torch.int64, device=device)  # counts applied updates only
        # Mean loss, gradient norm before clipping, whether the update was skipped, response tokens as counted on the
        # device, fp16's loss scale; then the loss's own figures, what the routers of a mixture did on this rank, and
        # with several ranks their control flags.
        self.own_figures = slice(REPORTED, REPORTED + len(self.loss.figures))
        self.routing = RoutingSums(decoder.spec, device) if decoder.spec.experts else None
        self.routed = slice(
            self.own_figures.stop, self.own_figures.stop + (self.routing.numbers if self.routing else 0)
        )
        self.report = torch.zeros(self.routed.stop + (2 * CONTROL_FLAGS if reduce else 0), device=device)
        self.factors = torch.zeros(len(segments), device=device)
        self.ok = torch.zeros((), dtype=torch.bool, device=device)
        # Work queued on side streams keeps its tensors alive until it has run, so policies that save memory go without.
        self.side_streams = (
            SideStreams(device) if launch.on_gpu(device) and recompute in ("none", "selective") else None
        )
        self.partials = torch.empty(len(self.table), device=device)
        self.scaler = LossScaler(device) if arena.compute_dtype == torch.float16 else None
        self.unit = FP16_UNIT if self.scaler else 1.0

    def set_hyper(self, values: Mapping[str, float]) -> None:
        """Upload lr, betas, eps, decay, the loss's divisor for the whole step, and clip."""
        self.uploaded.copy_(torch.tensor(self.upload_of(values)), non_blocking=True)

    @property
    def uploaded(self) -> torch.Tensor:
        """The numbers the host uploads with every step: the hyperparameters and this rank's stop request."""
        return self.live[: self.width + 1]

    def upload_of(self, values: Mapping[str, float]) -> list[float]:
        """The numbers to upload, in order; the divisor is given in the unit of the sums."""
        row = [values[name] * (self.unit if name == "divisor" else 1.0) for name in adamw.Hyper._fields]
        return [*row, float(values.get("stop", 0))]

    def set_dropout_seed(self, micro_batch_id: int) -> None:
        """Seed the dropout masks of a micro-batch. The run's seed may have 63 bits, so the product
        is cut to 63 bits."""
        self.dropout_seed.fill_((self.seed * 1_000_003 + micro_batch_id) & (2**63 - 1))

    def ahead_step(self, batch: PackedBatch, *, any_shape: bool = False) -> None:
        """Add a batch to the sums that the loss needs ahead of a step's micro-batches; call `share_ahead` after the
        last such batch. `any_shape`: as for `micro_step`."""
        spans.phase("ahead", operation="rotary tables")
        if self.other_backends and not any_shape:
            self._choose_attention(batch)
        backend, longest = (self.eager_backend, None) if any_shape else (self.backend, self.longest_ahead)
        with torch.no_grad(), matmul.tuned(self.tuned and not any_shape):
            ctx = self.decoder.begin_batch(batch, backend, longest)
            self.own_ahead.add_(sums_ahead(self.loss, self.decoder, batch, ctx, self.start))

    def share_ahead(self) -> None:
        """Sum `own_ahead` over ranks and move it to `ahead`, which the step's micro-batches read."""
        if self.reduce is not None:
            self.reduce.add_up(self.own_ahead)
        self.ahead += self.own_ahead
        self.own_ahead.zero_()

    def micro_step(self, batch: PackedBatch, *, any_shape: bool = False) -> None:
        """Add the loss and the gradients of a batch to the sums. `any_shape`: this shape is not expected again, so
        nothing is planned or timed for it."""
        decoder = self.decoder
        if self.loss.ahead:
            batch = replace(batch, extra={**batch.extra, "ahead": self.ahead})
        spans.phase("forward", operation="rotary tables")
        if self.side_streams is not None:
            self.side_streams.forget()
        dropout = Dropout(self.dropout, self.dropout_seed) if self.dropout else None
        if self.other_backends and not any_shape:
            self._choose_attention(batch)
        backend, longest = (self.eager_backend, None) if any_shape else (self.backend, self.longest)
        ctx = decoder.begin_batch(batch, backend, longest, dropout=dropout, side_streams=self.side_streams)
        tape = self.tapes.new(
            len(decoder.blocks), len(batch.tokens), decoder.spec.width, decoder.compute, decoder.device
        )

        with matmul.tuned(self.tuned and not any_shape):
            reference = reference_of(self.loss, decoder, batch, ctx, self.start)
            spans.phase("forward")
            if self.routing is not None:
                ctx.routing = RoutingPass.of(self.routing, len(batch.tokens), batch.rows, batch.labels)
            # No local variable: it would keep the residual stream and its gradient alive during the backward pass.
            decoder.backward(
                self.grad_of_loss(decoder.forward(batch.tokens, ctx, batch.rows, tape), batch, reference),
                batch.tokens,
                ctx,
                batch.rows,
                tape,
            )

    def grad_of_loss(self, stream: ResidualStream, batch: PackedBatch, reference: torch.Tensor | None) -> torch.Tensor:
        """Add the loss and its figures to their sums; returns the gradient of the residual stream's rows."""
        spans.phase("loss")
        scale = self.scaler.scale * self.unit if self.scaler else None
        with rehearsal.owned(LOGITS):
            output = self.decoder.read_out(stream, temperature=self.loss.temperature)
            found = self.loss(output, batch, reference, scale=scale)
            total, grad, figures = checked(self.loss, found, output.normed)
            self.loss_sum.add_(total, alpha=self.unit)
            self.token_sum.add_((batch.labels >= 0).sum())
            if figures is not None:
                self.figure_sums.add_(figures, alpha=self.unit)
            assert grad is not None
            return output.backward(grad)

    def _choose_attention(self, batch: PackedBatch) -> None:
        """Time the attention backends and keep the fastest. The scale and the row strides are those of a real layer, so
        that the step can use the plans built here. A model without attention skips this."""
        from graftune.kernels.attention import timing

        names, self.other_backends = (self.backend, *self.other_backends), ()
        parts = (part for block in self.decoder.blocks for part in block.parts)
        one = next((part for part in parts if isinstance(part, Attention) and part.own is None), None)
        if one is None:
            return
        longest = max(batch.lengths) if self.longest is None else self.longest
        case = timing.Case(
            len(batch.tokens), longest, one.heads, self.decoder.compute, one.spec.score_scale, *one.row_strides
        )
        self.backend = timing.fastest(names, batch.cu_seqlens, case)

    def update_step(self) -> torch.Tensor:
        """Clip the summed gradients, apply AdamW and zero the gradients. Returns `report`."""
        arena, state = self.arena, self.scaler.state if self.scaler else None
        if self.reduce is not None and self.reduce.captured:
            self._add_up_ranks(self.reduce)
        spans.phase("update", operation="gradient norm")
        if self.loss.figures:
            means = self.loss.means(self.figure_sums, adamw.Hyper(*self.row).divisor)
            self.report[self.own_figures].copy_(means)
            self.figure_sums.zero_()
        # clip writes the report, the factors and ok, counts the update and zeroes the loss sum.
        decided = self.report[:3], self.factors, self.ok
        grad_norm.clip(arena.grads, self.table, self.row, self.loss_sum, self.count, *decided, state, self.partials)
        buffers = arena.weights, arena.grads, arena.m, arena.v, arena.compute
        self.report[3].copy_(self.token_sum)
        self.token_sum.zero_()
        if self.routing is not None:
            self.routing.take(self.report[self.routed])
        if self.loss.ahead:
            self.ahead.zero_()
        if self.scaler is not None:
            self.report[4].copy_(self.scaler.scale)
        adamw.step(*buffers, self.table, self.row, self.count, self.ok, self.factors)  # also zeroes the gradients
        arena.publish(cast=False)  # copies A and s B beside their weights; AdamW wrote arena.compute already
        return self.report

    def reduce_outside_graph(self) -> None:
        """Sum over ranks before `update_step`, where the collective cannot be captured with it."""
        if self.reduce is not None and not self.reduce.captured:
            self._add_up_ranks(self.reduce)

    def _add_up_ranks(self, reduce: Reduce) -> None:
        spans.phase("update", operation="sum over ranks")
        self.tail.fill()
        reduce.add_up(self.arena.sums)
        self.tail.report(self.report[self.routed.stop :])

    def signals(self, report: Sequence[float]) -> RankSignals:
        """Whether any rank, this one included, asks to stop, and whether the ranks' weights differ, from a step's
        report."""
        return RankSignals() if self.reduce is None else signals(report[self.routed.stop :], self.reduce.size)

    def discard(self) -> None:
        """Drop the gradients and sums since the last update."""
        self.arena.grads.zero_()
        self.tail.zero()
        if self.routing is not None:
            self.routing.sums.zero_()
        self.ahead.zero_()
        self.own_ahead.zero_()
