"""graftune profile: who owns the time of a step, for a run or for a run as it would be."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from graftune.cli.settings import Count, Switch, given, in_range, loaded, looked_at, positional, takes
from graftune.cli.train import run_config
from graftune.config import Config
from graftune.errors import GraftuneError
from graftune.files import write_file
from graftune.observe.console import Console

SHOWN = 14  # operations in the table
FAR = 0.05  # by which a profiled step may differ from a plain one


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

    Of a run folder the steps are those of the run, and its folder gets profile.json and profile-trace.json.

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
    in_range("--steps", steps, at_least=2, at_most=10_000)
    console = Console(json=json, quiet=quiet)
    flags, folder = given(settings), Path(target) if target else None
    is_run = folder is not None and (folder / "config.yaml").is_file()
    if is_run:
        if config:
            raise GraftuneError(
                "a run has its own settings", where=target, mend="leave --config out; flags go over them"
            )
        whole = Config.of(run_config(target).flat(), positional(flags, data=data))
    else:
        whole = looked_at(loaded(config, positional(flags, base=target, data=data), console), "profile")
    if trace and Path(trace).is_dir():
        raise GraftuneError("is a folder", where=trace, mend="give --trace the name of a file")
    with console.working("starting PyTorch"):
        from graftune.training.profile import profile as profiled

    found = profiled(whole, console, steps)
    document = found.document()
    if is_run:
        write_file(Path(target) / "profile.json", json_module.dumps(document) + "\n")
    for path in [*([Path(target) / "profile-trace.json"] if is_run else []), *([Path(trace)] if trace else [])]:
        write_file(path, json_module.dumps(found.trace()) + "\n")
        console.note(f"trace: {path} (open it in ui.perfetto.dev)")
    console.result(document)
    if not json:
        show(console, document)
    return 0


def show(console: Console, found: dict[str, Any]) -> None:
    columns = ("phase", "ms", "p50", "p95", "p99", "share")
    rows = [[row["name"], *(_ms(row[key]) for key in columns[1:5]), _share(row["share"])] for row in found["phases"]]
    rows.append(["step", _ms(found["step_ms"]), *(_ms(found["step"][key]) for key in columns[2:5]), _share(1.0)])
    console.table(f"{found['model']} on {found['gpu']}: {found['steps']} steps", columns, rows)
    rows = [
        [row["name"], row["phase"], _ms(row["ms"]), row["calls"], _share(row["share"])]
        for row in found["operations"][:SHOWN]
    ]
    left = len(found["operations"]) - len(rows)
    more = f" ({left} smaller ones are in the document)" if left > 0 else ""
    console.table(f"operations{more}", ("operation", "phase", "ms", "calls", "share"), rows)
    if found["layers"]:
        _show_layers(console, found["layers"])
    if found["hotspots"]:
        rows = [[row["name"], _ms(row["ms"]), f"{row['times_the_mean']:.2f}"] for row in found["hotspots"][:SHOWN]]
        console.table("hotspots: far above the mean of the same operation", ("where", "ms", "times the mean"), rows)
    for name, title in (("apart", "on other streams, beside the step"), ("beside", "between steps")):
        if found[name]:
            console.table(title, ("what", "ms"), [[row["name"], _ms(row["ms"])] for row in found[name]])
    for line in said(found):
        console.line(line)


def _show_layers(console: Console, layers: list[dict[str, Any]]) -> None:
    """All of them where they are few, else the slowest."""
    slowest = sorted(layers, key=lambda row: -(row["forward_ms"] + row["backward_ms"]))[:8]
    rows = [[row["layer"], _ms(row["forward_ms"]), _ms(row["backward_ms"])] for row in slowest]
    title = "layers" if len(layers) <= len(slowest) else f"the slowest of {len(layers)} layers"
    console.table(title, ("layer", "forward ms", "backward ms"), rows)


def said(found: dict[str, Any]) -> list[str]:
    """The sentences below the tables."""
    step, plain, eager = found["step_ms"], found["plain_ms"], found["eager_ms"]
    lines = [f"{found['owned']:.1%} of the step has an owner"]
    if plain:
        off = step / plain - 1
        lines.append(f"a profiled step takes {_ms(step)} ms, a plain one {_ms(plain)} ms ({off:+.1%})")
        if abs(off) > FAR:
            lines[-1] += ": too far apart to trust single operations; profile more steps on a quiet machine"
    if eager and plain:
        lines.append(f"the same step without graphs takes {_ms(eager)} ms: the graph saves {1 - plain / eager:.0%}")
    lines += [found["eager_note"]] if found.get("eager_note") else []
    if found.get("floor_note"):
        lines.append(found["floor_note"])
    elif found["floor_share"]:
        lines.append(
            f"the floor (its products and attention alone) takes {_ms(found['floor_ms'])} ms: the step runs at "
            f"{found['floor_share']:.0%} of that speed"
        )
    return [*lines, found["bottleneck"]]


def _ms(value: float) -> str:
    return f"{value:.3f}" if value < 100 else f"{value:.1f}"


def _share(value: float) -> str:
    return f"{100 * value:.1f}%"
