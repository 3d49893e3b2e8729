"""FP8 checkpoints: a weight of e4m3 codes and the scales beside it, as one source of rows in fp32, or, where a row has
one scale, of the codes themselves: a base held in fp8 then has the checkpoint's very codes.

    q_proj.weight            codes [out, in]
    q_proj.weight_scale      compressed-tensors': one for the tensor, one a row [out] or [out, 1], or one a block
    q_proj.weight_scale_inv  fine-grained FP8's: one a block [out / 128, in / 128], the last ones cut off

Both names mean the same: value = code * scale. Scales of activations and of the key-value cache belong to other
programs' arithmetic and are left aside; what a checkpoint left unquantised is read as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from graftune.arithmetic import ceil_div
from graftune.errors import GraftuneError
from graftune.io.json_file import read_object
from graftune.kernels.fp8 import Rows
from graftune.weights.safetensors_io import READABLE, SafetensorsTensor

CODES = "F8_E4M3"
SCALES = ("weight_scale", "weight_scale_inv")
OTHERS = ("input_scale", "activation_scale", "output_scale", "q_scale", "k_scale", "v_scale")
BLOCK = (128, 128)  # of fine-grained FP8, where the configuration does not say


@dataclass(frozen=True)
class Fp8Tensor:
    """One weight (a RowSource), dequantised where it is read."""

    codes: SafetensorsTensor
    scales: torch.Tensor = field(repr=False)  # [blocks down, blocks across] fp32
    block: tuple[int, int]  # rows and columns that share a scale

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    @property
    def dtype_name(self) -> str:
        return "FP8"

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def read(self, start: int, stop: int) -> torch.Tensor:
        return self._scaled(self.codes.read(start, stop), torch.arange(start, min(stop, self.shape[0])))

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        return self._scaled(self.codes.gather(ids), ids.cpu())

    def values(self) -> torch.Tensor:
        return self.read(0, self.shape[0])

    def _scaled(self, codes: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        values = codes.float()
        scales = self.scales.index_select(0, rows // self.block[0])
        for place in range(scales.shape[1]):
            values[:, place * self.block[1] : (place + 1) * self.block[1]] *= scales[:, place, None]
        return values


class RowScaled(Fp8Tensor):
    """A weight with one scale for each row, or for all of it."""

    def read_codes(self, start: int, stop: int) -> Rows:
        """Codes [rows, in] and their scales [rows]."""
        rows = torch.arange(start, min(stop, self.shape[0]))
        return Rows(self.codes.read(start, stop), self.scales[:, 0].index_select(0, rows // self.block[0]))


def assembled(
    tensors: Mapping[str, SafetensorsTensor], folder: Path
) -> tuple[dict[str, Fp8Tensor], dict[str, SafetensorsTensor]]:
    """The folder's FP8 weights put together with their scales, and the tensors that are none of theirs."""
    coded = [name for name, tensor in tensors.items() if tensor.dtype_name == CODES]
    if not coded:
        return {}, dict(tensors)
    block = _block(folder)
    found, taken = {}, set(coded)
    for name in coded:
        stem = name.removesuffix("weight")
        scales = [stem + scale for scale in SCALES if stem + scale in tensors]
        if not name.endswith(".weight") or len(scales) != 1:
            raise _refused(f"tensor {name} is FP8 and has {len(scales)} tensors of scales", folder)
        found[name] = _put_together(name, tensors[name], tensors[scales[0]], block, folder)
        taken |= set(scales)
    rest = {name: t for name, t in tensors.items() if name not in taken and not name.endswith(OTHERS)}
    return found, rest


def _put_together(
    name: str, codes: SafetensorsTensor, stored: SafetensorsTensor, block: tuple[int, int], folder: Path
) -> Fp8Tensor:
    if len(codes.shape) != 2:
        raise _refused(f"tensor {name} is FP8 and has the shape {list(codes.shape)}", folder)
    if stored.dtype_name not in (*READABLE, "F8_E8M0"):
        raise _refused(f"the scales of {name} are {stored.dtype_name}", folder)
    rows, width = codes.shape
    blocks = (ceil_div(rows, block[0]), ceil_div(width, block[1]))
    if math.prod(stored.shape) == 1:
        shape, block = (1, 1), (rows, width)
    elif stored.shape in ((rows,), (rows, 1)):
        shape, block = (rows, 1), (1, width)
    elif stored.shape == blocks:
        shape = blocks
    else:
        raise _refused(f"{name} is {list(codes.shape)} and its scales are {list(stored.shape)}", folder)
    scales = stored.values().float().reshape(shape)
    if not bool(scales.isfinite().all()):
        raise _refused(f"the scales of {name} are no numbers", folder)
    row_scaled = block[1] == width and bool((scales > 0).all())
    return (RowScaled if row_scaled else Fp8Tensor)(codes, scales, block)


def _block(folder: Path) -> tuple[int, int]:
    """How many rows and columns share a scale, where blocks do: both methods' configurations say it."""
    quantisation = _keys(read_object(folder / "config.json").get("quantization_config"))
    groups = _keys(quantisation.get("config_groups"))
    places = [quantisation.get("weight_block_size")]
    places += [_keys(_keys(group).get("weights")).get("block_structure") for group in groups.values()]
    for place in places:
        if place is None:
            continue
        if isinstance(place, list) and len(place) == 2 and all(type(n) is int and 0 < n < 2**31 for n in place):
            return place[0], place[1]
        raise _refused(f"its blocks are {place!r}", folder)
    return BLOCK


def _keys(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _refused(what: str, folder: Path) -> GraftuneError:
    return GraftuneError(what, where=str(folder), fix="give the unquantised model, or download this one again")
