"""The whole forward, top to bottom: embed, blocks, final norm, head.

One decoder for every family: they differ by values of the spec (parts of each layer, where norms lie, bias, QK norm,
window, ropes, scales, caps), never by a copy of this file. It works on packed tokens [T] without a batch dimension;
which of them belong together is the business of `PassContext.sequences`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from graftune import spans
from graftune.batch import PackedBatch
from graftune.kernels import attention, linear_cross_entropy, rms_norm, rope
from graftune.model.block import Block
from graftune.model.bundles import EMBEDDING, HEAD, Bundles, Residents
from graftune.model.context import Dropout, PassContext, Sequences, SideStreams
from graftune.model.frozen import Frozen, Trained
from graftune.model.head import Head, NewRows, Output
from graftune.model.part import NormWeight
from graftune.model.projection import augmented_buffer
from graftune.model.rotary import Rope
from graftune.model.spec import ModelSpec
from graftune.model.tape import Tape


class Stream(NamedTuple):
    """The residual stream x and what is still to be added to it."""

    x: torch.Tensor
    y: torch.Tensor


@dataclass
class Decoder:
    spec: ModelSpec
    embedding: Frozen
    blocks: list[Block]
    norm: NormWeight
    head: Head
    ropes: tuple[Rope, ...]  # for each of spec.rope_kinds
    device: torch.device
    compute: torch.dtype
    added: NewRows | None = None
    bundles: Bundles | Residents = field(default_factory=Residents)  # brings frozen weights here that lie elsewhere

    def begin(
        self,
        positions: torch.Tensor,
        sequences: Sequences,
        *,
        adapted: bool = True,
        dropout: Dropout | None = None,
        side_streams: SideStreams | None = None,
    ) -> PassContext:
        """What the blocks share in one forward: rotary tables, which tokens belong together, adapters on or off."""
        tables = []
        for kind in self.ropes:
            frequencies = kind.frequencies
            if kind.far is not None:
                is_far = (sequences.final_lengths(positions) > kind.limit).unsqueeze(1)
                frequencies = torch.where(is_far, kind.far, frequencies)
            tables.append(rope.tables(positions, frequencies, kind.scaling))
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
        fixed; None: the longest of this batch. `backend` is attention's."""
        bound = max(batch.lengths) if longest is None else longest
        documents = attention.Documents(batch.cu_seqlens, batch.lengths, bound)
        return self.begin(
            batch.positions,
            PackedDocuments(documents, backend),
            adapted=adapted,
            dropout=dropout,
            side_streams=side_streams,
        )

    def forward(
        self, tokens: torch.Tensor, ctx: PassContext, rows: torch.Tensor | None = None, tape: Tape | None = None
    ) -> Stream:
        """tokens [T] -> the last block's output, all rows [T, D] or only the given ones [R, D].

        The last feed-forward sees no other row: its output elsewhere is never used. `tape` keeps what `backward` needs.
        """
        self.bundles.begin()
        x, y = self.embed(tokens, ctx.adapted), None
        for block in self.blocks:
            spans.layer(block.index)
            self.bundles.enter(block.index)
            x, y, mixed = block.mixing.forward(x, y, ctx)
            if rows is not None and block is self.blocks[-1]:
                spans.operation("response rows")
                x, y = x.index_select(0, rows), y.index_select(0, rows)
            x, y, fed = block.feeding.forward(x, y, ctx)
            self.bundles.leave(block.index, following=block.index + 2)
            if tape is not None:
                tape.keep(block, mixed, fed)
            del mixed, fed
        spans.layer(None)
        assert y is not None, "a decoder has at least one block"
        return Stream(x, y)

    def backward(
        self, grad: torch.Tensor, tokens: torch.Tensor, ctx: PassContext, rows: torch.Tensor, tape: Tape
    ) -> None:
        """The gradient that `Output.backward` gave of the rows -> everything that learns has its gradient added."""
        stream: torch.Tensor | None = grad
        del grad
        trainable_below, ready = self.added is not None or isinstance(self.embedding, Trained), None
        self.bundles.leave(HEAD, following=EMBEDDING)
        for block in reversed(self.blocks):
            last = block is self.blocks[-1]
            spans.phase("recompute", block.index)
            self.bundles.enter(block.index)
            mixed, fed = tape.take(block, ctx, rows if last else None)
            spans.phase("backward", block.index)
            assert stream is not None
            stream, ready = block.feeding.backward(stream, ready, fed, ctx, below=block.mixing)
            assert stream is not None
            del fed
            if last:  # rows that predict nothing have no gradient from the last feed-forward
                spans.operation("response rows")
                stream = self._stream_buffer(stream, len(tokens)).zero_().index_add_(0, rows, stream)
                ready = None
            # In the first block nothing below learns, so the input's gradient is not computed.
            below = self.blocks[block.index - 1].feeding if block.index else None
            need = trainable_below or below is not None
            stream, ready = block.mixing.backward(stream, ready, mixed, ctx, below, need)
            self.bundles.leave(block.index, following=block.index - 2)
            ctx.join()
            del mixed
            if stream is None:
                break
        spans.phase("backward")
        ctx.flush()
        ctx.join()
        if trainable_below and stream is not None:
            spans.operation("embedding")
            self._embed_backward(tokens, stream[:, : self.spec.width])
        self.bundles.settle()

    def hidden(self, tokens: torch.Tensor, ctx: PassContext, rows: torch.Tensor | None = None) -> torch.Tensor:
        """The same without a backward: [T, D] or [R, D]."""
        x, y = self.forward(tokens, ctx, rows)
        return y.add_(x)

    def embed(self, tokens: torch.Tensor, adapted: bool) -> torch.Tensor:
        """Lookup in the base's table and, from its end on, in the rows of added tokens; scaled as the family has it."""
        self.bundles.enter(EMBEDDING)
        with spans.covering("embedding"):
            x = self._lookup(tokens, adapted)
        self.bundles.leave(EMBEDDING, following=HEAD)
        return x if self.spec.embedding_scale == 1 else x * self._embedding_scale

    @property
    def _embedding_scale(self) -> float:
        """Rounded to the compute dtype, as it was where these models were trained."""
        return float(torch.tensor(self.spec.embedding_scale, dtype=self.compute))

    def _lookup(self, tokens: torch.Tensor, adapted: bool) -> torch.Tensor:
        if self.added is None:
            return self.embedding.rows(tokens)
        rows = self.added.value if adapted else self.added.start
        known = self.embedding.rows(tokens.clamp(max=self.embedding.out_features - 1))
        index, is_new = self._new(tokens)
        return torch.where(is_new, rows.index_select(0, index), known)

    def _embed_backward(self, tokens: torch.Tensor, grad: torch.Tensor) -> None:
        if self.spec.embedding_scale != 1:
            grad = grad * self._embedding_scale
        if isinstance(self.embedding, Trained):
            self.embedding.accumulate_row_grads(tokens, grad)
        if self.added is not None:
            index, is_new = self._new(tokens)
            self.added.grad.index_add_(0, index, (grad * is_new).float())

    def _new(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        known = self.embedding.out_features
        return (tokens - known).clamp(min=0), (tokens >= known).unsqueeze(1)

    def _stream_buffer(self, like: torch.Tensor, rows: int) -> torch.Tensor:
        """[rows, D + adapter_columns] for the stream's gradient."""
        return augmented_buffer(like, rows, self.spec.width, self._adapter_columns)

    @property
    def _adapter_columns(self) -> int:
        """The stream's gradient is what the parts' last projections read, so it has their adapter columns."""
        return max(max(block.mixing.adapter_columns, block.feeding.adapter_columns) for block in self.blocks)

    def read_out(self, stream: Stream, *, adapted: bool = True) -> Output:
        """Final norm and head over the rows of a forward pass: what a loss computes from."""
        self.bundles.enter(HEAD)
        weight, normed = self.norm.of(adapted), torch.empty_like(stream.x)
        with spans.covering("final norm"):
            x, rstd = rms_norm.add_forward(stream.x, stream.y, weight, self.spec.norm_eps, normed)
        head, spec = self.head.of(adapted), self.spec
        return Output(
            head, normed, x, rstd, weight, self.norm.grad, self._adapter_columns, spec.logit_scale, spec.logit_cap
        )

    def logits(self, x: torch.Tensor, *, adapted: bool = True) -> torch.Tensor:
        """Rows [R, D] -> [R, V] in fp32."""
        self.bundles.enter(HEAD)
        normed = rms_norm.forward(x, self.norm.of(adapted), self.spec.norm_eps)
        logits = self.head.of(adapted).matmul(normed).float()
        self.bundles.settle()  # the next token's pass may be a replay
        return linear_cross_entropy.soft_capped(logits, self.spec.logit_scale, self.spec.logit_cap)


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
