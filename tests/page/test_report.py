"""report.html: one file, opened from the disk by a real Chromium."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from graftune.observe.report import document, report, write_report
from tests.page.folders import HOSTILE, RIGHT, RunFolder
from tests.page.test_page import pixels, summary


def test_the_report_draws_the_charts_of_the_page(browser, tmp_path: Path):
    name = "<img src=x onerror=alert(1)>"
    run = (
        RunFolder(tmp_path / name, steps=2000, metric="<b>right</b>")
        .start(command=HOSTILE)
        .train(2100)
        .resumed(2000, 3000)
    )
    run.train(3000, since=2000, every=500).answered(3000)
    run.emit({"event": "warning", "step": 3000, "text": "</script><script>window.hacked = 1</script>"})
    run.ended()
    write_report(run.folder)
    file = run.folder / "report.html"
    assert file.stat().st_size < 400_000, "the curves are downsampled"
    page, complaints = browser.new_page(), []
    page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(file.as_uri())
    page.wait_for_selector('figure[data-name="loss"] canvas')
    assert pixels(page, "loss", "--line-1") > 100 and pixels(page, "loss", "--line-2") > 50
    assert "at step 3000" in summary(page, "loss") and "resumed, extended to 3000 at step 2000" in summary(page, "loss")
    assert "Metric: <b>right</b>" in page.inner_text(".charts") and "at step 3000" in summary(
        page, f"metric {run.metric}"
    )
    assert page.inner_text(".facts").startswith("HuggingFaceTB/SmolLM2-135M-Instruct \u00b7 support.jsonl")
    assert "3,000 / 3,000" in page.inner_text(".figures") and RIGHT[2] in page.inner_text(".answer.reference >> nth=2")
    whole = page.eval_on_selector_all("pre", "all => all.map(each => each.scrollHeight <= each.clientHeight)")
    assert whole == [True, True] and "max_seq_len: 512" in page.inner_text("main"), "nothing is cut off"
    assert page.inner_text("h1") == name and "</script><script>window.hacked" in page.inner_text("main")
    assert page.evaluate("window.hacked") is None and page.query_selector("main img") is None
    assert page.eval_on_selector_all("[src], [href]", "all => all.length") == 0, "nothing to load"
    page.close()
    assert not complaints, "a policy that refuses the file's own script or style says so"


def test_spikes_survive_and_text_cannot_end_the_data(tmp_path: Path):
    run = RunFolder(tmp_path / "run", steps=5000).start().train(5000, every=1000)
    found = document(run.folder)
    curves = found["curves"]
    assert len(curves["steps"]) == 1000 and all(len(v) == 1000 for v in curves["values"].values())
    losses = [e["loss"] for e in map(json.loads, run.log.read_text().splitlines()) if e["event"] == "step"]
    drawn, means = curves["values"]["loss"], curves["values"]["loss_mean"]
    assert max(drawn) == float(f"{max(losses):.6g}") > 2 * max(means)
    assert [drawn[0], drawn[-1]] == [float(f"{each:.6g}") for each in (losses[0], losses[-1])], "no extreme of others"
    assert sum(means) / 1000 == pytest.approx(sum(losses) / 5000, rel=0.02)
    (run.folder / "config.yaml").write_text("</script>&<b>\u2028" + "x" * 30_000)
    (data,) = re.findall(r'<script type="application/json" id="run">(.*?)</script>', report(run.folder))
    read = json.loads(data)["config"]
    assert read == (run.folder / "config.yaml").read_text() and "<" not in data


def test_every_figure_of_a_step_is_in_it(tmp_path: Path):
    run = RunFolder(tmp_path / "run", steps=20).start()
    run.emit(*({**run.step(n), "margin": 0.5, "text": "no figure"} for n in range(1, 21)))
    curves = document(run.folder)["curves"]
    wanted = {"loss", "grad_norm", "lr", "tok_s", "skipped", "floor_share", "margin"}
    assert set(curves["names"]) == wanted == set(curves["values"]) and curves["values"]["margin"] == [0.5] * 20
