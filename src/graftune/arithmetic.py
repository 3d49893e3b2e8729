"""Whole numbers that are rounded up."""

from __future__ import annotations


def ceil_div(number: int, by: int) -> int:
    """How many pieces of size `by` hold `number`: the quotient, rounded up."""
    return -(-number // by)
