"""graftune eval: loss and perplexity on the response tokens of a data set."""

from __future__ import annotations

from typing import Any

from graftune.cli.settings import Switch, takes
from graftune.cli.target import open_target
from graftune.observe.console import Console
from graftune.settings.recognise import check_data


@takes("base", "data", omit=("data", "eval_data", "val_split", "eval_examples"))
def evaluate(
    target: str,
    data: str,
    /,
    *,
    base_too: Switch = False,
    json: Switch = False,
    quiet: Switch = False,
    settings: Any = None,
) -> int:
    """Loss and perplexity of a run, adapter or base on DATA, counted over response tokens.

    Parameters
    ----------
    target
        Run folder, adapter folder, or base ("" for the bundled one).
    data
        .jsonl, .json, .csv or .parquet file.
    base_too
        Also evaluate the base without its adapter.
    json
        Print one JSON document to stdout.
    quiet
        No notes and no progress.
    """
    console = Console(json=json, quiet=quiet)
    check_data(data)

    from graftune.training.prepare import report_refused

    run = open_target(target, settings, needs_adapter="--base-too" if base_too else None, console=console, task="eval")
    examples = run.prepare(data, console)
    summary = examples.summary
    report_refused(console, summary)
    tuned = _figures(_with_progress(run, examples, console, True))
    base = _figures(_with_progress(run, examples, console, False)) if base_too else None
    more = {"base": base} if base else {}
    left_out = {**summary.refused, **summary.dropped}
    console.result(
        {"target": target, "data": data, **tuned, "left_out": left_out, "shortened": summary.truncated, **more}
    )
    if not json:
        rows = [(name, value, *([base[name]] if base else [])) for name, value in tuned.items()]
        console.table(
            f"{target or 'bundled base'} on {data}",
            ("", "tuned", "base") if base else ("", "value"),
            [(name.replace("_", " "), *map(_shown, values)) for name, *values in rows],
        )
    return 0


def _with_progress(run: Any, examples: Any, console: Console, adapted: bool) -> Any:
    label = "evaluating" if adapted else "evaluating the base"
    with console.progress(len(examples.examples), label=label, unit="examples") as bar:
        return run.evaluate(examples, adapted=adapted, on_progress=bar.update)


def _figures(result: Any) -> dict[str, Any]:
    return {name: value for name, value in result.document().items() if value is not None}


def _shown(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
