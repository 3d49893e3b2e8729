"""Rotary position embedding on packed positions, in place. x [T, N, H]; tables [T, 1, H/2] from `tables`."""

from graftune.kernels.rope.reference import rotate_, tables, unrotate_

__all__ = ["rotate_", "tables", "unrotate_"]
