"""graftune rl: the model answers prompts, functions reward the answers, and a policy loss trains on them."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import Parameter

from graftune.cli.settings import Switch, given, looked_at, positional, show_config, takes
from graftune.cli.train import run_and_report, settings_of
from graftune.data.sample import parcels
from graftune.data.sample.parcels import parcels_path
from graftune.errors import GraftuneError
from graftune.observe.console import Console
from graftune.settings.config import Config
from graftune.settings.sections import NOT_FOR_REWARDS


@takes("base", "lora", "data", "optim", "train", "run", "rl", omit=NOT_FOR_REWARDS)
def rl(
    base: Annotated[str, Parameter(show_default=False)] = "",
    data: Annotated[str, Parameter(show_default=False)] = "",
    /,
    *more: Annotated[str, Parameter(name="MORE", show_default=False)],
    config: Annotated[str, Parameter(name=["--config", "-c"], show_default=False)] = "",
    resume: Annotated[str, Parameter(show_default=False)] = "",
    print_config: Switch = False,
    json: Switch = False,
    quiet: Switch = False,
    watch: Switch = False,
    settings: Any = None,
) -> int:
    """Train BASE with rewards: it answers the prompts of DATA, and reward functions say how good each answer is. With
    neither data nor a reward: the bundled prompts.

    Ctrl-C saves a checkpoint and says how to go on.

    Parameters
    ----------
    base
        Hugging Face name or folder, or a .gguf file.
    data
        Prompts: a .jsonl, .json, .csv or .parquet file, a folder or glob of them, or a Hub data set.
    more
        More prompts: all of them are read (a glob that the shell expanded).
    config
        YAML file of settings; flags override it.
    resume
        Run folder to continue, with the settings it was started with.
    print_config
        Print the settings as YAML and end: file and flags over the defaults.
    json
        Print one JSON document to stdout at the end.
    quiet
        No notes and no progress.
    watch
        Open the page of graftune watch beside the training, and say its address.
    """
    console = Console(json=json, quiet=quiet)
    flags = positional(given(settings), base=base, data=data, more=more)
    whole, flags = settings_of(config, flags, resume, console)
    if print_config:
        return show_config(Config.of(whole.flat(), flags) if resume else whole, console)
    if not resume:
        if not whole.data.data and not whole.rl.reward:
            whole = whole.replace(data=str(parcels_path()), reward=[parcels.__file__])
        whole = looked_at(whole)
    if not whole.rl.reward:
        fix = f"resume it with graftune train --resume {resume}" if resume else "name one, as in --reward file.py"
        raise GraftuneError("there is no reward function", where=resume, fix=fix)
    return run_and_report(whole, console, resume, flags, watch)
