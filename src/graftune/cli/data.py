"""graftune data: shows the training data with its mask, before any training.

Opens the base for its tokenizer and chat template only: no weight is read. A wrong mask is the commonest silent error
of fine-tuning, so the preview shows the very tokens of the examples and which of them are trained.
"""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import Parameter

from graftune.cli.settings import Count, Switch, given, loaded, looked_at, positional, takes
from graftune.observe.console import Console
from graftune.settings.config import Config
from graftune.settings.sections import OF_MACHINE
from graftune.settings.values import check_range


@takes("base", "data", omit=("data", "eval_data", "val_split", "eval_examples", "any_base", *OF_MACHINE))
def data(
    data: Annotated[str, Parameter(show_default=False)] = "",
    /,
    *more: Annotated[str, Parameter(name="MORE", show_default=False)],
    config: Annotated[str, Parameter(name=["--config", "-c"], show_default=False)] = "",
    show: Count = 3,
    json: Switch = False,
    settings: Any = None,
) -> int:
    """Show what would be trained on DATA: the masked examples, the counts, lengths, every refused row and why.

    Parameters
    ----------
    data
        .jsonl, .json, .csv or .parquet file; without it the bundled sample.
    more
        More data: all of it is read (a glob that the shell expanded).
    config
        YAML file of settings; flags override it.
    show
        Examples to preview.
    json
        Print counts, every row left out and the preview as one JSON document to stdout.
    """
    check_range("--show", show, 0)
    console = Console(json=json)
    flags = positional(given(settings), data=data, more=more)
    whole = looked_at(loaded(config, flags, console))

    dataset, tokenizer = show_data(whole, console, show)
    if json:
        from graftune.data.preview import summary_json

        console.result(summary_json(dataset, tokenizer, show))
    return 0


def show_data(config: Config, console: Console, count: int) -> tuple[Any, Any]:
    """Show the data of these settings: the masks of the first examples and the summary. Returns the data set and its
    tokenizer. With --json nothing is shown."""
    from graftune.data.dataset import prepare
    from graftune.data.pairs import kind_of_data
    from graftune.data.preview import preview
    from graftune.data.sample import sample_for
    from graftune.losses import choose

    tokenizer, context = tokenizer_of(config)
    config = config.replace(max_seq_len=config.data.longest(context))
    path = config.data.data or str(sample_for(choose(config.train).data.name))
    dataset = prepare(path, tokenizer, config.data, console, kind_of_data(path, config.data))
    if not console.json:
        console.render(preview(dataset, tokenizer, count))
    return dataset, tokenizer


def tokenizer_of(config: Config) -> tuple[Any, int]:
    """The base's tokenizer, and the longest context it takes."""
    from graftune.session import reader_of
    from graftune.tokenizer.template import today
    from graftune.weights.base import described

    base = described(config.base.base, config.base.revision)
    dated = config.replace(date=config.data.date or today().isoformat())  # as for a run
    return reader_of(dated, base, None), base.spec.max_positions
