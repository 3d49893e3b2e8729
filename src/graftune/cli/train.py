"""graftune train: fine-tune a base on data, or resume a run."""

from __future__ import annotations

import gc
import shlex
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from graftune.cli.settings import Switch, given, loaded, looked_at, positional, show_config, takes
from graftune.io.yaml_file import read_yaml
from graftune.observe.console import Console
from graftune.ranks import from_environment
from graftune.settings.config import Config, flatten

FILES = (("adapter", "the adapter"), ("model", "the model"), ("report.html", "the report"), ("loss.png", "the curves"))


@takes("base", "lora", "data", "optim", "train", "run")
def train(
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
    """Fine-tune BASE on DATA. With neither: the bundled model on the bundled sample.

    Ctrl-C saves a checkpoint and says how to go on.

    Parameters
    ----------
    base
        Hugging Face name or folder, or a .gguf file.
    data
        .jsonl, .json, .csv or .parquet file, a folder or glob of them, or a Hub data set.
    more
        More data: all of it is read (a glob that the shell expanded).
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
    ranks = from_environment()
    console = Console(json=json, quiet=quiet, silent=ranks is not None and not ranks.leads)
    flags = positional(given(settings), base=base, data=data, more=more)
    whole, flags = settings_of(config, flags, resume, console, leads=ranks is None or ranks.leads)
    if print_config:
        return show_config(Config.of(whole.flat(), flags) if resume else whole, console)
    return run_and_report(whole if resume else looked_at(whole), console, resume, flags, watch)


def settings_of(
    config: str, flags: dict[str, Any], resume: str, console: Console, leads: bool = True
) -> tuple[Config, dict[str, Any]]:
    """The settings of a new run, or those that a run was started with; and those given now. `leads`: whether this is
    rank 0, which alone has to see the folder of the run."""
    if not resume:
        return loaded(config, flags, console), flags
    file = flatten(read_yaml(config), config, console.note) if config else {}
    return Config.of_run(resume) if leads else Config(), {**file, **flags}


def run_and_report(config: Config, console: Console, resume: str, overrides: dict[str, Any], watch: bool) -> int:
    """Train, and print how the run ended and what to do next. Returns the exit code."""
    result = _run(config, console, resume or None, overrides, watch)
    if result.stopped == "interrupted":
        with suppress(OSError):  # the terminal may be gone
            _interrupted(result, console, resume)
        return 128 + int(result.signal)
    console.result({"folder": str(result.folder), "steps": result.steps, "stopped": result.stopped, **result.summary})
    if not console.json:
        console.line(run_summary(result))
    return 0


def _run(config: Config, console: Console, resume: str | None, overrides: dict[str, Any], watch: bool) -> Any:
    with console.working("starting PyTorch"):
        from graftune import api

    with ExitStack() as ends:
        gc.freeze()  # objects made by imports stay: without this, each full collection takes 0.1 s to look at them
        ends.callback(gc.unfreeze)  # else libraries report them as leaks at the end of the process
        pages: list[Any] = []
        if watch:
            from graftune.cli.watch import TrainingPage

            folder = Path(resume or config.run.out or "runs/new").resolve()
            # The page shows all runs of the default folder; next to a folder of the user's choice may be a whole disk.
            shown = folder.parent if folder.parent.name == "runs" else folder
            pages.append(ends.enter_context(closing(TrainingPage(str(shown), console))))
        return api.train(config, console=console, resume=resume, overrides=overrides, callbacks=pages)


def _interrupted(result: Any, console: Console, resume: str) -> None:
    folder = str(result.folder) if result.started or resume else ""
    console.result({"folder": folder, "steps": result.steps, "stopped": result.stopped})
    again = f"go on with: graftune train --resume {shlex.quote(str(result.folder))}"
    if result.started:
        console.note(f"stopped at step {result.steps}; {again}")
    elif resume:
        console.note(f"stopped before the first step; nothing was changed; {again}")
    else:
        console.note("stopped before the first step; nothing was written")


def run_summary(result: Any) -> str:
    """What was trained, what changed, where it is, and the next three commands, of a run that was not interrupted."""
    lines = [*_trained_line(result), *_changed(result), *_location(result.folder)]
    return "\n".join([*lines, "next:", *_next(result.folder)])


def _trained_line(result: Any) -> list[str]:
    count = "1 step" if result.steps == 1 else f"{result.steps} steps"
    reason = "" if result.stopped == "finished" else f" ({result.stopped})"
    what = result.summary.get("trained", "")
    return [f"trained: {what}, {count}{reason}" if what else f"trained: {count}{reason}"]


def _changed(result: Any) -> list[str]:
    """Before and after, as far as both are known."""
    found: list[str] = []
    if result.first_eval is not None and result.best_eval is not None:
        share = result.best_eval / result.first_eval - 1 if result.first_eval else 0.0
        found.append(f"validation loss {result.first_eval:.3f} -> {result.best_eval:.3f} ({share:+.1%})")
        best = result.summary.get("best_step", -1)
        if 0 < best < result.steps:
            found[-1] += f", best at step {best}, which is kept"
    metric = result.summary.get("metric") or {}
    if metric.get("best") is not None:
        start = "" if metric["start"] is None else f"{metric['start']:.3f} -> "
        found.append(f"{metric['name']} {start}{metric['best']:.3f}")
    scores = result.summary.get("score") or {}
    if {"base", "tuned"} <= set(scores):
        base, tuned = scores["base"], scores["tuned"]
        found.append(f"exactly right {base['exact']:.0%} -> {tuned['exact']:.0%} of {tuned['total']} unseen records")
    return [f"changed: {'; '.join(found)}"] if found else []


def _location(folder: Path) -> list[str]:
    files = [f"{what} in {name}" for name, what in FILES if (folder / name).exists()]
    return [f"run folder: {shlex.quote(str(folder))}" + (f" ({', '.join(files)})" if files else "")]


def _next(folder: Path) -> list[str]:
    quoted = shlex.quote(str(folder))
    compare, base_too = (" --compare", " --base-too") if (folder / "adapter").is_dir() else ("", "")
    beside = ", beside its base" if compare else ""  # a full model has none
    rows = (
        (f"graftune chat {quoted}{compare}", f"talk to it{beside}"),
        (f"graftune eval {quoted} DATA.jsonl{base_too}", "its loss on other data"),
        (f"graftune export {quoted} --to gguf", "for llama.cpp, Ollama and LM Studio"),
    )
    width = max(len(command) for command, _ in rows)
    return [f"  {command:<{width}}  # {why}" for command, why in rows]
