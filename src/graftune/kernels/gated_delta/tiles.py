"""Chunk tables, and the tile sizes and launch options of the delta rule's kernels.

A chunk is up to 64 tokens of one document. The tables have a fixed capacity and are computed on the device from the
document boundaries, once for each pass, so that a captured pass can be replayed with other documents.

Triton has compiled such kernels wrongly on Hopper (heads of 128 in halves of 64 before Triton 3.7.1; 16 and 32 columns
of values, and eight warps for some widths, in 3.6), so tests/kernels/test_gated_delta_kernel.py and
tests/gpu/test_gated_delta.py compare them with the reference on the device. A key head is always one tile, never
divided.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from graftune.arithmetic import ceil_div
from graftune.kernels import launch
from graftune.kernels.attention import Documents

CHUNK = 64
LEAST_COLUMNS = 64


class DeltaTile(NamedTuple):
    """How many columns of a value head a program computes at a time, and the launch options."""

    columns: int
    warps: int
    stages: int


# By kernel (kernel.py describes them), the fastest of those tried on an H200; docs/lessons.md has the times.
TILES = {
    "solve": DeltaTile(0, 4, 1),  # has no columns of values
    "factors": DeltaTile(64, 4, 1),
    "scan": DeltaTile(64, 4, 2),
    "output": DeltaTile(64, 4, 1),
    "local": DeltaTile(64, 4, 1),
    "scan_back": DeltaTile(128, 8, 2),
    "grad_values": DeltaTile(128, 4, 1),
    "grad_queries": DeltaTile(64, 4, 1),
    "grad_keys": DeltaTile(64, 4, 1),
}
FP32_TILE = DeltaTile(32, 8, 1)  # products in fp32 do not use tensor cores, and their tiles take twice the memory
SOLVE_BLOCK = 8  # tokens of a block that is inverted row by row, in fp32
SOLVE_PRECISION = "tf32"  # in which the blocks are joined for 16-bit inputs; the result is rounded to 16 bits


def tile(kernel: str, v: torch.Tensor) -> DeltaTile:
    """The tile of a kernel for values like these. Its columns are a power of two, possibly wider than the head."""
    found = FP32_TILE if v.dtype == torch.float32 else TILES[kernel]
    return found._replace(columns=min(found.columns, launch.power_of_two(v.shape[2], LEAST_COLUMNS)))


class ChunkTables(NamedTuple):
    """On the device. Chunks beyond those of the documents are empty: they end where they start, or before."""

    # [N, 3] int32: the first token of each chunk, the one after its last, whether its document has another chunk
    bounds: torch.Tensor
    first: torch.Tensor  # [S + 1] int32: document s has the chunks first[s] to first[s + 1]


def tables(docs: Documents, tokens: int) -> ChunkTables:
    """The chunks of these documents, computed once for each pass. N = ceil(T / 64) + S is enough for any lengths."""
    if "delta bounds" not in docs.prepared:
        starts = docs.cu_seqlens
        slots = len(starts) - 1
        ends = ((starts[1:] - starts[:-1] + (CHUNK - 1)) // CHUNK).cumsum(0)
        first = torch.cat((ends.new_zeros(1), ends))
        chunk = torch.arange(ceil_div(tokens, CHUNK) + slots, device=starts.device)
        document = torch.searchsorted(ends, chunk, right=True).clamp_(max=slots - 1)
        begin = starts[document] + (chunk - first[document]) * CHUNK
        end = torch.minimum(begin + CHUNK, starts[document + 1])
        more = chunk + 1 < ends[document]
        docs.prepared["delta bounds"] = torch.stack((begin, end, more), 1).to(torch.int32)
        docs.prepared["delta first"] = first.to(torch.int32)
    return ChunkTables(docs.prepared["delta bounds"], docs.prepared["delta first"])
