"""Frozen products in 8-bit floats: e4m3 codes with one scale for each row, through the GPU's fp8 units.

reference.py has the formulas and explains the adapters' part; kernel.py quantises and transposes, adapters.py writes
adapters beside weights. Where a kernel of ours writes a tensor that is to be quantised, it writes the codes too:
norms.py, gated.py and rotary.py are norm, SwiGLU and rope with codes, and adapter_products.py has the adapters'
products, which write codes of their results. The output of attention, o's input, is quantised in a pass of its own,
since its kernels are not ours.

Codes are [T, K] and may have a row stride, as a rule `aligned` bytes; K and N of a product are multiples of 16.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graftune import spans
from graftune.arithmetic import ceil_div
from graftune.errors import GraftuneError
from graftune.kernels import launch, lora_linear, matmul, rope
from graftune.kernels.fp8 import reference
from graftune.kernels.fp8.reference import E4M3, LARGEST, PIECES, AdapterCodes, AdapterScale, Rows, scale_of
from graftune.kernels.lora_linear import THIN, LowRank

__all__ = [
    "E4M3",
    "LARGEST",
    "AdapterCodes",
    "AdapterScale",
    "Rows",
    "act",
    "act_backward",
    "adapter_code_columns",
    "aligned",
    "buffer",
    "down",
    "lay",
    "mm",
    "norm",
    "norm_backward",
    "quantise",
    "quantise_adapters",
    "refusal",
    "require",
    "rope_backward",
    "scale_of",
    "transpose",
    "up_backward",
    "up_both",
]  # fmt: skip

LEAST = (8, 9)  # compute capability of the first cards with fp8 units
LINE = 128


def refusal(device: torch.device) -> str | None:
    """Why this device cannot multiply in fp8, or None if it can."""
    if not launch.on_gpu(device) or torch.version.hip is not None:
        return f"fp8 products need an NVIDIA GPU of compute capability 8.9 or later, and the device is {device.type}"
    found = launch.capability(device)
    if found < LEAST:
        card = f"{launch.device_name(device)} has {found[0]}.{found[1]}"
        return f"fp8 products need a GPU of compute capability 8.9 or later, and {card}"
    return None


def require(device: torch.device, compute: torch.dtype) -> None:
    """Raises an error for a device without fp8 units, and for a compute dtype that their products do not have."""
    reason = refusal(device)
    if reason is None and compute != torch.bfloat16:
        reason = f"fp8 products come back in bf16, and compute_dtype is {str(compute).removeprefix('torch.')}"
    if reason is not None:
        raise GraftuneError(reason, fix="use base_dtype bf16, nf4 or auto")


def aligned(width: int) -> int:
    """Bytes from row to row: whole lines of memory."""
    return ceil_div(width, LINE) * LINE


def adapter_code_columns(ranks: int) -> int:
    """Columns of codes beside a weight for adapters whose ranks sum to `ranks`."""
    return ceil_div(PIECES * ranks, 16) * 16


def buffer(rows: int, width: int, device: torch.device, *, zero: bool = False) -> torch.Tensor:
    """Codes [rows, width], each row at the beginning of a line."""
    make = torch.zeros if zero else torch.empty
    return make(rows, aligned(width), dtype=torch.uint8, device=device).view(E4M3)[:, :width]


@launch.operation("quantise")
def quantise(
    x: torch.Tensor,
    codes: torch.Tensor,
    *,
    factor: torch.Tensor | None = None,
    reach: torch.Tensor | None = None,
    slack: float = 1.0,
) -> torch.Tensor:
    """Writes x [T, K] (times `factor` [K], fp32) as codes [T, K]; returns the scale [T]. `reach`, times `slack`, widens
    the scale so that it also covers the adapters' codes in the row (`AdapterScale`)."""
    assert x.shape == codes.shape and x.stride(1) == codes.stride(1) == 1 and codes.dtype == E4M3
    assert factor is None or (factor.shape == x.shape[1:] and factor.is_contiguous())
    return launch.implementation(reference, x).quantise(x, codes, factor, reach, slack)


