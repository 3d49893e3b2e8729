"""Character spans -> a trained/not-trained flag per token, and the check that the mask is what it must be.

The whole text is tokenised once, so tokens are the ones inference would see, and no control token is ever broken.
Borders of prompts and answers have to lie between two tokens: `border` finds the token that begins there, or the one
that lies across it. (Tokenising prompt and response apart would make the boundary trivial, but SentencePiece models put
a space before each piece.) Then `check` makes sure of it for every template: each span has tokens, the last of them is
the end token, and what follows it is not trained.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from graftune.data.row import Refusal
from graftune.tokenizer.offsets import Offsets


def border(offsets: Sequence[tuple[int, int]], place: int) -> tuple[int, bool]:
    """(the first token that covers a character from `place` on, whether it begins there and not before)."""
    if isinstance(offsets, Offsets) and (found := offsets.border(place)) is not None:
        return found, True
    token = bisect_right(offsets, place, key=lambda pair: pair[1])
    return token, token == len(offsets) or offsets[token][0] >= place


def flags(count: int, ranges: Sequence[tuple[int, int]]) -> list[bool]:
    supervised = [False] * count
    for first, last in ranges:
        supervised[first:last] = [True] * (last - first)
    return supervised


def spread(count: int, ranges: Sequence[tuple[int, int]], weights: Sequence[float]) -> list[float] | None:
    """The weight of each token: its range's, 0 outside of them. None where every weight is 1."""
    if all(weight == 1 for weight in weights):
        return None
    spread = [0.0] * count
    for (first, last), weight in zip(ranges, weights, strict=True):
        spread[first:last] = [weight] * (last - first)
    return spread


def check(tokens: Sequence[int], ranges: Sequence[tuple[int, int]], ends: frozenset[int]) -> None:
    """Refuses a degenerate mask: nothing trained, everything trained, or a turn that does not close with its end.

    `ends` are the ids that may close a turn; empty where the template closes it with ordinary text.
    """
    previous = 0
    for first, last in ranges:
        if first >= last or first < previous:
            raise Refusal(
                "nothing to train",
                "the template renders no text of the answer after its prompt, or all of it is reasoning that "
                "train_reasoning leaves out",
            )
        if ends and tokens[last - 1] not in ends:
            raise Refusal("a turn without its end token", "the last trained token is not the end token")
        previous = last
    if ranges[0][0] == 0:
        raise Refusal("everything is trained", "no token of the prompt stands before the response")
