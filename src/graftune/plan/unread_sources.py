"""A base's tensors without their contents: shape and format come from the file, and no weight is read."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from graftune.model.frozen.interface import CheckpointWeight
from graftune.plan.counting import MAPPED, Tally

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "U8": torch.uint8, "I8": torch.int8}


def unread(tensors: Mapping[str, Any], device: torch.device, tally: Tally) -> dict[str, Any]:
    """The same sources without contents. Those that are made on a device and need no file (`on`) are made on this
    one."""
    return {
        name: source.on(device) if hasattr(source, "on") else _without_contents(source, tally)
        for name, source in tensors.items()
    }


class Unread:
    """A mixin for a source of rows. safetensors returns views of the mapped file; a GGUF's rows are new tensors."""

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

    @property
    def _given_out(self) -> AbstractContextManager[None]:
        return self.tally.owner(MAPPED) if hasattr(self, "shard") else nullcontext()

    @property
    def _dtype(self) -> torch.dtype:
        """safetensors returns floats in their own dtype; GGUF blocks and floats are returned in fp32."""
        return DTYPES.get(self.dtype_name, torch.float32) if hasattr(self, "shard") else torch.float32


class UnreadBlocks(Unread):
    """A mixin for a source that can also return a GGUF's blocks."""

    nbytes: int

    def raw(self, start: int, stop: int) -> torch.Tensor:
        return torch.empty(stop - start, self.nbytes // self.shape[0], dtype=torch.uint8)


class UnreadWeight(Unread):
    """A mixin for a checkpoint's quantised weight, which is loaded as a whole. On a CPU it stays mapped."""

    def load(self, device: torch.device) -> Any:
        with self.tally.owner(MAPPED) if device.type == "cpu" else nullcontext():
            return self.empty(device)  # type: ignore[attr-defined]


def _without_contents(source: Any, tally: Tally) -> Any:
    """A copy that reads nothing and is still an instance of the source's class, which loading checks."""
    kind: Any = type(source)
    copy: Any = object.__new__(_unread_kind(kind, source.raw is not None))
    vars(copy)["tally"] = tally
    for name, value in vars(source).items():
        vars(copy)[name] = _without_contents(value, tally) if _is_source(value) else value
    return copy


@functools.cache
def _unread_kind(kind: Any, blocks: bool) -> type:
    unread = UnreadWeight if issubclass(kind, CheckpointWeight) else Unread
    unread = UnreadBlocks if blocks else unread
    return type("Unread" + kind.__name__, (unread, kind), {})


def _is_source(value: Any) -> bool:
    return hasattr(value, "gather") and hasattr(value, "dtype_name")
