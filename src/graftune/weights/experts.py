"""The experts of a mixture under the names and in the layouts of other programs.

    ours, the Hub's    layers.N.mlp.experts.E.gate_proj.weight [F, D], up_proj, down_proj [D, F]; mlp.gate.weight [E, D]
    transformers       layers.N.mlp.experts.gate_up_proj [E, 2F, D], down_proj [E, D, F]
    GGUF               blk.N.ffn_gate_exps.weight [E, F, D], ffn_up_exps, ffn_down_exps; ffn_gate_inp.weight

An expert's weights are row sources over the stored tensors; nothing is copied. Our adapters are stored by projection, A
[E R, in] and B [E, out, R]; PEFT stores B as [out, R E] with the expert fastest, under names that tell the order in
which parameters were wrapped, not the parameter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from graftune.errors import GraftuneError
from graftune.model.feed_forward.experts import PARAMETERS
from graftune.model.frozen import RowSource
from graftune.model.spec import ModelSpec
from graftune.weights.rows import Over, RowsByReading

if TYPE_CHECKING:
    from graftune.weights.gguf_io import GgufTensor

_GGUF = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}
PROJECTIONS = tuple(_GGUF)
_GGUF_BACK = {gguf: ours for ours, gguf in _GGUF.items()}


@dataclass(frozen=True)
class ExpertRows(Over):
    """`count` rows from `first` on of one expert of a stacked tensor [E, rows, in]."""

    expert: int
    first: int
    count: int

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return (self.count, *self.source.shape[2:])

    def read(self, start: int, stop: int) -> torch.Tensor:
        whole = self.source.read(self.expert, self.expert + 1)[0]
        return whole[self.first + start : self.first + min(stop, self.count)]


@dataclass(frozen=True)
class Stack(RowsByReading):
    """One projection of all experts as a tensor [E, out, in]; a row of it is an expert."""

    experts: tuple[RowSource, ...]

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return (len(self.experts), *self.experts[0].shape)

    @property
    def dtype_name(self) -> str:
        return self.experts[0].dtype_name

    @property
    def nbytes(self) -> int:
        return sum(expert.nbytes for expert in self.experts)

    def read(self, start: int, stop: int) -> torch.Tensor:
        return torch.stack([expert.values() for expert in self.experts[start:stop]])


def from_folder(tensors: Mapping[str, RowSource], spec: ModelSpec) -> dict[str, RowSource]:
    """A folder's tensors under our names, with one tensor for each projection of each expert."""
    found: dict[str, RowSource] = {}
    for name, tensor in tensors.items():
        stacked = re.fullmatch(r"(layers\.\d+\.mlp\.experts)\.(gate_up_proj|down_proj)(\.weight)?", name)
        if stacked and len(tensor.shape) == 3:
            for expert in range(tensor.shape[0]):
                at, projections = 0, PARAMETERS[stacked[2]]
                for projection in projections:
                    rows = tensor.shape[1] // len(projections)
                    found[f"{stacked[1]}.{expert}.{projection}.weight"] = ExpertRows(tensor, expert, at, rows)
                    at += rows
        else:
            found[name] = tensor
    return found


def from_gguf(name: str, tensor: GgufTensor) -> dict[str, GgufTensor] | None:
    """The experts that a tensor of a GGUF holds, or None if it holds none."""
    match = re.fullmatch(r"blk\.(\d+)\.(ffn_\w+_exps)\.weight", name)
    if match is None or match[2] not in _GGUF_BACK or len(tensor.shape) != 3:
        return None
    count, rows, width = tensor.shape
    return {
        f"layers.{match[1]}.mlp.experts.{expert}.{_GGUF_BACK[match[2]]}.weight": replace(
            tensor, shape=(rows, width), blocks=tensor.blocks[expert * rows : (expert + 1) * rows]
        )
        for expert in range(count)
    }


def to_gguf(tensors: Mapping[str, RowSource], spec: ModelSpec) -> tuple[dict[str, RowSource], dict[str, RowSource]]:
    """Splits a model's tensors: those written as they are, by our names, and the experts' stacks, by GGUF's names."""
    if not spec.experts:
        return dict(tensors), {}
    stacks: dict[str, RowSource] = {}
    plain = {name: tensor for name, tensor in tensors.items() if ".mlp.experts." not in name}
    for layer in range(len(spec.layers)):
        for projection, theirs in _GGUF.items():
            names = [f"layers.{layer}.mlp.experts.{e}.{projection}.weight" for e in range(spec.experts)]
            stacks[f"blk.{layer}.{theirs}.weight"] = Stack(tuple(tensors[name] for name in names))
    return plain, stacks


def paths_of(parameter: str) -> set[str]:
    """The projections that one of transformers' parameters holds; both are given by their paths."""
    module, _, name = parameter.rpartition(".")
    return {f"{module.removesuffix('.experts')}.{projection}" for projection in PARAMETERS[name]}


def parameters_of(targets: tuple[str, ...]) -> list[str]:
    """The parameters of transformers that the targets mean, which are names or paths."""
    names = {target.removeprefix("mlp.") for target in targets}
    return [parameter for parameter, projections in PARAMETERS.items() if set(projections) <= names]


def target_parameters(targets: tuple[str, ...]) -> list[str]:
    """The same as PEFT's configuration names them."""
    return [f"mlp.experts.{parameter}" for parameter in parameters_of(targets)]


