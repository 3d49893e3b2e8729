"""Quantised bases in memory, and the same bases dequantised: what training on either has to agree about."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from benchmarks.random_bases import SCALES

from graftune.kernels import nf4
from graftune.kernels.gguf_dequant import KINDS, reference, row_bytes
from graftune.model.bundles import BundleStorage
from graftune.model.decoder import Decoder
from graftune.model.frozen.interface import TensorRows
from graftune.model.lora import build_arena, initialise, norm_names
from graftune.model.spec import ModelSpec
from graftune.runtime import DTYPES, resolve
from graftune.settings.sections import LoraConfig
from graftune.settings.targets import TARGETS
from graftune.tokenizer import Tokenizer
from graftune.weights.base import Base
from graftune.weights.load import build_decoder
from graftune.weights.placement import Placement
from tests.support import oracle, specs


def spec(width: int = 64, *, layers: int = 2, tied: bool = False, **more: Any) -> ModelSpec:
    values = {
        "ffn": max(96, width) // 32 * 32 if width < 256 else width, "heads": 4, "kv_heads": 2, "head_width": width // 4,
        "vocab": 600, "norm_eps": 1e-5, "rope_theta": 10000.0, "max_positions": 256,
    }  # fmt: skip
    return specs.made(layers=layers, width=width, tied=tied, **values | more)


def delta_spec() -> ModelSpec:
    """A gated delta net and attention, with heads in the order of a GGUF."""
    heads = {"linear_num_key_heads": 4, "linear_num_value_heads": 16}
    widths = {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "norm_eps": 1e-3}
    made = spec(256, family="qwen3_5", full_attention_interval=2, **heads, **widths)
    return specs.edited(made, tiled=True)


@dataclass(frozen=True)
class Blocks:
    """GGUF blocks as a row source, read by our own reference (tests/parity has it judged by the gguf package)."""

    dtype_name: str
    shape: tuple[int, ...]
    blocks: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.blocks.nbytes

    def raw(self, start: int, stop: int) -> torch.Tensor:
        return self.blocks[start:stop]

    def read(self, start: int, stop: int) -> torch.Tensor:
        return values_of(self.blocks[start:stop], self.dtype_name)

    def gather(self, ids: torch.Tensor) -> torch.Tensor:
        return values_of(self.blocks[ids.cpu()], self.dtype_name)

    def values(self) -> torch.Tensor:
        return values_of(self.blocks, self.dtype_name)


def values_of(blocks: torch.Tensor, kind: str) -> torch.Tensor:
    block = KINDS[kind]
    out = torch.empty(len(blocks), blocks.shape[1] // block.bytes * block.values)
    reference.dequantise(blocks, kind, out)
    return out


def random_blocks(kind: str, rows: int, width: int, std: float, seed: int) -> torch.Tensor:
    """Random codes under scales that give values of about that deviation."""
    drawn = torch.Generator().manual_seed(seed)
    if kind in reference.PLAIN:
        floats = torch.randn(rows, width, generator=drawn).mul_(std).to(reference.PLAIN[kind])
        return floats.view(torch.uint8)
    size = KINDS[kind].bytes
    raw = torch.randint(256, (rows, row_bytes(kind, width) // size, size), generator=drawn, dtype=torch.uint8)

    if kind == "MXFP4":  # a power of two; codes are of about 3
        raw[:, :, 0] = 127 + round(math.log2(std / 3))
        return raw.view(rows, -1)

    def scaled(by: float) -> torch.Tensor:
        for at, share in SCALES[kind]:
            raw[:, :, at : at + 2] = torch.tensor([by * share], dtype=torch.float16).view(torch.uint8)
        return raw.view(rows, -1)

    return scaled(std / float(values_of(scaled(1.0), kind).std())).clone()


def gguf_base(kind: str, shape: ModelSpec, table: str = "Q8_0", mixed: str = "") -> Base:
    """Every projection in `kind` (v in `mixed`, if given), embedding and head in `table`."""
    tensors: dict[str, Any] = {}
    std = 0.6 / shape.width**0.5

    def put(name: str, rows: int, width: int, of: str, spread: float) -> None:
        tensors[name] = Blocks(of, (rows, width), random_blocks(of, rows, width, spread, len(tensors)))

    for name in ("embed_tokens.weight", *(() if shape.tied else ("lm_head.weight",))):
        put(name, shape.vocab, shape.width, table, 0.5 if name.startswith("embed") else std)
    for layer, own in enumerate(shape.layers):
        for projection, sizes in own.projections.items():
            of = mixed if mixed and projection == "self_attn.v_proj" else kind
            put(f"layers.{layer}.{projection}.weight", *sizes, of, std)
        for part in own.parts:
            for name, size in part.tensors.items():
                drawn = torch.Generator().manual_seed(layer + len(name))
                tensors[f"layers.{layer}.{part.named(name)}"] = TensorRows(torch.randn(size, generator=drawn))
        if own.stream_scale:
            tensors[f"layers.{layer}.{own.stream_scale}"] = TensorRows(torch.tensor([0.9]))
    for name, size in shape.layer_inputs.tensors.items() if shape.layer_inputs else ():
        if len(size) == 1:
            tensors[name] = TensorRows(torch.ones(size))
        else:
            put(name, size[0], size[1], table, std)
    for _, name, width in norm_names(shape):
        tensors[name] = TensorRows(torch.rand(width, generator=torch.Generator().manual_seed(len(name))) + 0.5)
    return Base("blocks", Path("blocks"), "gguf", shape, cast(Tokenizer, None), tensors)


def dequantised(base: Base) -> Base:
    """The same values in fp32."""
    tensors = {name: TensorRows(source.values().float()) for name, source in base.tensors.items()}
    return dataclasses.replace(base, kind="safetensors", tensors=tensors)


def through_nf4(base: Base) -> Base:
    """What NF4 makes of the projections, in fp32; the rest as it is."""
    tensors = dict(base.tensors)
    for name in tensors:
        if name.endswith(".weight") and name.split(".")[-2] in TARGETS:
            tensors[name] = TensorRows(nf4.dequantise(nf4.quantise(tensors[name].values()), torch.float32))
    return dataclasses.replace(base, tensors=tensors)


def placed(
    base: Base,
    lora: LoraConfig,
    base_dtype: str,
    device: str = "cpu",
    compute: torch.dtype = torch.float32,
    *,
    std_b: float = 0.02,
    storage: BundleStorage | None = None,
    embedding_on_host: bool = False,
) -> oracle.Ours:
    """A decoder of the base with adapters that are not zero, the same on every device."""
    name = next(name for name, dtype in DTYPES.items() if dtype == compute)
    runtime = resolve(device, name)
    arena = build_arena(base.spec, lora, runtime.device, runtime.compute)
    placement = Placement(base_dtype, "test", embedding_on_host=embedding_on_host)
    decoder = build_decoder(base, arena, lora, runtime, placement, storage)
    initialise(arena, dataclasses.replace(lora, init="gaussian"), seed=7)  # wide, so that adapters matter
    drawn = torch.Generator().manual_seed(8)
    for slot in arena.slots:
        if slot.endswith("lora_B.weight"):
            value = arena.view(slot, arena.weights)
            value.copy_(torch.empty(value.shape).normal_(0, std_b, generator=drawn))
    arena.publish()
    return oracle.Ours(base, decoder, arena, lora)


def frozen_bytes(decoder: Decoder) -> int:
    """Of a dense model's projections and tables, as they are kept."""
    tables = {id(table): table for table in (decoder.embedding, decoder.head.frozen)}
    weights = [projection.frozen for block in decoder.blocks for projection in block.projections]
    return sum(weight.nbytes for weight in (*weights, *tables.values()))


def nf4_checkpoint(of: nf4.Nf4, name: str) -> dict[str, torch.Tensor]:
    """What bitsandbytes saves for this weight, key by key and byte by byte."""
    state: dict[str, object] = {
        "quant_type": "nf4",
        "blocksize": nf4.reference.BLOCK,
        "dtype": str(of.dtype).removeprefix("torch."),
        "shape": of.shape,
    }
    tensors = {
        name: of.codes[:, None],
        name + ".absmax": of.absmax,
        name + ".quant_map": torch.tensor(nf4.reference.TABLE, device=of.device),
    }
    if of.nested_absmax is not None:
        assert of.nested_map is not None and of.offset is not None
        tensors[name + ".nested_absmax"] = of.nested_absmax
        tensors[name + ".nested_quant_map"] = of.nested_map.clone()  # safetensors refuses tensors that share memory
        state |= {"nested_blocksize": nf4.reference.GROUP, "nested_dtype": "float32", "nested_offset": of.offset.item()}
    tensors[name + nf4.STATE + "nf4"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return tensors
