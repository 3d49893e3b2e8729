"""AdamW on the flat arena, skipping an update on the device where the gradient is not finite; see reference.py."""

from graftune.kernels.adamw.reference import Hyper, update

__all__ = ["Hyper", "update"]
