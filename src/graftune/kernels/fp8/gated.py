# mypy: disallow-untyped-defs=False, check-untyped-defs=False
"""SwiGLU beside fp8 products: forward it writes the codes that `down` reads, and on the way back those of gate_up's
gradient.

Bytes a token (F = 14336 at 8B; 2 a value, 1 a code), apart and here:

    forward     reads 4 F and writes the codes, 1 F, which h is made of too. Apart the activation is written and read
                again, 4 F.
    way back    reads 6 F, writes the activation, 2 F, and dY's codes, 2 F, of which g and dB are made too. Apart dY is
                written and read again, 8 F.

On the way back a row's scale is known when all of dY has been seen, so a program writes its row of dY and reads it
back. Where nobody else wants dY, each program has one row of scratch for all its tokens: 2 programs to a multiprocessor
are 15 MB, which stay in a large chip's second level (50) and never reach the memory. Programs of 16 warps: with 4 there
would be 6 to a multiprocessor and 45 MB. Rejected: the row in registers whole (spilled with 16 warps as with 32),
several rows a program side by side, and codes written by the kernel of g and dB at a scale left here (its best tile
then needs 255 registers and spills).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from graftune.kernels.fp8.kernel import encode_row, scale_of, warps
from graftune.kernels.fp8.reference import LARGEST, SMALLEST
from graftune.kernels.launch import power_of_two
from graftune.kernels.swiglu.kernel import _act as unit

ONE_ACT = 1 << 14  # values of a SwiGLU row that one program holds
AT_ONCE = 2  # programs to a multiprocessor, on the way back without a dY
ACT_BLOCK = 4096  # values of each of gate, up and grad at a time
EACH = 8  # of them a thread: 16 bytes


@triton.jit
def _silu_up(gate_ptr, up_ptr, cols, F):
    """silu(gate) * up"""
    gate = tl.load(gate_ptr + cols, cols < F, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + cols, cols < F, other=0.0).to(tl.float32)
    silu, _ = unit(gate, False)
    return silu * up


@triton.jit
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


@triton.jit
def _act_backward(
    grad_ptr, gate_up_ptr, factor_ptr, reach_ptr, out_ptr, act_ptr, codes_ptr, scale_ptr, tokens, F, grad_stride,
    out_stride, act_stride, codes_stride, REACH: tl.constexpr, KEEP: tl.constexpr, B: tl.constexpr,
    EACH: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
):  # fmt: skip
    """KEEP: a program a token, whose dY stays; without, a program several tokens, one after the other."""
    kind = out_ptr.dtype.element_ty
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        row = tl.cast(token, tl.int64)
        gate_up, grads = gate_up_ptr + row * (2 * F), grad_ptr + row * grad_stride
        acts, codes = act_ptr + row * act_stride, codes_ptr + row * codes_stride
        out = out_ptr + (row if KEEP else tl.program_id(0).to(tl.int64)) * out_stride
        # Reduced within threads at once: a number for each value would be 16 registers a thread.
        most, total = tl.zeros([B // EACH], tl.float32), tl.zeros([B // EACH], tl.float32)
        for start in range(0, F, B):
            cols = start + tl.arange(0, B)
            inside = cols < F
            gate = tl.load(gate_up + cols, inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
            up = tl.load(gate_up + F + cols, inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
            grad = tl.load(grads + cols, inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
            silu, slope = unit(gate, False)
            of_gate = (grad * up * slope).to(kind)
            of_up = (grad * silu).to(kind)
            tl.store(out + cols, of_gate, inside, eviction_policy="evict_last")
            tl.store(out + F + cols, of_up, inside, eviction_policy="evict_last")
            tl.store(acts + cols, (silu * up).to(kind), inside)
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
            z = tl.load(out + cols, inside, other=0.0).to(tl.float32)
            z *= tl.load(factor_ptr + cols, inside, other=0.0)
            tl.store(codes + cols, (z * inverse).to(codes_ptr.dtype.element_ty), inside)
        tl.debug_barrier()  # what is written next, other threads may still read


def act(gate_up: torch.Tensor, codes: torch.Tensor, reach: torch.Tensor | None) -> torch.Tensor:
    tokens, width = codes.shape
    scale = torch.empty(tokens, dtype=torch.float32, device=codes.device)
    block = min(ONE_ACT, power_of_two(width))
    _act[(tokens,)](
        gate_up, reach, codes, scale, width, codes.stride(0), REACH=reach is not None, WHOLE=width <= block, B=block,
        LARGEST=LARGEST, SMALLEST=SMALLEST, num_warps=min(16, warps(block)),
    )  # fmt: skip
    return scale


def act_backward(
    grad: torch.Tensor,
    gate_up: torch.Tensor,
    out: torch.Tensor | None,
    act: torch.Tensor,
    codes: torch.Tensor,
    factor: torch.Tensor,
    reach: torch.Tensor | None,
) -> torch.Tensor:
    tokens, width = grad.shape
    scale = torch.empty(tokens, dtype=torch.float32, device=grad.device)
    block = min(ACT_BLOCK, power_of_two(width, EACH))
    programs = tokens if out is not None else min(tokens, at_once(grad.device))
    rows = out if out is not None else torch.empty(programs, 2 * width, dtype=gate_up.dtype, device=grad.device)
    _act_backward[(programs,)](
        grad, gate_up, factor, reach, rows, act, codes, scale, tokens, width, grad.stride(0), rows.stride(0),
        act.stride(0), codes.stride(0), REACH=reach is not None, KEEP=out is not None, B=block, EACH=EACH,
        LARGEST=LARGEST, SMALLEST=SMALLEST, num_warps=max(1, block // (32 * EACH)),
    )  # fmt: skip
    return scale


def at_once(device: torch.device) -> int:
    """Programs that find room on the chip together."""
    if device.type != "cuda":
        return AT_ONCE  # of the interpreter
    return AT_ONCE * int(torch.cuda.get_device_properties(device).multi_processor_count)
