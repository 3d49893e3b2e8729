"""graftune watch: a page that shows runs while they train, and after."""

from __future__ import annotations

import sys
from typing import Annotated

from cyclopts import Parameter

from graftune.cli.settings import Count, Switch, in_range
from graftune.observe.console import Console

PORT = 8472


def watch(
    folder: Annotated[str, Parameter(show_default=False)] = "runs",
    /,
    *,
    host: str = "127.0.0.1",
    port: Count = PORT,
    token: Switch = False,
    device: str = "auto",
    quiet: Switch = False,
) -> int:
    """Serve a page that shows FOLDER: one run, or all runs below a folder. Ctrl-C ends it; runs are never touched.

    Parameters
    ----------
    folder
        Run folder, or a folder of runs [default: runs].
    host
        Address to listen on. Any other than this machine's own needs a token, which is printed with the address.
    port
        Port to listen on; 0: any that is free.
    token
        Ask for a token on this machine, too.
    device
        Where the chat box loads a model: cpu, cuda, ...; auto: as chat does, but on the CPU while a watched run trains.
    quiet
        No notes but the address.
    """
    in_range("--port", port, at_least=0, at_most=65535)

    from graftune.dashboard.runs import open_runs
    from graftune.dashboard.serving import Page, token_for

    runs = open_runs(folder)
    page = Page(runs, host=host, port=port, token=token_for(host, token, sys.stderr.isatty), device=device)
    if not quiet:
        count = len(runs.all())
        found = "no run yet" if not count else "1 run" if count == 1 else f"{count} runs"
        Console().note(f"watching {runs.root} ({found}); Ctrl-C ends")
    print(page.address, file=sys.stderr, flush=True)
    page.run()
    return 0
