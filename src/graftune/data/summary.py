"""The summary of a data set: what became of every row, and what a user should know about it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

from graftune.arithmetic import power_of_two
from graftune.errors import GraftuneError

KEPT_DETAILS = 1000  # rows left out that are described in memory; the encoded file describes them all
LIMITS = (256, 512, 1024, 2048, 4096, 8192)
SHORTEST = 32  # tokens that the first part of a histogram reaches to


def counted(count: int, noun: str) -> str:
    """The count with its noun, singular or plural: `1 row`, `2 rows`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def share(part: float) -> str:
    """A share in percent, never rounded to 0% or 100%."""
    if 0 < part < 0.01:
        return "less than 1%"
    return f"{part:.0%}" if not 0.99 < part < 1 else f"{int(part * 1000) / 10:.1f}%"


@dataclass
class Summary:
    """What became of the data. `refused` rows were bad, `dropped` examples too long, `truncated` ones made to fit."""

    kinds: dict[str, int] = field(default_factory=Counter)
    rows: int = 0
    examples: int = 0
    tokens: int = 0
    response_tokens: int = 0
    longest: int = 0
    truncated: dict[str, int] = field(default_factory=Counter)
    dropped: dict[str, int] = field(default_factory=Counter)
    refused: dict[str, int] = field(default_factory=Counter)
    details: list[tuple[int, str]] = field(default_factory=list)  # (row, why) for the first rows refused or dropped
    left_out: int = 0  # how many rows were refused or dropped in all
    notes: dict[str, int] = field(default_factory=Counter)  # what a user should know, and for how many rows
    template: str = ""
    duplicates: int = 0  # examples that repeat an earlier one, token for token
    max_seq_len: int = 0
    lengths: dict[int, int] = field(default_factory=Counter)  # tokens before anything was cut -> how many examples

    @property
    def supervised_share(self) -> float:
        return self.response_tokens / self.tokens if self.tokens else 0.0

    @property
    def needed(self) -> int:
        """The max_seq_len that would keep every example whole."""
        return max(self.lengths, default=0)

    def too_long(self, limit: int) -> int:
        """Examples that a max_seq_len of `limit` would not keep whole."""
        return sum(count for length, count in self.lengths.items() if length > limit)

    def kept(self) -> dict[int, float]:
        """The share of examples that each of a few values of max_seq_len would keep whole."""
        total = sum(self.lengths.values()) or 1
        limits = sorted({*(n for n in (*LIMITS, self.max_seq_len) if 0 < n < self.needed), self.needed} - {0})
        return {limit: 1 - self.too_long(limit) / total for limit in limits}

    def histogram(self) -> list[tuple[int, int, int]]:
        """(from, to, examples) by length, each part twice as wide as the one before; from the shortest on."""
        found = Counter[int]()
        for length, count in self.lengths.items():
            found[max(SHORTEST, power_of_two(length))] += count
        powers = [1 << n for n in range(min(found).bit_length() - 1, max(found).bit_length())] if found else []
        return [(power // 2 + 1 if power > SHORTEST else 1, power, found[power]) for power in powers]

    def warnings(self) -> list[str]:
        shortened, total = self.too_long(self.max_seq_len), sum(self.lengths.values())
        if not shortened or not (self.truncated or self.dropped):
            return []
        which = f"{share(shortened / total)} of the examples are" if shortened > 1 else "1 example is"
        return [
            f"{which} longer than max_seq_len {self.max_seq_len} and "
            f"{'were' if shortened > 1 else 'was'} shortened or dropped; max_seq_len {self.needed} keeps all"
        ]

    def sentences(self) -> list[str]:
        """Facts that a user should know and that are not errors."""
        if not self.duplicates:
            return []
        of = f"{self.duplicates} of {self.examples} examples"
        verb = "repeats an earlier one" if self.duplicates == 1 else "repeat earlier ones"
        return [f"{of} {verb} word for word; repeats stay on one side of the split between training and validation"]

    def document(self) -> dict[str, Any]:
        """The fields for JSON; `lengths` becomes a list of pairs, since JSON's keys are text."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return values | {"lengths": sorted(self.lengths.items())}

    @staticmethod
    def of(document: dict[str, Any]) -> Summary:
        """Restores a summary from the result of `document`."""
        details = [(row, why) for row, why in document["details"]]
        return Summary(**document | {"lengths": dict(document["lengths"]), "details": details})


def nothing_usable(summary: Summary, path: str) -> GraftuneError:
    if not summary.rows:
        return GraftuneError("holds no rows", where=path, fix="give a file with at least one record")
    counts = Counter(summary.refused) + Counter(summary.dropped)
    (reason, count), *_ = counts.most_common(1)
    first = next(((row, why) for row, why in summary.details if why.startswith(reason)), None)
    example = f"; row {first[0]}: {first[1]}" if first else ""
    fix = "raise max_seq_len" if "max_seq_len" in reason else "fix those rows, or the settings that refuse them"
    return GraftuneError(
        f"none of the {summary.rows} rows can be used ({count} for: {reason}{example})", where=path, fix=fix
    )
