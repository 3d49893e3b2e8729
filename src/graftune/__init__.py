"""graftune: LoRA and QLoRA fine-tuning that never leaves the device.

open(base)      a session: prepare, batches, forward_backward, optim_step, evaluate, sample, save
train(...)      a whole run with its folder, checkpoints and evaluations, as `graftune train`
export(...)     a run or adapter for other programs, as `graftune export`
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "Accumulator",
    "Batch",
    "Config",
    "Dataset",
    "EvalResult",
    "Exported",
    "GraftuneError",
    "LossScaler",
    "Sample",
    "Session",
    "StepStats",
    "TrainResult",
    "export",
    "losses",
    "open",
    "train",
]

if TYPE_CHECKING:
    from graftune import losses
    from graftune.api import (
        Accumulator,
        Batch,
        Config,
        Dataset,
        EvalResult,
        Exported,
        LossScaler,
        Sample,
        Session,
        StepStats,
        TrainResult,
        export,
        open,
        train,
    )
    from graftune.errors import GraftuneError


def __getattr__(name: str) -> Any:
    """Import the verbs on first use, so that `graftune --help` does not wait for torch."""
    if name == "losses":
        return importlib.import_module("graftune.losses")
    if name == "GraftuneError":
        return importlib.import_module("graftune.errors").GraftuneError
    if name in ("api", *__all__):
        api = importlib.import_module("graftune.api")
        return api if name == "api" else getattr(api, name)
    raise AttributeError(f"module 'graftune' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
