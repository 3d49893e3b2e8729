"""Short causal convolutions over packed documents, in plain torch: LFM2's, gated twice, and Qwen3.5's with SiLU.

    u = B * x        c[t] = sum over j < K of taps[K - 1 - j] * u[t - j]        out = C * c

B, C and x are the thirds of one product [T, 3D]. The convolution is depthwise and causal and does not cross documents:
a token at position p of its document reads at most p tokens before it.

    dC = grad * c        du[t] = sum over j < K of taps[K - 1 - j] * (grad * C)[t + j]
    dB = du * x          dx = du * B

Qwen3.5: out = silu(c) with u = x, and du as above for the gradient of c, grad * silu'(c).
"""

from __future__ import annotations

import torch


def forward(bcx: torch.Tensor, taps: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
    b, c, x = bcx.chunk(3, 1)
    out.copy_(c.float() * _convolved(b.float() * x.float(), taps, positions))


def backward(
    grad: torch.Tensor, bcx: torch.Tensor, taps: torch.Tensor, positions: torch.Tensor, out: torch.Tensor,
    mixed: torch.Tensor, grad_taps: torch.Tensor | None = None,
) -> None:  # fmt: skip
    b, c, x = (part.float() for part in bcx.chunk(3, 1))
    u = b * x
    convolved = _convolved(u, taps, positions)
    grad_u = _through_convolution(grad.float() * c, u, taps, positions, grad_taps)
    mixed.copy_(c * convolved)
    out.copy_(torch.cat((grad_u * x, grad.float() * convolved, grad_u * b), 1))


def silu_forward(x: torch.Tensor, taps: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(torch.nn.functional.silu(_convolved(x.float(), taps, positions)))


def silu_backward(
    grad: torch.Tensor, x: torch.Tensor, taps: torch.Tensor, positions: torch.Tensor, out: torch.Tensor,
    grad_taps: torch.Tensor | None = None,
) -> None:  # fmt: skip
    u = x.float()
    convolved = _convolved(u, taps, positions)
    share = torch.sigmoid(convolved)
    through = grad.float() * share * (1 + convolved * (1 - share))
    out.copy_(_through_convolution(through, u, taps, positions, grad_taps))


def _through_convolution(
    grad: torch.Tensor, u: torch.Tensor, taps: torch.Tensor, positions: torch.Tensor, grad_taps: torch.Tensor | None
) -> torch.Tensor:
    """The gradient of u, for the gradient of its convolution. Adds the taps' gradient to `grad_taps` if given."""
    grad_u, kernel = torch.zeros_like(u), taps.shape[1]
    for j in range(kernel):
        reached = grad * (positions >= j).unsqueeze(1)  # of tokens that read j tokens back
        grad_u += taps[:, kernel - 1 - j] * _shifted(reached, -j)
        if grad_taps is not None:
            grad_taps[:, kernel - 1 - j] += (reached * _shifted(u, j)).sum(0)
    return grad_u


def _convolved(u: torch.Tensor, taps: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    kernel = taps.shape[1]
    total = taps[:, kernel - 1] * u
    for j in range(1, kernel):
        total += taps[:, kernel - 1 - j] * _shifted(u, j) * (positions >= j).unsqueeze(1)
    return total


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """Row t is row t - by of x, or zero if there is none."""
    if by == 0:
        return x
    moved = torch.zeros_like(x)
    if by > 0:
        moved[by:] = x[:-by]
    else:
        moved[:by] = x[-by:]
    return moved
