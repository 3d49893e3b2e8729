"""What the page shows of data and answers, whatever they hold; and every view on a phone, for every reader."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.page.folders import HOSTILE, PROMPTS, RIGHT, RunFolder, chat_example, gallery

PARTS = ("curves", "data", "samples", "profile", "command", "chat")


def test_the_mask_marks_exactly_the_trained_tokens(tab, tmp_path: Path):
    examples = [chat_example(f"{prompt} {i}", RIGHT[i % 3]) for i, prompt in enumerate(PROMPTS * 15)]
    tokens, trained = examples[0]
    examples[0] = ([*tokens, "a", "b", "c"], [*trained, 1, 0, 1])  # not only at the end
    RunFolder(tmp_path / "run").start().preview(examples)
    opened = tab(tmp_path)
    page = opened.open("run/run/data")
    page.wait_for_selector(".example")

    def shown() -> list[list[list]]:
        return page.eval_on_selector_all(
            ".example",
            """all => all.map(each => [...each.querySelectorAll(".token")].map(token => [
                 token.textContent.replace("⏎", ""),
                 getComputedStyle(token.parentElement).backgroundColor === "rgb(211, 235, 214)" ? 1 : 0]))""",
        )

    def expected(part):
        return [[[token, on] for token, on in zip(*example, strict=True)] for example in part]

    assert shown() == expected(examples[:20])
    page.keyboard.press("]")
    page.wait_for_selector(".example[data-index='20']")
    assert shown() == expected(examples[20:40])
    page.keyboard.press("/")
    page.keyboard.type("door. Order 7731. 43")
    page.wait_for_selector(".example[data-index='43']")
    assert shown() == expected([examples[43]]) and "1 examples" in page.inner_text(".toolbar")


def test_hostile_text_is_shown_as_text(tab, tmp_path: Path):
    name = "<img src=x onerror=alert(1)>&amp;\u001b[31m"
    run = RunFolder(tmp_path / name, settings={"data": {"data": HOSTILE}}).start(command=HOSTILE)
    run.train(5).preview([([HOSTILE, "</p><script>alert(2)</script>"], [0, 1])]).checkpoints(5)
    run.emit({"event": "sample", "step": 0, "prompts": [HOSTILE], "answers": [HOSTILE]})
    run.emit({"event": "sample", "step": 5, "answers": ["<script>alert(3)</script>"]})
    run.emit({"event": "warning", "step": 5, "text": HOSTILE})
    RunFolder(tmp_path / "plain").start().train(5)
    opened = tab(tmp_path)
    page = opened.open()
    page.check("tbody tr:has-text('onerror') input")
    assert "<img src=x onerror=alert(1)>&amp;␛[31m" in page.inner_text("tbody")
    page.click("tbody tr:has-text('onerror') a")
    page.wait_for_selector("figure canvas")
    address = page.evaluate("location.hash").removeprefix("#/")
    seen = page.inner_text("main")
    for part in ("data", "samples", "command", "chat", "curves"):
        opened.open(f"{address}/{part}")
        page.wait_for_timeout(100)
        seen += page.inner_text("main")
        assert page.eval_on_selector_all("main img, main script", "all => all.length") == 0
        assert "bold" not in page.eval_on_selector_all("main b", "all => all.map(each => each.textContent)")
    assert page.evaluate("window.hacked") is None
    assert seen.count('<img src=x onerror="window.hacked=1"><b>bold</b>␛[31mred␛[0m\u2039U+202E\u203aevil') >= 5
    assert "<script>alert(3)</script>" in seen and "</p><script>alert(2)</script>" in seen
    opened.open("compare")
    assert "onerror" in page.inner_text(".legend")


NAMELESS = """() => [...document.querySelectorAll("button, input, select, textarea, a")].filter(each => {
  const name = each.ariaLabel || each.textContent.trim() || each.labels?.[0]?.textContent.trim() || each.title;
  return each.checkVisibility() && !name;
}).map(each => each.outerHTML)"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_view_on_a_phone(tab, tmp_path: Path, scheme: str):
    """No view is wider than the screen, every control has a name, and landmarks and headings are there."""
    opened = tab(gallery(tmp_path), viewport={"width": 390, "height": 844}, color_scheme=scheme)
    views = ["", "compare/support-r16,support-r64", *(f"run/support-r16/{part}" for part in PARTS)]
    for view in views if scheme == "light" else views[:3]:
        page = opened.open(view)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, view
        assert page.evaluate(NAMELESS) == [], view
        assert page.eval_on_selector_all("h1", "all => all.length") == 1, view
    assert page.eval_on_selector_all("header, main, nav[aria-label]", "all => all.length") >= 3
    background = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    for _ in range(2 if scheme == "light" else 1):  # system, light, dark
        page.keyboard.press("t")
    assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") != background
    page.keyboard.press("?")
    assert "Log scale" in page.inner_text("dialog") or "All runs" in page.inner_text("dialog")
