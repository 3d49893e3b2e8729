"""graftune: LoRA and QLoRA fine-tuning that never leaves the device. See graftune.api for the verbs."""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Accumulator", "LossScaler", "Session", "TrainResult", "open"]

if TYPE_CHECKING:
    from graftune.api import Accumulator, LossScaler, Session, TrainResult, open


def __getattr__(name: str) -> Any:
    """The verbs on first use: `graftune --help` must not wait for torch."""
    if name in ("api", *__all__):
        api = importlib.import_module("graftune.api")
        return api if name == "api" else getattr(api, name)
    raise AttributeError(f"module 'graftune' has no attribute {name!r}")
