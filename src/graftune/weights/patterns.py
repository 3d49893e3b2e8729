"""Matches PEFT's patterns (rank_pattern, alpha_pattern) against the end of module names, in bounded time.

The expressions come from an adapter's file, and Python's `re` has no time limit: `(a+)+b` over forty letters does not
return. Plain names, the usual case, are matched by `re`. All other expressions are compiled by `re`, so that an
expression that PEFT refuses is refused here too, and matched by the `regex` package, which reads the same syntax and
has a time limit. An engine of our own would have to follow every release of `re`.
"""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable

LONGEST = 1000  # characters of an expression
SECONDS = 5.0  # for all names and expressions of a table; real ones take milliseconds
_TOO_LONG = "patterns that take too long to match"


class Unmatched(ValueError):
    """The reason why an expression cannot be matched here."""


class Deadline:
    """The time that is left for a table of expressions."""

    def __init__(self) -> None:
        self._end = time.monotonic() + SECONDS

    def left(self) -> float:
        seconds = self._end - time.monotonic()
        if seconds <= 0:
            raise Unmatched(_TOO_LONG)
        return seconds


def ends_with(key: str, deadline: Deadline) -> Callable[[str], bool]:
    """Returns a test, the same as PEFT's: whether a name is the expression, or ends with a dot and the expression."""
    if len(key) > LONGEST:
        raise Unmatched(f"a pattern of {len(key)} characters")
    whole = rf"(.*\.)?({key})$"
    try:
        with warnings.catch_warnings():  # a set that looks like one of sets, which `regex` would read otherwise
            warnings.simplefilter("error", FutureWarning)
            plain = re.compile(whole)
        if re.fullmatch(r"(?:[\w.-]|\\\.)*", key):
            return lambda name: plain.match(name) is not None
        if re.search(r"\{(?!\d*,?\d*\})", key):
            raise Unmatched(f"the pattern {key!r}, whose braces are not a repeat")  # approximate matching in `regex`
        import regex

        pattern = regex.compile(whole)
    except (re.error, OverflowError, RecursionError, FutureWarning) as error:
        raise Unmatched(f"the pattern {key!r}, which is not a valid expression ({error})") from None

    def fits(name: str) -> bool:
        try:
            return pattern.match(name, timeout=deadline.left()) is not None
        except TimeoutError:
            raise Unmatched(_TOO_LONG) from None

    return fits
