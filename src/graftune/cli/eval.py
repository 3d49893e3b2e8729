"""graftune eval: loss and perplexity on the response tokens of a data set, and a metric of the answers."""

from __future__ import annotations

from typing import Any

from graftune.cli.settings import Switch, given, takes
from graftune.cli.target import open_target
from graftune.observe.console import Console
from graftune.settings.config import Config
from graftune.settings.recognise import check_data

METRIC = ("metric", "metric_records", "metric_seconds", "sample_tokens")


@takes("base", "data", *METRIC, omit=("data", "eval_data", "val_split", "eval_examples"))
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
    """Loss and perplexity of a run, adapter or base on DATA, counted over response tokens, and --metric of its answers.

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

    from graftune.data.tokenised import SAMPLED
    from graftune.losses import CrossEntropy
    from graftune.training.metric import check_metric, metric_of
    from graftune.training.prepare import report_refused

    asked = {name: value for name, value in given(settings).items() if name in METRIC}
    check_metric(Config.of(asked))

    run = open_target(target, settings, needs_adapter="--base-too" if base_too else None, console=console, task="eval")
    if run.loss.data is SAMPLED:  # a run of reinforcement learning: files hold no advantages of sampled answers
        run._use_loss(CrossEntropy())
        if "max_seq_len" not in given(settings):  # the run's is that of its longest prompt and answer
            run.parts.config = run.config.replace(max_seq_len=Config().data.longest(run.base.spec.max_positions))
    examples = run.prepare(data, console)
    summary = examples.summary
    report_refused(console, summary)
    config = run.config.replace(**{"metric": "", **asked})
    metric, left = metric_of(config, examples, data, run.tokenizer, run.base.spec.max_positions, 0)
    if left:
        console.warn(left)
    found = [
        _evaluated(run, examples, console, adapted) | _measured(run, metric, console, adapted)
        for adapted in ((True, False) if base_too else (True,))
    ]
    more = {"base": found[1]} if base_too else {}
    left_out = {**summary.refused, **summary.dropped}
    console.result(
        {"target": target, "data": data, **found[0], "left_out": left_out, "shortened": summary.truncated, **more}
    )
    if not json:
        columns = [_rows(figures) for figures in found]
        console.table(
            f"{target or 'bundled base'} on {data}",
            ("", "tuned", "base") if base_too else ("", "value"),
            [(name, *(column.get(name, "-") for column in columns)) for name in columns[0]],
        )
    return 0


def _evaluated(run: Any, examples: Any, console: Console, adapted: bool) -> dict[str, Any]:
    label = "evaluating" if adapted else "evaluating the base"
    from graftune.data.encoded import unit_of

    with console.progress(len(examples), label=label, unit=unit_of(examples.examples)) as bar:
        result = run.evaluate(examples, adapted=adapted, on_progress=bar.update)
    return {name: value for name, value in result.document().items() if value is not None}


def _measured(run: Any, metric: Any, console: Console, adapted: bool) -> dict[str, Any]:
    """The metric of the answers; nothing without one."""
    if metric is None:
        return {}
    label = "answering" if adapted else "answering by the base"
    with console.progress(len(metric.questions), label=label, unit="answers") as bar:
        answers = metric.answers(run.parts, adapted=adapted, between=bar.update)
    try:
        scores = metric.scores(answers)
    finally:
        metric.close()
    if scores.failed:
        console.warn(scores.failures)
    if scores.cut:
        console.note(f"{scores.cut} of {scores.records} answers were cut off at sample_tokens")
    return dict(scores.document())


def _rows(figures: dict[str, Any]) -> dict[str, str]:
    """The figures as a table shows them, with each metric in a row of its own."""
    flat = {name.replace("_", " "): value for name, value in figures.items() if isinstance(value, int | float)}
    return {
        name: f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
        for name, value in (flat | figures.get("metrics", {})).items()
    }
