"""Character spans -> a trained/not-trained flag per token, and the check that the mask is what it must be.

The whole text is tokenised once, so tokens are the ones inference would see; each trained span then takes every token
that covers one of its characters. (Tokenising prompt and response apart would make the boundary trivial, but
SentencePiece models put a space before each piece.) Then, whatever the template did: every span has tokens, the last of
them is the end token, and what follows it is not trained.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from graftune.data.source import Refusal
from graftune.tokenizer.offsets import Offsets


def token_ranges(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """For each character span the half-open range of tokens that cover a part of it."""
    starts = [start for start, _ in offsets]
    ends = [end for _, end in offsets]
    return [(bisect_right(ends, first), bisect_left(starts, last)) for first, last in spans]


def exact_ranges(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]] | None:
    """`token_ranges` where every span begins and ends on a token border, found without walking over the offsets; None
    where the offsets themselves have to be looked at."""
    if not isinstance(offsets, Offsets):
        return None
    ranges = []
    for first, last in spans:
        start, end = offsets.border(first), offsets.border(last)
        if start is None or end is None:
            return None
        ranges.append((start, end))
    return ranges


def flags(count: int, ranges: Sequence[tuple[int, int]]) -> list[bool]:
    supervised = [False] * count
    for first, last in ranges:
        supervised[first:last] = [True] * (last - first)
    return supervised


def check(
    tokens: Sequence[int],
    offsets: Sequence[tuple[int, int]] | None,
    spans: Sequence[tuple[int, int]],
    ranges: Sequence[tuple[int, int]],
    ends: frozenset[int],
) -> None:
    """Refuses a degenerate mask: nothing trained, everything trained, or a turn that does not close with its end.

    `ends` are the ids that may close a turn; empty where the template closes it with ordinary text, which then has to
    be covered to its last character. Without `offsets` the ranges are exact ones.
    """
    previous = 0
    for (first, last), (_, end) in zip(ranges, spans, strict=True):
        if first >= last or first < previous:
            raise Refusal("nothing to train", "no token of the response is trained")
        if ends and tokens[last - 1] not in ends:
            raise Refusal("a turn without its end token", "the last trained token is not the end token")
        if offsets is not None and offsets[last - 1][1] < end:
            raise Refusal("a turn without its end token", "the tokens stop short of the end of the turn")
        previous = last
    if ranges[0][0] == 0:
        raise Refusal("everything is trained", "no token of the prompt stands before the response")
