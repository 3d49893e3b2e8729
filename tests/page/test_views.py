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
    width = 390 if scheme == "light" else 320
    opened = tab(gallery(tmp_path), viewport={"width": width, "height": 844}, color_scheme=scheme)
    views = ["", "compare/support-r16,support-r64", *(f"run/support-r16/{part}" for part in PARTS)]
    for view in views if scheme == "light" else views[:3]:
        page = opened.open(view)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, view
        assert page.evaluate(NAMELESS) == [], view
        assert page.eval_on_selector_all("h1", "all => all.length") == 1, view
    assert page.eval_on_selector_all("header, main, nav[aria-label]", "all => all.length") >= 3
    background = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    for _ in range(2 if scheme == "light" else 1):  # system, light, dark
        page.keyboard.press("t")
    assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") != background
    page.keyboard.press("?")
    assert "Log scale" in page.inner_text("dialog") or "All runs" in page.inner_text("dialog")


def test_the_keyboard_keeps_its_place(tab, tmp_path: Path):
    """What is drawn anew has the focus that it had; a field that is left empty filters nothing."""
    opened = tab(gallery(tmp_path))
    page = opened.open()
    focused = "() => document.activeElement.textContent"
    page.focus("thead th[data-key=last_loss] button")
    for arrow in ("\u2191", "\u2193"):
        page.keyboard.press("Enter")
        assert page.evaluate(focused) == f"Loss{arrow}"
    rows = page.locator("tbody tr").count()
    page.keyboard.press("/")
    page.keyboard.type("r64")
    assert page.locator("tbody tr").count() < rows
    page.keyboard.press("Escape")
    assert page.locator("tbody tr").count() == rows and page.input_value("#filter") == ""
    page = opened.open("run/support-r16/profile")
    page.focus(".icicle ul ul button")
    slice_of = "() => document.activeElement.ariaLabel?.split(',')[0]"
    name = page.evaluate(slice_of)
    page.keyboard.press("Enter")
    assert name and page.evaluate(slice_of) == name
    opened.open("run/%E0%A4%A")  # no name at all
    assert "This cannot be shown" in page.inner_text("main")
    opened.complaints[:] = [each for each in opened.complaints if "404" not in each]


STREAMS = """() => {
  const Real = window.EventSource;
  window.streams = new Set();
  window.EventSource = class extends Real {
    constructor(...all) { super(...all); window.streams.add(this); }
    close() { super.close(); window.streams.delete(this); }
  };
}"""


def test_a_view_that_is_left_early_leaves_no_stream(tab, tmp_path: Path):
    """Browsers allow six connections to a server: with a few left open the page would wait for ever."""
    opened = tab(gallery(tmp_path))
    opened.page.add_init_script(f"({STREAMS})()")
    page = opened.open("run/support-r16/command")
    for view in ["", "compare/support-r16,support-r64"] * 4:
        page.evaluate(
            "([view, run]) => { location.hash = view; setTimeout(() => { location.hash = run; }, 1); }",
            [f"#/{view}", "#/run/support-r16/command"],
        )
        page.wait_for_timeout(30)
    page.wait_for_timeout(500)
    page.wait_for_selector("main[aria-busy=false]")
    assert page.evaluate("window.streams.size") <= 1


def test_the_chat_of_a_run_that_trains(tab, tmp_path: Path):
    """Its steps arrive while the chat is open, and its first checkpoint opens the chat."""
    run = RunFolder(tmp_path / "run").start().train(3).held()
    page = tab(tmp_path).open("run/run/chat")
    assert "no checkpoint yet" in page.inner_text("main") and not page.is_visible("#message")
    run.checkpoints(3)
    run.train(6, since=3)
    run.emit({"event": "phase", "phase": "training"})
    page.wait_for_selector("#message")
    assert "step-3" in page.inner_text("#checkpoint") and "no checkpoint yet" not in page.inner_text("main")
