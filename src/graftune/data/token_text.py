"""The text of an example, token by token or in trained and untrained runs, for views that show the mask.

Decoding each prefix anew would be exact and quadratic. A token's text depends on its neighbours in two ways only:
SentencePiece drops the first blank of what it decodes, so `Pieces` decodes each id once behind an anchor; and a
character may be divided among tokens, so tokens are decoded together until they are whole characters, and the text
stands at the first of them.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence

from graftune.batch import Example
from graftune.tokenizer import Tokenizer

BROKEN = "\ufffd"  # what a piece of a character decodes to
LONGEST = 8  # most tokens that share one character


class Pieces:
    """Decodes tokens one by one, for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer, self._known = tokenizer, dict[int, str]()
        self._anchor = tokenizer.encode("a")
        self._skipped = len(tokenizer.decode(self._anchor))

    def of(self, ids: Sequence[int]) -> list[str]:
        """The texts of these tokens; joined they are the text of all."""
        known = self._known
        for id in set(ids) - known.keys():
            known[id] = self._decoded([id])
        texts = [known[id] for id in ids]
        place = 0
        while place < len(texts):
            if BROKEN not in texts[place]:
                place += 1
                continue
            for end in range(place + 2, min(place + LONGEST, len(ids)) + 1):
                whole = self._decoded(ids[place:end])
                if not whole.endswith(BROKEN):
                    texts[place:end] = [whole, *[""] * (end - place - 1)]
                    place = end - 1
                    break
            place += 1  # no break: the text itself contains BROKEN
        return texts

    def _decoded(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([*self._anchor, *ids])[self._skipped :]


def segments(example: Example, tokenizer: Tokenizer, start: int = 0) -> Iterator[tuple[str, bool]]:
    """The example's text from token `start` on, in runs of trained and untrained tokens."""
    shown = tokenizer.decode(example.tokens[:start]) if start else ""
    flags = example.supervised
    for end in range(start + 1, len(flags) + 1):
        if end < len(flags) and flags[end] == flags[start]:
            continue
        # Decoded from the beginning each time: SentencePiece decoders drop the first space of what they are given.
        whole = tokenizer.decode(example.tokens[:end])
        yield whole[len(shown) :], flags[start]
        start, shown = end, whole


def heading(example: Example) -> str:
    """One line about an example: its row, its tokens, and its numbers."""
    trained, total = example.response_tokens, len(example.tokens)
    text = f"row {example.row}: {total} tokens, {trained} trained ({trained / total:.0%})"
    text += f", with a weight of {example.response_weight:g}" if example.weights else ""
    text += f", of group {example.group + 1}" if example.group >= 0 else ""
    known = {name: value for name, value in example.numbers.items() if not isinstance(value, list)}
    return text + "".join(f", {name} {value:g}" for name, value in known.items())


def as_html(examples: Sequence[Example], tokenizer: Tokenizer) -> str:
    """Examples for a notebook: trained text is marked, the rest is grey."""
    parts = []
    for example in examples:
        runs = (
            f"<mark>{html.escape(text)}</mark>" if on else f"<span style='opacity:0.6'>{html.escape(text)}</span>"
            for text, on in segments(example, tokenizer)
        )
        title = html.escape(heading(example))
        parts.append(f"<div><b>{title}</b></div><pre style='white-space:pre-wrap'>{''.join(runs)}</pre>")
    return "".join(parts)
