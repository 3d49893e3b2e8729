"""A base's tensors without their contents: shape and kind are the file's, and no byte of a weight is read."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from graftune.arithmetic import ceil_div
from graftune.kernels.nf4 import Nf4
from graftune.kernels.nf4.reference import BLOCK, GROUP
from graftune.model.frozen import Nf4Rows
from graftune.plan.tally import MAPPED, Tally
from graftune.weights.synthetic import RandomRows

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "U8": torch.uint8, "I8": torch.int8}


def unread(tensors: Mapping[str, Any], device: torch.device, tally: Tally) -> dict[str, Any]:
    """The same sources without contents; random ones, which have none, are drawn on `device`."""
    return {
        name: dataclasses.replace(source, device=device)
        if isinstance(source, RandomRows)
        else _without_contents(source, tally)
        for name, source in tensors.items()
    }


class Unread:
    """Mixed into a source of rows. What safetensors gives out is its map of the file, not a copy; a GGUF's rows are
    made."""

    shape: tuple[int, ...]
    dtype_name: str
    tally: Tally

    def read(self, start: int, stop: int) -> torch.Tensor:
        with self._given_out:
            return torch.empty(stop - start, *self.shape[1:], dtype=self._dtype)

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.empty(len(ids), *self.shape[1:], dtype=self._dtype)

    def values(self) -> torch.Tensor:
        with self._given_out:
            return torch.empty(self.shape, dtype=self._dtype)

    def raw(self, start: int, stop: int) -> torch.Tensor:
        return torch.empty(stop - start, self.nbytes // self.shape[0], dtype=torch.uint8)  # type: ignore[attr-defined]

    def load(self, device: torch.device) -> Nf4Rows:
        """A checkpoint's NF4, with its scales' scales where it has them. On a CPU it stays in the map."""
        with self.tally.owner(MAPPED) if device.type == "cpu" else nullcontext():
            return self._loaded(device)

    def _loaded(self, device: torch.device) -> Nf4Rows:
        count = math.prod(self.shape)
        blocks, parts = ceil_div(count, BLOCK), vars(self)["parts"]
        codes = torch.empty((count + 1) // 2, dtype=torch.uint8, device=device)
        if not any(name.endswith(".nested_absmax") for name in parts):
            return Nf4Rows(Nf4(self.shape, torch.bfloat16, codes, torch.empty(blocks, device=device)))
        scales = torch.empty(blocks, dtype=torch.uint8, device=device)
        groups, entries, offset = (torch.empty(n, device=device) for n in ((ceil_div(blocks, GROUP),), (256,), ()))
        return Nf4Rows(Nf4(self.shape, torch.bfloat16, codes, scales, groups, entries, offset))

    @property
    def _given_out(self) -> AbstractContextManager[None]:
        return self.tally.owner(MAPPED) if hasattr(self, "shard") else nullcontext()

    @property
    def _dtype(self) -> torch.dtype:
        """Plain floats of a safetensors file come as they are; blocks, and a GGUF's floats, in fp32."""
        return DTYPES.get(self.dtype_name, torch.float32) if hasattr(self, "shard") else torch.float32


def _without_contents(source: Any, tally: Tally) -> Any:
    """Still an instance of its own class, which loading asks for."""
    kind = type("Unread" + type(source).__name__, (Unread, type(source)), {})
    copy: Any = object.__new__(kind)
    vars(copy)["tally"] = tally
    for name, value in vars(source).items():
        vars(copy)[name] = _without_contents(value, tally) if _is_source(value) else value
    return copy


def _is_source(value: Any) -> bool:
    return hasattr(value, "gather") and hasattr(value, "dtype_name")
