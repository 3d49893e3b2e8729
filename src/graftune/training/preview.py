"""preview.jsonl: the first examples of a run's data with the text of each token and whether it is trained.

It lies in the run folder, so that a folder which was copied elsewhere still shows what was trained. It is small: the
first examples, the first tokens of each, and no more than `LARGEST` bytes.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from graftune.batch import Example
from graftune.data.token_text import Pieces
from graftune.io.files import write_file
from graftune.tokenizer import Tokenizer

PREVIEW = "preview.jsonl"
EXAMPLES, TOKENS, LARGEST = 200, 4096, 4 << 20


def shown_example(index: int, example: Example, pieces: Pieces) -> dict[str, Any]:
    """An example as the page shows it. `truncated`: it was shortened to fit max_seq_len, or it goes on behind what is
    here."""
    shown: dict[str, Any] = {
        "index": index,
        "tokens": pieces.of(example.tokens[:TOKENS]),
        "trained": [int(on) for on in example.supervised[:TOKENS]],
        "truncated": example.shortened or len(example.tokens) > TOKENS,
    }
    return shown if example.weights is None else {**shown, "weights": example.weights[:TOKENS]}


class PreviewWriter:
    """Writes the file beside the first steps, which it is not worth holding up."""

    def __init__(
        self, folder: Path, examples: Sequence[Example], tokenizer: Tokenizer, warn: Callable[[str], None]
    ) -> None:
        self._path, self._examples, self._tokenizer, self._warn = folder / PREVIEW, examples, tokenizer, warn
        self._failed = ""
        self._thread = threading.Thread(target=self._write, name="preview")

    def start(self) -> None:
        """A resumed run has its preview, unless it was killed too early or is of an older version."""
        if not self._path.exists():
            self._thread.start()

    def finish(self) -> None:
        """Wait for it, and say if it could not be written; but a run that fails has one sentence, its own."""
        if self._thread.ident is not None:
            self._thread.join()
        if self._failed and sys.exc_info()[0] is None:
            self._failed = ""
            self._write()  # the disk may have room by now
        if self._failed and sys.exc_info()[0] is None:
            self._warn(f"{PREVIEW} was not written: {self._failed}")
            self._failed = ""

    def _write(self) -> None:
        try:
            write_preview(self._path, self._examples, self._tokenizer)
        except OSError as error:
            self._failed = error.strerror or str(error)


def write_preview(path: Path, examples: Sequence[Example], tokenizer: Tokenizer) -> None:
    pieces, lines, size = Pieces(tokenizer), list[bytes](), 0
    for index in range(min(EXAMPLES, len(examples))):
        line = json.dumps(shown_example(index, examples[index], pieces), separators=(",", ":")).encode() + b"\n"
        size += len(line)
        if size > LARGEST:
            break
        lines.append(line)
    write_file(path, b"".join(lines))
