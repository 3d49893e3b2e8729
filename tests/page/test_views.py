"""What the page shows of data and answers, whatever they hold; and every view on a phone, for every reader."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from graftune.observe.page_files import asset
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
    assert page.inner_text(".example h2 >> nth=0").startswith("Row 1 "), "as on the terminal"
    page.keyboard.press("]")
    page.wait_for_selector(".example[data-index='20']")
    assert shown() == expected(examples[20:40])
    page.keyboard.press("/")
    page.keyboard.type("door. Order 7731. 43")
    page.wait_for_selector(".example[data-index='43']")
    assert shown() == expected([examples[43]]) and "1 examples" in page.inner_text(".toolbar")


def test_the_answers_of_a_pair_stand_side_by_side(tab, tmp_path: Path):
    run = RunFolder(tmp_path / "run").start().preview([chat_example("Ask", text) for text in ("yes", "no", "well")])
    path = run.folder / "preview.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line, side in zip(lines, ("chosen", "rejected", "chosen"), strict=True):
        line |= {"side": side, "group": 0 if line["index"] < 2 else 1}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = tab(tmp_path).open("run/run/data")
    page.wait_for_selector(".pair")
    boxes = [page.locator(".example").nth(number).bounding_box() for number in range(3)]
    assert boxes[0]["y"] == boxes[1]["y"] < boxes[2]["y"] and boxes[0]["x"] < boxes[1]["x"]
    assert page.locator(".example .tag").all_inner_texts() == ["chosen", "rejected", "chosen"]


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


def test_twelve_runs_show_their_base_at_1024_pixels(tab, tmp_path: Path):
    """Settings that differ take the width that is left; figures of a row are on one line."""
    for number in range(12):
        settings = {"data": {"max_seq_len": 512 + number}, "optim": {"clip": 1.0 + number, "schedule": f"s{number}"}}
        run = RunFolder(tmp_path / f"customer-support-{number}", rank=8 + number, seed=number, settings=settings)
        run.start().train(2).ended()
    opened = tab(tmp_path, viewport={"width": 1024, "height": 800})
    page = opened.open()
    edge = "(name) => document.querySelector(`td[data-key='${name}']`).getBoundingClientRect().right"
    assert all(page.evaluate(edge, name) <= 1024 for name in ("base", "data", "steps", "last_loss", "setting rank"))
    assert page.inner_text("td[data-key=base] >> nth=0") == "SmolLM2-135M-Instruct"
    few = page.locator("th.setting").count()
    assert 2 <= few < 6 and f"{6 - few} more settings differ" in page.inner_text(".summary")
    tops = """() => ["steps", "last_loss"].map(key => {
      const range = document.createRange();
      range.selectNodeContents(document.querySelector(`td[data-key='${key}']`));
      return range.getClientRects()[0].top; })"""
    steps, loss = page.evaluate(tops)
    assert abs(steps - loss) < 0.6
    page.set_viewport_size({"width": 1900, "height": 800})
    page.wait_for_function("few => document.querySelectorAll('th.setting').length > few", arg=few)
    place = "() => [...document.querySelectorAll('.tabs a')].map(tab => tab.getBoundingClientRect().x)"
    places = [opened.open(f"run/customer-support-1/{part}").evaluate(place) for part in ("curves", "command")]
    assert places[0] == places[1], "tabs stay where they are"


def test_what_is_missing_comes_with_a_command(tab, tmp_path: Path):
    RunFolder(tmp_path / "one run").start().train(3)
    opened = tab(tmp_path)
    folder = f"'{tmp_path}/one run'"
    for part, command in (
        ("profile", f"graftune profile {folder}"),
        ("samples", f"graftune chat {folder} --compare"),
        ("curves", f"graftune train --resume {folder}"),
    ):
        page = opened.open(f"run/one%20run/{part}")
        assert command in page.eval_on_selector_all(".command code", "all => all.map(each => each.textContent)")
        assert "`" not in page.inner_text("main")
    assert not page.is_visible("figure[data-name=skipped]"), "no update was skipped"
    opened.complaints[:] = [each for each in opened.complaints if "404" not in each]
    (tmp_path / "none").mkdir()
    page = tab(tmp_path / "none").open()
    assert page.inner_text(".command code") == f"graftune train --out {tmp_path}/none/first"


def evaluated(page, file: str, call: str):
    """What a function of a module without imports returns."""
    source = asset(file).replace("export ", "")
    return page.evaluate(f"() => {{ {source}; return {call}; }}")


def test_smoothing_and_ticks(browser):
    page = browser.new_page()
    soft = (
        "smoothed([...Array(100).keys()], [...Array(100).keys()].map(at => at < 50 ? 2 : 0.001), spanOf(100, 2)).at(-1)"
    )
    assert evaluated(page, "smooth.js", soft) == pytest.approx(0.001, rel=1e-6)
    assert evaluated(page, "smooth.js", "smoothed([1, 2, 9], [3, null, 3], 40)") == [
        pytest.approx(3),
        None,
        pytest.approx(3),
    ]
    assert evaluated(page, "smooth.js", "[spanOf(49, 10), spanOf(50, 1), spanOf(500, 2), spanOf(1e5, 2)]") == [
        0,
        0,
        10,
        2000,
    ]
    for ticks, shown in (
        ("[0, 0.0004, 0.0008, 0.0012]", ["0", "0.0004", "0.0008", "0.0012"]),
        ("[0, 0.0002, 0.0008, 0.001]", ["0", "0.0002", "0.0008", "0.0010"]),
        ("[0, 0.00005, 0.0001]", ["0", "0.5e-4", "1.0e-4"]),
        ("[20.8, 21, 21.25]", ["20.80", "21.00", "21.25"]),
        ("[0.0001, null, 0.01, 1], true", ["1e-4", "", "1e-2", "1e0"]),
        ("[0.001, 0.1, 10], true", ["0.001", "0.1", "10"]),
    ):
        assert evaluated(page, "format.js", f"axisTicks({ticks})") == shown
    page.close()


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
