"""Shows before training what will be trained: the mask in colour, the counts, every row left out and why.

Masks go wrong silently, so they are made visible from the tokens and flags the trainer gets, not from the text they
came from. On a terminal without colour (or in a file) the trained text stands between ⟦ and ⟧ instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from graftune.arithmetic import ceil_div
from graftune.batch import Example
from graftune.data.columns import LOSSES
from graftune.data.dataset import Dataset
from graftune.data.summary import Summary, counted, share
from graftune.data.token_text import heading, segments
from graftune.tokenizer import Tokenizer

OPEN, CLOSE = "⟦", "⟧"
TRAINED, PROMPT, HEADING = "bold green", "dim", "bold"
SHOWN_DETAILS = 20
SIDES = ("chosen", "rejected")
NARROW = 100  # columns of a terminal; below, the answers to one prompt are shown one below the other
BAR, BARS = "█", 40  # the longest bar has so many


class MaskView:
    """One example from token `start` on; marks instead of colours where the console has none."""

    def __init__(self, example: Example, tokenizer: Tokenizer, title: str = "", start: int = 0):
        self.example, self.tokenizer, self.start = example, tokenizer, start
        self.title = title or heading(example)

    def plain(self) -> str:
        runs = segments(self.example, self.tokenizer, self.start)
        return "".join(f"{OPEN}{text}{CLOSE}" if on else text for text, on in runs)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self.title, style=HEADING)
        if console.no_color or console.color_system is None:
            yield Text(self.plain())
        else:
            runs = segments(self.example, self.tokenizer, self.start)
            yield Text.assemble(*((text, TRAINED if on else PROMPT) for text, on in runs))
        yield Text("")


class PairView:
    """The two answers of a pair: their prompt, and below it both side by side."""

    def __init__(self, examples: Sequence[Example], tokenizer: Tokenizer):
        self.examples, self.tokenizer = examples, tokenizer

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        first = self.examples[0]
        start = min(example.supervised.index(True) for example in self.examples)
        yield Text(f"row {first.row}: {counted(start, 'token')} of prompt", style=HEADING)
        yield Text(self.tokenizer.decode(first.tokens[:start]), style=PROMPT)
        views = []
        for example, side in zip(self.examples, SIDES, strict=True):
            title = f"{side}: {counted(len(example.tokens) - start, 'token')}, {example.response_tokens} trained"
            views.append(MaskView(example, self.tokenizer, title, start))
        if options.max_width < NARROW:
            yield from views
        else:
            table = Table.grid(padding=(0, 2), expand=True)
            for _ in views:
                table.add_column(ratio=1)
            table.add_row(*views)
            yield table


def first_groups(dataset: Dataset, count: int) -> list[list[Example]]:
    """The first `count` examples, or groups of those that belong together."""
    found: list[list[Example]] = []
    for example in dataset.examples:
        if found and example.group == found[-1][0].group >= 0:
            found[-1].append(example)
        elif len(found) < count:
            found.append([example])
        else:
            break
    return found


def preview(dataset: Dataset, tokenizer: Tokenizer, count: int) -> RenderableType:
    views: list[RenderableType] = []
    for group in first_groups(dataset, count):
        if dataset.kind == "pairs":
            views.append(PairView(group, tokenizer))
        else:
            views += [MaskView(example, tokenizer) for example in group]
    table = summary_table(dataset.summary, dataset.kind)
    return Group(*views, table, *lengths_view(dataset.summary), *_left_out(dataset.summary))


def summary_table(summary: Summary, kind: str = "answers") -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    if kind in LOSSES and kind != "answers":
        table.add_row("kind", f"{kind}, for loss: {LOSSES[kind]} and others that take {kind}")
    kinds = ", ".join(f"{count} {kind}" for kind, count in summary.kinds.items())
    table.add_row("rows", Text(f"{summary.rows} ({kinds})"))
    table.add_row("examples", f"{summary.examples}, the longest of {summary.longest} tokens")
    share = f"{summary.supervised_share:.1%}"
    table.add_row("tokens", f"{summary.tokens}, of which {summary.response_tokens} trained ({share})")
    if summary.template:
        table.add_row("template", Text(summary.template))
    for name in ("refused", "dropped", "truncated"):
        for reason, count in getattr(summary, name).items():
            table.add_row(name, Text(f"{count}: {reason}"))
    for warning in summary.warnings():
        table.add_row("warning", Text(warning))
    for note in summary.sentences():
        table.add_row("note", Text(note))
    for note, count in summary.notes.items():
        table.add_row("note", Text(f"{note} ({counted(count, 'row')})" if count else note))
    return table


def lengths_view(summary: Summary) -> list[RenderableType]:
    """The examples' lengths as bars, and what a few values of max_seq_len would keep whole."""
    parts = summary.histogram()
    if not parts:
        return []
    most = max(count for _, _, count in parts)
    bars = Table(show_header=False, box=None, pad_edge=False)
    for first, last, count in parts:
        bars.add_row(
            Text(f"{first} to {last}", justify="right"), Text(BAR * ceil_div(BARS * count, most)), Text(str(count))
        )
    kept = [f"{limit}: {share(part)}" for limit, part in summary.kept().items()]
    return [
        Text(""),
        Text("tokens per example, before anything is cut", style=HEADING),
        bars,
        Text(f"kept whole by max_seq_len {', '.join(kept)} (now {summary.max_seq_len})"),
    ]


def _left_out(summary: Summary) -> list[RenderableType]:
    lines = [Text(f"row {row}: {why}") for row, why in summary.details[:SHOWN_DETAILS]]
    if summary.left_out > SHOWN_DETAILS:
        lines.append(Text(f"... and {summary.left_out - SHOWN_DETAILS} more rows; --json lists them all"))
    return [Text(""), *lines] if lines else []


def summary_json(dataset: Dataset, tokenizer: Tokenizer | None = None, count: int = 0) -> dict[str, Any]:
    """The contents of `preview` for programs; with a tokenizer also the first `count` examples, in runs of one flag."""
    summary = dataset.summary
    result: dict[str, Any] = {
        "path": dataset.path,
        "kind": dataset.kind,
        "sha256": dataset.sha256,
        **{key: value for key, value in summary.document().items() if key != "details"},
        "supervised_share": summary.supervised_share,
        "histogram": [{"from": first, "to": last, "examples": n} for first, last, n in summary.histogram()],
        "kept_whole": [{"max_seq_len": limit, "share": part} for limit, part in summary.kept().items()],
        "warnings": summary.warnings(),
        "details": [{"row": row, "reason": why} for row, why in dataset.details()],
    }
    if tokenizer is not None:
        result["preview"] = [
            {
                "row": example.row,
                **({"group": example.group} if example.group >= 0 else {}),
                **({"numbers": example.numbers} if example.numbers else {}),
                "tokens": len(example.tokens),
                "response_tokens": example.response_tokens,
                "response_weight": example.response_weight,
                "segments": [{"text": text, "trained": on} for text, on in segments(example, tokenizer)],
            }
            for group in first_groups(dataset, count)
            for example in group
        ]
    return result
