"""Random text for tokenizer tests: every assigned Unicode plane, and the corners pre-tokenizers differ in."""

from __future__ import annotations

import random
import unicodedata
from functools import cache

CORNERS = """
's 'S 're 'LL 'd don't I'Ve hello World HTTPServer naïve Éa 123 4567 \uff11\uff12 ½ ٣٤ 中文 日本語の 한국어 รูป हिन्दी ...
!? $+<=>^`|~ —… 。\uff0c 🙂 👩\u200d💻 _x / a B \u200b \ufeff < > <s> </s> <0x0A> ▁ ﬁ \u017f e\u0301
"""
PIECES = [*CORNERS.split(), "//\n", "#\r\n"]
BLANKS = [" ", "  ", "   ", "\t", "\n", "\r\n", "\n\n", " \n ", "\u00a0", "\u3000", "\u2028", "\x85"]


@cache
def _assigned() -> tuple[int, ...]:
    planes = (*range(0x40000), *range(0xE0000, 0xE0200))  # beyond these nothing is assigned
    return tuple(c for c in planes if unicodedata.category(chr(c)) not in ("Cn", "Cs", "Co"))


def random_texts(count: int, seed: int, extra: tuple[str, ...] = ()) -> list[str]:
    """`count` strings of 1 to about 40 characters: a quarter each of all planes, the lower BMP mixed with ASCII, corner
    pieces, and ASCII with digits and blanks. `extra` joins the corner pieces (e.g. a model's special tokens)."""
    draw = random.Random(seed)
    everything = _assigned()
    lower = [c for c in everything if c < 0x3000]
    pieces = [*PIECES, *BLANKS, *extra]

    def ascii_() -> str:
        return chr(draw.randint(32, 126))

    def one(kind: int) -> str:
        length = draw.randint(1, 40)
        if kind == 0:
            return "".join(chr(draw.choice(everything)) for _ in range(length))
        if kind == 1:
            return "".join(chr(draw.choice(lower)) if draw.random() < 0.5 else ascii_() for _ in range(length))
        if kind == 2:
            return "".join(draw.choice(pieces) for _ in range(draw.randint(1, 14)))
        return "".join(
            draw.choice([ascii_(), draw.choice(BLANKS), str(draw.randint(0, 99999)), draw.choice(pieces)])
            for _ in range(draw.randint(1, 20))
        )

    return [one(index % 4) for index in range(count)]
