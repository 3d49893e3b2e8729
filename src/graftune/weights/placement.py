"""How the frozen weights of a run are held: what was asked for, or what fits.

    bf16 fp16 fp32   resident
    nf4              projections quantised while they are read (or taken from a checkpoint that already is); embedding
                     and head in the compute dtype, as bitsandbytes has them
    fp8              likewise in 8-bit floats, and multiplied as such, on GPUs that have units for it
    keep             as the file has it: on a GPU its very bytes, uploaded; on a CPU left in the map

Where they lie is a second question: on the device, in host memory, or in equal parts on the ranks (model/bundles.py).

`auto` takes the compute dtype if that fits comfortably in the memory that is free; if not, the blocks of a GGUF stay
what they are, and other weights become NF4 on a GPU or stay in the file on a CPU. load.py does what is decided here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from graftune.errors import GraftuneError
from graftune.kernels import launch
from graftune.kernels.gguf_dequant import KINDS as GGUF_KINDS
from graftune.observe.memory import free_bytes, human_bytes
from graftune.runtime import DTYPES, Runtime
from graftune.weights.base import Base
from graftune.weights.bnb_io import is_quantised
from graftune.weights.fp8_way import Fp8Way
from graftune.weights.way import Option, Way

COMFORTABLE = 0.6  # share of the free memory that a resident base may take
# The ways to hold a weight that are multiplied by a projection of their own.
WAYS: dict[str, Way] = {"fp8": Fp8Way()}


@dataclass(frozen=True)
class Placement:
    """How the frozen weights are held, and the sentence that says why."""

    base_dtype: str  # keep | bf16 | fp16 | fp32 | nf4 | fp8
    reason: str  # without what the option adds
    options: tuple[Option, ...] = (Option(),)  # of a way with a price in memory, from the one taken on, the best first
    on_host: bool = False  # fetched from host memory, block by block
    ranks: int = 0  # gathered, block by block, from so many ranks; 0: not divided

    @property
    def fetched(self) -> bool:
        return self.on_host or self.ranks > 0

    def lying(self, on_host: bool, ranks: int) -> Placement:
        """The same elsewhere. What is fetched takes the option with the least memory."""
        options = self.options[-1:] if on_host or ranks else self.options
        return replace(self, options=options, on_host=on_host, ranks=ranks)

    def describe(self) -> str:
        parts = f", in equal parts on {self.ranks} rank{'s' * (self.ranks > 1)}" if self.ranks else ""
        return f"{self.base_dtype}{parts}{', in host memory' * self.on_host} ({self.why})"

    @property
    def option(self) -> str:
        """The name of the one that is taken."""
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
        """As it is now, with no other option left: of weights that are loaded."""
        return replace(self, options=self.options[:1])

    @property
    def way(self) -> Way | None:
        """What makes the projections, where it is not load.py."""
        return WAYS.get(self.base_dtype)


def choose_placement(base: Base, asked: str, runtime: Runtime, free: int | None = None) -> Placement:
    """`free`: the device's bytes, where something is to be trained there; else they are asked for."""
    chosen = Placement(asked, "asked for") if asked != "auto" else _automatic(base, runtime, free)
    if chosen.base_dtype == "keep" and launch.augments(runtime.device):
        check_blocks(base)
    if chosen.way is not None:
        chosen.way.check(runtime)
        return replace(chosen, options=chosen.way.options(base, free or 0))
    return chosen


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
    """About what the frozen weights take."""
    spec, size = base.spec, compute.itemsize
    if base_dtype in DTYPES:
        return spec.parameters * DTYPES[base_dtype].itemsize
    if base_dtype == "keep":
        return sum(tensor.nbytes for tensor in base.tensors.values())
    tables = spec.vocab * spec.width * (1 if spec.tied else 2)
    return tables * size + int((spec.parameters - tables) * (1.0 if base_dtype == "fp8" else 0.516))


def table_bytes(base: Base, base_dtype: str, compute: torch.dtype) -> int:
    """About what the embedding takes of it."""
    if base_dtype == "keep":
        return base.tensors["embed_tokens.weight"].nbytes
    return base.spec.vocab * base.spec.width * DTYPES.get(base_dtype, compute).itemsize


def _automatic(base: Base, runtime: Runtime, free: int | None) -> Placement:
    if is_quantised(base.tensors):
        return Placement("nf4", "as the checkpoint has it")
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
    """That our kernels know all of the blocks."""
    if name := _without_kernel(base):
        raise GraftuneError(
            f"tensor {name} is {base.tensors[name].dtype_name}, of which no GPU kernel knows the blocks",
            where=str(base.path),
            fix="set base_dtype to nf4 or bf16, or take a file in another quantisation",
        )


def _without_kernel(base: Base) -> str:
    """The first tensor of a GGUF whose blocks no kernel knows; nothing where all are known."""
    unknown = (
        name
        for name, tensor in base.tensors.items()
        if base.kind == "gguf" and len(tensor.shape) == 2 and tensor.dtype_name not in GGUF_KINDS
    )
    return next(unknown, "")


def nothing_frozen(base: Base, asked: str, runtime: Runtime, free: int | None = None) -> Placement:
    """Of a run that trains every weight: there is nothing to place, but the arena has to fit."""
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
