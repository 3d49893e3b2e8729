"""Weights on their way to disk, a few rows at a time: whatever the size of the model, a few megabytes of it exist.

A row source is read piece by piece, each piece is brought to the dtype it is stored in and appended to the file. Its
checksum stays behind, so that what was written can be read back and compared: `same_rows` then also takes some rows
from the source again, which a checksum of the wrong bytes would not notice.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from graftune.errors import GraftuneError
from graftune.model.frozen import RowSource

PIECE_BYTES = 8 << 20  # fp32 bytes of a weight that exist at once
SAMPLED_ROWS = 16
SMALL = 1 << 16  # values of a matrix that is read at once rather than row by row
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
# Source, first and last row, and a function that gives so many rows of the piece as they were stored, in fp32.
OnPiece = Callable[[RowSource, int, int, Callable[[int], torch.Tensor]], None]


def nothing(source: RowSource, start: int, stop: int, stored: Callable[[int], torch.Tensor]) -> None:
    """For who does not want to see the pieces."""


@dataclass(frozen=True)
class Held:
    """Values in memory (a RowSource)."""

    tensor: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype_name(self) -> str:
        return NAMES[self.tensor.dtype]

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def read(self, start: int, stop: int) -> torch.Tensor:
        return self.tensor[start:stop]

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        return self.tensor.index_select(0, ids.to(self.tensor.device))

    def values(self) -> torch.Tensor:
        return self.tensor


def first_rows(values: torch.Tensor, rows: int) -> torch.Tensor:
    return values[:rows].float()


def pieces(source: RowSource) -> Iterator[tuple[int, int, torch.Tensor]]:
    """(start, stop, rows in fp32 on the CPU); of a vector all at once."""
    if len(source.shape) == 1:
        yield 0, source.shape[0], source.values().float().cpu()
        return
    size = max(1, PIECE_BYTES // (4 * math.prod(source.shape[1:])))
    for start in range(0, source.shape[0], size):
        stop = min(start + size, source.shape[0])
        yield start, stop, source.read(start, stop).float().cpu()


def sampled_rows(source: RowSource) -> torch.Tensor:
    """Rows to look at again: the first, the last and some between."""
    return torch.linspace(0, source.shape[0] - 1, min(SAMPLED_ROWS, source.shape[0])).round().long().unique()


def pick(source: RowSource, ids: torch.Tensor) -> torch.Tensor:
    """A few rows of a matrix, one by one unless it is small: a lookup in a safetensors file would read all of it."""
    if math.prod(source.shape) <= SMALL:
        return source.read(0, source.shape[0]).float().cpu()[ids]
    return torch.cat([source.read(row, row + 1).float().cpu() for row in ids.tolist()])


def rounded(values: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    stored = values.to(dtype)
    if not bool(stored.sum(dtype=torch.float32).isfinite()):  # which one inf or NaN spoils, at a fraction of the time
        sound = bool(values.isfinite().all())
        raise GraftuneError(
            f"{name} holds values {f'beyond what {NAMES[dtype]} can hold' if sound else 'that are no numbers'}",
            fix="choose BF16 or F32" if sound else "train again with a lower lr",
        )
    return stored


def raw(values: torch.Tensor) -> memoryview:
    return values.contiguous().reshape(-1).view(torch.uint8).numpy().data


@dataclass(frozen=True)
class Stored:
    """A tensor of a safetensors file to be."""

    name: str
    source: RowSource
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.source.shape) * self.dtype.itemsize


def write_safetensors(
    path: Path,
    tensors: Sequence[Stored],
    on_piece: OnPiece = nothing,
    on_tensor: Callable[[], None] = lambda: None,
) -> dict[str, int]:
    """The file, header first, as the format has it: the length of the JSON, the JSON, the bytes. Returns each tensor's
    checksum."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.source.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    sums = {}
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            check = 0
            for start, stop, values in pieces(tensor.source):
                stored = rounded(values, tensor.dtype, tensor.name)
                on_piece(tensor.source, start, stop, partial(first_rows, stored))
                file.write(raw(stored))
                check = zlib.crc32(raw(stored), check)
            sums[tensor.name] = check
            on_tensor()
    return sums


def check_safetensors(found: Any, tensors: Sequence[Stored], sums: dict[str, int], where: Path) -> None:
    """`found` is what our reader makes of the files: names, shapes, bytes and some rows have to be what they were."""
    if set(found) != {tensor.name for tensor in tensors}:
        raise spoilt("other tensors than were written", where)
    for tensor in tensors:
        back, check = found[tensor.name], 0
        if tuple(back.shape) != tuple(tensor.source.shape) or back.dtype_name != NAMES[tensor.dtype]:
            raise spoilt(f"{tensor.name} in another shape or type", where)
        size = max(1, PIECE_BYTES // (tensor.dtype.itemsize * math.prod(back.shape[1:])))
        for start in range(0, back.shape[0], size):
            part = back.values() if len(back.shape) == 1 else back.read(start, min(start + size, back.shape[0]))
            check = zlib.crc32(raw(part), check)
            if len(back.shape) == 1:
                break
        if check != sums[tensor.name]:
            raise spoilt(f"{tensor.name} with other bytes", where)
        if len(back.shape) == 1:
            got, want = back.values().float(), tensor.source.values().float().cpu()
        else:
            ids = sampled_rows(tensor.source)
            got, want = pick(back, ids), pick(tensor.source, ids)
        if not within_rounding(got, want, tensor.dtype):
            raise spoilt(f"{tensor.name} with other values", where)


def within_rounding(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> bool:
    """Equal but for the last digit of the dtype: sums over fewer rows at a time may round the other way."""
    tolerance = max(torch.finfo(dtype).eps, 1e-5)
    return bool(((got - want).abs() <= tolerance * want.abs() + 1e-6 * want.abs().max()).all())


def spoilt(what: str, where: Path) -> GraftuneError:
    return GraftuneError(f"reading back what was written gives {what}", where=str(where), fix="check the disk")
