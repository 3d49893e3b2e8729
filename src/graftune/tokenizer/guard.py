"""What the compiled `tokenizers` library raises, as one sentence.

A fault of a vocabulary or a text is a plain Exception there, and a panic of its Rust code an exception that is no
Exception. Both are caught around every call; what cannot be caught, an abort of the process, is found out before
(examine.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tokenizers

from graftune.errors import GraftuneError
from graftune.io import user_cache
from graftune.tokenizer import examine

KIND, MOST = "tokenizers", 500  # files whose examination is remembered
_AGAIN = "fetch it again from the model's repository"


@contextmanager
def guarded(doing: str, where: str = "", fix: str = "") -> Iterator[None]:
    """Around calls of the library: `doing` completes "the tokenizer cannot ..."."""
    try:
        yield
    except (GraftuneError, KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise GraftuneError(
            f"the tokenizer cannot {doing} ({str(error) or type(error).__name__})",
            where=where or None,
            fix=fix or "use the tokenizer of another version of the model, or other text",
        ) from None


def loaded(text: str, path: Path) -> tokenizers.Tokenizer:
    """The library's tokenizer of a tokenizer.json, once it is known that loading it is safe."""
    check(text, path)
    with guarded("be loaded", str(path), _AGAIN):
        backend = tokenizers.Tokenizer.from_str(text)
        # Some repositories ship the padding and truncation of their last training run inside the file.
        backend.no_padding()
        backend.no_truncation()
    return backend


def check(text: str, path: Path) -> None:
    """Refuses a file that the library cannot be trusted with. One that was seen before is known by its digest."""
    key = f"{hashlib.sha256(text.encode()).hexdigest()} {tokenizers.__version__}"
    if user_cache.recall(KIND).get(key) is True:
        return
    try:
        fault = examine.fault_of(text)
    except (OSError, examine.TooLong) as error:
        fault = f"it cannot be examined ({error})"
    if fault:
        raise GraftuneError(fault, where=str(path), fix=_AGAIN)
    user_cache.remember(KIND, key, True, MOST)
