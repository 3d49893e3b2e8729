"""graftune: LoRA and QLoRA fine-tuning that never leaves the device. See graftune.api for the verbs."""

import os
from typing import TYPE_CHECKING, Any

# torch's CPU allocator on Arm (mimalloc) gives freed pages back within milliseconds, and a step asks for them again:
# 200,000 page faults and 6% of its time (docs/log.md). It reads this when torch is loaded.
os.environ.setdefault("MIMALLOC_PURGE_DELAY", "-1")

__version__ = "0.1.0"
__all__ = ["Run", "TrainResult", "open"]

if TYPE_CHECKING:
    from graftune.api import Run, TrainResult, open


def __getattr__(name: str) -> Any:
    """The verbs on first use: `graftune --help` must not wait for torch."""
    if name in __all__:
        from graftune import api

        return getattr(api, name)
    raise AttributeError(f"module 'graftune' has no attribute {name!r}")
