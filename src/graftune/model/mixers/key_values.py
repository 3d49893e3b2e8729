"""Keys and values outside their layer: those of the past that generation keeps, with attention of one new token over
them, and those that later layers of a pass share.

Legend: T tokens, N heads, K key heads, H head width, S sequences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from graftune.kernels.rope.reference import added_up
from graftune.model.context import PassContext, Past

if TYPE_CHECKING:
    from graftune.model.mixers.attention import Attention


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

    def append(self, k: torch.Tensor, v: torch.Tensor, past: Past) -> None:
        """One new token a sequence."""
        self.keys[past.sequences, :, past.lengths] = k
        self.values[past.sequences, :, past.lengths] = v

    def attend(self, of: Attention, q: torch.Tensor, out: torch.Tensor, past: Past) -> None:
        """One new token a sequence, each seeing its own past and itself."""
        (heads, key_heads, width), lengths = of.heads, past.lengths
        grouped = q.reshape(-1, key_heads, heads // key_heads, width)
        scores = (grouped @ self.keys.transpose(2, 3)).float() * of.score_scale
        if of.score_cap:
            scores = torch.tanh(scores / of.score_cap) * of.score_cap
        hidden = past.token_indices > lengths[:, None]
        if of.window:
            hidden |= past.token_indices <= lengths[:, None] - of.window
        scores.masked_fill_(hidden[:, None, None], float("-inf"))
        if of.sinks.value is not None:
            column = of.sinks.value.view(key_heads, -1, 1).expand(len(scores), -1, -1, -1)
            shares = torch.softmax(torch.cat((scores, column), -1), -1)[..., :-1]
        else:
            shares = torch.softmax(scores, -1)
        out.copy_((shares.to(q.dtype) @ self.values).reshape(-1, heads, width))


class NoCache:
    """Of a layer that uses the keys and values of an earlier one."""

    def keep(self, sequences: torch.Tensor) -> None: ...


class SharedKeys(NamedTuple):
    """The keys and values that a layer leaves for later ones in `PassContext.shared`: [T, K, H], as attention reads
    them."""

    k: torch.Tensor
    v: torch.Tensor


def add_grads(ctx: PassContext, layer: int, key_heads: int, grads: tuple[torch.Tensor, ...]) -> None:
    """Add the gradients (dq, dk, dv) of a layer that uses the keys and values of `layer`: their sum is in fp32, because
    twenty layers may share one."""
    found = [added_up(grad, key_heads) for grad in grads[1:]]
    sums = ctx.shared_grads.get(layer)
    if sums is None:
        ctx.shared_grads[layer] = [grad.float() for grad in found]
        return
    for total, grad in zip(sums, found, strict=True):
        total.add_(grad)


def take_grads(ctx: PassContext, layer: int, key_heads: int, grads: tuple[torch.Tensor, ...]) -> None:
    """Add the sums to the gradients of the layer's own attention, which may be one for each query head."""
    for grad, total in zip(grads[1:], ctx.shared_grads.pop(layer), strict=True):
        place = grad if grad.shape[1] == key_heads else grad.unflatten(1, (key_heads, -1))[:, :, 0]
        place.add_(total)
