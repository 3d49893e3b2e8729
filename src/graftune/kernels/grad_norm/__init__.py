"""Gradient norm and clip factors over the flat arena, globally or a segment (layer) at a time; see reference.py."""

from graftune.kernels.grad_norm.reference import clip_factors, norms

__all__ = ["clip_factors", "norms"]
