"""The text of every token of an example, for views that show which tokens are trained.

Decoding each prefix anew would be exact and quadratic. A token's text does not depend on its neighbours but in two
ways: SentencePiece drops the first blank of what it decodes, so each id is decoded behind an anchor, once; and a
character may be divided among tokens, so tokens are decoded together until they are whole characters, and the text
stands at the first of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from graftune.tokenizer import Tokenizer

BROKEN = "\ufffd"  # what a piece of a character decodes to
LONGEST = 8  # tokens of one character


class Pieces:
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
            place += 1  # without a break the data itself holds the sign of a broken character
        return texts

    def _decoded(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([*self._anchor, *ids])[self._skipped :]
