"""Rotary positions in the Hugging Face layout: column i of a head is paired with column i + H/2.

    out[:H/2] = a cos - b sin        out[H/2:] = b cos + a sin        with a, b the two halves

Tables narrower than half a head rotate its first columns only, as if the head ended there; the rest is unchanged.

The rotation is orthogonal except for the scaling in cos and sin, so the backward is the same with sin negated.
`finish_` does everything between the qkv product and attention: bias, QK norm, rotation.
"""

from __future__ import annotations

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
    turned = torch.mul(a, sin)
    x[..., :half] = kept.addcmul_(b, sin, value=-1)
    x[..., half : 2 * half] = turned.addcmul_(b, cos)
    return x


def unrotate_(grad: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The backward of `rotate_`, in place."""
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
    eps: float = 0.0,
) -> torch.Tensor:
    if bias is not None:
        qkv += bias
    turned = _by_head(qkv, heads)
    raw = qkv.new_empty(0)
    if q_norm is not None and k_norm is not None:
        raw = turned.clone()
        q, k = turned.split([heads[0], heads[1]], 1)
        q.copy_(rms_norm.forward(q, q_norm, eps))
        k.copy_(rms_norm.forward(k, k_norm, eps))
    rotate_(turned, cos, sin)
    return raw


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
    eps: float = 0.0,
    grad_q_norm: torch.Tensor | None = None,
    grad_k_norm: torch.Tensor | None = None,
) -> None:
    if launch.address(grads[0]) != launch.address(grad_qkv):
        counts = (heads[0], heads[1], heads[1])
        added = [added_up(grad, n).to(grad_qkv.dtype) for grad, n in zip(grads, counts, strict=True)]
        torch.cat([grad.flatten(1) for grad in added], 1, out=grad_qkv)
    turned = unrotate_(_by_head(grad_qkv, heads), cos, sin)
    if q_norm is not None and k_norm is not None:
        sizes = [heads[0], heads[1]]
        (q, k), (raw_q, raw_k) = turned.split(sizes, 1), raw.split(sizes, 1)
        q.copy_(rms_norm.backward(q, raw_q, q_norm, eps, grad_q_norm))
        k.copy_(rms_norm.backward(k, raw_k, k_norm, eps, grad_k_norm))


def added_up(grad: torch.Tensor, heads: int) -> torch.Tensor:
    """[T, heads * group, H] -> [T, heads, H]: the sum over each group of adjacent heads."""
    return grad if grad.shape[1] == heads else grad.unflatten(1, (heads, -1)).sum(2)


def _by_head(qkv: torch.Tensor, heads: tuple[int, int, int]) -> torch.Tensor:
    """The q and k of [T, (N + 2K) H] as a view [T, N + K, H]."""
    return qkv.unflatten(1, (-1, heads[2]))[:, : heads[0] + heads[1]]
