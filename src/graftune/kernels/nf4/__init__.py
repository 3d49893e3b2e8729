"""NF4 weights: quantised to bitsandbytes' bytes, dequantised to its values, read from its checkpoints, all
without bitsandbytes. reference.py has the formulas; kernel.py runs them on a GPU.

    quantise(weight), quantise_pieces(pieces, shape, dtype)    -> Nf4
    dequantise(nf4, dtype, out=, rows=), gather(nf4, ids)      -> values
    from_checkpoint(tensors, name)                             -> Nf4
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from graftune.arithmetic import ceil_div
from graftune.errors import GraftuneError
from graftune.kernels import launch
from graftune.kernels.nf4 import reference
from graftune.kernels.nf4.reference import BLOCK, GROUP, TABLE, Nf4, joined

__all__ = [
    "STATE",
    "VALUE_BYTES",
    "Nf4",
    "checkpoint_shape",
    "dequantise",
    "from_checkpoint",
    "gather",
    "joined",
    "quantise",
    "quantise_pieces",
]

FLOATS = {str(x).removeprefix("torch."): x for x in (torch.float32, torch.float16, torch.bfloat16)}
STATE = ".quant_state.bitsandbytes__"
VALUE_BYTES = 0.5 + (1 + 4 / GROUP) / BLOCK  # a code's half byte, a block's one-byte scale, a group's fp32 scale


def quantise(weight: torch.Tensor, *, double: bool = True) -> Nf4:
    """Quantises a weight on its own device. Contiguous weights are not copied."""
    return quantise_pieces([weight], weight.shape, weight.dtype, double=double)


def quantise_pieces(
    pieces: Iterable[torch.Tensor], shape: Sequence[int], dtype: torch.dtype, *, double: bool = True
) -> Nf4:
    """Quantises a weight from its consecutive pieces (rows, as a rule), of which one is alive at a time. The bytes are
    those of `quantise` of the whole. Pieces may end anywhere; those that end between blocks of 64 are not copied. All
    are on one device, and so is the result."""
    count, at = math.prod(shape), 0
    assert count > 0 and dtype in FLOATS.values()
    codes, absmax = None, None
    for values in reference.whole_blocks(pieces):
        assert values.dtype == dtype and at + len(values) <= count, "pieces do not make up the shape"
        if codes is None or absmax is None:
            codes = torch.empty((count + 1) // 2, dtype=torch.uint8, device=values.device)
            absmax = torch.empty(ceil_div(count, BLOCK), dtype=torch.float32, device=values.device)
        stop = at + len(values)
        launch.implementation(reference, values).encode(
            values, codes[at // 2 : (stop + 1) // 2], absmax[at // BLOCK : ceil_div(stop, BLOCK)]
        )
        at = stop
    assert codes is not None and absmax is not None and at == count, "pieces do not make up the shape"
    return reference.finish(tuple(shape), dtype, codes, absmax, double)


@launch.operation("dequantise")
def dequantise(
    nf4: Nf4,
    dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    rows: tuple[int, int] | None = None,
    used: torch.Tensor | None = None,
) -> torch.Tensor:
    """The values, computed in fp32 and rounded once to `dtype` (else out's, else what was quantised), in the tensor's
    shape; of `rows` = (start, stop), as a matrix. `out` [rows, width] may be part of a wider buffer: it may have a row
    stride, and nothing beside its rows is touched. `used` [E + 1] (int32), if these are the weights of E experts: where
    each expert's token rows begin; on a GPU, weights of experts without any may be skipped."""
    start, stop = rows or (0, nf4.rows)
    assert 0 <= start < stop <= nf4.rows
    shape = (stop - start, nf4.width)
    if out is None:
        out = torch.empty(shape, dtype=dtype or nf4.dtype, device=nf4.device)
        _fill(nf4, out, start, used)
        return out if rows else out.view(nf4.shape)
    assert dtype is None or out.dtype == dtype
    matrix = out if out.shape == shape else out.view(shape)
    assert matrix.stride(1) == 1 or shape[1] == 1
    _fill(nf4, matrix, start, used)
    return out


def _fill(nf4: Nf4, out: torch.Tensor, start: int, used: torch.Tensor | None = None) -> None:
    assert out.dtype in FLOATS.values() and out.device == nf4.device
    launch.implementation(reference, out).dequantise(nf4, out, start, used)


def gather(nf4: Nf4, ids: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The rows of a matrix named by ids [T] -> [T, width]: an embedding lookup that dequantises nothing else."""
    assert len(nf4.shape) == 2 and ids.dim() == 1 and len(ids) > 0
    out = torch.empty(len(ids), nf4.width, dtype=dtype or nf4.dtype, device=nf4.device)
    if nf4.width % BLOCK == 0:
        _fill(reference.select(nf4, ids), out, 0)
    else:
        reference.gather(nf4, ids, out)
    return out


def from_checkpoint(tensors: Mapping[str, torch.Tensor], name: str) -> Nf4:
    """The weight `name` of a prequantised checkpoint. Reads only this weight's keys of `tensors`, and keeps the tensors
    unchanged: nothing is dequantised."""
    state = _state(tensors, name)
    shape, count = checkpoint_shape(tensors, name), math.prod(state["shape"])
    double = name + ".nested_absmax" in tensors
    _expect(name, "block size", state.get("blocksize"), BLOCK)
    if state.get("dtype") not in FLOATS:
        raise GraftuneError(
            f"dtype {state.get('dtype')} is not known", where=name, fix=f"use one of {', '.join(FLOATS)}"
        )
    if not torch.equal(_part(tensors, name, ".quant_map").float().cpu(), torch.tensor(TABLE)):
        raise GraftuneError("the weight's quant_map is not NF4's", where=name, fix="use an NF4 checkpoint")
    # Packed codes may be stored as another dtype (bnb_4bit_quant_storage), in which case a few bytes may follow them.
    codes = _part(tensors, name, "").contiguous().view(-1).view(torch.uint8)[: (count + 1) // 2]
    absmax = _part(tensors, name, ".absmax").view(-1)
    _expect(name, "number of codes", len(codes), (count + 1) // 2)
    _expect(name, "number of scales", len(absmax), ceil_div(count, BLOCK))
    if not double:
        return Nf4(shape, FLOATS[state["dtype"]], codes, absmax.float())
    _expect(name, "kind of scales", absmax.dtype, torch.uint8)
    _expect(name, "nested block size", state.get("nested_blocksize"), GROUP)
    _expect(name, "dtype of the scales", state.get("nested_dtype"), "float32")
    groups, entries = (_part(tensors, name, key).float().view(-1) for key in (".nested_absmax", ".nested_quant_map"))
    _expect(name, "number of nested scales", len(groups), ceil_div(len(absmax), GROUP))
    _expect(name, "number of nested codes", len(entries), 256)
    _expect(name, "offset a number", isinstance(state.get("nested_offset"), int | float), True)
    offset = torch.tensor(state["nested_offset"], dtype=torch.float32, device=codes.device)
    return Nf4(shape, FLOATS[state["dtype"]], codes, absmax, groups, entries, offset)


def checkpoint_shape(tensors: Mapping[str, torch.Tensor], name: str) -> tuple[int, ...]:
    shape = _state(tensors, name).get("shape")
    sound = isinstance(shape, list) and bool(shape) and all(type(n) is int and 0 < n < 2**40 for n in shape)
    _expect(name, "shape", "sound" if sound else shape, "sound")
    return tuple(shape or ())


def _state(tensors: Mapping[str, torch.Tensor], name: str) -> dict[str, Any]:
    if name + STATE + "nf4" not in tensors:
        kind = "fp4" if name + STATE + "fp4" in tensors else "not bitsandbytes' NF4"
        raise GraftuneError(f"the weight is {kind}", where=name, fix="use an NF4 or an unquantised checkpoint")
    try:
        state = json.loads(bytes(tensors[name + STATE + "nf4"].cpu().tolist()))
    except (ValueError, TypeError, RecursionError):
        state = None
    if not isinstance(state, dict):
        raise GraftuneError("the weight's quant_state is not valid JSON", where=name, fix="download the model again")
    return state


def _part(tensors: Mapping[str, torch.Tensor], name: str, part: str) -> torch.Tensor:
    if name + part not in tensors:
        raise GraftuneError(f"tensor {name}{part} is missing", fix="download the model again")
    return tensors[name + part]


def _expect(name: str, what: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise GraftuneError(f"its {what} is {found}, not {wanted}", where=name, fix="quantise it anew")
