"""Chooses the format and the place of a run's frozen weights: what was asked for, or what fits.

    bf16 fp16 fp32   resident
    nf4              projections quantised while they are read (or taken from a checkpoint that already is); embedding
                     and head in the compute dtype, as bitsandbytes has them
    fp8              likewise in 8-bit floats, and multiplied as such, on GPUs that have units for it
    keep             every tensor in the format of the file: a GPU gets its bytes, a CPU leaves it in the map

The place is the device, host memory, or the ranks in equal parts (model/bundles.py).

`auto` takes the compute dtype if that fits comfortably in the memory that is free. If not, GGUF blocks stay as they
are, and other weights become NF4 on a GPU or stay in the file on a CPU. load.py does what is decided here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from graftune.errors import GraftuneError
from graftune.kernels import launch
from graftune.model.frozen.formats import FORMATS, checkpoint_format, stored_format
from graftune.model.frozen.weight_format import Option, WeightFormat
from graftune.observe.memory import free_bytes, human_bytes
from graftune.runtime import Runtime
from graftune.weights.base import Base

COMFORTABLE = 0.6  # share of the free memory that a resident base may take


@dataclass(frozen=True)
class Placement:
    """The format and the place of the frozen weights, and the sentence that says why."""

    base_dtype: str  # keep | bf16 | fp16 | fp32 | nf4 | fp8
    reason: str  # without the option's own (`why` has both)
    options: tuple[Option, ...] = (Option(),)  # of the format, the one in use first, then those with less memory
    on_host: bool = False  # fetched from host memory, block by block
    ranks: int = 0  # gathered, block by block, from so many ranks; 0: not divided
    embedding_on_host: bool = False  # tables that are only looked up are read from host memory, row by row

    @property
    def fetched(self) -> bool:
        return self.on_host or self.ranks > 0

    def placed_at(self, on_host: bool, ranks: int) -> Placement:
        """The same weights in another place. If they are fetched, the format's option with the least memory is used."""
        options = self.options[-1:] if on_host or ranks else self.options
        return replace(self, options=options, on_host=on_host, ranks=ranks)

    def describe(self) -> str:
        parts = f", in equal parts on {self.ranks} rank{'s' * (self.ranks > 1)}" if self.ranks else ""
        table = ", the embedding in host memory" if self.embedding_on_host else ""
        return f"{self.base_dtype}{parts}{', in host memory' * self.on_host}{table} ({self.why})"

    @property
    def option(self) -> str:
        return self.options[0].name

    @property
    def why(self) -> str:
        return self.reason + self.options[0].why

    @property
    def with_less_memory(self) -> Placement | None:
        """The same weights with the next option, which takes less memory and more time; None: this takes the least."""
        return replace(self, options=self.options[1:]) if self.options[1:] else None

    @property
    def fixed(self) -> Placement:
        """The placement with only the option in use left, for weights that are already loaded."""
        return replace(self, options=self.options[:1])

    @property
    def format(self) -> WeightFormat | None:
        """The format asked for; None: each tensor keeps its own."""
        return FORMATS.get(self.base_dtype)


def choose_placement(
    base: Base, asked: str, runtime: Runtime, free: int | None = None, embedding_on: str = "device"
) -> Placement:
    """`free`: the device's free bytes, if a run is planned for it; None: the device is asked for them."""
    chosen = Placement(asked, "as set") if asked != "auto" else _automatic(base, runtime, free)
    if embedding_on == "host":
        _check_looked_up(base)
        chosen = replace(chosen, embedding_on_host=launch.on_gpu(runtime.device))
    if chosen.base_dtype == "keep" and launch.augments(runtime.device):
        check_blocks(base)
    if chosen.format is None:
        return chosen
    chosen.format.check(runtime.device, runtime.compute)
    options = chosen.format.options(base.tensors.values(), base.spec.parameters, free or 0)
    return replace(chosen, options=options)


def _check_looked_up(base: Base) -> None:
    """Refuses a base that has no table which is only looked up."""
    if base.spec.tied and base.spec.layer_inputs is None:
        raise GraftuneError(
            "embedding_on is host and the embedding is also the head (tied), which every pass multiplies",
            where=base.name or str(base.path),
            fix="leave embedding_on out, or set base_on to host",
        )