def from_target_parameters(names: list[str]) -> tuple[str, ...] | None:
    """The targets that PEFT's target_parameters mean, or None if one of them is unknown."""
    found: list[str] = []
    for name in names:
        match = re.fullmatch(r"(?:(?:.*\.)?experts\.)?(gate_up_proj|down_proj)", str(name))
        if match is None:
            return None
        found += PARAMETERS[match[1]]
    return tuple(found)


def adapters_to_peft(tensors: Mapping[str, torch.Tensor], targets: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """A mixture's adapters under PEFT's names and in its layout. The parameter that is wrapped first, gate_up where
    there is one, is inside the other's wrapper."""
    wrapped = parameters_of(targets)
    found = {}
    for name, value in tensors.items():
        match = _adapter(name)
        if match is None:
            found[name] = value
            continue
        inner = ".base_layer" if len(wrapped) == 2 and match[2] == wrapped[0] else ""
        if match[3] == "B":  # [E, out, R] -> [out, R, E]
            value = value.permute(1, 2, 0).flatten(1)
        found[f"{match[1]}{inner}.lora_{match[3]}.weight"] = value.contiguous()
    return found


def adapters_from_peft(
    tensors: Mapping[str, torch.Tensor], targets: tuple[str, ...], rank: int
) -> dict[str, torch.Tensor]:
    wrapped = parameters_of(targets)
    found = {}
    for name, value in tensors.items():
        match = re.fullmatch(r"(layers\.\d+\.mlp\.experts)(\.base_layer)?\.lora_([AB])\.weight", name)
        if match is None or not wrapped:
            found[name] = value
            continue
        if match[3] == "B" and value.dim() == 2 and value.shape[1] % rank == 0:  # else refused by its shape
            value = value.unflatten(1, (rank, -1)).permute(2, 0, 1).contiguous()
        parameter = wrapped[0] if match[2] else wrapped[-1]
        found[f"{match[1]}.{parameter}.lora_{match[3]}.weight"] = value
    return found


def _adapter(name: str) -> re.Match[str] | None:
    return re.fullmatch(r"(layers\.\d+\.mlp\.experts)\.(gate_up_proj|down_proj)\.lora_([AB])\.weight", name)


def is_expert_adapter(name: str) -> bool:
    return _adapter(name) is not None


def by_expert(
    tensors: Mapping[str, torch.Tensor], name: str, where: str
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """(A [R, in], B [out, R]) for the weight of every expert and projection, given the name of an expert adapter's
    A."""
    match = _adapter(name)
    assert match is not None
    down, up = tensors[name], tensors.get(name.replace("lora_A", "lora_B"))
    if up is None or down.dim() != 2 or up.dim() != 3 or len(down) != len(up) * up.shape[2]:
        raise GraftuneError(f"{match[1]}.{match[2]}.lora_B does not fit its lora_A", where=where, fix="copy it again")
    projections, found = PARAMETERS[match[2]], {}
    for expert, (a, b) in enumerate(zip(down.unflatten(0, (len(up), -1)), up, strict=True)):
        for projection, part in zip(projections, b.chunk(len(projections)), strict=True):
            found[f"{match[1]}.{expert}.{projection}.weight"] = (a, part)
    return found


def adapters_to_gguf(name: str, value: torch.Tensor, spec: ModelSpec) -> dict[str, torch.Tensor]:
    """One of our A's or B's as llama.cpp's stacks: the same A [E, R, in] for gate and up, and a B [E, out, R] for
    each."""
    match = _adapter(name)
    assert match is not None
    projections, layer = PARAMETERS[match[2]], match[1].split(".")[1]
    if match[3] == "A":
        parts = [value.unflatten(0, (spec.experts, -1))] * len(projections)
    else:
        parts = list(value.chunk(len(projections), 1))
    stems = [f"blk.{layer}.{_GGUF[p]}.weight.lora_{match[3].lower()}" for p in projections]
    return dict(zip(stems, parts, strict=True))


def is_stacked(name: str) -> bool:
    """Whether a tensor of a GGUF adapter belongs to experts."""
    return re.fullmatch(r"blk\.\d+\.ffn_(gate|up|down)_exps\.weight\.lora_[ab]", name) is not None


def adapters_from_gguf(tensors: Mapping[str, GgufTensor], where: str) -> dict[str, torch.Tensor]:
    """Our A's and B's from llama.cpp's stacks. Gate and up share one A here, so that two different ones are refused."""
    found = {}
    layers = dict.fromkeys(name.split(".")[1] for name in tensors if is_stacked(name))
    for layer in layers:
        for parameter, projections in PARAMETERS.items():
            a, b = ([f"blk.{layer}.{_GGUF[p]}.weight.lora_{m}" for p in projections] for m in "ab")
            given = [name for name in (*a, *b) if name in tensors]
            if not given:
                continue
            whole = len(given) == len(a) + len(b) and all(len(tensors[name].shape) == 3 for name in given)
            downs = [tensors[name].values() for name in a] if whole else []
            if not whole or not all(torch.equal(down, downs[0]) for down in downs):
                raise GraftuneError(
                    f"the adapter uses {given[0]} otherwise than gate and up as one",
                    where=where,
                    fix="this cannot be loaded here",
                )
            stem = f"layers.{layer}.mlp.experts.{parameter}"
            found[f"{stem}.lora_A.weight"] = downs[0].flatten(0, 1)
            found[f"{stem}.lora_B.weight"] = torch.cat([tensors[name].values() for name in b], 1)
    return found
