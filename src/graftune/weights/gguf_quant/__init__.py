"""Numbers to GGUF blocks: our own quantisers, for what is exported.

A block keeps small codes and one or two scales (kernels/gguf_dequant/reference.py has the formulas). Codes follow from
the scales by rounding; the scales are what has to be found. The obvious ones (largest value over largest code) spend
the range on one outlier. search.py instead tries a row of step widths and solves for the best scale of each in closed
form, which is cheap: all it needs of a block are a few sums. pack.py puts the result where the format wants it.

The work is done on pieces that stay in a core's cache, with the values of a block along the first dimension: sums over
a block are then additions of whole vectors.
"""

from __future__ import annotations

import torch

from graftune.errors import GraftuneError
from graftune.kernels.gguf_dequant import KINDS, row_bytes
from graftune.weights.gguf_quant import pack, search

__all__ = ["TYPES", "quantise"]

TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
PIECE = 1 << 16  # values quantised at a time
# The largest value that a block of each kind surely holds, as a multiple of what fp16 does.
_REACH = {"Q4_0": 7, "Q5_0": 15, "Q8_0": 127, "Q4_1": 1, "Q5_1": 1, "Q4_K": 63, "Q5_K": 63, "Q6_K": 31 * 127}
_SURE = 3e4  # of fp16's 65504: a search may end somewhat above the values it began with
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def quantise(weight: torch.Tensor, type_name: str) -> torch.Tensor:
    """weight [rows, cols] -> its blocks [rows, bytes of a row] uint8, as they lie in a GGUF file."""
    if type_name not in TYPES:
        raise GraftuneError(f"there is no quantiser for {type_name}", mend=f"choose one of {', '.join(TYPES)}")
    assert weight.dim() == 2, "a weight has rows and columns"
    values = KINDS[type_name].values
    if weight.shape[1] % values:
        raise GraftuneError(
            f"rows of {weight.shape[1]} values are not made of whole {type_name} blocks of {values}",
            mend="choose a type with smaller blocks, such as Q8_0 or F16",
        )
    weight = weight.detach().float().cpu().contiguous()
    out = torch.empty(len(weight), row_bytes(type_name, weight.shape[1]), dtype=torch.uint8)
    size = KINDS[type_name].bytes
    flat, blocks = weight.view(-1, values), out.view(-1, size)
    step = max(1, PIECE // values)
    for start in range(0, len(flat), step):
        blocks[start : start + step] = _blocks(flat[start : start + step], type_name)
    return out


def _blocks(x: torch.Tensor, kind: str) -> torch.Tensor:
    """x [n, values of a block] -> [n, bytes of a block]."""
    if not bool(x.isfinite().all()):
        raise GraftuneError("the weight holds values that are no numbers", mend="train again with a lower lr")
    if kind in _PLAIN:
        plain = x.to(_PLAIN[kind])
        if not bool(plain.isfinite().all()):
            raise _too_large(kind)
        return plain.view(torch.uint8)
    if float(x.abs().max()) > _SURE * _REACH[kind]:
        raise _too_large(kind)
    if kind in ("Q4_0", "Q5_0", "Q8_0"):
        # Q8_0 could hold -128 too, but its own quantiser never writes it, and a reader may count on that.
        within = {"Q4_0": search.Range(-8, 7), "Q5_0": search.Range(-16, 15), "Q8_0": search.Range(-127, 127)}[kind]
        scale, codes = search.scaled(x.t().contiguous(), within)
        return pack.legacy(kind, (scale,), codes.t() - (within.low if kind != "Q8_0" else 0))
    if kind in ("Q4_1", "Q5_1"):
        scale, least, codes = search.shifted(x.t().contiguous(), 15 if kind == "Q4_1" else 31)
        return pack.legacy(kind, (scale, least), codes.t())
    if kind == "Q6_K":
        scale, small, codes = search.scaled_groups(_groups(x, 16), search.Range(-32, 31))
        return pack.q6_k(scale, small.t(), _ungrouped(codes) + 32)
    found = search.shifted_groups(_groups(x, 8), 15 if kind == "Q4_K" else 31)
    return pack.with_minima(
        kind, (found.scale, found.least), found.scales.t(), found.minima.t(), _ungrouped(found.codes)
    )


def _groups(x: torch.Tensor, groups: int) -> torch.Tensor:
    """[n, 256] -> [values of a group, groups, n]."""
    return x.unflatten(1, (groups, -1)).permute(2, 1, 0).contiguous()


def _ungrouped(codes: torch.Tensor) -> torch.Tensor:
    """[values of a group, groups, n] -> [n, 256]."""
    return codes.permute(2, 1, 0).flatten(1)


def _too_large(kind: str) -> GraftuneError:
    return GraftuneError(f"the weight's largest value does not fit {kind}", mend="choose BF16 or F32")
