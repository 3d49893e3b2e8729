"""The one error a user sees: what is wrong, where, and how to mend it, in one sentence.

A single class rather than a hierarchy: nobody catches graftune's mistakes by kind; the command line turns every
one of them into one line on stderr and exit code 2. Broken invariants of our own are plain asserts.
"""

from __future__ import annotations


class GraftuneError(ValueError):
    """A mistake the user can mend. `where` is a file, line, field or row; `mend` says what to do."""

    def __init__(self, what: str, *, where: str | None = None, mend: str | None = None):
        self.what, self.where, self.mend = what, where, mend
        head = f"{where}: {what}" if where else what
        super().__init__(f"{head}; {mend}" if mend else head)
