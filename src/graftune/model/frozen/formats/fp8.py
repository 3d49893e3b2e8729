"""FP8: e4m3 codes with a scale for each row, multiplied without dequantising on GPUs that have units for it.

Weights are quantised while they are read. The codes of a checkpoint with one scale a row, or one for all, are taken as
they are; with scales of blocks, the values are rounded again to row scales. A checkpoint stores a weight in two:

    q_proj.weight            codes [out, in]
    q_proj.weight_scale      compressed-tensors: one for the tensor, one a row [out] or [out, 1], or one a block
    q_proj.weight_scale_inv  fine-grained FP8: one a block [out / 128, in / 128], the last ones cut off

Both names mean the same: value = code * scale. Scales of activations and of the key-value cache are ignored: only other
programs use them. Tensors that a checkpoint left unquantised are read as they are.

The products are in model/frozen/fp8.py, the projection over them in model/fp8_projection.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch

from graftune.arithmetic import ceil_div
from graftune.errors import GraftuneError
from graftune.io.json_file import read_object
from graftune.kernels import fp8
from graftune.kernels.fp8 import Rows
from graftune.model.arena import LoraGroup
from graftune.model.fp8_projection import Fp8Projection
from graftune.model.frozen.builder import WeightBuilder
from graftune.model.frozen.fp8 import MOST_RANK, FetchedFp8, Fp8, Workspace
from graftune.model.frozen.interface import Frozen, Packed, RowsByReading, RowSource, loaded
from graftune.model.frozen.weight_format import Option, WeightFormat
from graftune.model.projection import Projection

CODES = "F8_E4M3"
SCALES = ("weight_scale", "weight_scale_inv")
SCALE_DTYPES = ("BF16", "F16", "F32", "F8_E8M0")
OTHERS = ("input_scale", "activation_scale", "output_scale", "q_scale", "k_scale", "v_scale")
BLOCK = (128, 128)  # of fine-grained FP8, where the configuration does not say
SPARE = 1 / 8  # share of the free memory that codes may take if they are kept transposed too
BOTH = "both"  # the option that keeps the codes transposed too
ROUNDED = ", the checkpoint's block scales rounded again to row scales"
KEPT = ", its codes kept for forward and backward"


@dataclass(frozen=True)
class Fp8Tensor(RowsByReading):
    """One weight of a checkpoint, dequantised when it is read."""

    codes: RowSource
    scales: torch.Tensor = field(repr=False)  # [blocks down, blocks across] fp32
    block: tuple[int, int]  # rows and columns that share a scale

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
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


def _put_together(name: str, codes: RowSource, stored: RowSource, block: tuple[int, int], folder: Path) -> Fp8Tensor:
    if len(codes.shape) != 2:
        raise _refused(f"tensor {name} is FP8 and has the shape {list(codes.shape)}", folder)
    if stored.dtype_name not in SCALE_DTYPES:
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
        raise _refused(f"the scales of {name} are not finite", folder)
    row_scaled = block[1] == width and bool((scales > 0).all())
    return (RowScaled if row_scaled else Fp8Tensor)(codes, scales, block)


def _block(folder: Path) -> tuple[int, int]:
    """The rows and columns of a block that shares a scale, from the configuration of either method."""
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


class Fp8Format(WeightFormat):
    """A checkpoint's codes stay codes only where base_dtype is fp8. The setting `keep` reads them as floats, so the
    format claims no tensor."""

    name = "fp8"
    quantises = True
    experts = False
    dequantised = False
    value_bytes = 1.0

    def reads(self, quantisation: Mapping[str, Any]) -> bool:
        method = quantisation.get("quant_method")
        return method == "fp8" or (method == "compressed-tensors" and _has_fp8_groups(quantisation))

    def assemble(
        self, tensors: Mapping[str, RowSource], folder: Path
    ) -> tuple[dict[str, RowSource], dict[str, RowSource]]:
        coded = [name for name, tensor in tensors.items() if tensor.dtype_name == CODES]
        if not coded:
            return {}, dict(tensors)
        block = _block(folder)
        found: dict[str, RowSource] = {}
        taken = set(coded)
        for name in coded:
            stem = name.removesuffix("weight")
            scales = [stem + scale for scale in SCALES if stem + scale in tensors]
            if not name.endswith(".weight") or len(scales) != 1:
                raise _refused(f"tensor {name} is FP8 and has {len(scales)} tensors of scales", folder)
            found[name] = _put_together(name, tensors[name], tensors[scales[0]], block, folder)
            taken |= set(scales)
        rest = {name: t for name, t in tensors.items() if name not in taken and not name.endswith(OTHERS)}
        return found, rest

    def check(self, device: torch.device, compute: torch.dtype) -> None:
        fp8.require(device, compute)

    def options(self, sources: Iterable[RowSource], parameters: int, free: int) -> tuple[Option, ...]:
        """Transposed codes are kept, instead of made in every step, where there is memory to spare: that saves 1% of a
        step's time at 8B and takes as much memory as a bf16 base."""
        rounded = ROUNDED if any(isinstance(s, Fp8Tensor) and not isinstance(s, RowScaled) for s in sources) else ""
        least = Option(why=rounded)
        if 2 * parameters > SPARE * free:
            return (least,)
        return Option(BOTH, rounded + KEPT), least

    def pack(self, source: RowSource, device: torch.device) -> Packed:
        raise AssertionError("FP8 weights have products of their own")

    def weight(self, sources: Sequence[RowSource], builder: WeightBuilder, adapter_columns: int) -> Fp8:
        both, kind = builder.option == BOTH, FetchedFp8 if builder.fetched else Fp8
        return kind.of(
            [loaded(source) for source in sources],
            builder.device,
            builder.compute,
            self._workspace(builder, both),
            adapter_columns=adapter_columns if builder.rank <= MOST_RANK else 0,
            slack=1 / (1 - builder.dropout),  # dropout scales up what the adapters read
            both=both,
        )

    def _workspace(self, builder: WeightBuilder, both: bool) -> Workspace:
        if self.name not in builder.workspaces:
            size = 0 if both else max(Workspace.size(*product) for product in builder.products)
            widest = max(width for _, width, _ in builder.products)
            builder.workspaces[self.name] = Workspace(size, widest, builder.device)
        return cast(Workspace, builder.workspaces[self.name])

    def projection(self, weight: Frozen, lora: LoraGroup | None, mask_id: int, name: str) -> Projection:
        return Fp8Projection(cast(Fp8, weight), lora, mask_id, name)


def _has_fp8_groups(quantisation: Mapping[str, Any]) -> bool:
    """Whether compressed-tensors stores all its weights as floats of eight bits."""
    groups = quantisation.get("config_groups")
    weights = [_keys(_keys(group).get("weights")) for group in groups.values()] if isinstance(groups, dict) else [{}]
    return all(w.get("type") == "float" and w.get("num_bits") == 8 for w in weights)


FORMATS = (Fp8Format(),)
