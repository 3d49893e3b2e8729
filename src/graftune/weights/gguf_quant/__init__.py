"""Quantises weights to GGUF blocks, for exports.

A block has small codes and one or two scales (kernels/gguf_dequant/reference.py has the formulas). The codes follow
from the scales by rounding, so the task is to find good scales. The largest value over the largest code would spend the
range on one outlier. search.py instead tries several step widths and solves for the best scale of each in closed form,
which is cheap: it needs only a few sums over a block. pack.py writes the result in the layout of the format. Q8_0 has
enough codes for the simple scale, and its bytes are those that llama.cpp writes. MXFP4's scales are powers of two, of
which mxfp4.py tries two. Q5_0 and Q5_1 are only used where rows do not consist of whole larger blocks; the gguf package
quantises them, so their bytes are llama.cpp's too.

The weight is cut into pieces that stay in a core's cache, and the cores share them (kernels/cores.py). The pieces do
not depend on the number of threads, so neither do the bytes.
"""

from __future__ import annotations

import torch

from graftune.errors import GraftuneError
from graftune.kernels import cores
from graftune.kernels.gguf_dequant import KINDS, row_bytes
from graftune.kernels.gguf_dequant.reference import PLAIN
from graftune.weights.gguf_quant import mxfp4, pack, search

__all__ = ["TYPES", "quantise"]

TYPES = (
    *("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_0", "Q5_1"),
    *("Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"),
)
PIECE = 1 << 17  # values quantised at a time by a core
# The largest value that a block of each kind can always hold, as a multiple of the largest fp16 scale.
_REACH = {
    **{"Q4_0": 7, "Q5_0": 15, "Q8_0": 127, "Q5_1": 1, "Q3_K": 3 * 31, "Q4_K": 63, "Q5_K": 63},
    **{"Q6_K": 31 * 127, "IQ4_NL": 113, "IQ4_XS": 31 * 113, "MXFP4": 1e33},
}
# The levels of the kinds whose codes are whole numbers; the others have those of the curve.
_RANGES = {"Q4_0": search.Range(-8, 7), "Q3_K": search.Range(-4, 3), "Q6_K": search.Range(-32, 31)}
# The kinds with a scale per group beside the block's: number of groups, range of their scales, function that packs.
_GROUPED = {
    "Q3_K": (16, search.Range(-32, 31), pack.q3_k),
    "Q6_K": (16, search.Range(-128, 127), pack.q6_k),
    "IQ4_XS": (8, search.Range(-32, 31), pack.iq4_xs),
}
_SURE = 3e4  # less than fp16's 65504: a search may end with a scale above the first one


def quantise(weight: torch.Tensor, type_name: str) -> torch.Tensor:
    """weight [rows, cols] -> its blocks [rows, bytes of a row] uint8, as they lie in a GGUF file."""
    if type_name not in TYPES:
        raise GraftuneError(f"there is no quantiser for {type_name}", fix=f"choose one of {', '.join(TYPES)}")
    assert weight.dim() == 2, "a weight has rows and columns"
    values, size = KINDS[type_name]
    if weight.shape[1] % values:
        raise GraftuneError(
            f"rows of {weight.shape[1]} values are not made of whole {type_name} blocks of {values}",
            fix="choose a type with smaller blocks, such as Q8_0 or F16",
        )
    weight = weight.detach().float().contiguous()
    out = weight.new_empty(len(weight), row_bytes(type_name, weight.shape[1]), dtype=torch.uint8)
    flat, blocks = weight.view(-1, values), out.view(-1, size)
    step = max(1, PIECE // values)

    def piece(start: int) -> None:
        _fill(blocks[start : start + step], flat[start : start + step], type_name)

    cores.share(piece, range(0, len(flat), step))
    return out


def _fill(out: torch.Tensor, x: torch.Tensor, kind: str) -> None:
    """x [n, values of a block] -> out [n, bytes of a block]."""
    if kind in PLAIN:
        plain = x.to(PLAIN[kind])
        if not bool(plain.sum(dtype=torch.float32).isfinite()):  # NaN and Inf, but also large values
            _check(float(x.abs().max()), torch.finfo(PLAIN[kind]).max, kind)
        out.copy_(plain.view(torch.uint8))
        return
    size = x.abs().amax(1)
    _check(float(size.max()), _SURE * _REACH[kind], kind)
    if kind == "Q8_0":
        scale = size.div_(127)
        codes = x * search.inverse(scale)[:, None]
        out[:, :2] = pack.halves(scale.half())
        out[:, 2:].view(torch.int8).copy_(codes.mul(2).trunc_().sub_(codes.trunc_()))  # a half is rounded away from 0
        return
    if kind in ("Q5_0", "Q5_1"):
        from graftune.weights.gguf_io import TYPE_TRAITS

        out.copy_(torch.from_numpy(TYPE_TRAITS[kind].quantize_blocks(x.numpy())))
        return
    torch.cat(mxfp4.parts(x) if kind == "MXFP4" else _parts(x, kind), 1, out=out)


def _check(largest: float, reach: float, kind: str) -> None:
    """Refuses NaN, Inf and values beyond `reach`. A NaN makes the maximum NaN."""
    if not largest < float("inf"):
        raise GraftuneError("the weight holds values that are not finite", fix="train again with a lower lr")
    if largest > reach:
        raise GraftuneError(f"the weight's largest value does not fit {kind}", fix="choose BF16 or F32")


def _parts(x: torch.Tensor, kind: str) -> pack.Parts:
    if kind in ("Q4_K", "Q5_K"):
        scale, least, small, minima, codes = search.shifted_groups(_groups(x, 8), 15 if kind == "Q4_K" else 31)
        return pack.with_minima(kind, (scale, least), small.t(), minima.t(), _bytes(codes))
    levels = _RANGES.get(kind) or search.curve()
    if kind not in _GROUPED:
        grouped = _groups(x, 1)
        scale = search.scaled(grouped, levels)
        return pack.legacy(scale[0], _bytes(levels.codes(grouped, search.inverse(scale.float()))))
    groups, within, write = _GROUPED[kind]
    grouped = _groups(x, groups)
    scale, small = search.scaled_groups(grouped, levels, within)
    return write(scale, small.t(), _bytes(levels.codes(grouped, search.inverse(scale.float() * small))))


def _groups(x: torch.Tensor, groups: int) -> torch.Tensor:
    """[n, values] -> [values of a group, groups, n]."""
    return x.unflatten(1, (groups, -1)).permute(2, 1, 0).contiguous()


def _bytes(codes: torch.Tensor) -> torch.Tensor:
    """[values of a group, groups, n] -> [n, values] uint8."""
    return codes.to(torch.uint8).permute(2, 1, 0).contiguous().flatten(1)
