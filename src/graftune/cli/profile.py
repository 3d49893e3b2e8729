"""graftune profile: the time of a step by phase, layer and operation, for a run or for settings."""

from __future__ import annotations

import json as json_module
import os
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from graftune.cli.settings import Count, Switch, given, loaded, looked_at, positional, takes
from graftune.errors import GraftuneError
from graftune.io.files import write_file
from graftune.observe.console import Console
from graftune.observe.speed import compared, ms_text
from graftune.settings.config import Config
from graftune.settings.values import check_range

SHOWN, SLOWEST = 14, 8  # operations and layers in the tables


@takes("base", "lora", "data", "optim", "train")
def profile(
    target: Annotated[str, Parameter(show_default=False)] = "",
    data: Annotated[str, Parameter(show_default=False)] = "",
    /,
    *,
    config: Annotated[str, Parameter(name=["--config", "-c"], show_default=False)] = "",
    steps: Count = 20,
    trace: Annotated[str, Parameter(show_default=False)] = "",
    json: Switch = False,
    quiet: Switch = False,
    settings: Any = None,
) -> int:
    """Profile training steps: time by phase, layer and operation, what is slow, and what the graph saves.

    Of a run folder the steps are those of the run, and its folder gets profile.json and profile-trace.json; unless
    flags change what is profiled.

    Parameters
    ----------
    target
        Run folder, or a base: Hugging Face name or folder, or a .gguf file.
    data
        Training data; without it a run's own, or the bundled sample.
    config
        YAML file of settings; flags override it.
    steps
        Steps to profile, after those that warm up.
    trace
        File for a Chrome trace of single steps (open it in ui.perfetto.dev).
    json
        Print the profile as one JSON document to stdout.
    quiet
        No notes and no progress.
    """
    check_range("--steps", steps, 2, 10_000)
    console = Console(json=json, quiet=quiet)
    flags, folder = given(settings), Path(target) if target else None
    is_run = folder is not None and (folder / "config.yaml").is_file()
    _check_trace(trace)
    into: Path | None = None  # the run folder, if it gets the profile
    if is_run:
        if config:
            raise GraftuneError(
                "a run has its own settings", where=target, fix="leave --config out; flags go over them"
            )
        own = Config.of_run(target)
        whole = Config.of(own.flat(), positional(flags, data=data))
        into = folder if whole.flat() == own.flat() else None
        if into is None:
            console.note("these are not the run's own settings: its profile.json is left as it is")
    else:
        if folder is not None and (folder / "metrics.jsonl").is_file():
            raise GraftuneError("is a run folder without its config.yaml", where=target, fix="give a base and data")
        whole = looked_at(loaded(config, positional(flags, base=target, data=data), console))
    with console.working("starting PyTorch"):
        from graftune.training.profile import profile as profiled

    found = profiled(whole, console, steps)
    document = found.document()
    traces = [*([into / "profile-trace.json"] if into else []), *([Path(trace)] if trace else [])]
    try:
        if not json:
            show(console, document)  # before the files are written, because the disk may be full
    finally:  # the measurement is not lost if the reader of a pipe has gone
        if into is not None:
            write_file(into / "profile.json", json_module.dumps(document) + "\n")
        for path in traces:
            write_file(path, json_module.dumps(found.trace()) + "\n")
    for path in traces:
        console.note(f"trace: {path} (open it in ui.perfetto.dev)")
    console.result(document)
    return 0


def _check_trace(trace: str) -> None:
    path = Path(trace)
    if trace and (path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)):
        fix = "give --trace the name of a file in a folder that exists"
        raise GraftuneError("cannot be written", where=trace, fix=fix)


def show(console: Console, found: dict[str, Any]) -> None:
    """One table for each section of the profile, and the sentences."""
    step = {"name": "step", "ms": found["step_ms"], **found["step"], "share": 1.0}
    title = f"{found['model']} on {found['gpu']}: {found['steps']} steps"
    _table(console, title, [*found["phases"], step], {"name": "phase"}, "ms", "p50", "p95", "p99", "share")
    operations, layers = found["operations"], found["layers"]
    left = len(operations) - SHOWN
    title = f"operations ({left} smaller ones are in the document)" if left > 0 else "operations"
    _table(console, title, operations[:SHOWN], {"name": "operation"}, "phase", "ms", "calls", "share")
    slowest = sorted(layers, key=lambda row: -(row["forward_ms"] + row["backward_ms"]))[:SLOWEST]
    title = "layers" if len(layers) <= SLOWEST else f"the slowest of {len(layers)} layers"
    _table(console, title, slowest, {}, "layer", "forward_ms", "backward_ms")
    title = "hotspots: far above the mean of the same operation"
    _table(console, title, found["hotspots"][:SHOWN], {"name": "where"}, "ms", "times_the_mean")
    _table(console, "on other streams, beside the step", found["apart"], {"name": "what"}, "ms")
    _table(console, "between steps", found["beside"], {"name": "what"}, "ms")
    for line in conclusions(found):
        console.line(line)


def _table(console: Console, title: str, rows: list[dict[str, Any]], first: dict[str, str], *names: str) -> None:
    """Rows of the document. `first`: a key whose column has another title. No table where there are no rows."""
    if rows:
        columns = [*first.values(), *(name.replace("_", " ") for name in names)]
        console.table(title, columns, [[_cell(name, row[name]) for name in (*first, *names)] for row in rows])


def _cell(name: str, value: Any) -> str:
    if name == "share":
        return f"{100 * value:.1f}%"
    if name == "times_the_mean":
        return f"{value:.2f}"
    return ms_text(value) if isinstance(value, float) else str(value)


def conclusions(found: dict[str, Any]) -> list[str]:
    """The sentences below the tables."""
    plain, eager = found["plain_ms"], found["eager_ms"]
    lines = [f"{found['owned']:.1%} of the step has an owner"]
    if plain:
        lines.append(compared(found))
    if eager and plain:
        lines.append(f"the same step without graphs takes {ms_text(eager)} ms: the graph saves {1 - plain / eager:.0%}")
    lines += [found[name] for name in ("eager_note", "hotspots_note") if found.get(name)]
    if found.get("floor_note"):
        lines.append(found["floor_note"])
    elif found["floor_share"]:
        lines.append(
            f"the floor (its products and attention alone) takes {ms_text(found['floor_ms'])} ms: the step runs at "
            f"{found['floor_share']:.0%} of that speed"
        )
    return [*lines, found["bottleneck"]]
