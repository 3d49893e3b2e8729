"""Cross-entropy through the LM head on compacted response rows; full logits never exist. See reference.py."""

from graftune.kernels.linear_cross_entropy.reference import Product, chunk_rows, forward

__all__ = ["Product", "chunk_rows", "forward"]
