"""What will be trained, shown before it is: the mask in colour, the counts, every row left out and why.

Masks go wrong silently, so they are made visible from the tokens and flags the trainer gets, not from the text they
came from. On a terminal without colour (or in a file) the trained text stands between ⟦ and ⟧ instead.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from graftune.arithmetic import ceil_div
from graftune.batch import Example
from graftune.data.dataset import Dataset
from graftune.data.summary import Summary, counted, share
from graftune.data.token_text import heading, segments
from graftune.tokenizer import Tokenizer

OPEN, CLOSE = "⟦", "⟧"
TRAINED, PROMPT, HEADING = "bold green", "dim", "bold"
SHOWN_DETAILS = 20
BAR, BARS = "█", 40  # the longest bar has so many


class MaskView:
    """One example; marks instead of colours where the console has none."""

    def __init__(self, example: Example, tokenizer: Tokenizer):
        self.example, self.tokenizer = example, tokenizer

    def plain(self) -> str:
        parts = (f"{OPEN}{text}{CLOSE}" if on else text for text, on in segments(self.example, self.tokenizer))
        return "".join(parts)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(heading(self.example), style=HEADING)
        if console.no_color or console.color_system is None:
            yield Text(self.plain())
        else:
            runs = segments(self.example, self.tokenizer)
            yield Text.assemble(*((text, TRAINED if on else PROMPT) for text, on in runs))
        yield Text("")


def preview(dataset: Dataset, tokenizer: Tokenizer, count: int) -> RenderableType:
    """The first `count` examples and the summary."""
    views: list[RenderableType] = [MaskView(example, tokenizer) for example in dataset.examples[:count]]
    return Group(*views, summary_table(dataset.summary), *lengths_view(dataset.summary), *_left_out(dataset.summary))


def summary_table(summary: Summary) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
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
    for note in summary.says():
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
    """Everything above for a program; with a tokenizer also the first `count` examples in runs."""
    summary = dataset.summary
    result: dict[str, Any] = {
        "path": dataset.path,
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
                "tokens": len(example.tokens),
                "response_tokens": example.response_tokens,
                "response_weight": example.response_weight,
                "segments": [{"text": text, "trained": on} for text, on in segments(example, tokenizer)],
            }
            for example in dataset.examples[:count]
        ]
    return result
