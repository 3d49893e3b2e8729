"""Takes the pictures of the page that the documents show: docs/images/page-*.png.

python tools/screenshots.py          or `make screenshots`, which sets up what it needs

The runs are written by hand (tests/page/folders.py), with figures from a seed; times of day differ from one picture to
the next. No model is loaded for the chat box.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from playwright.sync_api import sync_playwright
from tests.page.conftest import chromium
from tests.page.folders import RunFolder, gallery

from graftune.dashboard.runs import Runs
from graftune.dashboard.serving import Page
from graftune.dashboard.worker import Worker

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
LENGTHS = (12, 500, 100_000)
PICTURES: dict[str, tuple[str, int, int, str]] = {  # the view, width and height, what is taken
    "page-light": ("run/support-r16", 1280, 840, ""),
    "page-dark": ("compare/support-r16,support-r64,support-lr5e-4", 1280, 799, ""),
    "page-phone": ("run/support-r16", 390, 844, ""),
    "page-list": ("", 1024, 560, ""),
    "page-chat": ("run/support-r64/chat", 390, 844, ""),
    **{f"page-{steps}-steps": (f"run/steps-{steps}", 900, 700, "figure[data-name=loss]") for steps in LENGTHS},
}
# Answers the chat box as graftune.cli.worker does.
WORKER = """
import json, sys
for line in sys.stdin:
    number = json.loads(line).get("number")  # None: stop
    base = "You can count the words of a text by hand, or use a program such as `wc`."
    code = "def words(text):\\n    return len(text.split())"
    tuned = f"Use `split`, which cuts at every blank:\\n```python\\n{code}\\n```\\n`words(\\"a b\\")` is 2."
    for who, text in (("base", base), ("tuned", tuned)):
        print(json.dumps({"number": number, "who": who, "text": text}), flush=True)
    print(json.dumps({"number": number, "end": True}), flush=True)
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        page = Page(Runs(runs(Path(folder) / "runs")), host="127.0.0.1", port=0)
        chat = page._server.config.app.state.server.chat  # type: ignore[union-attr]
        chat.worker = Worker("chat", (sys.executable, "-c", WORKER))
        threading.Thread(target=page.run, daemon=True).start()
        browser = driver.chromium.launch(executable_path=chromium(), args=["--no-sandbox", "--disable-gpu"])
        for name, (view, width, height, part) in PICTURES.items():
            settings: dict[str, Any] = {"viewport": {"width": width, "height": height}}
            settings |= {"color_scheme": "dark" if name.endswith(("dark", "list")) else "light"}
            tab = browser.new_page(reduced_motion="reduce", device_scale_factor=2 if width < 500 else 1, **settings)
            tab.goto(f"{page.address}#/{view}")
            tab.wait_for_selector("main[aria-busy=false]")
            if view.endswith("chat"):
                tab.fill("#message", "How do I count the words of a text in Python?")
                tab.keyboard.press("Enter")
                tab.wait_for_selector(".answer.tuned pre")
            tab.wait_for_timeout(500)  # charts are drawn once more when fonts and widths have settled
            tab.evaluate("document.getElementById('root').textContent = ''")  # a folder of this moment
            (tab.locator(part) if part else tab).screenshot(path=IMAGES / f"{name}.png")
            print(IMAGES / f"{name}.png")
        browser.close()
        page._server.should_exit = True


def runs(root: Path) -> Path:
    """The gallery, runs of three lengths, and so many others that there are twelve."""
    gallery(root)
    for steps in LENGTHS:
        RunFolder(root / f"steps-{steps}", steps=steps).start().train(steps, every=max(1, steps // 10)).ended()
    for number in range(4):
        settings = {"data": {"max_seq_len": 512 << number % 2}, "optim": {"schedule": ("cosine", "linear")[number % 2]}}
        run = RunFolder(root / f"sweep-{number}", seed=number, rank=8 << number, settings=settings).start()
        run.train(120 + 40 * number).ended()
    return root


if __name__ == "__main__":
    main()
