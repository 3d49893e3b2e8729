"""Causal attention over the documents of a pass: qkv as one product, bias, q and k norms and rope in one kernel, o.

The backward keeps qkv as rotated in place and attention's output; the rotation is undone without its input. Gradients
of weights that nothing waits for run beside attention's backward, whose kernels leave much of the GPU idle.

Legend: T tokens, D width, N heads, K key heads, H head width, S sequences.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from graftune.kernels import attention, rope
from graftune.model.context import PassContext, Past, Sequences
from graftune.model.part import (
    AttentionShape,
    Bias,
    CacheBytes,
    FileOrder,
    Mixer,
    MixerSpec,
    NormWeight,
    PartInput,
    PartPlacer,
    SavedInput,
)
from graftune.model.projection import Projection, ReadyGrad
from graftune.model.rotary import RopeSpec


@dataclass(frozen=True)
class AttentionSpec(MixerSpec):
    width: int
    heads: int
    kv_heads: int
    head_width: int
    norm_eps: float
    score_scale: float
    rope: RopeSpec
    score_cap: float = 0.0  # soft cap of the scores; 0: none
    window: int = 0  # sliding window; 0: none
    bias: bool = False  # of q, k and v
    interleaved: tuple[str, ...] = ()  # the kinds of files that interleave the two halves of each head of q and k
    fused: bool = False  # checkpoints hold q, k and v as one projection
    qk_norm: bool = False
    wide_qk_norm: bool = False  # over all heads of q, and of k, together
    norm_offset: float = 0.0  # of q's and k's norms (NormSpec.offset)
    module: str = "self_attn"
    out: str = "o_proj"
    qk_norms: tuple[str, str] = ("q_norm", "k_norm")

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        q, kv = self.heads * self.head_width, self.kv_heads * self.head_width
        qkv = {"qkv_proj": q + 2 * kv} if self.fused else {"q_proj": q, "k_proj": kv, "v_proj": kv}
        return {name: (out, self.width) for name, out in qkv.items()} | {self.out: (self.width, q)}

    @property
    def groups(self) -> dict[str, tuple[str, ...]]:
        return {"qkv": ("qkv_proj",) if self.fused else ("q_proj", "k_proj", "v_proj"), "o": (self.out,)}

    @property
    def biased(self) -> tuple[str, ...]:
        return self.groups["qkv"] if self.bias else ()

    @property
    def norms(self) -> dict[str, int]:
        if not self.qk_norm:
            return {}
        heads = (self.heads, self.kv_heads) if self.wide_qk_norm else (1, 1)
        return {name: count * self.head_width for name, count in zip(self.qk_norms, heads, strict=True)}

    def order_in(self, file: str, name: str) -> FileOrder | None:
        """Hugging Face stores what rope turns of a head as two halves, and rope rotates a value of one half with one of
        the other. The llama architecture of GGUF, and a few others, interleave the halves, so that rope rotates
        neighbours."""
        heads = {"q_proj": self.heads, "k_proj": self.kv_heads}.get(name)  # no file interleaves a fused projection
        if file not in self.interleaved or heads is None:
            return None
        order = torch.arange(heads * self.head_width).view(heads, self.head_width)
        turned = order[:, : self.rope.width].unflatten(1, (2, -1)).transpose(1, 2).flatten(1)
        return FileOrder(0, torch.cat((turned, order[:, self.rope.width :]), 1).reshape(-1))

    @property
    def residual_outputs(self) -> tuple[str, ...]:
        return (self.out,)

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        return (self.rope,)

    @property
    def attention(self) -> AttentionShape:
        return AttentionShape(self.heads, self.kv_heads, self.head_width, self.window, self.score_cap > 0)

    @property
    def checks(self) -> dict[str, bool]:
        return {
            "key heads": self.kv_heads > 0 and self.heads % self.kv_heads == 0,
            "head width": self.head_width > 0 and self.head_width % 2 == 0,
            "scales": 0 < self.score_scale < math.inf,
            "window": self.window >= 0,
            "caps": 0 <= self.score_cap < math.inf,
            "rope's share of a head": 0 < self.rope.width <= self.head_width and self.rope.width % 2 == 0,
            "rope base": 0 < self.rope.theta < math.inf,
        }

    def norm_offset_of(self, name: str) -> float:
        return self.norm_offset if name in self.qk_norms else 0.0

    def build(self, place: PartPlacer) -> Attention:
        q_norm, k_norm = (place.norm(name) for name in self.qk_norms) if self.qk_norm else (None, None)
        return Attention(
            layer=place.layer,
            heads=(self.heads, self.kv_heads, self.head_width),
            qkv=place.projection("qkv"),
            o=place.projection("o"),
            bias=place.bias("qkv") if self.bias else None,
            q_norm=q_norm,
            k_norm=k_norm,
            norm_eps=self.norm_eps,
            rope_index=place.rope(self.rope),
            window=self.window,
            score_scale=self.score_scale,
            score_cap=self.score_cap,
        )

    def new_cache(self, sequences: int, capacity: int, device: torch.device, dtype: torch.dtype) -> KeyValues:
        return KeyValues((sequences, self.kv_heads, capacity, self.head_width), device, dtype)

    def cache_bytes(self, dtype: torch.dtype) -> CacheBytes:
        return CacheBytes(0, 2 * self.kv_heads * self.head_width * dtype.itemsize)


class OwnBackend(NamedTuple):
    """The backend of a layer whose heads differ from those of most layers."""

    fixed: str  # for batches of a fixed shape
    any_shape: str


class AttentionSaved(NamedTuple):
    qkv: torch.Tensor  # [T, (N + 2K) H], rotated
    raw: torch.Tensor  # [T, N + K, H] before q's and k's norm; empty without one
    mixed: torch.Tensor  # [T, N H + adapter_columns], attention's output
    stats: torch.Tensor  # of the softmax
    h_qkv: torch.Tensor | None
    h_o: torch.Tensor | None


@dataclass
class Attention(Mixer[AttentionSaved]):
    layer: int
    heads: tuple[int, int, int]  # N, K, H
    qkv: Projection
    o: Projection
    bias: Bias | None
    q_norm: NormWeight | None
    k_norm: NormWeight | None
    norm_eps: float
    rope_index: int  # of the rotary tables
    window: int
    score_scale: float
    score_cap: float
    own: OwnBackend | None = None  # in place of the pass's backend

    @property
    def head_kind(self) -> attention.HeadKind:
        return attention.HeadKind(self.heads[2], self.score_cap > 0)

    @property
    def projections(self) -> tuple[Projection, ...]:
        return self.qkv, self.o

    @property
    def last(self) -> Projection:
        return self.o

    def forward(self, entry: PartInput, ctx: PassContext) -> tuple[torch.Tensor, AttentionSaved]:
        qkv, h_qkv = entry.product(self.qkv)
        raw = rope.finish_(
            qkv, *ctx.tables[self.rope_index], self.heads, bias=self.bias.value if self.bias else None,
            q_norm=_weight(self.q_norm, ctx), k_norm=_weight(self.k_norm, ctx), eps=self.norm_eps,
        )  # fmt: skip
        mixed = self.o.input_buffer(entry.x, len(entry.x))
        stats = self._attend(*self._split(qkv), self._by_head(mixed), ctx.sequences)
        out, h_o = self.o.forward(mixed, ctx)
        return out, AttentionSaved(qkv, raw, mixed, stats, h_qkv, h_o)

    def backward(
        self,
        grad: torch.Tensor,
        ready: ReadyGrad | None,
        read: SavedInput,
        saved: AttentionSaved,
        ctx: PassContext,
        need_input: bool,
    ) -> torch.Tensor | None:
        qkv, raw, mixed, stats, h_qkv, h_o = saved
        grad_mixed, g = self.o.backward(grad, h_o, ctx, ready=ready)
        assert grad_mixed is not None
        self.o.accumulate_grad(grad, g, mixed[:, : self.o.width_in], ctx)

        documents = ctx.sequences.documents
        assert documents is not None, "generation has no backward"
        window, backend = self._how(ctx.sequences, documents)
        q, k, v = self._split(qkv)
        grads, grad_qkv = attention.grad_buffers(q, k, backend), None
        if grads is None:
            grad_qkv = self.qkv.grad_buffer(read.x, len(read.x))
            grads = self._split(grad_qkv)
        ctx.flush()  # starts the queued weight gradients on side streams, beside attention
        attention.backward(
            self._by_head(grad_mixed), q, k, v, self._by_head(mixed), stats, documents, self.score_scale, window, grads,
            backend, self.score_cap,
        )  # fmt: skip
        del grad_mixed
        if grad_qkv is None:  # only now: attention's own memory is free again
            grad_qkv = self.qkv.grad_buffer(read.x, len(read.x))
        tables, ready = ctx.tables[self.rope_index], None
        if need_input and self.q_norm is None:
            ready = self.qkv.rope_backward(grads, grad_qkv, tables, self.heads, ctx)
        else:
            rope.finish_backward(
                grads, grad_qkv[:, : self.qkv.width_out], *tables, self.heads, raw,
                q_norm=_weight(self.q_norm, ctx), k_norm=_weight(self.k_norm, ctx), eps=self.norm_eps,
                grad_q_norm=self.q_norm.grad if self.q_norm else None,
                grad_k_norm=self.k_norm.grad if self.k_norm else None,
            )  # fmt: skip
        del grads
        if self.bias is not None and self.bias.grad is not None:
            self.bias.grad.add_(grad_qkv[:, : self.qkv.width_out].sum(0, dtype=torch.float32))

        grad_read, g = self.qkv.backward(grad_qkv, h_qkv, ctx, need_input, ready)
        self.qkv.accumulate_grad(grad_qkv, g, read.x, ctx, read.normed)
        return grad_read

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, sequences: Sequences
    ) -> torch.Tensor:
        """Writes out [T, N, H], whose tokens may have a row stride; returns statistics for the backward."""
        past, documents = sequences.past, sequences.documents
        if past is not None:
            cache = past.layers[self.layer]
            assert isinstance(cache, KeyValues)
            if documents is None:
                cache.attend(self, q, k, v, out, past)
                return out.new_empty(0)
            assert documents.lengths is not None
            cache.fill(k, v, documents.lengths)
        assert documents is not None
        window, backend = self._how(sequences, documents)
        return attention.forward(q, k, v, documents, self.score_scale, window, backend, out, self.score_cap)[1]

    def _how(self, sequences: Sequences, documents: attention.Documents) -> tuple[int, str]:
        """(window, backend). A window that no document reaches is ignored. cuDNN's plans have neither windows nor soft
        caps, so layers with either use our own kernels."""
        window, backend = self.window if self.window < documents.longest else 0, sequences.backend
        if self.own is not None and backend != "cpu":
            backend = self.own.fixed if documents.fixed else self.own.any_shape
        return window, "triton" if (window or self.score_cap) and backend != "cpu" else backend

    def _split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[T, (N + 2K) H (+ adapter_columns)] -> q [T, N, H], k and v [T, K, H], all views."""
        heads, key_heads, width = self.heads
        parts = qkv[:, : self.qkv.width_out].unflatten(1, (-1, width))
        q, k, v = parts.split([heads, key_heads, key_heads], 1)
        return q, k, v

    def _by_head(self, mixed: torch.Tensor) -> torch.Tensor:
        """[T, N H (+ adapter_columns)] -> [T, N, H], a view."""
        return mixed[:, : self.o.width_in].unflatten(1, (-1, self.heads[2]))


