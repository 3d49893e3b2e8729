"""Reads sharded safetensors as row sources, and writes a file so that a crash leaves the old one or the new one.

The safetensors package maps the file and checks its header; a tensor is read in slices straight from the map.

A `CarriedTensor` is never loaded: it goes from a base's files into an export byte for byte. The vision tower of a
text-and-vision checkpoint is one, and so are the blocks that predict further tokens (`mtp.*`, GGUF's
`nextn_predict_layers`): other programs need them, and training the text model changes none of them.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from graftune.errors import GraftuneError, one_line
from graftune.io.files import check_plain, new_file
from graftune.model.frozen.interface import RowsByReading
from graftune.weights.opening import read_json

MOST_DIMENSIONS = 8
PIECE_BYTES = 8 << 20  # of a carried tensor, copied at once
_SIZES = {"BF16": 2, "F16": 2, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I64": 8, "F64": 8}


@dataclass(frozen=True)
class SafetensorsTensor(RowsByReading):
    """One tensor of an open shard."""

    file: Path
    shard: Any
    name: str
    shape: tuple[int, ...]
    dtype_name: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _SIZES.get(self.dtype_name, 4)

    def read(self, start: int, stop: int) -> torch.Tensor:
        return self.shard.get_slice(self.name)[start:stop]

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        return self.shard.get_tensor(self.name).index_select(0, ids.cpu())

    def values(self) -> torch.Tensor:
        return self.shard.get_tensor(self.name)


@dataclass(frozen=True)
class CarriedTensor:
    """A tensor as bytes of a mapped file. The dtype need not be one that torch knows."""

    shape: tuple[int, ...]
    dtype_name: str
    data: np.ndarray[Any, Any]  # uint8, a view of the map: nothing is read until it is copied

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def pieces(self) -> Iterator[memoryview]:
        for start in range(0, self.nbytes, PIECE_BYTES):
            yield self.data[start : start + PIECE_BYTES].data


def carried(tensors: Mapping[str, SafetensorsTensor]) -> dict[str, CarriedTensor]:
    """The tensors as bytes of their files, of any dtype; nothing but the headers is read."""
    files = {file: _bytes_of(file) for file in {tensor.file for tensor in tensors.values()}}
    return {
        name: CarriedTensor(tensor.shape, tensor.dtype_name, files[tensor.file][tensor.name])
        for name, tensor in tensors.items()
    }


def _bytes_of(file: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The bytes of each tensor of a file that `open_shard` has checked."""
    data = np.memmap(file, np.uint8, "r")
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    header = json.loads(data[8:start].tobytes())
    places = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
    return {name: data[start + first : start + last] for name, (first, last) in places.items()}


# A plain file name: no folder, not hidden, and short enough for file systems.
_SHARD = re.compile(r"[\w-][\w .+=,@-]{0,200}\.safetensors")
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def weight_files(folder: Path) -> list[str]:
    """The files that hold the model, according to the folder's index. Other safetensors files beside them, such as the
    same weights in another layout, are ignored."""
    return sorted(set(weight_map(folder / INDEX).values())) if (folder / INDEX).exists() else [SINGLE]


def open_folder(folder: Path) -> dict[str, SafetensorsTensor]:
    """Every tensor of the folder's model.safetensors or of the shards its index names, under its own name and
    of any dtype: the table of weight formats puts quantised weights together and refuses unknown ones."""
    index = folder / INDEX
    if not index.exists() and not (folder / SINGLE).exists():
        raise GraftuneError(
            "holds no model.safetensors", where=str(folder), fix="give a model folder with safetensors weights"
        )
    if not index.exists():
        return _tensors(folder / SINGLE)
    named, held = weight_map(index), dict[str, SafetensorsTensor]()
    for file in weight_files(folder):
        held |= {name: tensor for name, tensor in _tensors(folder / file).items() if named.get(name) == file}
    if missing := named.keys() - held.keys():
        what = f"names {min(missing)} in {named[min(missing)]}, which does not hold it"
        raise GraftuneError(what, where=str(index), fix="download the model again")
    return {name: held[name] for name in named}


def weight_map(index: Path) -> dict[str, str]:
    where = read_json(index, "download the model again").get("weight_map")
    if not isinstance(where, dict) or not all(_SHARD.fullmatch(str(file)) for file in where.values()):
        raise GraftuneError("is not a shard index", where=str(index), fix="download the model again")
    return where


def _tensors(file: Path) -> dict[str, SafetensorsTensor]:
    shard = open_shard(file)
    found = {}
    for name in shard.keys():  # noqa: SIM118  safe_open is no mapping
        piece = shard.get_slice(name)
        found[name] = SafetensorsTensor(file, shard, name, tuple(piece.get_shape()), piece.get_dtype())
    return found


def open_shard(file: Path) -> Any:
    if not file.exists():
        raise GraftuneError("this shard is missing", where=str(file), fix="download the model again")
    try:
        check_plain(file)
        shard = safe_open(str(file), framework="pt")
        shapes = {name: shard.get_slice(name).get_shape() for name in shard.keys()}  # noqa: SIM118 (no mapping)
    except (SafetensorError, OSError) as error:
        raise GraftuneError(
            f"is damaged or cut short ({error})", where=str(file), fix="download or copy the file again"
        ) from None
    except (RuntimeError, MemoryError) as error:  # torch maps it privately, which the system counts as memory
        raise GraftuneError(
            f"cannot be mapped into memory ({one_line(str(error))})",
            where=str(file),
            fix="use files that are smaller than this machine's memory, or allow it with sysctl vm.overcommit_memory=1",
        ) from None
    for name, shape in shapes.items():
        if len(shape) > MOST_DIMENSIONS:  # torch has an error of its own at 64
            raise GraftuneError(
                f"tensor {name} has {len(shape)} dimensions", where=str(file), fix="download or copy the file again"
            )
    return shard


def load(file: Path) -> dict[str, torch.Tensor]:
    shard = open_shard(file)
    return {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118 (no mapping)


def write(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Writes beside the target, flushes to disk and renames."""
    with new_file(path) as aside:
        try:
            save_file({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, str(aside), metadata)
        except SafetensorError as error:  # the package keeps the system's error number in its text only
            number = re.search(r"os error (\d+)|code: (\d+)", str(error))
            if number is None:
                raise
            code = int(number[1] or number[2])
            raise OSError(code, os.strerror(code), str(path)) from None
        umask = os.umask(0)
        os.umask(umask)
        aside.chmod(0o666 & ~umask)  # the package makes files only their owner can read
