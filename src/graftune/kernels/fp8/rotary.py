# mypy: disallow-untyped-defs=False, check-untyped-defs=False
"""Rope's backward that writes fp8 codes: it writes qkv's gradient, and its codes for the product of dX.

A program computes all heads of a token, so the row's scale and codes are computed from values in registers; rope's own
kernel divides rows by heads, so whole rows would be read a second time. Bytes per token (W = 6144 columns at 8B): both
read 2 W and write 2 W; a separate kernel reads another 2 W for the 1 W of codes, which are only written here.

Other cases use rope's kernel and a pass for the codes: norms of q and k, heads that are rotated in part, and dk and dv
that still have to be summed over query heads (few tokens, so little to gain).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graftune.kernels import launch
from graftune.kernels.fp8.kernel import scale_of
from graftune.kernels.fp8.reference import LARGEST, SMALLEST


@triton.jit
def _turned(x_ptr, cos, sin, COUNT: tl.constexpr, H: tl.constexpr, HALF: tl.constexpr, TURN: tl.constexpr,
            BN: tl.constexpr, BC: tl.constexpr, kind: tl.constexpr):  # fmt: skip
    """The halves of COUNT heads, turned back and rounded to what is stored; where they lie, and whether they do."""
    heads, cols = tl.arange(0, BN)[:, None], tl.arange(0, BC)[None, :]
    at = heads * H + cols
    inside = (heads < COUNT) & (cols < HALF)
    a = tl.load(x_ptr + at, inside, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + HALF + at, inside, other=0.0).to(tl.float32)
    if TURN:
        before = a
        a = a * cos + b * sin
        b = b * cos - before * sin
    return a.to(kind), b.to(kind), at, inside


@triton.jit
def _measured(a, b, factor_ptr, at, inside, HALF: tl.constexpr, SIZE: tl.constexpr, L: tl.constexpr):
    """a and b, of SIZE values each, times the factor; of L shares, as a rule a thread's, largest and sum of squares."""
    a = a.to(tl.float32) * tl.load(factor_ptr + at, inside, other=0.0)
    b = b.to(tl.float32) * tl.load(factor_ptr + HALF + at, inside, other=0.0)
    most = tl.max(tl.reshape(tl.maximum(tl.abs(a), tl.abs(b)), [L, SIZE // L]), 1)
    return a, b, most, tl.sum(tl.reshape(a * a + b * b, [L, SIZE // L]), 1)


@triton.jit
def _stored(out_ptr, codes_ptr, a, b, z_a, z_b, inverse, at, inside, HALF: tl.constexpr):
    code = codes_ptr.dtype.element_ty
    tl.store(out_ptr + at, a, inside)
    tl.store(out_ptr + HALF + at, b, inside)
    tl.store(codes_ptr + at, (z_a * inverse).to(code), inside)
    tl.store(codes_ptr + HALF + at, (z_b * inverse).to(code), inside)


@launch.kernel
def _rope_backward(
    dq_ptr, dk_ptr, dv_ptr, cos_ptr, sin_ptr, factor_ptr, reach_ptr, out_ptr, codes_ptr, scale_ptr,
    dq_stride, dk_stride, dv_stride, out_stride, codes_stride, N: tl.constexpr, K: tl.constexpr, HALF: tl.constexpr,
    REACH: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BC: tl.constexpr, L: tl.constexpr,
    LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
):  # fmt: skip
    """Nothing is stored before the scale is known, for which every thread waits: dq, dk and dv may be views of out."""
    row = tl.program_id(0).to(tl.int64)
    H: tl.constexpr = 2 * HALF
    kind = out_ptr.dtype.element_ty
    cols = tl.arange(0, BC)[None, :]
    cos = tl.load(cos_ptr + row * HALF + cols, cols < HALF, other=0.0)
    sin = tl.load(sin_ptr + row * HALF + cols, cols < HALF, other=0.0)
    q_a, q_b, q_at, q_in = _turned(dq_ptr + row * dq_stride, cos, sin, N, H, HALF, True, BN, BC, kind)
    k_a, k_b, k_at, k_in = _turned(dk_ptr + row * dk_stride, cos, sin, K, H, HALF, True, BK, BC, kind)
    v_a, v_b, v_at, v_in = _turned(dv_ptr + row * dv_stride, cos, sin, K, H, HALF, False, BK, BC, kind)
    zq_a, zq_b, q_most, q_total = _measured(q_a, q_b, factor_ptr, q_at, q_in, HALF, BN * BC, L)
    zk_a, zk_b, k_most, k_total = _measured(k_a, k_b, factor_ptr + N * H, k_at, k_in, HALF, BK * BC, L)
    zv_a, zv_b, v_most, v_total = _measured(v_a, v_b, factor_ptr + (N + K) * H, v_at, v_in, HALF, BK * BC, L)
    most = tl.max(tl.maximum(tl.maximum(q_most, k_most), v_most), 0)
    scale = scale_of(most, tl.sum(q_total + k_total + v_total, 0), reach_ptr, 1.0, REACH, LARGEST, SMALLEST)
    tl.store(scale_ptr + row, scale)
    inverse = tl.div_rn(1.0, scale)
    out_ptr += row * out_stride
    codes_ptr += row * codes_stride
    _stored(out_ptr, codes_ptr, q_a, q_b, zq_a, zq_b, inverse, q_at, q_in, HALF)
    _stored(out_ptr + N * H, codes_ptr + N * H, k_a, k_b, zk_a, zk_b, inverse, k_at, k_in, HALF)
    behind: tl.constexpr = (N + K) * H
    _stored(out_ptr + behind, codes_ptr + behind, v_a, v_b, zv_a, zv_b, inverse, v_at, v_in, HALF)


def fits(dv: torch.Tensor, cos: torch.Tensor, heads: tuple[int, int, int]) -> bool:
    return dv.shape[1] == heads[1] and 2 * cos.shape[1] == heads[2]


def rope_backward(
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: tuple[int, int, int],
    codes: torch.Tensor,
    factor: torch.Tensor,
    reach: torch.Tensor | None,
) -> torch.Tensor:
    scale = torch.empty(len(out), dtype=torch.float32, device=out.device)
    half = cos.shape[1]
    of_q, of_k, of_half = (launch.power_of_two(n) for n in (heads[0], heads[1], half))
    warps = min(16, launch.power_of_two(triton.cdiv((of_q + 2 * of_k) * of_half, 512)))  # at most 16 pairs a thread
    _rope_backward[(len(out),)](
        *grads, cos, sin, factor, reach, out, codes, scale, *(g.stride(0) for g in grads), out.stride(0),
        codes.stride(0), N=heads[0], K=heads[1], HALF=half, REACH=reach is not None, BN=of_q, BK=of_k, BC=of_half,
        L=min(32 * warps, of_k * of_half), LARGEST=LARGEST, SMALLEST=SMALLEST, num_warps=warps,
    )  # fmt: skip
    return scale
