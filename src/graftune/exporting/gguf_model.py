"""A whole model as one GGUF file: every tensor under GGUF's name, written, and read back."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import torch

from graftune.errors import GraftuneError
from graftune.exporting.gguf_file import write_gguf
from graftune.exporting.gguf_keys import architecture, model_keys, rope_factors
from graftune.exporting.gguf_mix import TYPES, tensor_kind
from graftune.model.frozen import RowSource
from graftune.weights import experts, names, rows
from graftune.weights.base import Base
from graftune.weights.rows import Held
from graftune.weights.streamed import UNWATCHED, OutputTensor, Watcher

# What a family may have, and a GGUF of it has a key for or takes for granted.
SHAPED = (
    "conv_layers",
    "conv_taps",
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


def gguf_tensors(base: Base, mix: str) -> list[OutputTensor]:
    """Every tensor of a model under GGUF's name, rows of Q and K in GGUF's order."""
    found = []
    factors = rope_factors(base)
    if factors is not None:
        found.append(OutputTensor("rope_freqs.weight", Held(factors), "F32"))
    if base.spec.rope.kind == "longrope":
        for which in ("short", "long"):
            values = torch.tensor(getattr(base.spec.rope, which))
            found.append(OutputTensor(f"rope_factors_{which}.weight", Held(values), "F32"))
    interleaved = architecture(base) in rows.INTERLEAVED
    plain, stacks = experts.to_gguf(base.tensors, base.spec)
    for ours in sorted(plain, key=_place):
        if ours == "lm_head.weight" and base.spec.tied:
            continue
        name = names.to_gguf(ours, architecture(base))
        if name is None:
            raise GraftuneError(f"{ours} has no name in GGUF", where=str(base.path), fix="export to merged or peft")
        source: RowSource = base.tensors[ours]
        turned, shapes = rows.heads_of(base.spec, ours), rows.shapes_of(base.spec, ours)
        if interleaved and turned is not None:
            source = rows.Reordered(source, rows.gguf_order(*turned))
        if shapes is not None:
            source = rows.Reshaped(source, shapes[1])
        found.append(OutputTensor(name, source, tensor_kind(name, tuple(source.shape), mix, base.spec)))
    found += [OutputTensor(n, s, tensor_kind(n, tuple(s.shape), mix, base.spec)) for n, s in stacks.items()]
    return found


def _place(name: str) -> tuple[int, int]:
    """Embedding, layers in order, final norm, head: as a reader walks through the file."""
    layer = re.match(r"layers\.(\d+)\.", name)
    return (1, int(layer[1])) if layer else ({"embed_tokens.weight": 0, "norm.weight": 2}.get(name, 3), 0)


def write_model_gguf(
    path: Path,
    base: Base,
    tensors: list[OutputTensor],
    mix: str,
    name: str,
    end_of_turn: int | None,
    watcher: Watcher = UNWATCHED,
) -> None:
    """Written at `path` and read back, tokenizer and shape of the model too."""
    keys = model_keys(base, name, int(TYPES[mix][1]), end_of_turn)
    write_gguf(path, keys, tensors, watcher)
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
            raise GraftuneError(f"reads back with {field} {got} instead of {want}", where=str(path), fix="report this")
    spec = base.spec if base.spec.window_layers else dataclasses.replace(base.spec, window=0)
    for field in SHAPED if back.spec.family == spec.family or spec.window else ():
        got, want = getattr(back.spec, field), getattr(spec, field)
        same = math.isclose(got, want, rel_tol=1e-6) if isinstance(want, float) else got == want
        if not same:
            raise GraftuneError(
                f"a GGUF of the family {base.spec.family} cannot say that {field} is {want}",
                fix="export to merged or peft",
            )
    if not torch.allclose(_frequencies(back), _frequencies(base), rtol=1e-5):
        raise GraftuneError("reads back with other rope frequencies", where=str(path), fix="report this")


def _frequencies(base: Base) -> Any:
    frequencies, attention = base.spec.inverse_frequencies()
    factors = base.rope_factors
    return torch.cat((frequencies if factors is None else frequencies / factors, torch.tensor([attention])))
