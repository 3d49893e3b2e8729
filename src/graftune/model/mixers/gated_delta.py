"""Qwen3.5's mixer in most layers: a gated delta net, which reads and writes a matrix per head, not keys and values.

    q, k, v = silu(conv(in_qkv(n)))      decay, beta from in_a(n), in_b(n)      n: the normed stream
    o       = delta rule(q, k, v, decay, beta)          out(rms_norm(o) * silu(in_z(n)))

All inputs are one product. The convolution and the state restart in every document. The backward keeps that product,
the rule's output and what the rule saves, and recomputes the convolution and the gates, which cost little; under
`selective` the rule is computed again, too. Generation keeps the columns that the taps still reach, and the state.

Value head h reads key head h // (V / K) in Hugging Face's folders and h % K in GGUFs. The columns of the output
projection follow the same order, and they cannot change places inside a GGUF's blocks, so the order of the heads is a
property of the mixer (`tiled`), and adapters and exports are reordered instead (`order_in`). Qwen3-Next has two input
projections, and its folders hold their rows by key head.

Legend: T tokens, W width, K key heads, V value heads, D width of a key head, E width of a value head, C = 2KD + VE
columns of the convolution, S sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from graftune.kernels import delta_gates, gated_delta, gated_norm, short_conv
from graftune.model.context import LayerCache, PassContext
from graftune.model.part import (
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

TAPS, DECAY, DT_BIAS = "conv1d.weight", "A_log", "dt_bias"


class DeltaHeads(NamedTuple):
    key_heads: int
    value_heads: int
    key_width: int
    value_width: int

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_width

    @property
    def values(self) -> int:
        return self.value_heads * self.value_width

    @property
    def convolved(self) -> int:
        return 2 * self.keys + self.values


@dataclass(frozen=True)
class GatedDeltaSpec(MixerSpec):
    width: int
    heads: DeltaHeads
    taps: int
    norm_eps: float
    tiled: bool = False  # value head h reads key head h % K, not h // (V / K)
    module: str = "linear_attn"
    by_key_head: bool = False  # q, k, v and z are one projection, b and a another; folders order their rows by key head

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        heads = self.heads
        if self.by_key_head:
            fused = {"in_proj_qkvz": heads.convolved + heads.values, "in_proj_ba": 2 * heads.value_heads}
            return {name: (out, self.width) for name, out in fused.items()} | {"out_proj": (self.width, heads.values)}
        into = {"qkv": heads.convolved, "z": heads.values, "b": heads.value_heads, "a": heads.value_heads}
        found = {f"in_proj_{name}": (out, self.width) for name, out in into.items()}
        return found | {"out_proj": (self.width, heads.values)}

    @property
    def groups(self) -> dict[str, tuple[str, ...]]:
        return {"in": tuple(self.projections)[:-1], "out": ("out_proj",)}

    @property
    def gguf_rows(self) -> dict[str, tuple[int, ...]]:
        return {"in_proj_qkvz": (self.heads.convolved, self.heads.values)} if self.by_key_head else {}

    @property
    def norms(self) -> dict[str, int]:
        return {"norm": self.heads.value_width}

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        per_head = (self.heads.value_heads,)
        return {TAPS: (self.heads.convolved, 1, self.taps), DECAY: per_head, DT_BIAS: per_head}

    @property
    def state_values(self) -> int:
        return self.heads.values * self.heads.key_width

    @property
    def log_decays(self) -> tuple[str, ...]:
        return (DECAY,)

    @property
    def checks(self) -> dict[str, bool]:
        heads = self.heads
        return {
            "value heads": min(heads) > 0 and heads.value_heads % heads.key_heads == 0,
            "taps of the convolution": 0 < self.taps <= 64,
        }

    def start_of(self, name: str, generator: torch.Generator) -> torch.Tensor | None:
        """The initial values of transformers: decay rates between 0.01 and 16, time steps of one."""
        if name == DECAY:
            return torch.empty(self.heads.value_heads).uniform_(0.01, 16.0, generator=generator).log()
        return torch.ones(self.heads.value_heads) if name == DT_BIAS else None

    def order_in(self, file: str, name: str) -> FileOrder | None:
        """Folders store the value heads of a key head side by side, GGUFs one value head of every key head in turn."""
        if self.by_key_head:
            return self._by_key_head(file, name)
        heads = self.heads
        widths = {"in_proj_b": 1, "in_proj_a": 1, DECAY: 1, DT_BIAS: 1} | dict.fromkeys(
            ("in_proj_qkv", "conv1d", "in_proj_z", "out_proj"), heads.value_width
        )
        if self.tiled == (file == "gguf") or name not in widths or heads.key_heads == heads.value_heads:
            return None
        shape = (heads.key_heads, -1) if file == "gguf" else (-1, heads.key_heads)
        order = torch.arange(heads.value_heads * widths[name]).view(heads.value_heads, -1)
        order = order.unflatten(0, shape).transpose(0, 1).reshape(-1)
        if name in ("in_proj_qkv", "conv1d"):  # the rows of q and k keep their order
            order = torch.cat((torch.arange(2 * heads.keys), order + 2 * heads.keys))
        return FileOrder(1 if name == "out_proj" else 0, order)

    def _by_key_head(self, file: str, name: str) -> FileOrder | None:
        """The order of Qwen3-Next's two input projections: by key head in folders; in GGUFs only b and a are."""
        heads = self.heads
        sizes: dict[str, tuple[int, ...]] = {"in_proj_ba": (heads.value_heads, heads.value_heads)}
        if file == "folder":
            sizes["in_proj_qkvz"] = (heads.keys, heads.keys, heads.values, heads.values)
        if name not in sizes:
            return None
        parts = torch.arange(sum(sizes[name])).split(sizes[name])
        return FileOrder(0, torch.cat([part.view(heads.key_heads, -1) for part in parts], 1).reshape(-1))

    def build(self, place: PartPlacer) -> GatedDelta:
        taps, grad_taps = place.tensor(TAPS)
        a_log, grad_a_log = place.tensor(DECAY)
        dt_bias, grad_dt_bias = place.tensor(DT_BIAS)
        return GatedDelta(
            spec=self,
            layer=place.layer,
            into=place.projection("in"),
            out=place.projection("out"),
            taps=taps[:, 0],
            a_log=a_log,
            dt_bias=dt_bias,
            grad_taps=None if grad_taps is None else grad_taps[:, 0],
            grad_a_log=grad_a_log,
            grad_dt_bias=grad_dt_bias,
            norm=place.norm("norm"),
        )

    def new_cache(self, slots: int, rows: Mapping[int, int], device: torch.device, dtype: torch.dtype) -> LayerCache:
        """The last columns before the convolution, oldest first and zeros before the beginning of a sequence,
        [slots, taps - 1, C], and the state [slots, V, D, E] in fp32."""
        heads = self.heads
        columns = torch.zeros(slots, self.taps - 1, heads.convolved, device=device, dtype=dtype)
        shape = slots, heads.value_heads, heads.key_width, heads.value_width
        return LayerCache(columns, torch.zeros(shape, device=device, dtype=torch.float32))

    def cache_bytes(self, dtype: torch.dtype) -> CacheBytes:
        columns = (self.taps - 1) * self.heads.convolved * dtype.itemsize
        return CacheBytes(columns + 4 * self.state_values, 0)


