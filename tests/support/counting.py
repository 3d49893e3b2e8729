"""Work counted instead of timed.

What a test may say about cost is how often something is called, which is the same on every machine and under any load;
seconds are for benchmarks/. Calls of Python and of C functions are counted by the interpreter's profiling hook. Work
inside one C function is one call, so a bound here is one on Python's share.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any


class Calls:
    """Counts the calls made in this thread inside its `with` block. The one after `most` fails, so that endless work
    ends as a failure instead of a hang."""

    def __init__(self, most: int = sys.maxsize):
        self.count, self.most = 0, most

    def __enter__(self) -> Calls:
        sys.setprofile(self._seen)
        return self

    def __exit__(self, *failure: object) -> None:
        sys.setprofile(None)

    def _seen(self, frame: FrameType, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            self.count += 1
            if self.count > self.most:
                sys.setprofile(None)
                raise AssertionError(f"more than {self.most} calls")
