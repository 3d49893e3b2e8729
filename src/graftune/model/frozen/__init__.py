"""Frozen weights: one interface for products, in every format.

The step does not know which kind of weight it multiplies: the kind is a property of the weight, not a mode of the
trainer.

    Dense      resident in a float dtype, as a rule the compute dtype, with adapter columns beside it where asked
    Fetched    likewise, in a buffer that blocks use in turn (model/bundles.py)
    Fp8        on a GPU as 8-bit codes with a scale a row, multiplied without dequantising (model/fp8_projection.py)
    Unpacked   on a GPU in fewer bits (NF4, GGUF blocks as in the file, or another float dtype): each product
               dequantises the weight into a scratch that all layers share
    Table      an embedding or head likewise, by as many rows as fit the scratch
    HostTable  an embedding in host memory, whose rows a GPU reads itself (host_table.py)
    Mapped     on a CPU, still in the file or in NF4: each product dequantises a few rows at a time
    Trained    not frozen: a view into the arena, for full-parameter training

All but the last are built of row sources, so that q, k and v (or gate and up) are one weight; each source keeps its own
format. interface.py has the interfaces; resident.py, fp8.py, scratch.py and mapped.py have these kinds; formats/ has
the formats (weight_format.py), and builder.py puts both together.
"""

from __future__ import annotations

from graftune.model.frozen.interface import Augmented, Frozen, Packed, ReadBlocks, RowSource, row_stride
from graftune.model.frozen.mapped import MAPPED_ROWS_BYTES, Mapped, fill, pieces
from graftune.model.frozen.resident import Dense, Fetched, Trained
from graftune.model.frozen.scratch import Scratch, Table, Unpacked

__all__ = [
    "MAPPED_ROWS_BYTES",
    "Augmented",
    "Dense",
    "Fetched",
    "Frozen",
    "Mapped",
    "Packed",
    "ReadBlocks",
    "RowSource",
    "Scratch",
    "Table",
    "Trained",
    "Unpacked",
    "fill",
    "pieces",
    "row_stride",
]
