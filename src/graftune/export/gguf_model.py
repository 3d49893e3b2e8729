"""A whole model as one GGUF file, in one type or in llama.cpp's mixes.

Vectors (norms, biases) stay fp32. Of the matrices, those whose errors show most get more bits, as llama.cpp deals them
out: the head Q6_K in every type below Q8_0 (and with it a tied embedding), and in Q4_K_M the values' and down
projections of the first and last eighth of the layers and of every third between. Rows that are not made of whole
blocks of 256 fall back as there: Q4_K to Q5_0, Q6_K to Q8_0, and where even 32 do not divide them, to F16.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType

from graftune.errors import GraftuneError
from graftune.export.gguf_file import Block, write_gguf
from graftune.export.gguf_keys import architecture, model_keys, rope_factors
from graftune.model.frozen import RowSource
from graftune.model.spec import ModelSpec
from graftune.weights import experts, names, rows
from graftune.weights.base import Base
from graftune.weights.streamed import Held, OnPiece, nothing

# What --type may be, the type of most tensors, and the number llama.cpp gives the mix.
TYPES = {
    "F32": ("F32", LlamaFileType.ALL_F32),
    "F16": ("F16", LlamaFileType.MOSTLY_F16),
    "BF16": ("BF16", LlamaFileType.MOSTLY_BF16),
    "Q8_0": ("Q8_0", LlamaFileType.MOSTLY_Q8_0),
    "Q4_0": ("Q4_0", LlamaFileType.MOSTLY_Q4_0),
    "Q4_K_M": ("Q4_K", LlamaFileType.MOSTLY_Q4_K_M),
    "Q6_K": ("Q6_K", LlamaFileType.MOSTLY_Q6_K),
}
# What a family may have, and a GGUF of it has a key for or takes for granted.
SHAPED = (
    "window",
    "window_layers",
    "norms",
    "activation",
    "wide_qk_norm",
    "local_theta",
    "unrotated_layers",
    "rotated",
    "embedding_scale",
    "score_scale",
    "attention_cap",
    "residual_scale",
    "logit_scale",
    "logit_cap",
)
_FALLBACK = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}
_FLOATS = ("F32", "F16", "BF16")


def more_bits(layer: int, layers: int) -> bool:
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def tensor_kind(name: str, shape: tuple[int, ...], mix: str, spec: ModelSpec) -> str:
    """The block type of a tensor by its GGUF name."""
    kind = TYPES[mix][0]
    if len(shape) == 1 or name.endswith("ffn_gate_inp.weight"):  # a router's choice hangs on small differences
        return "F32"
    if kind in _FLOATS:
        return kind
    layer = re.match(r"blk\.(\d+)\.", name)
    if name == ("token_embd.weight" if spec.tied else "output.weight"):
        kind = kind if kind == "Q8_0" else "Q6_K"
    elif mix == "Q4_K_M" and layer and re.search(r"\.(attn_v|ffn_down)", name):
        kind = "Q6_K" if more_bits(int(layer[1]), spec.layers) else kind
    if shape[-1] % _block(kind):
        kind = _FALLBACK.get(kind, "F16")
    return "F16" if shape[-1] % _block(kind) else kind


def _block(kind: str) -> int:
    return int(GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0])


def gguf_tensors(base: Base, mix: str) -> list[Block]:
    """Every tensor of a model under GGUF's name, rows of Q and K in GGUF's order."""
    found = []
    factors = rope_factors(base)
    if factors is not None:
        found.append(Block("rope_freqs.weight", Held(factors), "F32"))
    if base.spec.rope.kind == "longrope":
        for which in ("short", "long"):
            values = torch.tensor(getattr(base.spec.rope, which))
            found.append(Block(f"rope_factors_{which}.weight", Held(values), "F32"))
    interleaved = architecture(base) in rows.INTERLEAVED
    plain, stacks = experts.to_gguf(base.tensors, base.spec)
    for ours in sorted(plain, key=_place):
        if ours == "lm_head.weight" and base.spec.tied:
            continue
        name = names.to_gguf(ours, architecture(base))
        if name is None:
            raise GraftuneError(f"{ours} has no name in GGUF", where=str(base.path), mend="export to merged or peft")
        source: RowSource = base.tensors[ours]
        heads = rows.heads_of(base.spec, ours)
        if interleaved and heads is not None:
            source = rows.Reordered(source, rows.gguf_order(heads, base.spec.head_width))
        found.append(Block(name, source, tensor_kind(name, tuple(source.shape), mix, base.spec)))
    found += [Block(n, s, tensor_kind(n, tuple(s.shape), mix, base.spec)) for n, s in stacks.items()]
    return found


def _place(name: str) -> tuple[int, int]:
    """Embedding, layers in order, final norm, head: as a reader walks through the file."""
    layer = re.match(r"layers\.(\d+)\.", name)
    return (1, int(layer[1])) if layer else ({"embed_tokens.weight": 0, "norm.weight": 2}.get(name, 3), 0)


def write_model_gguf(
    path: Path,
    base: Base,
    tensors: list[Block],
    mix: str,
    name: str,
    end_of_turn: int | None,
    on_piece: OnPiece = nothing,
    on_tensor: Callable[[], None] = lambda: None,
) -> None:
    """Written at `path` and read back, tokenizer and shape of the model too."""
    keys = model_keys(base, name, int(TYPES[mix][1]), end_of_turn)
    write_gguf(path, keys, tensors, on_piece, on_tensor)
    _check(path, base)


def _check(path: Path, base: Base) -> None:
    from graftune.weights.base import open_base

    back = open_base(str(path))
    for field in (
        "layers",
        "width",
        "ffn",
        "heads",
        "kv_heads",
        "head_width",
        "vocab",
        "tied",
        "qkv_bias",
        "qk_norm",
        "experts",
        "experts_chosen",
    ):
        got, want = getattr(back.spec, field), getattr(base.spec, field)
        if got != want:
            raise GraftuneError(f"reads back with {field} {got} instead of {want}", where=str(path), mend="report this")
    spec = base.spec if base.spec.window_layers else dataclasses.replace(base.spec, window=0)
    for field in SHAPED if back.spec.family == spec.family or spec.window else ():
        got, want = getattr(back.spec, field), getattr(spec, field)
        same = math.isclose(got, want, rel_tol=1e-6) if isinstance(want, float) else got == want
        if not same:
            raise GraftuneError(
                f"a GGUF of the family {base.spec.family} cannot say that {field} is {want}",
                mend="export to merged or peft",
            )
    if not torch.allclose(_frequencies(back), _frequencies(base), rtol=1e-5):
        raise GraftuneError("reads back with other rope frequencies", where=str(path), mend="report this")


def _frequencies(base: Base) -> Any:
    frequencies, attention = base.spec.inverse_frequencies()
    factors = base.rope_factors
    return torch.cat((frequencies if factors is None else frequencies / factors, torch.tensor([attention])))
