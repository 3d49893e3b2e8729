"""The whole forward, top to bottom: embed, blocks, final norm, head.

One decoder for every family: they differ by values of the spec (bias, QK norm, window, rope), never by a copy of this
file. It works on packed tokens [T] without a batch dimension; who may see whom is the business of `Pass.attend`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from graftune.kernels import attention, linear_cross_entropy, rms_norm, rope
from graftune.model.block import Attend, AttentionHalf, Block, Dropout, MlpHalf, NormWeight, Pass
from graftune.model.frozen import Frozen
from graftune.model.spec import ModelSpec


@dataclass
class NewRows:
    """Embedding or head rows of added tokens: trained, in the arena, behind the base's own vocabulary."""

    value: torch.Tensor  # [added, D], compute dtype
    grad: torch.Tensor  # fp32
    start: torch.Tensor  # what they were before training: the base's rows, as far as it has any


@dataclass
class Head:
    """The LM head: the base's frozen rows and, behind them, the rows of added tokens."""

    frozen: Frozen
    added: NewRows | None = None

    @property
    def out_features(self) -> int:
        return self.frozen.out_features + (len(self.added.value) if self.added else 0)

    def of(self, adapted: bool) -> Head:
        if adapted or self.added is None:
            return self
        return Head(self.frozen, replace(self.added, value=self.added.start))

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.frozen.matmul(x)
        return logits if self.added is None else torch.cat((logits, x @ self.added.value.t()), 1)

    def input_grad(self, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if self.added is None:
            return self.frozen.input_grad(grad)
        base, extra = grad.split([self.frozen.out_features, len(self.added.value)], 1)
        self.added.grad.add_(extra.t() @ x)
        return self.frozen.input_grad(base).addmm_(extra, self.added.value)


@dataclass
class Decoder:
    spec: ModelSpec
    embedding: Frozen
    blocks: list[Block]
    norm: NormWeight
    head: Head
    inverse_frequencies: torch.Tensor  # [H/2]
    rope_scaling: float
    device: torch.device
    compute: torch.dtype
    added: NewRows | None = None

    def __post_init__(self) -> None:
        # Requires a gradient so that autograd records the blocks although no frozen tensor does.
        self.anchor = torch.zeros((), device=self.device, requires_grad=True)

    def begin(
        self, positions: torch.Tensor, attend: Attend, *, adapted: bool = True, dropout: Dropout | None = None
    ) -> Pass:
        """What the blocks share in one forward: rotary tables [T, 1, H/2], attention, adapters on or off."""
        cos, sin = rope.tables(positions, self.inverse_frequencies, self.rope_scaling)
        return Pass(cos, sin, attend, adapted, dropout)

    def hidden(self, tokens: torch.Tensor, run: Pass, rows: torch.Tensor | None = None) -> torch.Tensor:
        """tokens [T] -> the last block's output, [T, D], or only its given rows [R, D].

        The last MLP sees no other row: its output elsewhere is never used.
        """
        x = self.embed(tokens, run.adapted)
        for block in self.blocks:
            x = AttentionHalf.apply(x, self.anchor, block, run)
            if rows is not None and block is self.blocks[-1]:
                x = x.index_select(0, rows)
            x = MlpHalf.apply(x, self.anchor, block, run)
        return x

    def embed(self, tokens: torch.Tensor, adapted: bool) -> torch.Tensor:
        if self.added is None:
            return self.embedding.rows(tokens)
        rows = self.added.value if adapted else self.added.start
        return _EmbedWithNew.apply(self.anchor, self.embedding, rows, self.added.grad, tokens)

    def loss(
        self, x: torch.Tensor, labels: torch.Tensor, *, adapted: bool = True, need_grad: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows [R, D] and the tokens they should predict -> (loss sum in fp32, gradient of the rows)."""
        weight = self.norm.of(adapted)
        normed = rms_norm.forward(x, weight, self.spec.norm_eps)
        total, grad = linear_cross_entropy.forward(normed, self.head.of(adapted), labels, need_grad=need_grad)
        if grad is None:
            return total, None
        return total, rms_norm.backward(grad, x, weight, self.spec.norm_eps, self.norm.grad)

    def logits(self, x: torch.Tensor, *, adapted: bool = True) -> torch.Tensor:
        """Rows [R, D] -> [R, V] in fp32."""
        normed = rms_norm.forward(x, self.norm.of(adapted), self.spec.norm_eps)
        return self.head.of(adapted).matmul(normed).float()

    @property
    def frozen_bytes(self) -> int:
        weights = [w for b in self.blocks for w in (b.qkv, b.o, b.gate_up, b.down)]
        tied = self.head.frozen is self.embedding
        return sum(w.nbytes for w in weights) + self.embedding.nbytes + (0 if tied else self.head.frozen.nbytes)


@dataclass(frozen=True)
class PackedDocuments:
    """Attention of a training or evaluation pass: causal inside each document, nothing across."""

    lengths: tuple[int, ...]

    def forward(
        self, block: Block, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return attention.forward(q, k, v, self.lengths, block.heads[2] ** -0.5, block.window)

    def backward(
        self,
        block: Block,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        stats: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return attention.backward(grad, q, k, v, out, stats, self.lengths, block.heads[2] ** -0.5, block.window)


class _EmbedWithNew(torch.autograd.Function):
    """Lookup in the base's table and, from its end on, in the rows of added tokens."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, table: Frozen, rows: torch.Tensor, grad: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        index = (tokens - table.out_features).clamp(min=0)
        is_new = (tokens >= table.out_features).unsqueeze(1)
        ctx.save_for_backward(index, is_new)
        ctx.grad = grad
        known = table.rows(tokens.clamp(max=table.out_features - 1))
        return torch.where(is_new, rows.index_select(0, index), known)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None, None, None, None]:
        index, is_new = ctx.saved_tensors
        ctx.grad.index_add_(0, index, (grads[0] * is_new).float())
        return None, None, None, None, None
