"""train --watch: the page in a separate process, for as long as the training goes on.

In the training process it would compete for the interpreter. The page shows the folder that contains the run, so that
runs can be compared; it starts with the run's first event, and ends with the training. If the training is killed, the
page stays for a while to show that.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from graftune.cli.watch import PORT
from graftune.errors import GraftuneError
from graftune.observe.console import Console

STAYS = 60.0  # seconds after the training was killed


class TrainingPage:
    """A callback of `train` that opens the page with the first event."""

    def __init__(self, folder: str, console: Console):
        self._folder, self._console = folder, console
        self.process: subprocess.Popen[str] | None = None

    def __call__(self, event: dict[str, Any]) -> None:
        if self.process is None:
            command = [sys.executable, "-m", "graftune.cli.train_page", self._folder, str(PORT)]
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
    """Runs in the page's process."""
    from graftune.dashboard.runs import open_runs
    from graftune.dashboard.serving import Page, token_for

    token = token_for("127.0.0.1", False, lambda: True)
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
