"""Rotary position embedding on packed positions. x [T, N, H]; tables [T, 1, H/2] from `tables`."""

from graftune.kernels.rope.reference import backward, forward, tables

__all__ = ["backward", "forward", "tables"]