class GatedDeltaSaved(NamedTuple):
    product: torch.Tensor  # [T, C + VE + 2V]: q, k, v before the convolution, z, b and a
    mixed: torch.Tensor  # [T, VE], the rule's output; its gradient takes its place
    rule: tuple[torch.Tensor, ...]  # what the rule saves
    h_in: torch.Tensor | None
    h_out: torch.Tensor | None


class DeltaInputs(NamedTuple):
    """The columns of the product, views."""

    qkv: torch.Tensor  # [T, C]
    z: torch.Tensor  # [T, VE]
    b: torch.Tensor  # [T, V]
    a: torch.Tensor  # [T, V]


@dataclass
class GatedDelta(Mixer[GatedDeltaSaved]):
    spec: GatedDeltaSpec
    layer: int
    into: Projection
    out: Projection
    taps: torch.Tensor  # [C, taps] fp32, the last one for the token itself
    a_log: torch.Tensor  # [V] fp32
    dt_bias: torch.Tensor  # [V] fp32
    grad_taps: torch.Tensor | None  # where every weight trains
    grad_a_log: torch.Tensor | None
    grad_dt_bias: torch.Tensor | None
    norm: NormWeight

    @property
    def scale(self) -> float:
        return float(self.spec.heads.key_width) ** -0.5

    def forward(self, entry: PartInput, ctx: PassContext) -> tuple[torch.Tensor, GatedDeltaSaved]:
        product, h_in = entry.product(self.into)
        mixed, rule = self._mix(product, ctx)
        normed = self.out.input_buffer(product, len(product))
        weight = self.norm.of(ctx.adapted)
        gated_norm.forward(mixed, self._inputs(product).z, weight, self.spec.norm_eps, normed[:, : self.out.width_in])
        out, h_out = self.out.forward(normed, ctx)
        return out, GatedDeltaSaved(product, mixed, rule, h_in, h_out)

    def drop_recomputable(self, saved: GatedDeltaSaved) -> GatedDeltaSaved:
        return saved._replace(mixed=saved.mixed.new_empty(0), rule=())

    def recompute_dropped(self, saved: GatedDeltaSaved, read: SavedInput, ctx: PassContext) -> GatedDeltaSaved:
        mixed, rule = self._mix(saved.product, ctx)
        return saved._replace(mixed=mixed, rule=rule)

    def backward(
        self,
        grad: torch.Tensor,
        ready: ReadyGrad | None,
        read: SavedInput,
        saved: GatedDeltaSaved,
        ctx: PassContext,
        need_input: bool,
    ) -> torch.Tensor | None:
        product, mixed, rule, h_in, h_out = saved
        documents = ctx.sequences.documents
        assert documents is not None, "generation has no backward"
        grad_normed, g = self.out.backward(grad, h_out, ctx, ready=ready)
        assert grad_normed is not None
        grad_product = self.into.grad_buffer(product, len(product))
        inputs, grads = self._inputs(product), self._inputs(grad_product)
        gated_norm.backward(
            grad_normed, mixed, inputs.z, self.norm.of(ctx.adapted), self.spec.norm_eps, mixed, grads.z, grad_normed,
            self.norm.grad,
        )  # fmt: skip
        self.out.accumulate_grad(grad, g, grad_normed, ctx)  # the norm's output has replaced its gradient
        del grad_normed
        ctx.flush()
        qkv, decay, beta = self._rule_inputs(inputs, ctx)
        grad_qkv, grad_decay, grad_beta = torch.empty_like(qkv), torch.empty_like(decay), torch.empty_like(beta)
        gated_delta.backward(
            self._by_head(mixed), *self._split(qkv), decay, beta, documents, self.scale, rule, self._split(grad_qkv),
            grad_decay, grad_beta, self.spec.tiled,
        )  # fmt: skip
        del mixed, rule, qkv
        delta_gates.backward(
            grad_decay, grad_beta, inputs.a, inputs.b, self.a_log, self.dt_bias, grads.a, grads.b, self.grad_a_log,
            self.grad_dt_bias,
        )  # fmt: skip
        short_conv.silu_backward(grad_qkv, inputs.qkv, self.taps, ctx.positions, grads.qkv, self.grad_taps)
        del grad_qkv
        grad_read, g = self.into.backward(grad_product, h_in, ctx, need_input)
        self.into.accumulate_grad(grad_product, g, read.x, ctx, read.normed)
        return grad_read

    def _mix(self, product: torch.Tensor, ctx: PassContext) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """The rule's output [T, VE], and what its backward needs."""
        past, documents = ctx.sequences.past, ctx.sequences.documents
        cache = None if past is None else past.layers[self.layer]
        kept, state = (None, None) if cache is None else cache.states
        inputs = self._inputs(product)
        mixed = torch.empty(len(product), self.spec.heads.values, dtype=product.dtype, device=product.device)
        qkv, decay, beta = self._rule_inputs(inputs, ctx, kept)
        if documents is None:
            assert state is not None
            state = state[: len(product)]
            gated_delta.step_(*self._split(qkv), decay, beta, state, self.scale, self._by_head(mixed), self.spec.tiled)
            return mixed, ()
        before = None if past is None or state is None or past.new else state.index_select(0, past.slots)
        rule, after = gated_delta.forward(
            *self._split(qkv), decay, beta, documents, self.scale, self._by_head(mixed), before, state is not None,
            self.spec.tiled,
        )  # fmt: skip
        if past is not None and state is not None:
            assert after is not None
            state.index_copy_(0, past.slots, after)
        return mixed, rule

    def _rule_inputs(
        self, inputs: DeltaInputs, ctx: PassContext, kept: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v after the convolution [T, C], decay and beta [T, V] fp32. `kept`: the columns that
        generation keeps for this layer."""
        qkv = torch.empty(inputs.qkv.shape, dtype=inputs.qkv.dtype, device=inputs.qkv.device)
        if kept is not None:
            self._convolve(inputs.qkv, qkv, kept, ctx)
        else:
            short_conv.silu_forward(inputs.qkv, self.taps, ctx.positions, qkv)
        decay, beta = (torch.empty(inputs.a.shape, dtype=torch.float32, device=qkv.device) for _ in range(2))
        delta_gates.forward(inputs.a, inputs.b, self.a_log, self.dt_bias, decay, beta)
        return qkv, decay, beta

    def _convolve(self, read: torch.Tensor, qkv: torch.Tensor, kept: torch.Tensor, ctx: PassContext) -> None:
        """Convolves new tokens of generation with the columns `kept` before them, and updates these."""
        past = ctx.sequences.past
        assert past is not None
        if ctx.sequences.documents is None:
            short_conv.silu_step_(read, self.taps, kept[: len(read)], qkv)
            return
        columns, before = past.columns(self.taps.shape[1] - 1), kept.index_select(0, past.slots)
        before = torch.zeros_like(before) if past.new else before
        kept.index_copy_(0, past.slots, columns.last_of(read, before))
        if past.new:
            short_conv.silu_forward(read, self.taps, ctx.positions, qkv)
            return
        joined = columns.join(read, before)
        out = torch.empty_like(joined)
        short_conv.silu_forward(joined, self.taps, columns.positions, out)
        qkv.copy_(out.index_select(0, columns.tokens))

    def _inputs(self, product: torch.Tensor) -> DeltaInputs:
        """The columns of the product, or of its gradient."""
        heads = self.spec.heads
        sizes = [heads.convolved, heads.values, heads.value_heads, heads.value_heads]
        return DeltaInputs(*product[:, : self.into.width_out].split(sizes, 1))

    def _split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[T, C] -> q and k [T, K, D], v [T, V, E], all views."""
        heads = self.spec.heads
        q, k, v = qkv.split([heads.keys, heads.keys, heads.values], 1)
        by_key = (heads.key_heads, heads.key_width)
        return q.unflatten(1, by_key), k.unflatten(1, by_key), self._by_head(v)

    def _by_head(self, mixed: torch.Tensor) -> torch.Tensor:
        """[T, VE] -> [T, V, E], a view."""
        return mixed.unflatten(1, (self.spec.heads.value_heads, self.spec.heads.value_width))
