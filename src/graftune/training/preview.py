"""preview.jsonl: the first examples of a run's data with the text of each token and whether it is trained.

It is in the run folder, so that a folder which was copied elsewhere still shows what was trained. It is small: the
first examples, the first tokens of each, and no more than `LARGEST` bytes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from graftune.batch import Example
from graftune.data.encoded import side_of
from graftune.data.token_text import Pieces
from graftune.io.files import write_file
from graftune.tokenizer import Tokenizer
from graftune.training.hooks import Hook, RunState

PREVIEW = "preview.jsonl"
EXAMPLES, TOKENS, LARGEST = 200, 4096, 4 << 20


def shown_example(index: int, example: Example, pieces: Pieces, side: str = "") -> dict[str, Any]:
    """An example as the page shows it. `truncated`: it was shortened to fit max_seq_len, or has more tokens than are
    shown here. `side`: chosen or rejected, where it is an answer of a pair."""
    shown: dict[str, Any] = {
        "index": index,
        "row": example.row,  # as on the terminal: from 1
        "tokens": pieces.of(example.tokens[:TOKENS]),
        "trained": [int(on) for on in example.supervised[:TOKENS]],
        "truncated": example.shortened or len(example.tokens) > TOKENS,
    }
    if side:
        shown |= {"group": example.group, "side": side}
    if example.numbers:
        shown["numbers"] = {name: value for name, value in example.numbers.items() if not isinstance(value, list)}
    return shown if example.weights is None else {**shown, "weights": example.weights[:TOKENS]}


class Preview(Hook):
    """Writes the file in a thread beside the first steps, so that they do not wait for it."""

    def __init__(self, examples: Sequence[Example]) -> None:
        self._examples, self._thread = examples, ThreadPoolExecutor(1, "preview")
        self._written: Future[None] | None = None

    def start(self, state: RunState) -> None:
        """A resumed run has its preview, unless it was killed before it was written."""
        if state.ranks.leads and not (state.folder / PREVIEW).exists():
            how = state.folder / PREVIEW, self._examples, state.parts.tokenizer
            self._written = self._thread.submit(write_preview, *how)

    def finish(self, state: RunState) -> dict[str, Any]:
        self.close(state)  # before `run_end` is logged: a run with that event has all its files
        return {}

    def close(self, state: RunState) -> None:
        """Wait for the thread, and warn if the file was not written. A run that fails reports only its own error."""
        self._thread.shutdown()
        written, self._written = self._written, None
        if written is not None and (error := written.exception()) and sys.exc_info()[0] is None:
            state.report.warn(f"{PREVIEW} was not written: {getattr(error, 'strerror', None) or error}")


def write_preview(path: Path, examples: Sequence[Example], tokenizer: Tokenizer) -> None:
    pieces, lines, size = Pieces(tokenizer), list[bytes](), 0
    for index in range(min(EXAMPLES, len(examples))):
        shown = shown_example(index, examples[index], pieces, side_of(examples, index))
        line = json.dumps(shown, separators=(",", ":")).encode() + b"\n"
        size += len(line)
        if size > LARGEST:
            break
        lines.append(line)
    write_file(path, b"".join(lines))
