"""The frozen weight: one matmul interface, whatever the weight is made of.

The step never asks which kind it holds: that is a property of the weight, not a mode of the trainer. One kind has a
projection of its own, fp8_projection.py, since norm, SwiGLU and rope write the codes that it reads; nobody else knows.

    Dense      resident in a float dtype, as a rule the compute dtype, with adapter columns beside it where asked
    Fetched    likewise, in a buffer that blocks take in turn (model/bundles.py)
    Fp8        on a GPU as 8-bit codes with a scale a row, and multiplied as such
    Unpacked   on a GPU in fewer bits (NF4, GGUF blocks as in the file, or another float dtype): each product
               dequantises the weight into a scratch that all layers share, and then is the same product
    Table      an embedding or head likewise, by the rows that fit the scratch
    Mapped     on a CPU, still in the file or in NF4: each product dequantises a few rows at a time
    Trained    not frozen at all but a view into the arena, for full-parameter training

All but the last are made of sources of rows, so q, k and v (or gate and up) are one weight; where they are quantised,
each is by itself, as in its file. resident.py, fp8.py, scratch.py and mapped.py hold the kinds, packed.py the formats.
"""

from __future__ import annotations

from graftune.model.frozen.interface import Augmented, BlockSource, Frozen, Packed, RowSource, row_stride
from graftune.model.frozen.mapped import MAPPED_ROWS_BYTES, Mapped, fill, pieces
from graftune.model.frozen.packed import FloatRows, GgufRows, Nf4Rows
from graftune.model.frozen.resident import Dense, Fetched, Trained
from graftune.model.frozen.scratch import Scratch, Table, Unpacked

__all__ = [
    "MAPPED_ROWS_BYTES",
    "Augmented",
    "BlockSource",
    "Dense",
    "Fetched",
    "FloatRows",
    "Frozen",
    "GgufRows",
    "Mapped",
    "Nf4Rows",
    "Packed",
    "RowSource",
    "Scratch",
    "Table",
    "Trained",
    "Unpacked",
    "fill",
    "pieces",
    "row_stride",
]
