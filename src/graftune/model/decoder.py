"""The whole forward, top to bottom: embed, blocks, final norm, head.

One decoder for every family: they differ by values of the spec (branches, parts and norms of each layer, ropes, scales,
caps), never by a copy of this file. It works on packed tokens [T] without a batch dimension; `PassContext.sequences`
says which of them belong together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from graftune import spans
from graftune.batch import PackedBatch
from graftune.kernels import attention, linear_cross_entropy, rms_norm, rope
from graftune.model.block import Block, ResidualGrad, ResidualStream
from graftune.model.bundles import EMBEDDING, HEAD, Bundles, Residents
from graftune.model.context import Dropout, PassContext, RopeTables, Sequences, SideStreams
from graftune.model.frozen import Frozen, Scratch, Trained
from graftune.model.head import Head, NewRows, Output
from graftune.model.layer_inputs import LayerInputMaker
from graftune.model.part import NormWeight
from graftune.model.rotary import Rope
from graftune.model.spec import ModelSpec
from graftune.model.tape import Tape


@dataclass
class Decoder:
    spec: ModelSpec
    embedding: Frozen
    blocks: list[Block]
    norm: NormWeight
    head: Head
    ropes: tuple[Rope, ...]  # for each of spec.ropes
    device: torch.device
    compute: torch.dtype
    new_rows: NewRows | None = None  # rows of added tokens, which train
    embedding_norm: NormWeight | None = None
    scratch: Scratch | None = None  # of quantised weights, where there are any
    bundles: Bundles | Residents = field(default_factory=Residents)  # fetches frozen weights from elsewhere
    layer_inputs: LayerInputMaker | None = None  # makes what parts read beside the residual stream; None: no part does

    def begin(
        self,
        positions: torch.Tensor,
        sequences: Sequences,
        *,
        adapted: bool = True,
        dropout: Dropout | None = None,
        side_streams: SideStreams | None = None,
    ) -> PassContext:
        """The context that the blocks of one pass share: rotary tables, which tokens belong together, adapters on or
        off."""
        tables, documents, past = [], sequences.documents, sequences.past
        # Positions stay below `bound`; with a past that is not empty it is not known.
        bound = None if documents is None or (past is not None and not past.new) else documents.longest
        for kind in self.ropes:
            frequencies = kind.frequencies
            if kind.far is not None:  # longrope: other frequencies for documents beyond `limit`
                is_far = (sequences.final_lengths(positions) > kind.limit).unsqueeze(1)
                frequencies = torch.where(is_far, kind.far, frequencies)
            q_scale = kind.q_scale(positions, bound)
            tables.append(RopeTables(*rope.tables(positions, frequencies, kind.scaling), q_scale))
        return PassContext(tuple(tables), positions, sequences, adapted, dropout, side_streams)

    def begin_batch(
        self,
        batch: PackedBatch,
        backend: str,
        longest: int | None = None,
        *,
        adapted: bool = True,
        dropout: Dropout | None = None,
        side_streams: SideStreams | None = None,
    ) -> PassContext:
        """Begin a pass over the documents of a batch. `longest` bounds their lengths where the shape of the pass is
        fixed; None: the longest of this batch. `backend` is the attention backend of layers with the most common
        heads."""
        bound = max(batch.lengths) if longest is None else longest
        documents = attention.Documents(batch.cu_seqlens, batch.lengths, bound, fixed=longest is not None)
        return self.begin(
            batch.positions,
            PackedDocuments(documents, backend),
            adapted=adapted,
            dropout=dropout,
            side_streams=side_streams,
        )

    def forward(
        self, tokens: torch.Tensor, ctx: PassContext, rows: torch.Tensor | None = None, tape: Tape | None = None
    ) -> ResidualStream:
        """tokens [T] -> the last block's output, all rows [T, D] or only the given ones [R, D], which are selected
        after the last mixer. `tape` keeps what `backward` needs."""
        self.bundles.begin()
        ctx.inputs_only = tape is None or tape.inputs_only
        stream = ResidualStream(self.embed(tokens, ctx, save=tape is not None and self._embedding_trains))
        ctx.layer_inputs = None if self.layer_inputs is None else self.layer_inputs(tokens, stream.x)
        for block in self.blocks:
            spans.layer(block.index)
            self.bundles.enter(block.index)
            saved = block.forward(stream, ctx, rows if block is self.blocks[-1] else None)
            self.bundles.leave(block.index, following=block.index + 2)
            if tape is not None:
                tape.keep(block, saved)
            del saved
        spans.layer(None)
        return stream

    def backward(
        self, grad: torch.Tensor, tokens: torch.Tensor, ctx: PassContext, rows: torch.Tensor, tape: Tape
    ) -> None:
        """Adds the gradients of all trained weights. `grad`: what `Output.backward` returned for the rows."""
        stream = ResidualGrad(grad)
        del grad
        ctx.inputs_only, ctx.routing = False, None  # routing that is recomputed is not counted again
        embedding_trains = self._embedding_trains
        self.bundles.leave(HEAD, following=EMBEDDING)
        for block in reversed(self.blocks):
            needed = rows if block is self.blocks[-1] else None
            spans.phase("recompute", block.index)
            self.bundles.enter(block.index)
            saved = tape.take(block, ctx, needed)
            spans.phase("backward", block.index)
            # Usually nothing below the first block trains; then the gradient of its input is not computed.
            below = self.blocks[block.index - 1] if block.index else None
            projection_below = None if below is None else below.output_projection
            block.backward(stream, saved, ctx, needed, projection_below, below is not None or embedding_trains)
            self.bundles.leave(block.index, following=block.index - 2)
            ctx.join()
        spans.phase("backward")
        ctx.flush()
        ctx.join()
        if embedding_trains and stream.grad is not None:
            spans.operation("embedding")
            grad = stream.grad[:, : self.spec.width]
            more = None if ctx.layer_inputs is None else ctx.layer_inputs.backward()
            self._embed_backward(tokens, grad if more is None else grad + more, ctx)
        self.bundles.restore_first_blocks()

    def hidden(self, tokens: torch.Tensor, ctx: PassContext, rows: torch.Tensor | None = None) -> torch.Tensor:
        """The last block's output, as of `forward` but without a backward: [T, D] or [R, D]."""
        return self.forward(tokens, ctx, rows).total()

    @property
    def _embedding_trains(self) -> bool:
        return self.new_rows is not None or isinstance(self.embedding, Trained)

    def embed(self, tokens: torch.Tensor, ctx: PassContext, *, save: bool = False) -> torch.Tensor:
        """Looks tokens up in the base's table and, beyond its end, in the rows of added tokens; scales and norms them
        as the family does. `save`: keep what the backward of the norm needs."""
        self.bundles.enter(EMBEDDING)
        with spans.covering("embedding"):
            x = self._lookup(tokens, ctx.adapted)
        self.bundles.leave(EMBEDDING, following=HEAD)
        x = x if self.spec.embedding.scale == 1 else x * self._embedding_scale
        if self.embedding_norm is None:
            return x
        assert self.spec.embedding.norm_eps is not None
        normed = torch.empty_like(x)
        read = rms_norm.add_forward(x, None, self.embedding_norm.value, self.spec.embedding.norm_eps, normed)
        ctx.embedded = read if save else None
        return normed

    @property
    def _embedding_scale(self) -> float:
        """The scale of the embedding, rounded to the compute dtype as in the training of these models."""
        return float(torch.tensor(self.spec.embedding.scale, dtype=self.compute))

    def _lookup(self, tokens: torch.Tensor, adapted: bool) -> torch.Tensor:
        if self.new_rows is None:
            return self.embedding.rows(tokens)
        rows = self.new_rows.value if adapted else self.new_rows.start
        known = self.embedding.rows(tokens.clamp(max=self.embedding.out_features - 1))
        index, is_new = self._new(tokens)
        return torch.where(is_new, rows.index_select(0, index), known)

    def _embed_backward(self, tokens: torch.Tensor, grad: torch.Tensor, ctx: PassContext) -> None:
        if self.embedding_norm is not None:
            assert ctx.embedded is not None
            grad = rms_norm.add_backward(grad, *ctx.embedded, self.embedding_norm.value, None, None)
            ctx.embedded = None
        if self.spec.embedding.scale != 1:
            grad = grad * self._embedding_scale
        if isinstance(self.embedding, Trained):
            self.embedding.accumulate_row_grads(tokens, grad)
        if self.new_rows is not None:
            index, is_new = self._new(tokens)
            self.new_rows.grad.index_add_(0, index, (grad * is_new).float())

    def _new(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        known = self.embedding.out_features
        return (tokens - known).clamp(min=0), (tokens >= known).unsqueeze(1)

    @property
    def _adapter_columns(self) -> int:
        """The last projections of the parts read the stream's gradient, so it has their adapter columns."""
        return max(block.adapter_columns for block in self.blocks)

    def read_out(self, stream: ResidualStream, *, adapted: bool = True, temperature: float = 1.0) -> Output:
        """Final norm and head over the rows of a forward pass: what a loss computes from. `temperature` divides the
        logits: l / t = (c / t) tanh((f / t) z / (c / t)), so scale and cap are divided by it."""
        self.bundles.enter(HEAD)
        weight, normed = self.norm.of(adapted), torch.empty_like(stream.x)
        with spans.covering("final norm"):
            x, rstd = rms_norm.add_forward(stream.x, stream.pending, weight, self.spec.head.norm.eps, normed)
        head, spec = replace(self.head.of(adapted), scratch=self.scratch), self.spec.head
        scale, cap = spec.logit_scale / temperature, spec.logit_cap / temperature
        return Output(head, normed, x, rstd, weight, self.norm.grad, self._adapter_columns, scale, cap)

    def logits(self, x: torch.Tensor, *, adapted: bool = True) -> torch.Tensor:
        """Rows [R, D] -> [R, V], in fp32 where the family scales or caps them."""
        self.bundles.enter(HEAD)
        head = self.spec.head
        normed = rms_norm.forward(x, self.norm.of(adapted), head.norm.eps)
        logits = self.head.of(adapted).matmul(normed)
        self.bundles.restore_first_blocks()  # the next token's pass may be a replay
        if head.logit_scale == 1 and not head.logit_cap:
            return logits
        return linear_cross_entropy.soft_capped(logits.float(), head.logit_scale, head.logit_cap)


@dataclass(frozen=True)
class PackedDocuments:
    """The tokens of a training or evaluation pass: each document sees itself, and nothing across its borders."""

    documents: attention.Documents
    backend: str = "cpu"
    past: None = None

    @staticmethod
    def of(lengths: Sequence[int], device: torch.device | str = "cpu", backend: str = "cpu") -> PackedDocuments:
        return PackedDocuments(attention.Documents.of(lengths, device), backend)

    def final_lengths(self, positions: torch.Tensor) -> torch.Tensor:
        starts, tokens = self.documents.cu_seqlens, torch.arange(len(positions), device=positions.device)
        document = torch.searchsorted(starts[1:], tokens, right=True).clamp_(max=len(starts) - 2)
        return starts.diff().index_select(0, document)
