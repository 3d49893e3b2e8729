# mypy: disallow-untyped-defs=False, check-untyped-defs=False
"""SwiGLU that writes fp8 codes: the forward those that `down` multiplies, the backward those of gate_up's gradient.

Bytes per token (F = 14336 at 8B; 2 a value, 1 a code), in separate kernels and here:

    forward     reads 4 F and writes the codes, 1 F, from which h is computed too. Separate kernels also write the
                activation and read it again, 4 F.
    backward    reads 6 F, writes 4 F + 2 F, and g reads dY, 4 F. Separate kernels read dY once more for the codes, 4 F,
                and write these, 2 F. Here a program reads back from cache the row that it has just written, so only
                the 2 F of codes are further memory traffic.

The row is still in cache if few rows are in flight: 2 on a multiprocessor with 16 warps each, of 115 kB with activation
and codes, are 30 MB, and the second-level cache of a large chip has 50. With 4 warps there would be 6, and 91 MB.
Rejected, in microseconds at 8B and 8192 tokens (H200), where this takes 432, and computing g and dB from its dY 137:
the whole row in registers (16 and 32 warps both spilled); several rows a program (480 to 500); codes written by the
kernel of g and dB with a scale from here (301 for it: its best tile then needs 255 registers and spills); no dY at all,
but a row of scratch per program (394), and g and dB from the codes (232 at best: converting codes to numbers takes
longer than reading the other half of their bytes).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graftune.kernels import launch
from graftune.kernels.fp8.kernel import encode_row, scale_of, warps
from graftune.kernels.fp8.reference import LARGEST, SMALLEST
from graftune.kernels.swiglu.kernel import _act as unit

ONE_ACT = 1 << 14  # values of a SwiGLU row that one program holds
ACT_BLOCK = 4096  # values of each of gate, up and grad at a time
EACH = 8  # of these values per thread: 16 bytes


@triton.jit
def _silu_up(gate_ptr, up_ptr, cols, F):
    """silu(gate) * up"""
    gate = tl.load(gate_ptr + cols, cols < F, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + cols, cols < F, other=0.0).to(tl.float32)
    silu, _ = unit(gate, "silu")
    return silu * up


@launch.kernel
def _act(
    gate_up_ptr, reach_ptr, codes_ptr, scale_ptr, F, codes_stride,
    REACH: tl.constexpr, WHOLE: tl.constexpr, B: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, B)
    gate_ptr = gate_up_ptr + row * (2 * F)
    codes_ptr += row * codes_stride
    scale_ptr += row
    if WHOLE:
        act = _silu_up(gate_ptr, gate_ptr + F, cols, F)
        encode_row(act, codes_ptr, scale_ptr, cols, cols < F, reach_ptr, 1.0, REACH, LARGEST, SMALLEST)
    else:
        most, total = tl.zeros([B], tl.float32), tl.zeros([B], tl.float32)
        for start in range(0, F, B):
            act = _silu_up(gate_ptr, gate_ptr + F, start + cols, F)
            most = tl.maximum(most, tl.abs(act))
            total += act * act
        scale = scale_of(tl.max(most, 0), tl.sum(total, 0), reach_ptr, 1.0, REACH, LARGEST, SMALLEST)
        tl.store(scale_ptr, scale)
        inverse = tl.div_rn(1.0, scale)
        for start in range(0, F, B):
            act = _silu_up(gate_ptr, gate_ptr + F, start + cols, F)
            tl.store(codes_ptr + start + cols, (act * inverse).to(codes_ptr.dtype.element_ty), start + cols < F)


@launch.kernel
def _act_backward(
    grad_ptr, gate_up_ptr, factor_ptr, reach_ptr, out_ptr, act_ptr, codes_ptr, scale_ptr, F, grad_stride, out_stride,
    act_stride, codes_stride, REACH: tl.constexpr, B: tl.constexpr, EACH: tl.constexpr, LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    kind = out_ptr.dtype.element_ty
    gate_up_ptr += row * (2 * F)
    grad_ptr += row * grad_stride
    out_ptr += row * out_stride
    act_ptr += row * act_stride
    codes_ptr += row * codes_stride
    # Reduced within threads at once: a number for each value would be 16 registers a thread.
    most, total = tl.zeros([B // EACH], tl.float32), tl.zeros([B // EACH], tl.float32)
    for start in range(0, F, B):
        cols = start + tl.arange(0, B)
        inside = cols < F
        gate = tl.load(gate_up_ptr + cols, inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        up = tl.load(gate_up_ptr + F + cols, inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        grad = tl.load(grad_ptr + cols, inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        silu, slope = unit(gate, "silu")
        of_gate = (grad * up * slope).to(kind)
        of_up = (grad * silu).to(kind)
        tl.store(out_ptr + cols, of_gate, inside, eviction_policy="evict_last")
        tl.store(out_ptr + F + cols, of_up, inside, eviction_policy="evict_last")
        tl.store(act_ptr + cols, (silu * up).to(kind), inside)
        a = of_gate.to(tl.float32) * tl.load(factor_ptr + cols, inside, other=0.0)
        b = of_up.to(tl.float32) * tl.load(factor_ptr + F + cols, inside, other=0.0)
        most = tl.maximum(most, tl.max(tl.reshape(tl.maximum(tl.abs(a), tl.abs(b)), [B // EACH, EACH]), 1))
        total += tl.sum(tl.reshape(a * a + b * b, [B // EACH, EACH]), 1)
    scale = scale_of(tl.max(most, 0), tl.sum(total, 0), reach_ptr, 1.0, REACH, LARGEST, SMALLEST)
    tl.store(scale_ptr + row, scale)
    inverse = tl.div_rn(1.0, scale)
    tl.debug_barrier()  # what is read now, other threads may have written
    for start in range(0, 2 * F, B):
        cols = start + tl.arange(0, B)
        inside = cols < 2 * F
        z = tl.load(out_ptr + cols, inside, other=0.0).to(tl.float32)
        z *= tl.load(factor_ptr + cols, inside, other=0.0)
        tl.store(codes_ptr + cols, (z * inverse).to(codes_ptr.dtype.element_ty), inside)


def act(gate_up: torch.Tensor, codes: torch.Tensor, reach: torch.Tensor | None) -> torch.Tensor:
    tokens, width = codes.shape
    scale = torch.empty(tokens, dtype=torch.float32, device=codes.device)
    block = min(ONE_ACT, launch.power_of_two(width))
    _act[(tokens,)](
        gate_up, reach, codes, scale, width, codes.stride(0), REACH=reach is not None, WHOLE=width <= block, B=block,
        LARGEST=LARGEST, SMALLEST=SMALLEST, num_warps=min(16, warps(block)),
    )  # fmt: skip
    return scale


def act_backward(
    grad: torch.Tensor,
    gate_up: torch.Tensor,
    out: torch.Tensor,
    act: torch.Tensor,
    codes: torch.Tensor,
    factor: torch.Tensor,
    reach: torch.Tensor | None,
) -> torch.Tensor:
    tokens, width = grad.shape
    scale = torch.empty(tokens, dtype=torch.float32, device=grad.device)
    block = min(ACT_BLOCK, launch.power_of_two(width, EACH))
    _act_backward[(tokens,)](
        grad, gate_up, factor, reach, out, act, codes, scale, width, grad.stride(0), out.stride(0), act.stride(0),
        codes.stride(0), REACH=reach is not None, B=block, EACH=EACH, LARGEST=LARGEST, SMALLEST=SMALLEST,
        num_warps=max(1, block // (32 * EACH)),
    )  # fmt: skip
    return scale
