"""Chooses the block type of each tensor of a GGUF: one type for all, or one of llama.cpp's mixes.

Vectors (norms, biases) and routers stay fp32. Matrices whose errors matter most get more bits, as in llama.cpp without
an importance matrix: the head (and with it a tied embedding) gets Q6_K in every type below Q8_0; so do value and down
projections in the layers that a mix names, often the first and last eighth and every third between; models with 8
experts and those of 70B get more for the small attention matrices. Rows that do not consist of whole blocks of 256 use
a type with blocks of 32, and rows that 32 does not divide use F16.
"""

from __future__ import annotations

import re

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType

from graftune.model.families import family_of
from graftune.model.frozen import RowSource
from graftune.model.spec import ModelSpec

# The values of --type, the type of most tensors, and llama.cpp's number of the mix.
TYPES = {
    "F32": ("F32", LlamaFileType.ALL_F32),
    "F16": ("F16", LlamaFileType.MOSTLY_F16),
    "BF16": ("BF16", LlamaFileType.MOSTLY_BF16),
    "Q8_0": ("Q8_0", LlamaFileType.MOSTLY_Q8_0),
    "Q6_K": ("Q6_K", LlamaFileType.MOSTLY_Q6_K),
    "Q5_K_M": ("Q5_K", LlamaFileType.MOSTLY_Q5_K_M),
    "Q4_K_M": ("Q4_K", LlamaFileType.MOSTLY_Q4_K_M),
    "IQ4_XS": ("IQ4_XS", LlamaFileType.MOSTLY_IQ4_XS),
    "Q4_0": ("Q4_0", LlamaFileType.MOSTLY_Q4_0),
    "Q3_K_M": ("Q3_K", LlamaFileType.MOSTLY_Q3_K_M),
    "MXFP4": ("MXFP4", LlamaFileType.MOSTLY_MXFP4_MOE),  # of experts; everything else is Q8_0
}
_FALLBACK = {"Q3_K": "Q4_0", "IQ4_XS": "IQ4_NL", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
_FLOATS = ("F32", "F16", "BF16")
_PLACE = re.compile(r"blk\.(\d+)\.(attn_v|attn_qkv|attn_k|attn_output|ffn_down)(?:_exps)?\.weight")


def more_bits(layer: int, layers: int) -> bool:
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def kind_of(name: str, source: RowSource, mix: str, spec: ModelSpec) -> str:
    """The block type of a tensor by its GGUF name. A tensor in MXFP4 that no adapter has changed stays so under every
    type: a larger one would be no better."""
    kept = source.dtype_name == "MXFP4" and source.raw is not None
    return "MXFP4" if kept else tensor_kind(name, tuple(source.shape), mix, spec)


def tensor_kind(name: str, shape: tuple[int, ...], mix: str, spec: ModelSpec) -> str:
    """The block type of a tensor by its GGUF name."""
    kind = TYPES[mix][0]
    # A router's choice depends on small differences; llama.cpp takes the taps of a convolution in F32 only.
    # The biases of experts are one matrix, with a row per expert, so they are found by name.
    if len(shape) == 1 or name.endswith((".bias", "ffn_gate_inp.weight", "shortconv.conv.weight", "ssm_conv1d.weight")):
        return "F32"
    if kind in _FLOATS:
        return kind
    place = _PLACE.fullmatch(name)
    if mix == "MXFP4":
        kind = kind if name.endswith("_exps.weight") else "Q8_0"
    elif name == ("token_embd.weight" if spec.tied else "output.weight"):
        kind = kind if kind == "Q8_0" else "Q6_K"
    elif place and place[2].startswith("ffn"):
        kind = _down(int(place[1]), mix, spec) or kind
    elif place:
        kind = _attention(place[2], int(place[1]), mix, spec) or kind
    if shape[-1] % _block(kind):
        kind = _FALLBACK.get(kind, "F16")
    return "F16" if shape[-1] % _block(kind) else kind


def _down(layer: int, mix: str, spec: ModelSpec) -> str | None:
    if mix in ("Q4_K_M", "Q5_K_M") and more_bits(layer, len(spec.layers)):
        return "Q6_K"
    if mix == "Q3_K_M":
        return "Q5_K" if layer < len(spec.layers) // 16 else "Q4_K"
    return "Q5_K" if mix == "IQ4_XS" and layer < len(spec.layers) // 8 else None


def _attention(part: str, layer: int, mix: str, spec: ModelSpec) -> str | None:
    if part == "attn_k":
        return "Q8_0" if spec.experts == 8 else None
    if part == "attn_output":
        if spec.experts == 8:
            return "Q5_K" if mix in ("Q3_K_M", "Q4_K_M", "IQ4_XS") else None
        return "Q4_K" if mix == "Q3_K_M" else None
    if spec.experts == 8:
        return "Q8_0"
    kind = _values(layer, mix, spec)
    shares_keys = any(shape.kv_heads < shape.heads for shape in spec.attention)
    seventy = len(spec.layers) == family_of(spec).layers_of_70b and shares_keys
    return "Q5_K" if seventy and (kind or TYPES[mix][0]) in ("Q3_K", "Q4_K") else kind


def _values(layer: int, mix: str, spec: ModelSpec) -> str | None:
    if mix in ("Q4_K_M", "Q5_K_M") and more_bits(layer, len(spec.layers)):
        return "Q6_K"
    if mix == "Q3_K_M":
        return "Q5_K" if layer < 2 else "Q4_K"
    return "Q5_K" if mix == "IQ4_XS" and all(shape.heads >= 4 * shape.kv_heads for shape in spec.attention) else None


def _block(kind: str) -> int:
    return int(GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0])
