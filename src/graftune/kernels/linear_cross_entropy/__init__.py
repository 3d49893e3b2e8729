"""Cross-entropy through the LM head on compacted response rows; full logits never exist. See reference.py."""

from graftune.kernels.linear_cross_entropy.reference import Product, forward

__all__ = ["Product", "forward"]
