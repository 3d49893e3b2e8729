"""The table of weight formats. Every file of this folder defines the tuple FORMATS; importing the folder collects them.

Adding a format therefore means adding a file (docs/extending.md).
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graftune.errors import GraftuneError
from graftune.model.frozen.formats.mxfp4 import KIND as MXFP4
from graftune.model.frozen.interface import CheckpointWeight, RowSource
from graftune.model.frozen.weight_format import WeightFormat

READABLE = ("BF16", "F16", "F32")  # dtypes of a safetensors file that need no format of their own


def _table() -> dict[str, WeightFormat]:
    modules = [importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)]
    return {form.name: form for module in modules for form in module.FORMATS}


FORMATS = _table()


def stored_format(source: RowSource) -> WeightFormat | None:
    """The format that a tensor of a file is stored in and may stay in; None: it has to be read as floats."""
    return next((form for form in FORMATS.values() if form.claims(source)), None)


def checkpoint_format(tensors: Mapping[str, RowSource]) -> WeightFormat | None:
    """The format that a checkpoint was quantised in, if it was. MXFP4 counts in a GGUF too: models were trained in it,
    and dequantising gains nothing."""
    kept = (t for t in tensors.values() if isinstance(t, CheckpointWeight) or t.dtype_name == MXFP4)
    found = next(kept, None)
    return None if found is None else stored_format(found)


def check_quantisation(quantisation: Any, where: str) -> None:
    """Refuses a `quantization_config` whose tensors no format reads."""
    if not quantisation:
        return
    described = quantisation if isinstance(quantisation, dict) else {}
    if any(form.reads(described) for form in FORMATS.values()):
        return
    kind = described.get("quant_method") or "its method is not named"
    if kind == "bitsandbytes":
        kind = "llm_int8" if described.get("load_in_8bit") else described.get("bnb_4bit_quant_type", "fp4")
    raise GraftuneError(
        f"is a quantised checkpoint ({kind}), of which only bitsandbytes' NF4, FP8 and MXFP4 are read",
        where=where,
        fix="give an NF4, FP8, MXFP4 or the unquantised model, or a GGUF file",
    )


def assembled(tensors: Mapping[str, RowSource], folder: Path) -> dict[str, RowSource]:
    """A folder's tensors, where the parts of a quantised weight become one tensor. All others must be floats."""
    found: dict[str, RowSource] = {}
    rest = dict(tensors)
    for form in FORMATS.values():
        weights, rest = form.assemble(rest, folder)
        found |= weights
    for name, tensor in rest.items():
        if tensor.dtype_name not in READABLE:
            int8 = name.removesuffix("weight") + "SCB" in tensors
            raise GraftuneError(
                f"tensor {name} is {'int8 (llm_int8)' if int8 else tensor.dtype_name}",
                where=str(folder),
                fix="give an NF4 or an unquantised checkpoint" if int8 else f"give one of {', '.join(READABLE)}",
            )
    return found | rest