class KeyValues:
    """Keys and values of one layer while text is generated: [S, K, capacity, H], each sequence filled up to its own
    length."""

    def __init__(self, shape: tuple[int, int, int, int], device: torch.device, dtype: torch.dtype):
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)

    def keep(self, sequences: torch.Tensor) -> None:
        self.keys = self.keys.index_select(0, sequences)
        self.values = self.values.index_select(0, sequences)

    def fill(self, k: torch.Tensor, v: torch.Tensor, lengths: tuple[int, ...]) -> None:
        """The packed prompts' [T, K, H]."""
        start = 0
        for sequence, length in enumerate(lengths):
            for stored, fresh in ((self.keys, k), (self.values, v)):
                stored[sequence, :, :length] = fresh[start : start + length].transpose(0, 1)
            start += length

    def attend(
        self, of: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, past: Past
    ) -> None:
        """One new token a sequence, each seeing its own past."""
        (heads, key_heads, width), lengths = of.heads, past.lengths
        self.keys[past.sequences, :, lengths] = k
        self.values[past.sequences, :, lengths] = v
        grouped = q.reshape(-1, key_heads, heads // key_heads, width)
        scores = (grouped @ self.keys.transpose(2, 3)).float() * of.score_scale
        if of.score_cap:
            scores = torch.tanh(scores / of.score_cap) * of.score_cap
        hidden = past.token_indices > lengths[:, None]
        if of.window:
            hidden |= past.token_indices <= lengths[:, None] - of.window
        scores.masked_fill_(hidden[:, None, None], float("-inf"))
        out.copy_((torch.softmax(scores, -1).to(v.dtype) @ self.values).reshape(-1, heads, width))


def _weight(norm: NormWeight | None, ctx: PassContext) -> torch.Tensor | None:
    return None if norm is None else norm.of(ctx.adapted)
