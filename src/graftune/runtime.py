"""The device and the compute dtype of a run, resolved once at start, printed once, and passed explicitly from then on.

A global default device or autocast would hide which dtype a product runs in; here every layer is handed a Runtime.
Importing this file changes nothing in the process. `set_up` makes the process-wide settings that a run on CUDA needs,
and returns what it changed.
"""

from __future__ import annotations

import os
import platform
import sys
import warnings
from dataclasses import dataclass

import torch

from graftune.errors import GraftuneError
from graftune.private import find

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


# The size is that of torch's own workspace on Hopper.
WORKSPACE = ":4096:8"
_segments_grow = False
_switched_on = False


@dataclass(frozen=True)
class Runtime:
    """Device and compute dtype of a run; `why` says how each was chosen, for the start-up line and the run's record."""

    device: torch.device
    compute: torch.dtype
    why: str
    deterministic: bool = False

    @property
    def compute_name(self) -> str:
        return next(name for name, dtype in DTYPES.items() if dtype == self.compute)

    def describe(self, *, why: bool = True) -> str:
        found = f"{device_name(self.device)}, products in {self.compute_name}"
        return f"{found} ({self.why})" if why else found


def resolve(device: str = "auto", compute: str = "auto", *, threads: int = 0, deterministic: bool = False) -> Runtime:
    """The device and compute dtype that the user asked for, or the best there are. Refuses a device that is absent."""
    chosen = device_of(device)
    if threads:
        torch.set_num_threads(threads)
    _start_vector_functions()
    _set_deterministic(deterministic)
    if chosen.type == "cuda" and chosen.index is not None:
        torch.cuda.set_device(chosen)  # streams, events and launches belong to the current device
    fast = has_fast_bf16(chosen)
    if compute == "auto":
        dtype, why = _best_compute(chosen, fast)
    else:
        dtype, why = DTYPES[compute], "as set"
        if dtype == torch.bfloat16 and not fast:
            warnings.warn("this device has no bf16 units: bf16 products will be far slower than fp32", stacklevel=2)
        if dtype == torch.float16 and chosen.type == "cpu":
            warnings.warn("fp16 is for GPUs: on a CPU its products are far slower than fp32", stacklevel=2)
    return Runtime(chosen, dtype, why, deterministic)


def set_up(device: torch.device) -> list[str]:
    """Make the process-wide settings that a run on CUDA needs, before its first product. Returns a sentence for each
    change."""
    global _segments_grow
    if device.type != "cuda":
        return []
    changes = []
    # torch reads this once, at the first product of the process; without it there is no deterministic mode later on.
    if "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = WORKSPACE
        changes.append(
            f"CUBLAS_WORKSPACE_CONFIG is set to {WORKSPACE} for this process: deterministic products need it"
        )
    if torch.get_float32_matmul_precision() != "highest":
        torch.set_float32_matmul_precision("highest")
        changes.append("fp32 products of this process are exact now, without tf32")
    if not _segments_grow and _set_allocator():
        _segments_grow = True
        changes.append("CUDA memory of this process is taken in segments that grow (expandable_segments)")
    return changes


def _best_compute(device: torch.device, bf16: bool) -> tuple[torch.dtype, str]:
    """bf16 before fp16, which needs a loss scale; Volta and Turing have units for fp16 alone."""
    if bf16:
        return torch.bfloat16, "bf16 units found"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (7, 0):
        return torch.float16, "fp16 units and none for bf16: with a dynamic loss scale"
    return torch.float32, "no bf16 units here"


def _start_vector_functions() -> None:
    """Call a vector function of MKL on one value. If the first call of a process is divided among threads, a thread may
    compute its share with an error of 1e-4 (cos, sin and log of torch 2.13), as in the rotary tables of a resumed run's
    first step. Later calls are right."""
    torch.zeros(1).cos()


def _set_deterministic(wanted: bool) -> None:
    """Switch deterministic algorithms on if wanted, and off again for a later run of this process, unless other code
    had switched them on."""
    global _switched_on
    if wanted and not torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(True)
        _switched_on = True
    elif not wanted and _switched_on:
        torch.use_deterministic_algorithms(False)
        _switched_on = False
    if wanted:
        # Nothing reads uninitialised memory, and filling it takes time (torch types the switch as missing).
        setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010


def _set_allocator() -> bool:
    """Make torch's allocator use segments that grow, unless the user has set it up. Returns whether it does. In blocks
    of fixed sizes it holds 1 to 2.4 GiB more than a step of 8192 tokens needs, which a plan cannot predict."""
    asked = any(os.environ.get(name) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    # Under Windows (WSL is a Linux whose kernel says so) the driver may refuse to map them.
    fits = sys.platform == "linux" and "microsoft" not in platform.release().lower() and torch.version.hip is None
    if asked or not fits:
        return False
    find("torch._C._accelerator_setAllocatorSettings")("expandable_segments:True")
    return True


def device_of(asked: str) -> torch.device:
    """The device that the user asked for, or the best there is. Refuses one that is not there."""
    available = available_devices()
    if asked == "auto":
        return torch.device(available[0])
    try:
        device = torch.device(asked)
    except RuntimeError:
        raise GraftuneError(f"device is {asked!r}", fix="use auto, cpu, cuda, cuda:N, xpu or mps") from None
    if device.type not in available:
        reason = _absence(device.type)
        raise GraftuneError(
            f"device {asked} is not available here{reason}", fix=f"set device to {' or '.join(available)}"
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise GraftuneError(f"device {asked} does not exist", fix=f"there are {torch.cuda.device_count()} CUDA devices")
    return device


def _absence(kind: str) -> str:
    if kind != "cuda":
        return ""
    built = torch.version.cuda is not None or torch.version.hip is not None
    return " (no GPU or no driver was found)" if built else " (this torch is built without CUDA)"


def available_devices() -> list[str]:
    """Device types that work here, best first; cpu is always last."""
    found = []
    if torch.cuda.is_available():
        found.append("cuda")
    if torch.xpu.is_available():
        found.append("xpu")
    if torch.backends.mps.is_available():
        found.append("mps")
    return [*found, "cpu"]


def has_fast_bf16(device: torch.device) -> bool:
    """Whether bf16 products are faster than fp32 ones: AMX, AVX-512 BF16 or Arm's BF16 on a CPU, Ampere and later.

    Asked of the hardware rather than timed, so that the same machine always answers the same. It matters: without
    such units torch's bf16 product runs below 1 GFLOP/s where fp32 runs at 75 (Neoverse-N1, docs/lessons.md).
    """
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type in ("xpu", "mps"):
        return True
    # Newer torch has one query for all architectures; torch 2.11 has only the two below, for x86.
    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    names = ("bf16", "amx_bf16", "avx512_bf16", "amx_tile")
    return any(bool(capabilities.get(name)) for name in names) or any(
        bool(find(f"torch.cpu.{question}")()) for question in ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    )


def device_uuid(device: torch.device) -> str:
    """The name of a CUDA device that is the same in every process, whichever devices it sees."""
    index = torch.cuda.current_device() if device.index is None else device.index
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    if index < len(visible) and visible[index].startswith("MIG-"):  # a part of a card, with memory of its own
        return visible[index]
    return f"GPU-{torch.cuda.get_device_properties(index).uuid}"


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    return str(device)
