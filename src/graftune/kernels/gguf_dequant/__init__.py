"""Dequantises GGUF blocks, stored as in the file: values are those of the gguf package to the bit, then rounded to the
dtype of the output. See reference.py for the formats.

blocks [rows, bytes of a row] uint8, contiguous -> out [rows, width] in bf16, fp16 or fp32, which may have any row
stride.
"""

from __future__ import annotations

import torch

from graftune.kernels import launch
from graftune.kernels.gguf_dequant import reference
from graftune.kernels.gguf_dequant.reference import KINDS, MXFP4_LARGEST, PLAIN, SCALES, row_bytes

__all__ = ["KINDS", "cast", "dequantise", "gather", "is_quantised", "row_bytes", "scales"]

_OUT = (torch.bfloat16, torch.float16, torch.float32)


def is_quantised(kind: str) -> bool:
    """Whether `kind` is a kind of blocks that this package reads, other than plain floats."""
    return kind in KINDS and kind not in PLAIN


@launch.operation("dequantise")
def dequantise(
    blocks: torch.Tensor, kind: str, out: torch.Tensor, rows: torch.Tensor | None = None,
    used: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Writes all rows of the weight to `out`, or those that `rows` [len(out)] (int32 or int64) names, in its order.
    `used` [E + 1] (int32), if these are the weights of E experts, at least two rows each: where each expert's token
    rows begin; on a GPU, weights of experts without any may be skipped."""
    assert blocks.dtype == torch.uint8 and blocks.dim() == 2 and blocks.is_contiguous()
    assert kind in KINDS, f"there is no dequantisation of {kind}"
    assert out.dtype in _OUT and out.dim() == 2 and out.stride(1) == 1
    assert out.device == blocks.device or (rows is not None and not launch.on_gpu(blocks)), "only rows come from a host"
    assert out.shape[1] > 0 and blocks.shape[1] == row_bytes(kind, out.shape[1])
    if rows is None:
        assert len(blocks) == len(out)
    else:
        assert rows.shape == (len(out),) and rows.is_contiguous() and rows.dtype in (torch.int32, torch.int64)
    if not launch.fused(out):
        reference.dequantise(blocks, kind, out, rows)
        return
    from graftune.kernels.gguf_dequant import kernel

    if kind in PLAIN:
        kernel.cast(blocks.view(PLAIN[kind]), out, rows)
    else:
        kernel.dequantise(blocks, kind, out, rows, used)


def scales(blocks: torch.Tensor, kind: str) -> torch.Tensor:
    """Floats that are all finite if and only if all values are: the fp16 scales of all blocks, in no particular order,
    or the values themselves for plain floats."""
    if kind in PLAIN:
        return blocks.view(PLAIN[kind])
    each = blocks.view(-1, KINDS[kind].bytes)
    if kind == "MXFP4":  # a power of two: infinite where the largest code would be
        return torch.where(each[:, 0] > MXFP4_LARGEST, torch.inf, 1.0)
    return torch.cat([each[:, at : at + 2] for at in SCALES[kind]]).view(torch.float16)


@launch.operation("dequantise")
def cast(values: torch.Tensor, out: torch.Tensor) -> None:
    """Casts floats [rows, width] in bf16, fp16 or fp32 to the dtype of `out`, which may have any row stride."""
    assert values.dtype in _OUT and values.shape == out.shape and values.is_contiguous() and out.stride(1) == 1
    if launch.fused(values):
        from graftune.kernels.gguf_dequant import kernel

        kernel.cast(values, out, None)
    else:
        out.copy_(values)


def gather(blocks: torch.Tensor, kind: str, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """An embedding lookup: the rows `ids` [T] -> [T, width]. No other row is touched. Where ids are on a GPU, blocks
    may be in host memory that it can read (model/frozen/host_table.py)."""
    block = KINDS[kind]
    out = torch.empty(len(ids), blocks.shape[1] // block.bytes * block.values, dtype=dtype, device=ids.device)
    dequantise(blocks, kind, out, ids)
    return out
