"""8-bit floats (e4m3: 4 bits of exponent, 3 of mantissa, at most 448), one scale for each row; adapters beside them.

    rows       x [T, K] ~ scale[t] * codes[t, k], with scale[t] = max |x[t]| / 448
    product    y[t, o] = a.scale[t] * b.scale[o] * sum over k of a.codes[t, k] b.codes[o, k]

The weight's scales belong to its rows [out], which are what the backward sums over: there they are multiplied into dY
before it is quantised (`factor`), and the same codes serve forward and backward.

**Adapters.** s h B' must be added to y in bf16's precision, and a separate addition would read y once more. So the
adapters are more columns of the product. A number is stored as two codes, v = hi + lo, with a relative error of 2^-8
(and an absolute one of 2^-10, where the largest code is 448), and

    [x | hi(h) | hi(h) | lo(h)] [W | hi(B) | lo(B) | hi(B)]'  =  x W' + (hi + lo)(h) (hi + lo)(B)' - lo(h) lo(B)'

The row scales are those of x and W, so B is divided by W's, and a power of two q is multiplied into B and divided out
of h: B q must stay below 448, and h / q below 448 times x's scale. For the latter, the scale of a row is widened where
needed before h is known, using the bound |h_r| <= |x| |A_r| (`reach`). e4m3 keeps its 3 bits of mantissa over 15 powers
of two, so a scale that is too wide by up to 2^6 loses no more than those 3 bits lose already. The relative error of the
adapters' share is then 2^-8, or, where the share is tiny, a thousandth of the error of rounding y to bf16. The same
holds for dX and g A, with W and A, dY and g.

Rejected: adding h B' to y afterwards (a pass over y: 18 ms of a step of 290 at 8B, 8192 tokens), letting the consumers
of y add it (products in their tiles: docs/lessons.md), one code instead of two (an error of 2^-4).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from graftune.kernels.lora_linear.reference import members
from graftune.kernels.rms_norm import reference as rms_norm
from graftune.kernels.swiglu import reference as swiglu

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
SMALLEST = 2.0**-100  # the smallest scale: that of a row of zeros
PIECES = 3  # columns a rank takes: hi hi, hi lo, lo hi
HEADROOM = 8.0  # by which q may exceed the largest |A_r|: h / q then has two good codes, and scales are rarely widened
MOST_Q = 2.0**24  # q is between 1 / MOST_Q and this: divided by the smallest scale it is still finite


class Rows(NamedTuple):
    """Quantised rows, as an operand of the product."""

    codes: torch.Tensor  # [T, K] e4m3; rows may have a stride
    scale: torch.Tensor  # [T] fp32


class AdapterScale(NamedTuple):
    """How to quantise the rows beside a group's adapters: 0-dim fp32 views, updated with the adapters."""

    reach: torch.Tensor  # the row's scale is at least reach * |x| / 448
    shift: torch.Tensor  # 1 / q


class AdapterCodes(NamedTuple):
    """A group's adapters, and the frozen weight whose codes they lie beside (B) and below (A)."""

    down: torch.Tensor  # [R * members, in], the A's
    up: torch.Tensor  # [sum of the members' outs, R], the B's
    columns: tuple[tuple[int, int], ...]  # of y, for each member
    alpha: float  # alpha / rank
    scale: torch.Tensor  # [out] fp32, of the weight
    beside: torch.Tensor  # [out, code columns] e4m3, columns after the weight's
    below: torch.Tensor  # [code columns, in] e4m3, rows after the weight's; both may have any strides
    figures: torch.Tensor  # [4] fp32: reach and shift of the forward pass, then of the backward

    @property
    def forward(self) -> AdapterScale:
        return AdapterScale(self.figures[0], self.figures[1])

    @property
    def backward(self) -> AdapterScale:
        return AdapterScale(self.figures[2], self.figures[3])


def scale_of(x32: torch.Tensor, reach: torch.Tensor | None = None) -> torch.Tensor:
    """The scales of rows in fp32. A row that is not finite gets such a scale: the step is then skipped."""
    most = x32.abs().amax(1)
    if reach is not None:
        most = torch.maximum(most, reach * x32.square().sum(1).sqrt())
    return most.mul(1.0 / LARGEST).clamp_min(SMALLEST)


