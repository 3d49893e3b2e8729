"""LFM2's double-gated short convolution over packed documents: C * conv(B * x), see reference.py.

bcx [T, 3D] holds B, C and x side by side; taps [D, K] are fp32, the last one for the token itself; positions [T] count
from 0 in every document, which is how the convolution knows where to begin anew. fp32 inside; rows may have a stride.
"""

from __future__ import annotations

import torch

from graftune.kernels import launch
from graftune.kernels.short_conv import reference

__all__ = ["backward", "forward", "step_"]


@launch.operation("convolution")
def forward(bcx: torch.Tensor, taps: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
    """Writes [T, D] to `out`."""
    _check(bcx, taps, positions, out)
    launch.implementation(reference, bcx).forward(bcx, taps, positions, out)


@launch.operation("convolution")
def backward(
    grad: torch.Tensor, bcx: torch.Tensor, taps: torch.Tensor, positions: torch.Tensor, out: torch.Tensor,
    mixed: torch.Tensor, grad_taps: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """grad [T, D] -> writes the gradient of bcx [T, 3D] to `out` and what `forward` wrote to `mixed`; adds that of the
    taps, where they train, by plain torch: only training of every weight asks for it."""
    _check(bcx, taps, positions, grad)
    assert out.shape == bcx.shape and mixed.shape == grad.shape and out.stride(1) == mixed.stride(1) == 1
    if launch.fused(bcx) and grad_taps is None:
        from graftune.kernels.short_conv import kernel

        kernel.backward(grad, bcx, taps, positions, out, mixed)
    else:
        reference.backward(grad, bcx, taps, positions, out, mixed, grad_taps)


def step_(bcx: torch.Tensor, taps: torch.Tensor, state: torch.Tensor, out: torch.Tensor) -> None:
    """One new token of each sequence: bcx [S, 3D], `state` [S, K - 1, D] the last B * x of each, oldest first, which
    moves on by one."""
    b, c, x = (part.float() for part in bcx.chunk(3, 1))
    u = torch.cat((state.float(), (b * x).unsqueeze(1)), 1)
    out.copy_(c * torch.einsum("skd,dk->sd", u, taps))
    state.copy_(u[:, 1:])


def _check(bcx: torch.Tensor, taps: torch.Tensor, positions: torch.Tensor, narrow: torch.Tensor) -> None:
    tokens, width = narrow.shape
    assert bcx.shape == (tokens, 3 * width) and taps.shape[0] == width and positions.shape == (tokens,)
    assert bcx.stride(1) == narrow.stride(1) == 1 and taps.is_contiguous() and taps.dtype == torch.float32