@launch.operation("adapters")
def lay(h: torch.Tensor, rows: Rows, width: int, shift: torch.Tensor) -> None:
    """Writes h [T, n] (rows may have a stride) as codes after the first `width` columns of rows."""
    tail = rows.codes[:, width:]
    assert h.stride(1) == 1 and tail.shape[1] >= PIECES * h.shape[1]
    launch.implementation(reference, h).lay(h, rows.scale, shift, tail)


@launch.operation(spans.PRODUCT)
def mm(a: Rows, b: Rows, dtype: torch.dtype) -> torch.Tensor:
    """a [M, K], b [N, K] -> a b' [M, N], a fresh tensor. Without a GPU, the codes are dequantised and multiplied."""
    assert a.codes.shape[1] == b.codes.shape[1] and a.codes.shape[1] % 16 == 0 and len(b.codes) % 16 == 0
    if not launch.on_gpu(a.codes):
        return reference.mm(a, b, dtype)
    return matmul.scaled_mm(a.codes, b.codes.t(), (a.scale, b.scale), dtype)


@launch.operation(spans.PRODUCT)
def transpose(codes: torch.Tensor, out: torch.Tensor) -> None:
    """codes [M, N] -> out [N, M], M and N multiples of 4."""
    assert out.shape == codes.shape[::-1] and all(n % 4 == 0 for n in (*out.shape, codes.stride(0), out.stride(0)))
    launch.implementation(reference, codes).transpose(codes, out)


@launch.operation("adapters to their weights")
def quantise_adapters(groups: Sequence[AdapterCodes], tables: dict[str, torch.Tensor]) -> None:
    """Updates the codes of adapters and their `figures`; three launches on a GPU."""
    if groups:
        launch.implementation(reference, groups[0].down, "adapters").quantise_adapters(groups, tables)


