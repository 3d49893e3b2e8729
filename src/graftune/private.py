"""Names of other projects that those projects do not promise to keep, in one place.

Each is here because there is no public way to do the same. `NAMES` says in which versions it was seen to work and what
it is used for; `find` is how the rest of the package gets it, so that an upgrade that drops one ends in a sentence with
the name and the versions, not in an AttributeError somewhere in a step. tests/test_private.py looks all of them up, and
checks that no other file reaches for a private name. Nothing but torch is imported before a name is asked for.
"""

from __future__ import annotations

import functools
import importlib
import threading
from typing import Any

import torch

from graftune.errors import GraftuneError

TORCH, GGUF = "torch 2.11 to 2.13", "gguf 0.19"
NAMES = {
    # Attention without cuDNN: the public functions take no packed documents, or hide the statistics of the backward.
    "torch.ops.aten._flash_attention_forward.default": TORCH,
    "torch.ops.aten._flash_attention_backward.default": TORCH,
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu": TORCH,
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward": TORCH,
    # Gradients of activations into memory that is there already.
    "torch.ops.aten.silu.out": TORCH,
    "torch.ops.aten.silu_backward.grad_input": TORCH,
    "torch.ops.aten.gelu_backward": TORCH,
    # FP8 products with row scales.
    "torch._scaled_mm": TORCH,
    # Keeps the device busy while short products are queued, so that host time is not measured.
    "torch.cuda._sleep": TORCH,
    # Segments that grow, set for a process that has begun: the public way is an environment variable at its start.
    "torch._C._accelerator_setAllocatorSettings": TORCH,
    # Whether a profiler runs: named ranges cost nothing otherwise.
    "torch.autograd._profiler_enabled": TORCH,
    # Whether the CPU has units for bf16; torch 2.11 has no public query.
    "torch.cpu._is_amx_tile_supported": TORCH,
    "torch.cpu._is_avx512_bf16_supported": TORCH,
    # The plan looks at every operation of a rehearsal, and tells storages without memory apart.
    "torch.utils._python_dispatch.TorchDispatchMode": TORCH,
    "torch.UntypedStorage._cdata": TORCH,
    "torch.ops.aten._to_copy": TORCH,
    "torch.ops.aten._scaled_mm": TORCH,
    "torch.ops.aten._local_scalar_dense.default": TORCH,
    "torch.ops.aten._to_copy.default": TORCH,
    "torch.ops.aten.mm.default._schema": TORCH,
    "torch.ops.aten._softmax": TORCH,
    "torch.ops.aten._log_softmax": TORCH,
    "torch.ops.aten._unsafe_view": TORCH,
    "torch.ops.aten._flash_attention_forward": TORCH,
    "torch.ops.aten._flash_attention_backward": TORCH,
    # Every launcher is loaded as a module of the same name: two threads that load at once can get each other's.
    "triton.runtime.build._load_module_from_path": "triton 3.6 to 3.9",
    # Which types of blocks gguf can dequantise.
    "gguf.quants._type_traits": GGUF,
}


def find(name: str) -> Any:
    """The object that a name of `NAMES` refers to."""
    try:
        return _looked_up(name)
    except (AttributeError, ImportError):
        raise GraftuneError(
            f"{name}, a private name that graftune uses, is missing from what is installed",
            fix=f"install a version that has it: {NAMES[name]}",
        ) from None


def makes_new(operation: Any) -> bool:
    """Whether what an operator returns has memory of its own, so that it is no view of what it is given."""
    return not any(returned.alias_info for returned in operation._schema.returns)


def writes_to(operation: Any) -> list[int]:
    """The numbers of the arguments that an operator writes to."""
    arguments = enumerate(operation._schema.arguments)
    return [number for number, taken in arguments if taken.alias_info is not None and taken.alias_info.is_write]


def storage_id(storage: torch.UntypedStorage) -> int:
    """A number that no other storage has while this one lives, with memory or without."""
    return int(storage._cdata)


def load_launchers_one_by_one() -> None:
    """Put a lock around Triton's loading of a launcher; building launchers stays parallel. All launchers' modules have
    one name, so two that are loaded at once can be taken for each other."""
    from triton.runtime import build

    load, lock = find("triton.runtime.build._load_module_from_path"), threading.Lock()
    if hasattr(load, "__wrapped__"):
        return

    @functools.wraps(load)
    def locked(*args: Any) -> Any:
        with lock:
            return load(*args)

    build._load_module_from_path = locked


def _looked_up(name: str) -> Any:
    """Look a name up by attributes, importing the parts that are modules."""
    path, *rest = name.split(".")
    found: Any = importlib.import_module(path)
    for part in rest:
        path = f"{path}.{part}"
        if not hasattr(found, part) and part in getattr(found, "__annotations__", {}):
            return found.__annotations__[part]  # an attribute of instances only
        if not hasattr(found, part) and hasattr(found, "__path__"):
            importlib.import_module(path)
        found = getattr(found, part)
    return found
