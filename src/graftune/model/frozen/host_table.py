"""An embedding in host memory, whose rows a GPU reads itself.

A pass needs a few thousand rows of a table with 200,000: 12 MB of gpt-oss-20b's 1.2 GB. The table stays in page-locked
host memory, which has an address on the device, and the kernel of a lookup reads the rows through the link: the token
numbers never leave the device, so that passes can be captured. (Copying the rows on the host would need the numbers
there. Fetching the whole table, as model/bundles.py does, needs memory for it on the device.)

The memory is locked after it is filled: torch's own pinned memory is rounded up to powers of two.
"""

from __future__ import annotations

import weakref

import torch

from graftune.errors import GraftuneError
from graftune.model.frozen.formats.floats import FloatFormat
from graftune.model.frozen.formats.gguf import GgufFormat, GgufRows
from graftune.model.frozen.interface import NAMES, RowSource
from graftune.observe.memory import human_bytes


class HostTable:
    """A table that is only looked up: as floats, or in a GGUF's blocks."""

    def __init__(self, source: RowSource, form: FloatFormat | GgufFormat, device: torch.device, compute: torch.dtype):
        rows = form.pack(source, torch.device("cpu"))
        if not isinstance(rows, GgufRows):
            rows = GgufRows(rows.tensor.view(torch.uint8), NAMES[rows.tensor.dtype], rows.shape[1])
        self.members, self.kind, self.compute = [rows], f"{rows.dtype_name}, in host memory", compute
        self.out_features, self.in_features = rows.shape
        if device.type == "cuda":
            self._lock(rows.blocks)

    def _lock(self, blocks: torch.Tensor) -> None:
        """Makes the memory readable for the GPU, as long as this table exists."""
        cuda = torch.cuda.cudart()
        if failed := int(cuda.cudaHostRegister(blocks.data_ptr(), blocks.nbytes, 0)):
            raise GraftuneError(
                f"CUDA could not lock {human_bytes(blocks.nbytes)} of host memory for the embedding (error {failed})",
                fix="free host memory, or set embedding_on to device",
            )
        weakref.finalize(self, cuda.cudaHostUnregister, blocks.data_ptr())

    @property
    def nbytes(self) -> int:
        return self.members[0].nbytes

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self.members[0].lookup(ids, self.compute)

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a table in host memory is only looked up")

    def input_grad(self, grad: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a table in host memory is only looked up")
