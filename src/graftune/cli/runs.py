"""graftune runs: the runs of a folder, as the first view of the page shows them."""

from __future__ import annotations

import time
from typing import Annotated, Any

from cyclopts import Parameter

from graftune.cli.settings import Switch
from graftune.observe.console import Console


def runs(folder: Annotated[str, Parameter(show_default=False)] = "runs", /, *, json: Switch = False) -> int:
    """List the runs below FOLDER: state, steps, losses, and the settings in which they differ.

    Parameters
    ----------
    folder
        Run folder, or a folder of runs [default: runs].
    json
        Print one JSON document to stdout: what the page's list shows, with all settings.
    """
    from graftune.dashboard.runs import open_runs

    console = Console(json=json)
    found = open_runs(folder)
    document = found.document()
    console.result(document)
    if json:
        return 0
    documents = document["runs"]
    if not documents:
        console.line(f"there is no run below {found.root}")
        return 0
    shown = [name for name in document["differing"] if name not in ("data", "base")][:4]
    console.table(
        str(found.root),
        ("run", "state", "step", "loss", "best validation", "tok/s", "last sign", *shown),
        [_row(run, shown) for run in documents],
    )
    for run in documents:
        if run["state"] in ("died", "stopped"):
            console.line(f"{run['id']}: {run['sentence']}")
    return 0


def _row(run: dict[str, Any], shown: list[str]) -> tuple[str, ...]:
    steps = str(run["steps"]) + (f"/{run['max_steps']}" if run["max_steps"] else "")
    best = "" if run["best_eval"] is None else f"{run['best_eval']:.4f} at {run['best_eval_step']}"
    updated = run["updated"]
    return (
        run["id"],
        run["state"],
        steps,
        "" if run["last_loss"] is None else f"{run['last_loss']:.4f}",
        best,
        "" if run["tok_s"] is None else f"{run['tok_s']:,.0f}",
        "" if updated is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(min(max(updated, 0), 1 << 35))),
        *(str(run["settings"].get(name, "")) for name in shown),
    )
