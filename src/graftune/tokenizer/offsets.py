"""The characters of each token, computed only when they are needed.

A mask needs a handful of borders, and turning all offsets of an encoding into Python tuples takes as long as
everything else that is done with it. So `Offsets` is a sequence that makes the whole list when it is iterated or
indexed, while `border` asks the encoding itself. That shortcut is taken only where tokens follow each
other without gaps: next to a character that the vocabulary's normaliser dropped or moved, the whole list decides.

Tracking characters takes an eighth of the library's time. Byte-level vocabularies do not need it: each token is a known
number of bytes of the text, so borders follow from their sums (`ByteOffsets`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import tokenizers

Pair = tuple[int, int]


class Offsets(Sequence[Pair]):
    """For each token the characters [start, end) of the text, as `Tokenizer.encode_with_offsets` gives them."""

    def __init__(self, encoding: tokenizers.Encoding, length: int, plain: bool):
        """`length`: of the text, in characters. `plain`: nothing can have moved a character to another place."""
        self._encoding, self._length, self._plain = encoding, length, plain
        self._count = len(encoding)
        self._whole: list[Pair] | None = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: Any) -> Any:
        return self.whole()[place]

    def whole(self) -> list[Pair]:
        if self._whole is None:
            made, reached = [], 0
            for start, end in self._encoding.offsets:
                start, end = min(start, reached), max(end, reached)
                made.append((start, end))
                reached = end
            if made:
                made[-1] = (made[-1][0], self._length)
            self._whole = made
        return self._whole

    def border(self, char: int) -> int | None:
        """The index of the token that begins at this character (the count of tokens at the end of the text); None
        if a token covers it together with the one before, or if only the whole list can tell."""
        if not self._plain or self._whole is not None:
            return None
        if char >= self._length:
            return self._count
        token = self._encoding.char_to_token(char)
        if not token:  # None: dropped. 0: the text's beginning, or a gap before it
            return 0 if char == 0 and token == 0 else None
        here, before = self._encoding.token_to_chars(token), self._encoding.token_to_chars(token - 1)
        return token if here is not None and before is not None and here[0] == char == before[1] > before[0] else None


class ByteOffsets(Offsets):
    """Offsets for ids that were encoded without them, from the byte length of each token."""

    def __init__(
        self, ids: list[int], text: str, sizes: Sequence[int], encode: Callable[[str], tuple[list[int], list[Pair]]]
    ):
        """`sizes`: the bytes of each token, by id. `encode` gives ids and the whole list, as `encode_with_offsets`."""
        self._ids, self._text, self._sizes, self._encode = ids, text, sizes, encode
        self._count = len(ids)
        self._whole: list[Pair] | None = None
        self._ends: list[int] = []  # of the tokens, in bytes, with a 0 before them; empty: not computed yet

    def whole(self) -> list[Pair]:
        if self._whole is None:
            self._whole = self._encode(self._text)[1]
        return self._whole

    def border(self, char: int) -> int | None:
        text = self._text
        if not self._ends:
            self._ends = list(accumulate(map(self._sizes.__getitem__, self._ids), initial=0))
            if self._ends[-1] != (len(text) if text.isascii() else len(text.encode())):
                self._ends = [-1]  # some bytes have no token
        byte = char if text.isascii() else len(text[:char].encode())
        token = bisect_left(self._ends, byte)
        return token if token < len(self._ends) and self._ends[token] == byte else None
