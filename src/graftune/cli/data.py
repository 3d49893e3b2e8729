"""graftune data: what will be trained, before anything is trained.

Opens the base for its tokenizer and chat template only: no weight is read. A wrong mask is the commonest silent error
of fine-tuning, so the preview shows the very tokens of the examples and which of them are trained.
"""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import Parameter

from graftune.cli.settings import Count, Switch, given, in_range, positional, takes
from graftune.config import Config
from graftune.observe.console import Console

_LISTED = 20  # refused rows named one by one; --json names them all


@takes("base", "data", omit=("data", "eval_data", "val_split", "device", "base_dtype", "compute_dtype", "threads"))
def data(
    data: Annotated[str, Parameter(show_default=False)] = "",
    /,
    *,
    config: Annotated[str, Parameter(name=["--config", "-c"], show_default=False)] = "",
    show: Count = 3,
    json: Switch = False,
    settings: Any = None,
) -> int:
    """Show what would be trained on DATA: the masked examples, the counts, every refused row and why.

    Parameters
    ----------
    data
        .jsonl, .json, .csv or .parquet file; without it the bundled sample.
    config
        YAML file of settings; flags override it.
    show
        Examples to preview.
    json
        Print the counts as one JSON document to stdout.
    """
    in_range("--show", show, at_least=0)
    console = Console(json=json)
    flags = positional(given(settings), data=data)
    whole = Config.load(config, flags) if config else Config.of(flags)
    tokenizer = _tokenizer(whole)
    dataset = _prepare(whole, tokenizer)
    from graftune.data.preview import preview, summary_json

    console.result(summary_json(dataset, tokenizer))
    if json:
        return 0
    if show:
        console.render(preview(dataset, tokenizer, show))
    _report(console, dataset)
    return 0


def _tokenizer(config: Config) -> Any:
    from graftune.weights.base import open_base

    tokenizer = open_base(config.base.base, config.base.revision).tokenizer
    return tokenizer.with_tokens(config.lora.new_tokens) if config.lora.new_tokens else tokenizer


def _prepare(config: Config, tokenizer: Any) -> Any:
    from graftune.data.dataset import prepare

    return prepare(config.data.data, tokenizer, config.data)


def _report(console: Console, dataset: Any) -> None:
    summary = dataset.summary
    console.table(
        dataset.path,
        ("what", "count"),
        [
            ("rows", f"{summary.rows:,}"),
            *((f"  {kind}", f"{count:,}") for kind, count in summary.kinds.items()),
            ("examples", f"{summary.examples:,}"),
            ("tokens", f"{summary.tokens:,}"),
            ("  trained", f"{summary.response_tokens:,}"),
            ("longest example, tokens", f"{summary.longest:,}"),
            *((f"shortened: {how}", f"{count:,}") for how, count in summary.truncated.items()),
            *((f"dropped: {why}", f"{count:,}") for why, count in summary.dropped.items()),
            *((f"refused: {why}", f"{count:,}") for why, count in summary.refused.items()),
        ],
    )
    if summary.details:
        console.table("Rows not used", ("row", "why"), summary.details[:_LISTED])
        if len(summary.details) > _LISTED:
            console.line(f"  and {len(summary.details) - _LISTED:,} more (--json lists them all)")
    console.line(f"template: {summary.template or 'none'}, trained share {summary.supervised_share:.1%}")
    for note, count in summary.notes.items():
        console.note(f"note: {note}" + (f" ({count:,} rows)" if count else ""))
