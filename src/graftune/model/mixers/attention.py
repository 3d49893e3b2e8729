"""Causal attention over the documents of a pass: qkv in one product, bias, norms and rope in one kernel, attention, o.

The forward saves the rotated qkv and attention's output; the backward undoes the rotation without its input. Weight
gradients that are deferred run beside attention's backward, whose kernels leave much of the GPU idle; the end of the
block waits for them.

A gate on attention's output is a part of the qkv product too. A gate with a projection of its own adds columns after
q, k and v, and nothing else changes. With a gate inside q, each head is followed by its gate, as in checkpoints: the
rows of the weight, of quantised blocks and of adapters keep their order, the kernel that norms and rotates q and k
writes them to a separate buffer, and the norms' backward reads the product itself. The same holds where values are the
keys before their norm.

A layer may also use the keys and values of an earlier layer: its product is q alone, and its backward adds to the
gradients that the earlier layer's backward starts from (key_values.py).

Legend: T tokens, D width, N heads, K key heads, H head width, S sequences.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from graftune.kernels import attention, output_gate, paged_attention, rope
from graftune.model.context import PassContext, Sequences
from graftune.model.frozen import row_stride
from graftune.model.mixers.key_values import KeyValues, SharedKeys, add_grads, take_grads
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
    sinks: bool = False  # a learned score of each head beside those of the keys
    window: int = 0  # sliding window; 0: none
    bias: bool = False  # of q, k and v
    interleaved: tuple[str, ...] = ()  # the kinds of files that interleave the two halves of each head of q and k
    out_bias: bool = False
    fused: bool = False  # checkpoints hold q, k and v as one projection
    gate: str = "none"  # on the output: none | in_q (after each head of q) | value, head (a projection: see gate_proj)
    qk_norm: bool = False
    wide_qk_norm: bool = False  # over all heads of q, and of k, together
    v_norm: bool = False  # v has a norm too
    v_from_k: bool = False  # no v_proj: v is v_norm of the keys before their norm
    shares_keys: bool = False  # later layers use its keys and values
    keys_from: int | None = None  # the earlier layer whose keys and values it uses, in place of any of its own
    unweighted: tuple[str, ...] = ()  # names of the norms of q, k and v that have no weight
    norm_after_rope: bool = False
    norm_offset: float = 0.0  # of the norms of q, k and v (NormSpec.offset)
    module: str = "self_attn"
    out: str = "o_proj"
    gate_proj: str = "gate_proj"  # gates every value of a head, or the whole head
    qk_norms: tuple[str, str] = ("q_norm", "k_norm")

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        q, kv = self.heads * self.head_width, self.kv_heads * self.head_width
        q_rows = 2 * q if self.gate == "in_q" else q
        rows = {"qkv_proj": q + 2 * kv, "q_proj": q_rows, "k_proj": kv, "v_proj": kv}
        found = {name: rows[name] for name in self._qkv}
        if self.gate in ("value", "head"):
            found[self.gate_proj] = q if self.gate == "value" else self.heads
        return {name: (out, self.width) for name, out in found.items()} | {self.out: (self.width, q)}

    @property
    def groups(self) -> dict[str, tuple[str, ...]]:
        gate = (self.gate_proj,) if self.gate in ("value", "head") else ()
        return {"qkv": (*self._qkv, *gate), "o": (self.out,)}

    @property
    def _qkv(self) -> tuple[str, ...]:
        if self.fused:
            return ("qkv_proj",)
        return ("q_proj", "k_proj", "v_proj")[: 1 if self.keys_from is not None else 2 if self.v_from_k else 3]

    @property
    def biased(self) -> tuple[str, ...]:
        return (*(self._qkv if self.bias else ()), *((self.out,) if self.out_bias else ()))

    @property
    def norms(self) -> dict[str, int]:
        return {name: width for name, width in self._norm_widths.items() if name not in self.unweighted}

    @property
    def _norm_widths(self) -> dict[str, int]:
        names = (*(self.qk_norms if self.qk_norm else ()), *(("v_norm",) if self.v_norm else ()))
        names = names if self.keys_from is None else names[:1]
        heads = (self.heads, self.kv_heads) if self.wide_qk_norm else (1, 1, 1)
        return {name: count * self.head_width for name, count in zip(names, heads, strict=False)}

    def order_in(self, file: str, name: str) -> FileOrder | None:
        """The row order of q and k. Hugging Face stores the rotated columns of a head as two halves, and rope pairs a
        column of one half with one of the other. The llama architecture of GGUF, and a few others, interleave the
        halves, so that rope pairs neighbours."""
        heads = {"q_proj": self.heads, "k_proj": self.kv_heads}.get(name)  # no file interleaves a fused projection
        if file not in self.interleaved or heads is None:
            return None
        order = torch.arange(heads * self.head_width).view(heads, self.head_width)
        turned = order[:, : self.rope.width].unflatten(1, (2, -1)).transpose(1, 2).flatten(1)
        return FileOrder(0, torch.cat((turned, order[:, self.rope.width :]), 1).reshape(-1))

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        return (self.rope,)

    @property
    def attention(self) -> AttentionShape:
        capped = self.score_cap > 0
        return AttentionShape(self.heads, self.kv_heads, self.head_width, self.window, capped, self.sinks)

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
            "scale by position": 0 <= self.rope.temperature < math.inf
            and (not self.rope.temperature or self.rope.temperature_length > 0),
            "gate": self.gate in ("none", "in_q", "value", "head"),
            "keys as values": not self.v_from_k or (self.qk_norm and self.v_norm and self.gate == "none"),
            "shared keys": self.keys_from is None or not (self.fused or self.shares_keys or self.wide_qk_norm),
        }

    def moved(self, places: Mapping[int, int]) -> AttentionSpec:
        return self if self.keys_from is None else replace(self, keys_from=places[self.keys_from])

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        return {"sinks": (self.heads,)} if self.sinks else {}

    def start_of(self, name: str, generator: torch.Generator) -> torch.Tensor:
        return torch.zeros(self.tensors[name])

    def norm_offset_of(self, name: str) -> float:
        return self.norm_offset

    def build(self, place: PartPlacer) -> Attention:
        norms = tuple(
            place.unit_norm(width) if name in self.unweighted else place.norm(name)
            for name, width in self._norm_widths.items()
        )
        return Attention(
            spec=self,
            layer=place.layer,
            qkv=place.projection("qkv"),
            o=place.projection("o"),
            bias=place.bias("qkv") if self.bias else None,
            out_bias=place.bias("o") if self.out_bias else None,
            norms=norms,
            rope_index=place.rope(self.rope),
            sinks=Sinks(*place.tensor("sinks")) if self.sinks else Sinks(),
        )

    def new_cache(
        self, slots: int, rows: Mapping[int, int], device: torch.device, dtype: torch.dtype
    ) -> KeyValues | None:
        if self.keys_from is not None:
            return None
        return KeyValues(self.window, (rows[self.window], self.kv_heads, self.head_width), device, dtype)

    def cache_bytes(self, dtype: torch.dtype) -> CacheBytes:
        heads = self.kv_heads if self.keys_from is None else 0
        return CacheBytes(0, 2 * heads * self.head_width * dtype.itemsize, self.window)


class OwnBackend(NamedTuple):
    """The backend of a layer whose heads differ from those of most layers."""

    fixed: str  # for batches of a fixed shape
    any_shape: str


class Sinks(NamedTuple):
    """The sinks of a layer's heads [N] in fp32, and their gradient where every weight trains."""

    value: torch.Tensor | None = None
    grad: torch.Tensor | None = None


