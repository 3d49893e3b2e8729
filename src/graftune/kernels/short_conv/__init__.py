"""Short causal convolutions over packed documents: LFM2's, gated twice, C * conv(B * x), and Qwen3.5's silu(conv(x)),
see reference.py.

bcx [T, 3D] holds B, C and x in adjacent columns; x alone is [T, D]. taps [D, K] are fp32; the last one is for the token
itself. positions [T] count from 0 in every document, so that the convolution does not cross a boundary. It computes in
fp32; tensors may have any row stride.
"""

from __future__ import annotations

import torch

from graftune.kernels import launch
from graftune.kernels.short_conv import reference
from graftune.kernels.short_conv.columns import Columns

__all__ = ["Columns", "backward", "forward", "silu_backward", "silu_forward", "silu_step_", "step_"]


@launch.operation("convolution")
def forward(bcx: torch.Tensor, taps: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
    """Write the result [T, D] to `out`."""
    _check(bcx, taps, positions, out)
    launch.implementation(reference, bcx).forward(bcx, taps, positions, out)


@launch.operation("convolution")
def backward(
    grad: torch.Tensor, bcx: torch.Tensor, taps: torch.Tensor, positions: torch.Tensor, out: torch.Tensor,
    mixed: torch.Tensor, grad_taps: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """For grad [T, D], write the gradient of bcx [T, 3D] to `out` and the forward's result to `mixed`. Add the taps'
    gradient to `grad_taps` if given; the reference does this, since only full training needs it."""
    _check(bcx, taps, positions, grad)
    assert out.shape == bcx.shape and mixed.shape == grad.shape and out.stride(1) == mixed.stride(1) == 1
    if launch.fused(bcx) and grad_taps is None:
        from graftune.kernels.short_conv import kernel

        kernel.backward(grad, bcx, taps, positions, out, mixed)
    else:
        reference.backward(grad, bcx, taps, positions, out, mixed, grad_taps)


def step_(bcx: torch.Tensor, taps: torch.Tensor, state: torch.Tensor, out: torch.Tensor) -> None:
    """Compute one new token of each sequence from bcx [S, 3D]. `state` [S, K - 1, D] holds the last values of B * x of
    each sequence, oldest first, and is shifted by one."""
    b, c, x = (part.float() for part in bcx.chunk(3, 1))
    out.copy_(c * _next(b * x, taps, state))


@launch.operation("convolution")
def silu_forward(x: torch.Tensor, taps: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
    """Write silu(conv(x)) [T, D] to `out`."""
    _check_silu(x, taps, positions, out)
    launch.implementation(reference, x).silu_forward(x, taps, positions, out)


@launch.operation("convolution")
def silu_backward(
    grad: torch.Tensor, x: torch.Tensor, taps: torch.Tensor, positions: torch.Tensor, out: torch.Tensor,
    grad_taps: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """For grad [T, D], write the gradient of x [T, D] to `out`, which must be another buffer. Add the taps' gradient to
    `grad_taps` if given. The reference computes this, since only full training needs it, and more than four taps."""
    _check_silu(x, taps, positions, grad)
    _check_silu(x, taps, positions, out)
    if launch.fused(x) and grad_taps is None and taps.shape[1] <= 4:
        from graftune.kernels.short_conv import kernel

        kernel.silu_backward(grad, x, taps, positions, out)
    else:
        reference.silu_backward(grad, x, taps, positions, out, grad_taps)


@launch.operation("convolution")
def silu_step_(x: torch.Tensor, taps: torch.Tensor, state: torch.Tensor, out: torch.Tensor) -> None:
    """Compute silu(conv(x)) of one new token of each sequence from x [S, D]. `state` [S, K - 1, D] holds the last
    values of x of each sequence, oldest first, and is shifted by one."""
    out.copy_(torch.nn.functional.silu(_next(x.float(), taps, state)))


def _next(u: torch.Tensor, taps: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """The convolution at the new token u [S, D]; shifts the state."""
    reached = torch.cat((state.float(), u.unsqueeze(1)), 1)
    state.copy_(reached[:, 1:])
    return torch.einsum("skd,dk->sd", reached, taps)


def _check_silu(x: torch.Tensor, taps: torch.Tensor, positions: torch.Tensor, other: torch.Tensor) -> None:
    assert x.shape == other.shape == (len(positions), len(taps)), (x.shape, other.shape, taps.shape)
    assert x.stride(1) == other.stride(1) == 1 and taps.is_contiguous() and taps.dtype == torch.float32


def _check(bcx: torch.Tensor, taps: torch.Tensor, positions: torch.Tensor, narrow: torch.Tensor) -> None:
    tokens, width = narrow.shape
    assert bcx.shape == (tokens, 3 * width) and taps.shape[0] == width and positions.shape == (tokens,)
    assert bcx.stride(1) == narrow.stride(1) == 1 and taps.is_contiguous() and taps.dtype == torch.float32
