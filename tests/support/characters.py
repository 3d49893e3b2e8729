"""The characters that UTF-8 encodes, for texts that hypothesis makes up.

`st.text()` takes the same ones, and in a fresh clone it tries all 1.1 million to find them: six seconds a worker.
"""

from __future__ import annotations

from hypothesis import strategies as st

CHARACTERS = st.characters(exclude_categories=["Cs"])