class AttentionSaved(NamedTuple):
    qkv: torch.Tensor  # [T, (N + 2K) H + gate], rotated; the unchanged product with a gate in q or v_from_k
    raw: torch.Tensor  # [T, N + K (+ K), H]: the norms' input, or empty; if qkv is unchanged, the finished q, k (and v)
    mixed: torch.Tensor  # [T, N H + adapter_columns], attention's output; with a gate: [T, N H], before the gate
    stats: torch.Tensor  # of the softmax, for attention's backward
    h_qkv: torch.Tensor | None
    h_o: torch.Tensor | None


@dataclass
class Attention(Mixer[AttentionSaved]):
    spec: AttentionSpec
    layer: int
    qkv: Projection
    o: Projection
    bias: Bias | None
    out_bias: Bias | None
    norms: tuple[NormWeight, ...]  # of q, k and perhaps v; or none
    rope_index: int  # into PassContext.tables
    sinks: Sinks
    own: OwnBackend | None = None  # in place of the pass's backend

    @property
    def head_kind(self) -> attention.HeadKind:
        return attention.HeadKind(self.spec.head_width, self.spec.score_cap > 0, self.spec.sinks)

    @cached_property
    def heads(self) -> tuple[int, int, int]:
        """N, K, H."""
        return self.spec.heads, self.spec.kv_heads, self.spec.head_width

    @property
    def gate_in_q(self) -> bool:
        return self.spec.gate == "in_q"

    @property
    def product_heads(self) -> tuple[int, int, int]:
        """N, K, H of the qkv product; K is 0 in a layer that uses another layer's keys."""
        return self.heads if self.spec.keys_from is None else (self.heads[0], 0, self.heads[2])

    @property
    def columns(self) -> int:
        """Columns of the product that are q, k and v, gates in q included."""
        heads, key_heads, width = self.product_heads
        return ((2 if self.gate_in_q else 1) * heads + (1 if self.spec.v_from_k else 2) * key_heads) * width

    @property
    def _form(self) -> dict[str, Any]:
        """How the product is laid out, for rope's kernels."""
        return {"gated": self.gate_in_q, "v_from_k": self.spec.v_from_k and self.spec.keys_from is None}

    @property
    def row_strides(self) -> tuple[int, int, int]:
        """The row strides of qkv, of attention's output and of qkv's gradient. With a gate, attention writes its output
        to a buffer without adapter columns."""
        columns = self.o.adapter_columns if self.spec.gate == "none" else 0
        heads, key_heads, width = self.heads
        plain = self.spec.keys_from is None and not self.spec.v_from_k
        qkv = self.qkv.width_out if plain else (heads + 2 * key_heads) * width
        return qkv, row_stride(self.o.width_in, columns), row_stride(qkv, self.qkv.adapter_columns)

    def forward(self, entry: PartInput, ctx: PassContext) -> tuple[torch.Tensor, AttentionSaved]:
        qkv, h_qkv = entry.product(self.qkv)
        cos, sin, q_scale = ctx.tables[self.rope_index]
        raw = rope.finish_(
            qkv[:, : self.columns], cos, sin, self.product_heads, q_scale=q_scale,
            bias=self.bias.value if self.bias else None, **self._form, **self._norm_weights(ctx),
        )  # fmt: skip
        read = self.o.input_buffer(entry.x, len(entry.x))
        mixed = read if self.spec.gate == "none" else entry.x.new_empty(len(entry.x), self.o.width_in)
        q, k, v = self._split(qkv, raw, ctx)
        if self.spec.shares_keys:
            ctx.shared[self.layer] = SharedKeys(k, v)
        stats = self._attend(q, k, v, self._by_head(mixed), ctx.sequences)
        if self.spec.gate != "none":
            output_gate.forward(self._by_head(mixed), self._gates(qkv), self._by_head(read))
        out, h_o = self.o.forward(read, ctx)
        if self.out_bias is not None:
            out += self.out_bias.value
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
        if self.out_bias is not None and self.out_bias.grad is not None:
            self.out_bias.grad.add_(grad[:, : self.o.width_out].sum(0, dtype=torch.float32))
        grad_qkv, gated = None, mixed
        if self.spec.gate != "none":
            grad_qkv = self.qkv.grad_buffer(read.x, len(read.x))
            gated = torch.empty_like(mixed) if self.o.reads_input(g) else mixed
            output_gate.backward(
                self._by_head(grad_mixed), self._by_head(mixed), self._gates(qkv), self._by_head(grad_mixed),
                self._gates(grad_qkv), None if gated is mixed else self._by_head(gated),
            )  # fmt: skip
        self.o.accumulate_grad(grad, g, gated[:, : self.o.width_in], ctx)
        del gated

        documents = ctx.sequences.documents
        assert documents is not None, "generation has no backward"
        window, backend = self._window_and_backend(ctx.sequences, documents)
        q, k, v = self._split(qkv, raw, ctx)
        grads = attention.grad_buffers(q, k, backend)
        if grads is None:
            grad_qkv = self.qkv.grad_buffer(read.x, len(read.x)) if grad_qkv is None else grad_qkv
            grads = self._grads_of(q, k, grad_qkv)
        ctx.flush()  # starts the queued weight gradients on side streams, beside attention
        attention.backward(
            self._by_head(grad_mixed), q, k, v, self._by_head(mixed), stats, documents, self.spec.score_scale, window,
            grads, backend, self.spec.score_cap, *self.sinks,
        )  # fmt: skip
        del grad_mixed, k, v
        if self.spec.keys_from is not None:
            add_grads(ctx, self.spec.keys_from, self.heads[1], grads)
            none = q.new_empty(len(q), 0, self.heads[2])
            grads = grads[0], none, none
        elif self.spec.shares_keys:
            take_grads(ctx, self.layer, self.heads[1], grads)
        if grad_qkv is None:  # only now: attention's own memory is free again
            grad_qkv = self.qkv.grad_buffer(read.x, len(read.x))
        (cos, sin, q_scale), ready = ctx.tables[self.rope_index], None
        plain = not self.norms and self.spec.gate == "none" and self.spec.keys_from is None
        if need_input and plain and q_scale is None:
            ready = self.qkv.rope_backward(grads, grad_qkv, (cos, sin), self.heads, ctx)
        else:
            options = {"q_scale": q_scale} | self._form | self._norm_weights(ctx) | self._norm_grads()
            place, kept = grad_qkv[:, : self.columns], qkv[:, : self.columns] if any(self._form.values()) else raw
            rope.finish_backward(grads, place, cos, sin, self.product_heads, kept, **options)
        del grads
        if self.bias is not None and self.bias.grad is not None:
            self.bias.grad.add_(grad_qkv[:, : self.columns].sum(0, dtype=torch.float32))

        grad_read, g = self.qkv.backward(grad_qkv, h_qkv, ctx, need_input, ready)
        self.qkv.accumulate_grad(grad_qkv, g, read.x, ctx, read.normed)
        return grad_read

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, sequences: Sequences
    ) -> torch.Tensor:
        """Writes out [T, N, H], whose tokens may have a row stride; returns statistics for the backward."""
        past, documents = sequences.past, sequences.documents
        if past is not None:
            cache = past.layers[self.layer if self.spec.keys_from is None else self.spec.keys_from]
            assert isinstance(cache, KeyValues)
            paged = past.paged(cache.window)
            if self.spec.keys_from is None:
                paged_attention.store_(k, v, cache.keys, cache.values, paged.rows)
            if documents is None or not past.new:
                how = self.spec.score_scale, self.spec.window, out, self.spec.score_cap, self.sinks.value
                paged_attention.forward(q, cache.keys, cache.values, paged, *how)
                return out.new_empty(0)
        assert documents is not None
        window, backend = self._window_and_backend(sequences, documents)
        more = out, self.spec.score_cap, self.sinks.value
        return attention.forward(q, k, v, documents, self.spec.score_scale, window, backend, *more)[1]

    def _window_and_backend(self, sequences: Sequences, documents: attention.Documents) -> tuple[int, str]:
        """(window, backend). A window that no document reaches is ignored. cuDNN's plans have no windows, soft
        caps or sinks, so layers with any of them use our own kernels; so do rows that are not aligned (a gate for each
        of a few heads)."""
        window, backend = self.spec.window if self.spec.window < documents.longest else 0, sequences.backend
        if self.own is not None and backend != "cpu":
            backend = self.own.fixed if documents.fixed else self.own.any_shape
        ours = window or self.spec.score_cap or self.sinks.value is not None or self.qkv.width_out % 8
        return window, "triton" if ours and backend != "cpu" else backend

    def _split(
        self, qkv: torch.Tensor, raw: torch.Tensor, ctx: PassContext
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [T, N, H], k and v [T, K, H] as attention reads them, all views."""
        if self.spec.v_from_k and self.spec.keys_from is None:
            return rope.parts(raw.flatten(1), self.heads)
        q, k, v = rope.parts(qkv[:, : self.columns], self.product_heads, self.gate_in_q)
        if self.gate_in_q:
            q, k = raw.split([self.heads[0], self.product_heads[1]], 1)
        return (q, k, v) if self.spec.keys_from is None else (q, *ctx.shared[self.spec.keys_from])

    def _grads_of(
        self, q: torch.Tensor, k: torch.Tensor, grad_qkv: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The tensors to which attention's backward writes dq, dk and dv: views of the product's gradient. With gates
        between its heads, q is not contiguous, so dq has a buffer of its own; so have dk and dv if the product has no
        columns for them."""
        dq, dk, dv = rope.parts(grad_qkv[:, : self.columns], self.product_heads, self.gate_in_q)
        if self.gate_in_q:
            dq = torch.empty_like(q, memory_format=torch.contiguous_format)
        if self.spec.keys_from is not None:
            dk = k.new_empty(k.shape)
        return dq, dk, k.new_empty(k.shape) if self.spec.v_from_k or self.spec.keys_from is not None else dv

    def _gates(self, qkv: torch.Tensor) -> torch.Tensor:
        """The gates of a product or its gradient [T, N, H], or [T, N, 1], a view."""
        heads, _, width = self.heads
        if self.gate_in_q:
            return qkv[:, : 2 * heads * width].unflatten(1, (heads, 2 * width))[:, :, width:]
        return qkv[:, self.columns : self.qkv.width_out].unflatten(1, (heads, -1))

    def _by_head(self, mixed: torch.Tensor) -> torch.Tensor:
        """[T, N H (+ adapter_columns)] -> [T, N, H], a view."""
        return mixed[:, : self.o.width_in].unflatten(1, (-1, self.heads[2]))

    def _norm_weights(self, ctx: PassContext) -> dict[str, Any]:
        if not self.norms:
            return {}
        weights = {f"{name}_norm": norm.of(ctx.adapted) for name, norm in zip("qkv", self.norms, strict=False)}
        if self.spec.keys_from is not None:
            weights["k_norm"] = weights["q_norm"]  # required beside q_norm, but never used: there are no keys
        return {**weights, "eps": self.spec.norm_eps, "norm_after": self.spec.norm_after_rope}

    def _norm_grads(self) -> dict[str, Any]:
        return {f"grad_{name}_norm": norm.grad for name, norm in zip("qkv", self.norms, strict=False)}
