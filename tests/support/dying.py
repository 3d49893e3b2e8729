"""A process that dies while it writes, played inside the test: from the n-th call that changes the disk on, every call
fails, as in a process that is gone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from graftune.io import files

CALLS = [*((os, name) for name in ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir")), (files, "_exchange")]


class Died(BaseException):
    """Not an Exception, so that no code handles it and cleans up."""


class Deaths:
    """Counts the calls of CALLS and of `more`, pairs of an object and a name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *more: tuple[Any, str]):
        self.calls = self.at = 0
        for owner, name in (*CALLS, *more):
            monkeypatch.setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            if self.at:
                self.calls += 1
                if self.calls >= self.at:
                    raise Died
            return real(*args, **named)

        return call

    def each(self, work: Callable[[], None]) -> Iterator[bool]:
        """Do the work with a death at its first call, its second, ...; yields whether the work was done, which it is
        at last, when it has no n-th call. What the caller does in between is not disturbed."""
        for number in range(1, 60):
            self.calls, self.at = 0, number
            try:
                work()
                done = True
            except Died:
                done = False
            finally:
                self.at = 0
            yield done
            if done:
                return
        raise AssertionError("more calls than expected")
