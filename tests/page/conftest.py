"""One browser for all tests of the page, and a server of the page for each folder of runs."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "chrome")
# What a test has to wait for at most; the cores may be busy with other tests.
PATIENCE = 20_000


def chromium() -> str | None:
    return os.environ.get("GRAFTUNE_CHROMIUM") or next((p for name in BROWSERS if (p := shutil.which(name))), None)


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    """Not for the whole session: while playwright is open its event loop runs, and other tests start their own."""
    path = chromium()
    if path is None:
        pytest.skip("no Chromium on this machine (apt-get install chromium), so the page was not opened")
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; `make page-test` installs it")
    with api.sync_playwright() as driver:
        # Without its sandbox, which needs rights that containers do not give: it opens nothing but our own pages.
        made = driver.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield made
        made.close()


class Tab:
    """A page of the browser, and all that it complained of."""

    def __init__(self, page: Any, address: str):
        self.page, self.address, self.complaints = page, address, []
        page.set_default_timeout(PATIENCE)
        page.on("console", self.hear)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("dialog", lambda dialog: (self.complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))

    def hear(self, said: Any) -> None:
        if said.type == "error":
            self.complaints.append(said.text)

    def open(self, view: str = "") -> Any:
        """Show a view, `run/NAME/data` for example, and wait until it is there."""
        # Of the view that is left: where only the hash changes, its "not busy" would pass for the next one's.
        self.page.evaluate("document.querySelector('main')?.setAttribute('aria-busy', 'true')")
        self.page.goto(f"{self.address}#/{view}")
        self.page.wait_for_selector("main[aria-busy=false]")
        return self.page


@pytest.fixture(scope="package")
def serve() -> Iterator[Callable[..., str]]:
    """folder -> the address of a page that watches it, from a thread of this process."""
    from graftune.dashboard.runs import Runs
    from graftune.dashboard.serving import Page
    from graftune.dashboard.worker import Worker

    made: list[Page] = []

    def started(root: Path) -> str:
        page = Page(Runs(root), host="127.0.0.1", port=0)
        chat = page._server.config.app.state.server.chat  # type: ignore[union-attr]
        chat.worker = Worker("chat", (sys.executable, str(Path(__file__).with_name("fake_worker.py"))))
        threading.Thread(target=page.run, daemon=True).start()
        made.append(page)
        return page.address

    yield started
    for page in made:
        page._server.should_exit = True


@pytest.fixture
def tab(browser: Any, serve: Callable[..., str]) -> Iterator[Callable[..., Tab]]:
    """(folder, settings of the context) -> a tab on its page. In the end no tab may have complained of anything: a
    script that fails, a file that is missing, or something that the page's own security policy refused."""
    made: list[tuple[Any, Tab]] = []

    def opened(root: Path, **settings: Any) -> Tab:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **settings})
        made.append((context, Tab(context.new_page(), serve(root))))
        return made[-1][1]

    yield opened
    complaints = [text for _, each in made for text in each.complaints]
    for context, _ in made:
        context.close()
    assert not complaints
