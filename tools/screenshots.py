"""Takes the pictures of the page that the documents show: docs/images/page-light.png, page-dark.png, page-phone.png.

python tools/screenshots.py          or `make screenshots`, which sets up what it needs

The runs are written by hand (tests/page/folders.py), with figures from a seed; times of day differ from one picture to
the next.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from playwright.sync_api import sync_playwright
from tests.page.conftest import chromium
from tests.page.folders import gallery

from graftune.dashboard.runs import Runs
from graftune.dashboard.serving import Page

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
PICTURES: dict[str, tuple[str, dict[str, Any]]] = {  # the view, and the settings of the browser
    "page-light": ("run/support-r16", {"viewport": {"width": 1280, "height": 840}}),
    "page-dark": ("compare/support-r16,support-r64,support-lr5e-4", {"viewport": {"width": 1280, "height": 799}}),
    "page-phone": ("run/support-r16", {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2}),
}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        page = Page(Runs(gallery(Path(folder) / "runs")), host="127.0.0.1", port=0)
        page.start()
        browser = driver.chromium.launch(executable_path=chromium(), args=["--no-sandbox", "--disable-gpu"])
        for name, (view, settings) in PICTURES.items():
            scheme = "dark" if name.endswith("dark") else "light"
            tab = browser.new_page(color_scheme=scheme, reduced_motion="reduce", **settings)
            tab.goto(f"{page.address}#/{view}")
            tab.wait_for_selector("main[aria-busy=false] canvas")
            tab.wait_for_timeout(500)  # charts are drawn once more when fonts and widths have settled
            tab.evaluate("document.getElementById('root').textContent = ''")  # a folder of this moment
            tab.screenshot(path=IMAGES / f"{name}.png")
            print(IMAGES / f"{name}.png")
        browser.close()
        page.close()


if __name__ == "__main__":
    main()