@launch.operation("adapters")
def down(rows: Rows, width: int, weight: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """h = x A' [T, n], computed from the codes of x; writes h's own codes after those. Since the adapters read the
    weight's input codes, x need not exist in bf16 for up to THIN columns, and half as many bytes are moved."""
    x = rows.codes[:, :width]
    if launch.fused(x) and len(weight) <= THIN:
        from graftune.kernels.fp8 import adapter_products

        codes = adapter_products.CodeColumns(rows.codes, width, rows.scale, shift)
        return adapter_products.rows(
            x, weight, ((0, width),), codes, rank=len(weight), transposed=True, row_scale=rows.scale
        )
    h = lora_linear.down(x.to(weight.dtype), weight)
    h = h.mul_(rows.scale.unsqueeze(1))
    lay(h, rows, width, shift)
    return h


@launch.operation("adapters")
def up_backward(grad_y: torch.Tensor, low: LowRank, rows: Rows, shift: torch.Tensor) -> torch.Tensor:
    """g = s dY B [T, n]; writes its codes after those of dY."""
    width = grad_y.shape[1]
    if launch.fused(grad_y) and low.rank <= THIN:
        from graftune.kernels.fp8 import adapter_products

        codes = adapter_products.CodeColumns(rows.codes, width, rows.scale, shift)
        return adapter_products.rows(grad_y, low.up, low.columns, codes, rank=low.rank, scale=low.scale)
    g = lora_linear.up_backward(grad_y, low)
    lay(g, rows, width, shift)
    return g


@launch.operation("adapters")
def up_both(grad_y: torch.Tensor, low: LowRank, grad_up: torch.Tensor, rows: Rows, shift: torch.Tensor) -> torch.Tensor:
    """`up_backward`, and dB added to `grad_up` [sum of outs, R] (fp32), with our kernel in one pass over dY."""
    width = grad_y.shape[1]
    if launch.fused(grad_y) and low.rank <= THIN:
        from graftune.kernels.fp8 import adapter_products
        from graftune.kernels.lora_linear import sums

        codes = adapter_products.CodeColumns(rows.codes, width, rows.scale, shift)

        def add_up(parts: torch.Tensor, g: torch.Tensor, counts: tuple[int, ...]) -> None:
            adapter_products.add_up(parts, g, codes, counts)

        g = sums.both(grad_up, grad_y, low.h, low.up, low.columns, rank=low.rank, scale=low.scale, add_up=add_up)
        adapter_products.clear(g.shape[1], codes)
        return g
    lora_linear.up_grad(grad_y, low, grad_up)
    return up_backward(grad_y, low, rows, shift)


@launch.operation("norm")
def norm(
    x: torch.Tensor,
    y: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    codes: torch.Tensor,
    *,
    reach: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, y [T, D] -> (s = x + y, rstd [T], scale [T]); writes norm(s) as codes [T, D]. y is overwritten by the sum."""
    assert x.is_contiguous() and (y is None or (y.shape == x.shape and y.is_contiguous()))
    assert codes.shape == x.shape and codes.stride(1) == 1
    return launch.implementation(reference, x, "norms").norm(x, y, weight, eps, codes, reach)


@launch.operation("norm")
def norm_backward(
    grad_y: torch.Tensor,
    x: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    out: torch.Tensor,
    codes: torch.Tensor,
    factor: torch.Tensor,
    *,
    reach: torch.Tensor | None = None,
) -> torch.Tensor:
    """Writes rms_norm.add_backward to `out`, which may be `residual`, and times `factor` [D] as codes [T, D], for the
    projection that wrote the stream. Returns the codes' scale [T]."""
    assert x.is_contiguous() and grad_y.stride(1) == residual.stride(1) == out.stride(1) == codes.stride(1) == 1
    assert grad_y.shape == residual.shape == out.shape == codes.shape == x.shape and factor.shape == x.shape[1:]
    implementation = launch.implementation(reference, x, "norms")
    return implementation.norm_backward(grad_y, x, rstd, weight, residual, out, codes, factor, reach)


@launch.operation("gated unit")
def act(gate_up: torch.Tensor, codes: torch.Tensor, *, reach: torch.Tensor | None = None) -> torch.Tensor:
    """Writes SwiGLU of gate_up [T, 2F] as codes [T, F]; returns their scale [T]."""
    assert gate_up.is_contiguous() and gate_up.shape == (len(codes), 2 * codes.shape[1]) and codes.stride(1) == 1
    return launch.implementation(reference, gate_up, "gated").act(gate_up, codes, reach)


@launch.operation("gated unit")
def act_backward(
    grad: torch.Tensor,
    gate_up: torch.Tensor,
    out: torch.Tensor,
    act: torch.Tensor,
    codes: torch.Tensor,
    factor: torch.Tensor,
    *,
    reach: torch.Tensor | None = None,
) -> torch.Tensor:
    """Runs swiglu.backward, and writes out times `factor` [2F] as codes [T, 2F]. Returns their scale [T]."""
    assert gate_up.is_contiguous() and gate_up.shape == out.shape == codes.shape and grad.shape == act.shape
    assert grad.stride(1) == out.stride(1) == act.stride(1) == codes.stride(1) == 1 and factor.shape == out.shape[1:]
    return launch.implementation(reference, grad, "gated").act_backward(grad, gate_up, out, act, codes, factor, reach)


@launch.operation("rope")
def rope_backward(
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    grad_qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: tuple[int, int, int],
    codes: torch.Tensor,
    factor: torch.Tensor,
    *,
    reach: torch.Tensor | None = None,
) -> torch.Tensor:
    """Runs rope.finish_backward without norms, and writes grad_qkv times `factor` [(N + 2K) H] as codes
    [T, (N + 2K) H]. Returns their scale [T]."""
    assert codes.shape == grad_qkv.shape and codes.stride(1) == 1 and factor.shape == codes.shape[1:]
    if launch.fused(grad_qkv):
        from graftune.kernels.fp8 import rotary

        if rotary.fits(grads[2], cos, heads):
            return rotary.rope_backward(grads, grad_qkv, cos, sin, heads, codes, factor, reach)
    rope.finish_backward(grads, grad_qkv, cos, sin, heads, grad_qkv.new_empty(0))
    return quantise(grad_qkv, codes, factor=factor, reach=reach)
