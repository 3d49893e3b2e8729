# mypy: disallow-untyped-defs=False, check-untyped-defs=False
"""The norm that writes fp8 codes: the forward those that the projection after it multiplies, the backward those of the
gradient that the projection before it multiplies.

Bytes per token (D = 4096 at 8B; 2 a value, 1 a code), in separate kernels and here, for each of a layer's two norms:

    forward     reads x and y, writes their sum: 6 D. Separate kernels also write the normed row and read it for the
                codes and for h: 2 D + 2 D + 2 D, and 1 D of codes. Here 1 D of codes; h is computed from these: 1 D.
    backward    reads the gradient of the norm's output, x and the stream's gradient, and writes the latter: 8 D. That
                is dY of the projection (o or down) that wrote the stream. Separate kernels read it once more for the
                codes, 2 D, and write these, 1 D. Here they are only written: 1 D.

At 8192 tokens the backward saves 2 x 2 D x 8192 = 134 MB a layer, about 1 ms of a step of 8B at 4.2 TB/s. It could
store only the scale and let the kernel of g write the codes, which moves as many bytes; but here a whole row of the
stream is in registers, while writing codes raises that kernel from 93 registers to 255.
"""

from __future__ import annotations

import torch
import triton.language as tl

from graftune.kernels import launch
from graftune.kernels.fp8.kernel import encode_row, warps
from graftune.kernels.fp8.reference import LARGEST, SMALLEST
from graftune.kernels.rms_norm.kernel import normed_row, through_norm


@launch.kernel
def _norm(
    x_ptr, y_ptr, w_ptr, sum_ptr, reach_ptr, codes_ptr, rstd_ptr, scale_ptr, eps, codes_stride,
    D: tl.constexpr, ADD: tl.constexpr, REACH: tl.constexpr, B: tl.constexpr,
    LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, B)
    inside = cols < D
    n = normed_row(x_ptr, y_ptr, w_ptr, sum_ptr, rstd_ptr, eps, D, row, cols, inside, D, ADD)
    place = codes_ptr + row * codes_stride
    encode_row(n, place, scale_ptr + row, cols, inside, reach_ptr, 1.0, REACH, LARGEST, SMALLEST)


@launch.kernel
def _norm_backward(
    grad_ptr, x_ptr, rstd_ptr, w_ptr, residual_ptr, out_ptr, factor_ptr, reach_ptr, codes_ptr, scale_ptr,
    grad_stride, residual_stride, out_stride, codes_stride,
    D: tl.constexpr, REACH: tl.constexpr, B: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, B)
    inside = cols < D
    rstd = tl.load(rstd_ptr + row)
    grad = tl.load(grad_ptr + row * grad_stride + cols, inside, other=0.0).to(tl.float32)
    n = tl.load(x_ptr + row * D + cols, inside, other=0.0).to(tl.float32) * rstd
    out = through_norm(grad, n, tl.load(w_ptr + cols, inside, other=0.0), rstd, D)
    out += tl.load(residual_ptr + row * residual_stride + cols, inside, other=0.0).to(tl.float32)
    out = out.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * out_stride + cols, out, inside)
    z = out.to(tl.float32) * tl.load(factor_ptr + cols, inside, other=0.0)
    place = codes_ptr + row * codes_stride
    encode_row(z, place, scale_ptr + row, cols, inside, reach_ptr, 1.0, REACH, LARGEST, SMALLEST)


def norm(
    x: torch.Tensor,
    y: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    codes: torch.Tensor,
    reach: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, width = x.shape
    total = x if y is None else y
    rstd, scale = (torch.empty(tokens, dtype=torch.float32, device=x.device) for _ in range(2))
    _norm[(tokens,)](
        x, y, weight, total, reach, codes, rstd, scale, eps, codes.stride(0), D=width, ADD=y is not None,
        REACH=reach is not None, B=launch.power_of_two(width), LARGEST=LARGEST, SMALLEST=SMALLEST,
        num_warps=warps(width),
    )  # fmt: skip
    return total, rstd, scale


def norm_backward(
    grad_y: torch.Tensor,
    x: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    out: torch.Tensor,
    codes: torch.Tensor,
    factor: torch.Tensor,
    reach: torch.Tensor | None,
) -> torch.Tensor:
    tokens, width = x.shape
    scale = torch.empty(tokens, dtype=torch.float32, device=x.device)
    # Five tensors of a row at once. At 8B, 8192 tokens: 86 microseconds with 4 warps, 89 with 8, 77 with 16.
    _norm_backward[(tokens,)](
        grad_y, x, rstd, weight, residual, out, factor, reach, codes, scale, grad_y.stride(0), residual.stride(0),
        out.stride(0), codes.stride(0), D=width, REACH=reach is not None, B=launch.power_of_two(width), LARGEST=LARGEST,
        SMALLEST=SMALLEST, num_warps=min(32, 4 * warps(width)),
    )  # fmt: skip
    return scale
