"""The page in a real Chromium, over run folders that are written by hand."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.page.folders import BASE, RIGHT, RunFolder, gallery

# How many pixels of a chart's canvas have a line's colour, all but its blurred edges.
PIXELS = """(figure, name) => {
  const canvas = figure.querySelector("canvas");
  const probe = document.createElement("span");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const wanted = getComputedStyle(probe).color.match(/\\d+/g).map(Number);
  probe.remove();
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  let found = 0;
  for (let at = 0; at < data.length; at += 4)
    if (data[at + 3] > 200 && wanted.every((part, i) => Math.abs(part - data[at + i]) < 12)) found++;
  return found;
}"""


def pixels(page, chart: str, colour: str) -> int:
    return page.eval_on_selector(f'figure[data-name="{chart}"]', f"figure => ({PIXELS})(figure, '{colour}')")


def summary(page, chart: str) -> str:
    """What a screen reader is told of a chart."""
    return page.get_attribute(f'figure[data-name="{chart}"] .plot', "aria-label")


def wait_for_step(page, chart: str, step: int) -> None:
    page.wait_for_function(
        "([chart, text]) => document.querySelector(`figure[data-name='${chart}'] .plot`).ariaLabel.includes(text)",
        arg=[chart, f"at step {step}"],
    )


def test_curves_grow_while_a_run_trains(tab, tmp_path: Path):
    run = RunFolder(tmp_path / "live").start().train(40).held()
    page = tab(tmp_path).open("run/live")
    wait_for_step(page, "loss", 40)
    before = page.eval_on_selector('figure[data-name="loss"] canvas', "canvas => canvas.toDataURL()")
    assert page.inner_text(".state") == "training"
    run.train(90, since=40)
    wait_for_step(page, "loss", 90)
    wait_for_step(page, "grad_norm", 90)
    assert re.search(r"validation from [\d.]+ at step 0 to [\d.]+ at step 50", summary(page, "loss"))
    assert pixels(page, "loss", "--line-2") > 200, "a line joins the two evaluations"
    assert page.eval_on_selector('figure[data-name="loss"] canvas', "canvas => canvas.toDataURL()") != before
    page.wait_for_selector(".figures:has-text('90 / 400')")
    run.ended()
    page.wait_for_selector(".state[data-state=finished]")
    assert "finished" in page.inner_text("#announcer"), "screen readers are told"


def test_every_figure_of_a_step_has_a_chart(tab, tmp_path: Path):
    """No list names those of a loss or of rewards; one that begins later gets its chart while the page is open."""
    run = RunFolder(tmp_path / "live", steps=40).start()
    run.emit(*({**run.step(n), "margin": 0.1 * n, "constructor": 1.0, "tokens": 4096} for n in range(1, 11)))
    page = tab(tmp_path).open("run/live")
    page.wait_for_selector("figure[data-name=margin]")
    wait_for_step(page, "margin", 10)
    assert "Margin" in page.inner_text("figure[data-name=margin]") and page.query_selector("[data-name=tokens]") is None
    run.held().emit(*({**run.step(n), "margin": 1.0, "reward_exact": 0.5, "toString": 1.0} for n in range(11, 21)))
    page.wait_for_selector("figure[data-name=reward_exact]")
    wait_for_step(page, "reward_exact", 20)
    assert "Reward exact" in page.inner_text("figure[data-name=reward_exact]")
    wait_for_step(page, "margin", 20)


def test_one_run_shows_its_settings_and_figures(tab, tmp_path: Path):
    RunFolder(tmp_path / "done").start().train(400).answered(200, 400).checkpoints(400).profiled().ended()
    opened = tab(tmp_path)
    asked: list[str] = []
    opened.page.on("request", lambda request: asked.append(urlsplit(request.url).path))
    page = opened.open("run/done")
    page.wait_for_selector("figure[data-name=grad_norm] .chart-note:text-is('clipped at 1')")
    data = sorted(path for path in asked if path.startswith("/api/"))
    assert data == ["/api/runs/done", "/api/runs/done/events", "/api/runs/done/series"], "what is asked early is used"
    files = set(asked) - set(data) - {"/static/icon.svg"}
    assert files == {"/", "/static/head.js", "/static/page.css", "/static/page.js", "/static/uPlot.js"}
    assert pixels(page, "grad_norm", "--ink") > 100, "the dashed line of the clip"
    assert "Measured peak" in page.inner_text(".memory") and "saved activations" in page.inner_text(".memory")
    assert "step 346: the gradient was not finite" in page.inner_text("main")
    page.click("text=Log scale")
    page.focus('figure[data-name="loss"] .plot')
    page.keyboard.press("+")
    page.click('figure[data-name="lr"] summary')
    first = """document.querySelector('figure[data-name="lr"] tbody td:first-child')"""
    page.wait_for_function(f"() => {first} && Number({first}.innerText) > 60")
    steps = page.eval_on_selector_all(
        'figure[data-name="lr"] tbody td:first-child', "cells => cells.map(cell => Number(cell.innerText))"
    )
    assert 60 < steps[0] < 100 and 300 < steps[-1] < 340, "the table holds what is shown after zooming in"
    opened.open("run/done/samples")
    shown = [page.inner_text(f".sample:first-child .{who} .text") for who in ("base", "tuned", "reference")]
    assert shown == [BASE[0], RIGHT[0], RIGHT[0]]
    page.keyboard.press("[")
    assert page.inner_text(".sample:first-child .tuned .text") == RIGHT[0][: len(RIGHT[0]) // 2]
    opened.open("run/done/profile")
    page.click(".slice:has-text('backward')")
    assert page.inner_text(".crumbs").startswith("step \u203a backward")
    opened.open("run/done/command")
    assert "graftune train HuggingFaceTB/SmolLM2-135M-Instruct" in page.inner_text("pre >> nth=0")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.click("text=Copy >> nth=0")
    page.wait_for_selector("text=Copied")
    assert page.evaluate("navigator.clipboard.readText()").startswith("graftune train ")


def readout(page, chart: str) -> str:
    return page.inner_text(f"figure[data-name='{chart}'] .readout").replace("\n", " ")


@pytest.mark.parametrize(
    ("steps", "span"), [(12, "none below 50 steps"), (500, "over 10 steps"), (20_000, "over 400 steps")]
)
def test_charts_show_the_true_last_value(tab, tmp_path: Path, steps: int, span: str):
    """Smoothing and downsampling change lines and no figure, in the comparison and zoomed in, too."""
    run = RunFolder(tmp_path / "run", steps=steps).start().train(steps - 3, every=steps)
    last = [run.step(steps - left) | {"loss": loss} for left, loss in ((2, 9), (1, 1e-5), (0, 6.25e-4))]
    run.emit(*last, {"event": "eval", "step": steps, "loss": 0.25})
    run.ended()
    opened = tab(tmp_path)
    page = opened.open("run/run")
    page.wait_for_selector("figure[data-name=loss] canvas")
    assert page.inner_text(".toolbar output") == span
    assert readout(page, "loss") == "latest training 0.00063 validation 0.2500" and "0.00063" in page.inner_text(
        ".figures"
    )
    assert f"to 0.00063 at step {steps}" in summary(page, "loss")
    assert (pixels(page, "loss", "--raw") > 50) == (steps > 12), "the single steps, behind what is smoothed"
    if steps > 500:
        page.focus('figure[data-name="loss"] .plot')
        for _ in range(8):
            page.keyboard.press("+")
        wait_for_step(page, "loss", 10_000 + 504)  # a finer part has arrived, which ends there
        assert readout(page, "loss") == "latest training 0.00063 validation 0.2500"
    opened.open("compare/run")
    page.wait_for_selector("figure[data-name=loss] canvas")
    assert readout(page, "loss") == "latest 0.00063" and f"to 0.00063 at step {steps}" in summary(page, "loss")


def test_the_time_left_runs_down(tab, tmp_path: Path):
    """Within a step of a minute it falls until the next step is due; a resume and its length are marked."""
    run = RunFolder(tmp_path / "slow", steps=10).start().held()
    run.time = time.time() - 200
    run.emit({"event": "resume", "step": 0})
    for number in (1, 2, 3):
        run.time += 60
        run.emit({"event": "step", "step": number, "loss": 1.0})
    opened = tab(tmp_path)
    opened.page.clock.install()
    page = opened.open("run/slow")
    left = []
    for _ in range(8):
        minutes, seconds = re.search(r"(\d+) min (\d+) s", page.inner_text(".figures div:has-text('Left')")).groups()
        left.append(60 * int(minutes) + int(seconds))
        page.clock.run_for(10_000)
    assert left == sorted(left, reverse=True) and 390 < left[0] <= 400 and left[-1] == 360
    run.resumed(2, 20)
    run.emit({"event": "step", "step": 3, "loss": 1.0})
    page.clock.run_for(2000)
    page.wait_for_selector(".figures:has-text('3 / 20')")
    page.clock.run_for(2000)
    page.wait_for_function(
        "() => document.querySelector('figure[data-name=loss] .plot').ariaLabel.includes('extended to 20 at step 2')"
    )


def test_two_runs_overlay(tab, tmp_path: Path):
    RunFolder(tmp_path / "a", seed=1).start().train(200).ended()
    live = RunFolder(tmp_path / "b", seed=2, lr=1e-3).start().train(120).held()
    page = tab(tmp_path).open()
    assert "2 runs" in page.inner_text(".summary")
    for name in ("a", "b"):
        page.check(f'[aria-label="Choose {name} for the comparison"]')
    page.keyboard.press("c")
    page.wait_for_selector('figure[data-name="loss"] canvas')
    for chart in ("loss", "lr"):
        assert pixels(page, chart, "--line-1") > 50 and pixels(page, chart, "--line-2") > 50
    rows = page.inner_text("table >> nth=-1")
    assert "lr\t2e-4\t0.001" in rows and "rank" not in rows, "settings that differ, and no others"
    live.train(150, since=120)
    wait_for_step(page, "loss", 150)
    page.uncheck(".legend li:first-child input")
    assert pixels(page, "lr", "--line-1") < 10 < pixels(page, "lr", "--line-2")


def test_the_list_sorts_and_filters(tab, tmp_path: Path):
    page = tab(gallery(tmp_path)).open()
    names = "cells => cells.map(cell => cell.innerText)"
    page.click("thead button:has-text('Best validation')")
    ordered = page.eval_on_selector_all("tbody th", names)
    assert ordered[0] == "support-lr5e-4" and ordered[-1] == "sweep/lr1e-3", "the best first"
    page.keyboard.press("/")
    page.keyboard.type("rank=16 stopped")
    page.wait_for_function("() => document.querySelectorAll('tbody tr').length === 1")
    assert page.eval_on_selector_all("tbody th", names) == ["sweep/lr1e-4"]
    page.keyboard.press("Enter")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_selector(".state[data-state=stopped]")
    page.wait_for_selector(".state-line:has-text('SIGTERM')")


def test_a_killed_run_is_shown_as_dead_within_15_seconds(tab, tmp_path: Path):
    with subprocess.Popen(["sleep", "600"]) as process:
        RunFolder(tmp_path / "killed").start().train(30).held(process.pid)
        page = tab(tmp_path).open("run/killed")
        assert page.inner_text(".state") == "training"
        process.kill()
        process.wait()
    since = time.monotonic()
    page.wait_for_selector(".state[data-state=died]", timeout=15_000)
    assert time.monotonic() - since < 15
    page.wait_for_selector(".state-line:has-text('--resume')")


def asked(page, text: str) -> None:
    page.fill("#message", text)
    page.keyboard.press("Enter")


def test_a_chat_answer_streams(tab, tmp_path: Path):
    """Base and tuned in parallel, over the checkpoint that is chosen, while another run trains."""
    run = RunFolder(tmp_path / "done").start().train(10).checkpoints(10).ended()
    RunFolder(tmp_path / "live").start().train(10).held()
    page = tab(tmp_path).open("run/done/chat")
    page.select_option("#checkpoint", "step-10")
    asked(page, "Hello")
    for who in ("base", "tuned"):
        page.wait_for_selector(f".answer.{who} .text:text-is('{who} of step-10')")
    assert page.is_enabled("button:text-is('Stop')"), "the answer goes on"
    (run.folder / "go").touch()
    page.wait_for_selector(".answer.tuned .text:text-is('tuned of step-10 was asked u <b>Hello</b>')")
    page.wait_for_selector("button:text-is('Send'):enabled")
    asked(page, "And?")
    page.wait_for_selector(".turn:nth-child(2) .answer.base .text:text-is('base of step-10 was asked uau <b>And?</b>')")
    assert page.inner_text(".turn:nth-child(1) .answer.base .text").endswith("<b>Hello</b>")


CODE = """Try:
```python
def f(x):
    return "<b>" + `x`
```
and `f(1)`."""


def test_a_chat_shows_code_and_its_end_on_a_phone(tab, tmp_path: Path):
    run = RunFolder(tmp_path / "done").start().train(10).checkpoints(10).ended()
    (run.folder / "go").touch()
    page = tab(tmp_path, viewport={"width": 390, "height": 844}).open("run/done/chat")
    page.click("text=Settings")
    page.fill("#system", "Be brief.")
    for number in (1, 2):
        page.fill("#message", CODE + "\n." * 12)
        page.keyboard.press("Enter")
        page.wait_for_selector(f".turn:nth-child({number}) .answer.tuned code:text-is('f(1)')")
        page.wait_for_selector("button:text-is('Send'):enabled")
    answer = page.locator(".turn:nth-child(2) .answer.tuned")
    assert "was asked suau <b>Try:" in answer.inner_text() and "```" not in answer.inner_text()
    assert answer.locator("pre").inner_text() == 'def f(x):\n    return "<b>" + `x`'
    faces = answer.locator("pre code, .text > code").evaluate_all("all => all.map(e => getComputedStyle(e).fontFamily)")
    assert len(faces) == 2 and all("monospace" in face for face in faces)
    end, form = answer.bounding_box(), page.locator(".ask").bounding_box()
    assert 0 < end["y"] + end["height"] <= form["y"] + 1 and form["y"] + form["height"] <= 844
