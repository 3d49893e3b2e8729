"""Whether a tokenizer.json can be handed to the `tokenizers` library at all, found out in a process of its own.

The library is compiled code that trusts its file: some files end in a panic, which is no Exception to Python, some in
an abort, and one token with an id of a billion in an array of that length. Nothing in our process can catch an abort.
So a file that was never seen is first loaded and used by a child with limits on its memory and time; what it thinks of
a file is remembered by the file's digest, so a tokenizer costs a tenth of a second once. Rejected: checking the file's
structure here, which would follow every version of a format that others define.

The child runs this very file by its path, with nothing of graftune imported: keep it so.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

SECONDS, BYTES_A_SECOND = 2, 1 << 20  # of CPU time that a child may take, and of a file that give it one more
BYTES, PER_BYTE = 2 << 30, 60  # of memory, by the file's size
USED_SECONDS = 0.5  # of CPU time that the texts below may take, which are encoded in milliseconds
TOKENS_A_BYTE, TOKENS = 8, 100  # that a text may become; one a byte and a few around it are many
LARGEST_ID = 1 << 22  # sixteen times that of the largest vocabularies
_TEXTS = (
    "é中👩",
    "Hello, world! It's 2026: 1234567 tokens.\n\n\tdef f(x):\r\n    return x  # naïve\n",
    "héllo 中文 日本語 한국어 👩\u200d👩 \u0301\ufb03 \u2581a</s> ##b",
    "a" * 2000,
    " " * 200,
    "",
)


class _Unusable(Exception):
    """Texts become too many tokens, or take too long."""


class TooLong(Exception):
    """The child was still at it after any time that a file may take."""


def fault_of(text: str) -> str:
    """Why this tokenizer.json cannot be used; empty if it can. Asked of a child process."""
    import subprocess

    try:
        made = subprocess.run(
            [sys.executable, "-I", __file__, json.dumps(sys.path)],
            input=text.encode(),
            capture_output=True,
            timeout=60 + 20 * _seconds(len(text)),  # of the clock: the machine may be busy
            env=os.environ | {"TOKENIZERS_PARALLELISM": "false", "RUST_BACKTRACE": "0"},
        )
    except subprocess.TimeoutExpired:
        raise TooLong("it takes minutes") from None
    try:
        return str(json.loads(made.stdout)["fault"])
    except (ValueError, KeyError, TypeError):
        how = f"signal {-made.returncode}" if made.returncode < 0 else f"exit code {made.returncode}"
        return f"the tokenizers library ends the process that loads it ({how})"


def examined(text: str) -> str:
    """The child's part: load it, and do once what will be done with it. Refusals of a text are no fault here: the rows
    that have such a text are told so."""
    import tokenizers

    try:
        made = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises plain Exception for every fault of the file
        return f"the file is not a tokenizer: {error}"
    if (largest := max(made.get_vocab(with_added_tokens=True).values(), default=0)) > LARGEST_ID:
        return f"a token has the id {largest}"
    made.no_padding()
    made.no_truncation()
    special = [token.content for token in made.get_added_tokens_decoder().values()][:50]
    try:
        _try(made, (*_TEXTS, " ".join(special)))
    except _Unusable as error:
        return str(error)
    return "" if tokenizers.Tokenizer.from_str(made.to_str()) is not None else "the file cannot be written again"


def _try(made: Any, texts: tuple[str, ...]) -> None:
    began = time.process_time()
    for words in texts:
        for plain in (False, True):
            made.encode_special_tokens = plain
            for around in (False, True):
                _used(made, words, around)
                if (taken := time.process_time() - began) > USED_SECONDS:
                    raise _Unusable(f"it takes {taken:.1f} s to encode a few words")


def _used(made: Any, words: str, around: bool) -> None:
    try:
        ids = made.encode(words, add_special_tokens=around).ids
        if len(ids) > TOKENS_A_BYTE * len(words.encode()) + TOKENS:
            raise _Unusable(f"it makes {len(ids)} tokens of {len(words)} characters")
        made.encode_batch_fast([words, words[:7]], add_special_tokens=around)
        made.decode(ids)
        made.decode(ids, skip_special_tokens=True)
    except _Unusable:
        raise
    except Exception as error:
        if "regex" in str(error).lower():  # a search without end, on plain text
            raise


def _seconds(size: int) -> int:
    return SECONDS + size // BYTES_A_SECOND


def _child() -> None:
    import resource

    sys.path[:] = json.loads(sys.argv[1])
    text = sys.stdin.buffer.read()
    limit = BYTES + PER_BYTE * len(text)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CPU, (_seconds(len(text)),) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        fault = examined(text.decode())
    except BaseException as error:  # a panic of the library
        fault = f"the tokenizers library fails on it: {error or type(error).__name__}"
    json.dump({"fault": fault[:2000]}, sys.stdout)


if __name__ == "__main__":
    _child()