def encode(x32: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """Codes of x32 * inverse, clamped to -448 and 448; NaN stays NaN."""
    return (x32 * inverse).clamp(-LARGEST, LARGEST).to(E4M3)


def quantise(
    x: torch.Tensor, codes: torch.Tensor, factor: torch.Tensor | None, reach: torch.Tensor | None, slack: float = 1.0
) -> torch.Tensor:
    x32 = x.float() if factor is None else x.float() * factor
    scale = scale_of(x32, None if reach is None else reach * slack)
    codes.copy_(encode(x32, scale.reciprocal().unsqueeze(1)))
    return scale


def split(x32: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes hi and lo whose sum approximates x32."""
    hi = encode(x32, torch.ones((), device=x32.device))
    return hi, encode(x32 - hi.float(), torch.ones((), device=x32.device))


def lay(h: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, tail: torch.Tensor) -> None:
    """Writes h [T, n] as codes to tail [T, code columns], beside rows of this scale; columns beyond 3 n become zero."""
    n = h.shape[1]
    hi, lo = split(h.float() * (scale.reciprocal() * shift).unsqueeze(1))
    for i, piece in enumerate((hi, hi, lo)):
        tail[:, i * n : (i + 1) * n].copy_(piece)
    tail[:, PIECES * n :].zero_()


def mm(a: Rows, b: Rows, dtype: torch.dtype) -> torch.Tensor:
    """a [M, K], b [N, K] -> a b' [M, N]."""
    product = a.codes.float() @ b.codes.float().t()
    return product.mul_(a.scale.unsqueeze(1)).mul_(b.scale).to(dtype)


def transpose(codes: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(codes.t())


def power(x: torch.Tensor) -> torch.Tensor:
    """The largest power of two that is at most x, within the range of q."""
    x = x.float().clamp(1 / MOST_Q, MOST_Q)
    return (x.view(torch.int32) & 0x7F800000).view(torch.float32)


def quantise_adapters(groups: Sequence[AdapterCodes], tables: dict[str, torch.Tensor]) -> None:
    """Updates each group's `figures` and its codes beside and below the weight."""
    for group in groups:
        _quantise(group)


def _quantise(group: AdapterCodes) -> None:
    n, out = len(group.down), len(group.scale)
    a = group.down.float()
    u = a.new_zeros(out, n)  # s B / the weight's scales, member by member on a diagonal
    for columns, rows, ranks in members(group.columns, group.up.shape[1]):
        u[columns, ranks] = group.up[rows].float() * (group.alpha / group.scale[columns]).unsqueeze(1)
    a_length, u_length = a.norm(dim=1).amax(), u.norm(dim=0).amax()
    q = power(torch.minimum(LARGEST / u.abs().amax(), HEADROOM * a_length))
    p = power(torch.minimum(LARGEST / a.abs().amax(), HEADROOM * u_length))
    group.figures.copy_(torch.stack((a_length / q, 1 / q, u_length / p, 1 / p)))
    for target, (hi, lo) in (
        (group.beside, split(u * q)),
        (group.below.t(), split(a.t() * p)),
    ):
        for i, piece in enumerate((hi, lo, hi)):
            target[:, i * n : (i + 1) * n].copy_(piece)


def norm(
    x: torch.Tensor,
    y: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    codes: torch.Tensor,
    reach: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x + y, rstd, scale); the norm of the sum goes to `codes`. y is overwritten."""
    normed = torch.empty_like(x, dtype=torch.float32)
    total, rstd = rms_norm.add_forward(x, y, weight, eps, normed)
    return total, rstd, quantise(normed, codes, None, reach)


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
    """Writes the stream's gradient to `out` and, times `factor`, to `codes`; returns the scale."""
    rms_norm.add_backward(grad_y, x, rstd, weight, residual, None, out)
    return quantise(out, codes, factor, reach)


def act(gate_up: torch.Tensor, codes: torch.Tensor, reach: torch.Tensor | None) -> torch.Tensor:
    """Writes SwiGLU to `codes`; returns the scale."""
    x32 = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    swiglu.forward(gate_up.float(), x32)
    return quantise(x32, codes, None, reach)


def act_backward(
    grad: torch.Tensor,
    gate_up: torch.Tensor,
    out: torch.Tensor,
    act: torch.Tensor,
    codes: torch.Tensor,
    factor: torch.Tensor,
    reach: torch.Tensor | None,
) -> torch.Tensor:
    """Writes SwiGLU's backward to `out` and `act`, and out times `factor` to `codes`; returns the scale."""
    swiglu.backward(grad, gate_up, out, act)
    return quantise(out, codes, factor, reach)
