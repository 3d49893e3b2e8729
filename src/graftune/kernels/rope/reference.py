"""Rotary positions in the Hugging Face layout: column i of a head is paired with column i + H/2.

    out[:H/2] = a cos - b sin        out[H/2:] = b cos + a sin        with a, b the two halves

Tables narrower than half a head rotate its first columns only, as if the head ended there; the rest is unchanged.

The rotation is orthogonal except for the scaling in cos and sin, so the backward is the same with sin negated.
`finish_` does everything between the qkv product and attention: bias, norms of heads before or after the rotation, the
rotation, and a factor of q that depends on the position.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graftune.kernels import launch
from graftune.kernels.rms_norm import reference as rms_norm


def tables(
    positions: torch.Tensor, inverse_frequencies: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [T, R/2] in fp32 for the R rotated columns of a head. Frequencies are [R/2], or [T, R/2] where
    tokens differ; `scaling` is yarn's attention factor (else 1)."""
    angles = positions.to(torch.float32).unsqueeze(1) * inverse_frequencies.to(positions.device)
    return angles.cos() * scaling, angles.sin() * scaling


def rotate_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [T, N, H] in place by tables [T, R/2]."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    half = cos.shape[-1]
    a, b = x[..., :half].float(), x[..., half : 2 * half].float()
    kept = a * cos
    rotated = torch.mul(a, sin)
    x[..., :half] = kept.addcmul_(b, sin, value=-1)
    x[..., half : 2 * half] = rotated.addcmul_(b, cos)
    return x


def unrotate_(grad: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return rotate_(grad, cos, -sin)


def finish_(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: tuple[int, int, int],
    *,
    bias: torch.Tensor | None = None,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    v_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    norm_after: bool = False,
    q_scale: torch.Tensor | None = None,
    gated: bool = False,
    v_from_k: bool = False,
) -> torch.Tensor:
    if bias is not None:
        qkv += bias
    queries, keys, _ = heads
    norms = [norm for norm in (q_norm, k_norm, v_norm) if norm is not None]
    counts = [queries, keys, keys][: max(2, len(norms))]
    if gated:
        raw, work = qkv.new_empty(0), torch.cat(parts(qkv, heads, gated)[:2], 1)
    elif v_from_k:
        by_head = qkv.unflatten(1, (-1, heads[2]))
        raw, work = qkv.new_empty(0), torch.cat((by_head, by_head[:, queries:]), 1)
    else:
        work = qkv.unflatten(1, (-1, heads[2]))[:, : sum(counts)]
        raw = work.clone() if norms and not norm_after else qkv.new_empty(0)
    if norms and not norm_after:
        _normalise(work.split(counts, 1), norms, eps)
    rotate_(work[:, : queries + keys], cos, sin)
    if norms and norm_after:
        raw = work.clone()
        _normalise(work.split(counts, 1), norms, eps)
    if q_scale is not None:
        work[:, :queries].mul_(q_scale[:, None, None])
    return work if gated or v_from_k else raw


def finish_backward(
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    grad_qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: tuple[int, int, int],
    raw: torch.Tensor,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    v_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    norm_after: bool = False,
    q_scale: torch.Tensor | None = None,
    gated: bool = False,
    v_from_k: bool = False,
    grad_q_norm: torch.Tensor | None = None,
    grad_k_norm: torch.Tensor | None = None,
    grad_v_norm: torch.Tensor | None = None,
) -> None:
    queries, keys, width = heads
    if v_from_k:  # as if k's product were there twice, and its gradient is the sum of both
        count = queries + keys
        whole = torch.cat(
            [added_up(grad, n).to(raw.dtype) for grad, n in zip(grads, (queries, keys, keys), strict=True)], 1
        )
        read, flat = raw.unflatten(1, (-1, width)), whole.flatten(1)
        finish_backward(
            parts(flat, heads), flat, cos, sin, heads, torch.cat((read, read[:, queries:]), 1), q_norm=q_norm,
            k_norm=k_norm, v_norm=v_norm, eps=eps, q_scale=q_scale, grad_q_norm=grad_q_norm, grad_k_norm=grad_k_norm,
        )  # fmt: skip
        place = grad_qkv.unflatten(1, (-1, width)).copy_(whole[:, :count])
        place[:, queries:] += whole[:, count:]
        return
    places = parts(grad_qkv, heads, gated)
    if launch.address(grads[0]) != launch.address(grad_qkv):
        added = [added_up(grad, n).to(grad_qkv.dtype) for grad, n in zip(grads, (queries, keys, keys), strict=True)]
        if gated:
            for place, grad in zip(places, added, strict=True):
                place.copy_(grad)
        else:
            torch.cat([grad.flatten(1) for grad in added], 1, out=grad_qkv)
    if q_scale is not None:
        places[0].mul_(q_scale[:, None, None])

    def through_norms() -> None:
        counts = [queries, keys, keys][: 2 if v_norm is None else 3]
        read = parts(raw, heads, gated) if gated else raw.split(counts, 1)
        pairs = ((q_norm, grad_q_norm), (k_norm, grad_k_norm), (v_norm, grad_v_norm))
        for place, x, (weight, grad_weight) in zip(places, read, pairs, strict=False):
            if weight is not None:
                place.copy_(rms_norm.backward(place, x, weight, eps, grad_weight))

    if q_norm is not None and norm_after:
        through_norms()
    rotated = places[:2] if gated else [grad_qkv.unflatten(1, (-1, width))[:, : queries + keys]]
    for place in rotated:
        unrotate_(place, cos, sin)
    if q_norm is not None and not norm_after:
        through_norms()


def added_up(grad: torch.Tensor, heads: int) -> torch.Tensor:
    """[T, heads * group, H] -> [T, heads, H]: the sum over each group of adjacent heads."""
    return grad if grad.shape[1] == heads else grad.unflatten(1, (heads, -1)).sum(2)


def parts(
    qkv: torch.Tensor, heads: tuple[int, int, int], gated: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [T, N, H], k and v [T, K, H] of a product [T, (N + 2K) H], as views. `gated`: each head of q is followed by the
    H columns of its gate, [T, (2N + 2K) H]."""
    queries, keys, width = heads
    by_head = qkv.unflatten(1, (-1, width))
    step = 2 if gated else 1
    k, v = by_head[:, step * queries : step * queries + keys], by_head[:, step * queries + keys :]
    return by_head[:, : step * queries : step], k, v


def _normalise(places: Sequence[torch.Tensor], norms: Sequence[torch.Tensor], eps: float) -> None:
    for place, weight in zip(places, norms, strict=True):
        place.copy_(rms_norm.forward(place, weight, eps))