def places(base_on: str, shard_base: str, ranks: int, device: torch.device) -> list[tuple[bool, int]]:
    """(on_host, ranks) of each place that the settings allow, the fastest first. On a CPU host memory is the device's.
    `ranks`: of the run; 0 where no launcher has started it."""
    if shard_base == "yes" and not ranks:
        raise GraftuneError(
            "shard_base is yes and this process is the only one of its run",
            fix="start it with torchrun, or leave shard_base out",
        )
    on_host = {"auto": (False, True), "device": (False,), "host": (True,)}[base_on]
    divided = {"auto": (0, ranks) if ranks > 1 else (0,), "yes": (ranks,), "no": (0,)}[shard_base]
    if not launch.on_gpu(device):
        on_host = (False,)
    found = [(False, count) for count in divided if False in on_host]
    return [*found, (True, divided[-1])] if True in on_host else found


def held_bytes(base: Base, base_dtype: str, compute: torch.dtype) -> int:
    """An estimate of the frozen weights' bytes."""
    spec, form = base.spec, FORMATS.get(base_dtype)
    if form is None:
        return sum(tensor.nbytes for tensor in base.tensors.values())
    tables = spec.table_values if form.quantises else 0
    return tables * compute.itemsize + int((spec.parameters - tables) * form.value_bytes)


def table_bytes(base: Base, base_dtype: str, compute: torch.dtype) -> int:
    """An estimate of the embedding's part of `held_bytes`."""
    form = FORMATS.get(base_dtype)
    if form is None:
        return base.tensors["embed_tokens.weight"].nbytes
    return int(base.spec.vocab * base.spec.width * (compute.itemsize if form.quantises else form.value_bytes))


def _automatic(base: Base, runtime: Runtime, free: int | None) -> Placement:
    if quantised := checkpoint_format(base.tensors):
        return Placement(quantised.name if quantised.by_name else "keep", "as the checkpoint has it")
    need = base.spec.parameters * runtime.compute.itemsize
    free = free_bytes(runtime.device) if free is None else free
    figures = f"{human_bytes(need)} of {human_bytes(free)} free"
    if need <= COMFORTABLE * free:
        return Placement(runtime.compute_name, f"resident: {figures}")
    if not launch.augments(runtime.device):
        return Placement("keep", f"left in the file: resident would take {figures}")
    if base.kind == "gguf" and not (unknown := _without_kernel(base)):
        return Placement("keep", f"the file's own blocks: {runtime.compute_name} would take {figures}")
    why = f" (no GPU kernel knows the file's {base.tensors[unknown].dtype_name})" if base.kind == "gguf" else ""
    return Placement("nf4", f"quantised{why}: {runtime.compute_name} would take {figures}")


def check_blocks(base: Base) -> None:
    """Refuses a file with blocks that no kernel dequantises."""
    if name := _without_kernel(base):
        raise GraftuneError(
            f"tensor {name} is {base.tensors[name].dtype_name}, of which no GPU kernel knows the blocks",
            where=str(base.path),
            fix="set base_dtype to nf4 or bf16, or take a file in another quantisation",
        )


def _without_kernel(base: Base) -> str:
    """The name of the first matrix that no kernel dequantises; "" if there is none."""
    for name, tensor in base.tensors.items():
        form = stored_format(tensor) if len(tensor.shape) == 2 else None
        if form is not None and not form.has_kernel(tensor):
            return name
    return ""


def nothing_frozen(base: Base, asked: str, runtime: Runtime, free: int | None = None) -> Placement:
    """The placement of a run that trains every weight: nothing is frozen, but the arena has to fit."""
    if asked not in ("auto", runtime.compute_name):
        raise GraftuneError(
            f"base_dtype is {asked} and every weight trains, so that none is frozen",
            fix="leave base_dtype out, or set method to lora",
        )
    wide, narrow = 4 * 4, 0 if runtime.compute == torch.float32 else runtime.compute.itemsize
    need = base.spec.parameters * (wide + narrow)
    free = free_bytes(runtime.device) if free is None else free
    if need > free:
        raise GraftuneError(
            f"training every weight takes {human_bytes(need)} and {human_bytes(free)} are free",
            where=base.name,
            fix="take a smaller model, or method lora",
        )
    return Placement(runtime.compute_name, "none is frozen: every weight trains")
