"""The characters of each token, computed only when they are needed.

A mask needs a handful of borders, and turning all offsets of an encoding into Python tuples takes as long as
everything else that is done with it. So `Offsets` is a sequence that makes the whole list when it is iterated or
indexed, while `border` asks the encoding itself. That shortcut is taken only where tokens follow each
other without gaps: next to a character that the vocabulary's normaliser dropped or moved, the whole list decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

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

    @overload
    def __getitem__(self, place: int) -> Pair: ...
    @overload
    def __getitem__(self, place: slice) -> list[Pair]: ...
    def __getitem__(self, place: int | slice) -> Pair | list[Pair]:
        return self.whole()[place]

    def __iter__(self) -> Iterator[Pair]:
        return iter(self.whole())

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
