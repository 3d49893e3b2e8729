"""Whole numbers that are rounded up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import numpy as np

Whole = TypeVar("Whole", int, "np.ndarray[Any, Any]")


def ceil_div(number: Whole, by: int) -> Whole:
    """How many pieces of size `by` hold `number`: the quotient, rounded up; of an array, of each."""
    return -(-number // by)


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()
