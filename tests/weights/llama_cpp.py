"""llama.cpp's own quantisers and dequantisers: its Python package does not offer them, its library exports them."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
import xllamacpp
from gguf.constants import GGMLQuantizationType

from graftune.kernels.gguf_dequant import row_bytes


@functools.cache
def library() -> ctypes.CDLL:
    (file,) = Path(xllamacpp.__file__).parent.glob("xllamacpp*.so")
    loaded = ctypes.CDLL(str(file))
    loaded.ggml_quantize_chunk.restype = ctypes.c_size_t
    loaded.ggml_quantize_chunk.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    return loaded


def quantised(weight: torch.Tensor, kind: str) -> torch.Tensor:
    rows, columns = weight.shape
    out = torch.empty(rows, row_bytes(kind, columns), dtype=torch.uint8)
    code = int(GGMLQuantizationType[kind])
    library().ggml_quantize_chunk(code, weight.contiguous().data_ptr(), out.data_ptr(), 0, rows, columns, None)
    return out


def dequantised(blocks: torch.Tensor, kind: str, columns: int) -> torch.Tensor:
    out = torch.empty(len(blocks), columns)
    read = getattr(library(), f"dequantize_row_{kind.lower().replace('k', 'K')}")
    read(ctypes.c_void_p(blocks.contiguous().data_ptr()), ctypes.c_void_p(out.data_ptr()), ctypes.c_int64(out.numel()))
    return out
