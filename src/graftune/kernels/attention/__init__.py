"""Packed causal attention with grouped heads. q [T, N, H], k and v [T, K, H]; documents given by their lengths."""

from graftune.kernels.attention.reference import backward, forward

__all__ = ["backward", "forward"]
