"""Rotary position embedding on packed positions, fused with everything between the qkv product and attention.

`finish_` adds the bias, normalises the heads and rotates q and k. `tables` computes cos and sin [T, R/2] for the R
columns of a head that are rotated.
"""

from __future__ import annotations

import torch

from graftune.kernels import launch, rms_norm
from graftune.kernels.rope import reference
from graftune.kernels.rope.reference import parts, tables

__all__ = ["finish_", "finish_backward", "parts", "tables"]


@launch.operation("rope")
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
    """Turn the product qkv [T, (N + 2K) H], whose rows may have any stride, into attention's input, in place: add the
    bias [(N + 2K) H], normalise q, k and perhaps v, rotate q and k, multiply q by `q_scale` [T] (fp32). The norms have
    fp32 weights, those of q and k both or neither: [H] normalises each head separately, [N H] and [K H] all heads
    together. `norm_after`: the norms come after the rotation.

    Returns what the norms read, [T, N + K, H] or with v's [T, N + 2K, H], for the backward; empty without a norm, since
    the backward of the rotation does not need its input.

    `gated`: the product is [T, (2N + 2K) H], each head of q followed by its gate. It is not changed, and serves as
    `raw` in the backward. The finished q and k are returned, [T, N + K, H]: attention wants the heads of a token next
    to each other.

    `v_from_k`: the product is [T, (N + K) H], and v is v_norm of the input of k's norm. It is not changed either, and
    the finished q, k and v are returned, [T, N + 2K, H]. In a layer without keys of its own (K = 0), only q is
    finished."""
    _check(qkv, cos, sin, heads, q_norm, k_norm, gated, v_from_k)
    assert bias is None or bias.shape == ((heads[0] + 2 * heads[1]) * heads[2],)
    assert not gated or (bias is None and v_norm is None and not norm_after), "no family has these beside a gate in q"
    assert v_norm is None or q_norm is not None, "no family normalises v alone"
    assert not v_from_k or (v_norm is not None and bias is None and not norm_after and not gated), "no family has these"
    more = {
        "bias": bias, "q_norm": q_norm, "k_norm": k_norm, "v_norm": v_norm, "eps": eps, "norm_after": norm_after,
        "q_scale": q_scale, "gated": gated, "v_from_k": v_from_k,
    }  # fmt: skip
    if q_norm is not None and k_norm is not None and len(q_norm) != heads[2]:
        assert bias is None and v_norm is None and not norm_after and not gated
        raw = qkv[:, : (heads[0] + heads[1]) * heads[2]].clone()
        for part, weight, place in zip(_both(raw, heads), (q_norm, k_norm), _both(qkv, heads), strict=True):
            rms_norm.add_forward(part, None, weight, eps, place)
        finish_(qkv, cos, sin, heads, q_scale=q_scale)
        return raw.unflatten(1, (-1, heads[2]))
    found: torch.Tensor = launch.implementation(reference, qkv).finish_(qkv, cos, sin, heads, **more)
    return found


@launch.operation("rope")
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
    """Compute the gradient of the qkv product, grad_qkv [T, (N + 2K) H], from those of attention's input: dq [T, N, H],
    dk and dv [T, K, H]. All may have any row stride. dq, dk and dv may be views of grad_qkv, which is then changed in
    place. dk and dv may also be [T, N, H] in fp32, one for each query head; they are summed here. Adds the norm
    weights' gradients to `grad_q_norm`, `grad_k_norm` and `grad_v_norm` [H] (fp32) if given.

    `raw` is what the norms read. `gated`: see `finish_`; raw is the product, grad_qkv [T, (2N + 2K) H], the columns of
    the gates are left alone, and dq is a tensor of its own. `v_from_k`: raw is the product, grad_qkv [T, (N + K) H],
    and dv is a tensor of its own; v's norm has no weight that trains."""
    _check(grad_qkv, cos, sin, heads, q_norm, k_norm, gated, v_from_k)
    assert not v_from_k or grad_v_norm is None
    shared, kind = (heads[1], grad_qkv.dtype) if grads[2].shape[1] == heads[1] else (heads[0], torch.float32)
    wanted = (heads[0], grad_qkv.dtype), (shared, kind), (shared, kind)
    for grad, (count, dtype) in zip(grads, wanted, strict=True):
        assert grad.shape == (len(grad_qkv), count, heads[2]) and grad.dtype == dtype, (grad.shape, grad.dtype, heads)
        assert grad.stride(2) == 1 and (grad.stride(1) == heads[2] or count == 1)
    if gated or v_from_k:
        assert raw.shape == grad_qkv.shape and raw.stride(1) == 1
    elif q_norm is not None:
        count = heads[0] + heads[1] * (1 if v_norm is None else 2)
        assert raw.shape == (len(grad_qkv), count, heads[2]) and raw.is_contiguous()
    if q_norm is not None and k_norm is not None and len(q_norm) != heads[2]:
        finish_backward(grads, grad_qkv, cos, sin, heads, raw.new_empty(0), q_scale=q_scale)
        pairs = ((q_norm, grad_q_norm), (k_norm, grad_k_norm))
        for place, part, (weight, grad_weight) in zip(
            _both(grad_qkv, heads), _both(raw.flatten(1), heads), pairs, strict=True
        ):
            rstd = torch.rsqrt(part.float().square().mean(1).add_(eps))
            rms_norm.add_backward(place, part, rstd, weight, None, grad_weight, place)
        return
    launch.implementation(reference, grad_qkv).finish_backward(
        grads, grad_qkv, cos, sin, heads, raw, q_norm=q_norm, k_norm=k_norm, v_norm=v_norm, eps=eps,
        norm_after=norm_after, q_scale=q_scale, gated=gated, v_from_k=v_from_k, grad_q_norm=grad_q_norm,
        grad_k_norm=grad_k_norm, grad_v_norm=grad_v_norm,
    )  # fmt: skip


def _both(qkv: torch.Tensor, heads: tuple[int, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k of [T, (N + K (+ K)) H], each [T, its heads H], as views."""
    q, k = heads[0] * heads[2], heads[1] * heads[2]
    return qkv[:, :q], qkv[:, q : q + k]


def _check(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: tuple[int, int, int],
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    gated: bool,
    v_from_k: bool,
) -> None:
    queries, keys, width = heads
    columns = ((2 if gated else 1) * queries + (1 if v_from_k else 2) * keys) * width
    assert width % 2 == 0 and qkv.shape[1:] == (columns,) and qkv.stride(1) == 1, (qkv.shape, heads)
    assert (
        cos.shape == sin.shape
        and len(cos) == len(qkv)
        and 2 * cos.shape[1] <= width
        and cos.dtype == sin.dtype == torch.float32
    )
    assert cos.is_contiguous() and sin.is_contiguous()
    assert (q_norm is None) == (k_norm is None), "either both q and k have a norm or neither"
