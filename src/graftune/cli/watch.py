"""graftune watch: a page that shows runs while they train, and after.

train --watch serves the same page in a separate process, for as long as the training goes on: in the training process
it would compete for the interpreter. It shows the folder that contains the run, so that runs can be compared; it starts
with the run's first event, and ends with the training. If the training is killed, the page stays for a while to show
that.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from typing import Annotated, Any

from cyclopts import Parameter

from graftune.cli.settings import Count, Switch
from graftune.errors import GraftuneError
from graftune.observe.console import Console
from graftune.settings.values import check_range

PORT = 8472
STAYS = 60.0  # seconds after the training was killed


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
    check_range("--port", port, 0, 65535)

    from graftune.dashboard.runs import open_runs
    from graftune.dashboard.serving import Page, token_for

    runs = open_runs(folder)
    page = Page(runs, host=host, port=port, token=token_for(host, token, sys.stderr.isatty()), device=device)
    if not quiet:
        count = len(runs.all())
        found = "no run yet" if not count else "1 run" if count == 1 else f"{count} runs"
        Console().note(f"watching {runs.root} ({found}); Ctrl-C ends")
    print(page.address, file=sys.stderr, flush=True)
    page.run()
    return 0


class TrainingPage:
    """A callback of `train` that opens the page with the first event."""

    def __init__(self, folder: str, console: Console):
        self._folder, self._console = folder, console
        self.process: subprocess.Popen[str] | None = None

    def __call__(self, event: dict[str, Any]) -> None:
        if self.process is None:
            command = [sys.executable, "-m", "graftune.cli.watch", self._folder, str(PORT)]
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, start_new_session=True
            )
            threading.Thread(target=self._print_address, daemon=True).start()

    def _print_address(self) -> None:
        assert self.process is not None and self.process.stdout is not None
        address = self.process.stdout.readline().strip()
        if address and self._console.quiet:
            print(address, file=sys.stderr, flush=True)  # as `watch --quiet` does
        elif address:
            self._console.note(f"watch it at {address}")
        else:
            self._console.warn("the page could not be opened; the training goes on without it")

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()  # it has nothing to save
            self.process.wait()


def main(folder: str, port: str) -> int:
    """Runs in the process of the page of train --watch."""
    from graftune.dashboard.runs import open_runs
    from graftune.dashboard.serving import Page, token_for

    token = token_for("127.0.0.1", False, True)
    try:
        page = Page(open_runs(folder), host="127.0.0.1", port=int(port), token=token)
    except GraftuneError:  # the port is taken
        page = Page(open_runs(folder), host="127.0.0.1", port=0, token=token)
    print(page.address, flush=True)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    page.run()
    return 0


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    time.sleep(STAYS)
    signal.raise_signal(signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
