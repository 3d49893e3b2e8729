"""LFM2's mixer in place of attention: a short causal convolution over gated values, gated once more.

    B, C, x = in(n)        out(C * conv(B * x))        n: the normed stream; conv: depthwise, a few taps a column

The convolution restarts in every document. The backward keeps only the product of `in` and recomputes the rest.
Generation keeps the last values that the taps still reach.

Legend: T tokens, D width, K taps, S sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from graftune.kernels import short_conv
from graftune.model.context import LayerCache, PassContext
from graftune.model.part import CacheBytes, Mixer, MixerSpec, PartInput, PartPlacer, SavedInput
from graftune.model.projection import Projection, ReadyGrad

TAPS = "conv.weight"


@dataclass(frozen=True)
class ShortConvSpec(MixerSpec):
    width: int
    taps: int
    module: str = "conv"

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        return {"in_proj": (3 * self.width, self.width), "out_proj": (self.width, self.width)}

    @property
    def groups(self) -> dict[str, tuple[str, ...]]:
        return {"in": ("in_proj",), "out": ("out_proj",)}

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        return {TAPS: (self.width, 1, self.taps)}

    def build(self, place: PartPlacer) -> ShortConv:
        taps, grad = place.tensor(TAPS)
        return ShortConv(
            layer=place.layer,
            into=place.projection("in"),
            out=place.projection("out"),
            taps=taps[:, 0],
            grad_taps=None if grad is None else grad[:, 0],
        )

    def new_cache(self, slots: int, rows: Mapping[int, int], device: torch.device, dtype: torch.dtype) -> LayerCache:
        """The last K - 1 values of B * x of each slot, oldest first, zeros before its beginning: [slots, K - 1, D]."""
        return LayerCache(torch.zeros(slots, self.taps - 1, self.width, device=device, dtype=dtype))

    def cache_bytes(self, dtype: torch.dtype) -> CacheBytes:
        return CacheBytes((self.taps - 1) * self.width * dtype.itemsize, 0)


class ShortConvSaved(NamedTuple):
    bcx: torch.Tensor  # [T, 3D]: B, C and x
    h_in: torch.Tensor | None
    h_out: torch.Tensor | None


@dataclass
class ShortConv(Mixer[ShortConvSaved]):
    layer: int
    into: Projection
    out: Projection
    taps: torch.Tensor  # [D, K] fp32, the last one for the token itself
    grad_taps: torch.Tensor | None  # where every weight trains

    def forward(self, entry: PartInput, ctx: PassContext) -> tuple[torch.Tensor, ShortConvSaved]:
        bcx, h_in = entry.product(self.into)
        mixed = self.out.input_buffer(bcx, len(bcx))
        self._mix(bcx, mixed[:, : self.out.width_in], ctx)
        out, h_out = self.out.forward(mixed, ctx)
        return out, ShortConvSaved(bcx, h_in, h_out)

    def backward(
        self,
        grad: torch.Tensor,
        ready: ReadyGrad | None,
        read: SavedInput,
        saved: ShortConvSaved,
        ctx: PassContext,
        need_input: bool,
    ) -> torch.Tensor | None:
        bcx, h_in, h_out = saved
        grad_mixed, g = self.out.backward(grad, h_out, ctx, ready=ready)
        assert grad_mixed is not None
        grad_bcx, mixed = self.into.grad_buffer(bcx, len(bcx)), torch.empty_like(grad_mixed)
        ctx.flush()
        written = grad_bcx[:, : self.into.width_out]
        short_conv.backward(grad_mixed, bcx, self.taps, ctx.positions, written, mixed, self.grad_taps)
        del grad_mixed
        self.out.accumulate_grad(grad, g, mixed, ctx)
        del mixed
        grad_read, g = self.into.backward(grad_bcx, h_in, ctx, need_input)
        self.into.accumulate_grad(grad_bcx, g, read.x, ctx, read.normed)
        return grad_read

    def _mix(self, bcx: torch.Tensor, mixed: torch.Tensor, ctx: PassContext) -> None:
        past, documents = ctx.sequences.past, ctx.sequences.documents
        if past is None:
            short_conv.forward(bcx, self.taps, ctx.positions, mixed)
            return
        cache = past.layers[self.layer]
        assert cache is not None
        (values,) = cache.states
        if documents is None:
            short_conv.step_(bcx, self.taps, values[: len(bcx)], mixed)
            return
        columns, before = past.columns(self.taps.shape[1] - 1), values.index_select(0, past.slots)
        before = torch.zeros_like(before) if past.new else before
        b, _, x = bcx.chunk(3, 1)
        values.index_copy_(0, past.slots, columns.last_of(b * x, before))
        if past.new:
            short_conv.forward(bcx, self.taps, ctx.positions, mixed)
            return
        gated = torch.cat((before, torch.zeros_like(before), torch.ones_like(before)), 2)  # B * x is `before`
        joined = columns.join(bcx, gated)
        out = joined.new_empty(len(joined), mixed.shape[1])
        short_conv.forward(joined, self.taps, columns.positions, out)
        mixed.copy_(out.index_select(0, columns.tokens))
