// report.html: one run in one file, with the charts of the page. observe/report.py joins this module with those that it
// imports; there is no server behind it, and all data is in the file.

import { Chart, Range, aligned } from "./chart.js";
import { withCode } from "./code_text.js";
import { copyButton, el, fill } from "./dom.js";
import { count, date, duration, loss } from "./format.js";
import { memoryTable } from "./memory.js";
import { routingTable } from "./routing.js";
import { clipMark, evalLine, isShown, linesOf, metricLine, metricPanels, panelsOf } from "./panels.js";
import { USUAL, smoothLoss, spanOf } from "./smooth.js";

const run = JSON.parse(document.getElementById("run").textContent);
const span = spanOf(run.done, USUAL);

function headOf() {
  const after = run.evals.filter((each) => each.loss !== null && each.step > 0);
  const best = after.reduce((least, each) => (least === null || each.loss < least.loss ? each : least), null);
  const last = run.curves.values.loss?.[run.curves.steps.length - 1];
  const figures = [
    ["State", run.stopped ?? "not ended"],
    ["Steps", `${count(run.done)} / ${count(run.steps)}`],
    ["Last loss", loss(last)],
    ["Best validation", best ? loss(best.loss) : loss(null), best ? `at step ${count(best.step)}` : ""],
    ["Time", duration(run.worked_s ?? run.ended - run.started), `began ${date(run.started)}`],
  ];
  const shown = figures.map(([name, value, more]) => el("div", {}, el("dt", {}, name), el("dd", {}, value, more ? el("small", {}, more) : null)));
  return [el("h1", {}, run.name), el("p", { class: "dim facts" }, [run.base, run.data, run.device].filter(Boolean).join(" \u00b7 ")), el("dl", { class: "figures" }, shown)];
}

function chartOf(panel, range) {
  const values = run.curves.values[panel.name];
  if (!panel.metric && (!values || !isShown(panel, values))) return null;
  const mark = panel.name === "grad_norm" ? clipMark({ clip: run.clip }) : null;
  const chart = new Chart({ ...panel, lines: linesOf(panel, span > 0), range, mark, marks: run.marks });
  chart.element.classList.toggle("wide", Boolean(panel.wide));
  chart.element.dataset.name = panel.name;
  if (panel.metric) return [chart, panel, [metricLine(run.evals, panel.metric)]];
  const line = { steps: run.curves.steps, values };
  const smooth = span ? [{ steps: line.steps, values: smoothLoss(run.curves, span) }] : [];
  return [chart, panel, panel.name === "loss" ? [line, ...smooth, evalLine(run.evals)] : [line]];
}

function section(title, ...content) {
  return el("section", { class: "panel" }, el("h2", {}, title), content);
}

function samplesOf() {
  const side = (who, text) => el("div", { class: `answer ${who}` }, el("h3", {}, who), el("div", { class: "text" }, withCode(text)));
  const one = (sample) => el("article", { class: "sample" }, el("div", { class: "prompt text" }, withCode(sample.prompt)), el("div", { class: "sides" }, side("base", sample.base), side("tuned", sample.tuned), sample.reference ? side("reference", sample.reference) : null));
  return run.samples.length ? section("Sample answers", el("div", { class: "samples" }, run.samples.map(one))) : null;
}

function show() {
  const range = new Range();
  const steps = [...run.curves.steps, ...run.evals.map((each) => each.step)];
  range.whole = [Math.min(0, ...steps), Math.max(1, ...steps)];
  const charts = [...panelsOf(run.curves.names), ...metricPanels(run.evals)].map((panel) => chartOf(panel, range)).filter(Boolean);
  const log = el("input", { type: "checkbox", on: { change: () => charts.forEach(([chart, panel]) => panel.canLog && chart.setLog(log.checked)) } });
  const thinned = run.curves.thinned ? el("p", { class: "dim" }, "The curves are downsampled: each point shows the lowest or the highest value of several steps.") : null;
  const warnings = run.warnings.length ? section("Warnings", run.warned > run.warnings.length ? el("p", { class: "dim" }, `The last ${run.warnings.length} of ${count(run.warned)}.`) : null, el("ul", { class: "lines" }, run.warnings.map((text) => el("li", {}, text)))) : null;
  fill(
    document.getElementById("view"),
    headOf(),
    el("div", { class: "toolbar" }, el("label", {}, log, " Log scale"), thinned),
    el("div", { class: "charts" }, charts.map(([chart]) => chart.element)),
    run.routing ? section("Experts", routingTable(run.routing)) : null,
    el("div", { class: "columns" }, section("Memory", memoryTable(run.plan, run.memory, run.end)), warnings),
    el("div", { class: "columns one" }, samplesOf()),
    el("div", { class: "columns one" }, run.command ? section("Command", copyButton("Copy", () => run.command), el("pre", { tabindex: "0" }, run.command)) : null, section("Configuration", el("pre", {}, run.config))),
  );
  for (const [chart, , lines] of charts) chart.set(aligned(lines)); // after they are in the page, where they have a width
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => dispatchEvent(new Event("theme")));
}

show();
