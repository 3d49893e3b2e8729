// The curves of one run, growing while it trains, with its memory and its warnings below.

import { Chart, Range, aligned, plotter } from "./chart.js";
import { button, el, fill } from "./dom.js";
import { count } from "./format.js";
import { shortcut } from "./keys.js";
import { memoryTable } from "./memory.js";
import { routingTable } from "./routing.js";
import { PANELS, clipMark, evalLine, isShown, linesOf, metricLine, metricPanels, panelsOf } from "./panels.js";
import { Curves, columnOf } from "./series.js";
import { USUAL, smoothLoss, spanOf } from "./smooth.js";

const SMOOTH = [0, 1, 2, 5, 10]; // percent of the run

export class CurvesView {
  constructor(root, run) {
    Object.assign(this, { root, run, range: new Range(), curves: new Curves(run.id), charts: new Map(), smooth: kept("smooth-percent", USUAL), span: 0, log: kept("log", 0) });
    this.curves.evals = [...(run.evals ?? [])].sort((a, b) => a.step - b.step);
    this.grid = el("div", { class: "charts" });
    this.memory = el("section", { class: "panel" });
    this.warnings = el("section", { class: "panel" });
    this.routing = el("section", { class: "panel", hidden: !run.routing });
    fill(root, this.toolbar(), this.grid, this.routing, el("div", { class: "columns" }, this.memory, this.warnings));
    for (const panel of PANELS) this.makeChart(panel);
    this.range.onChange(() => this.scheduleZoom());
    shortcut("l", "Log scale on and off", () => this.setLog(!this.log));
    shortcut("s", "More smoothing, then none", () => this.setSmooth(SMOOTH[(SMOOTH.findIndex((each) => each >= this.smooth) + 1) % SMOOTH.length]));
  }

  toolbar() {
    this.smoothInput = el("input", { type: "range", min: 0, max: 10, step: 0.5, "aria-label": "Smoothing of the training loss, in percent of the run", on: { input: () => this.setSmooth(Number(this.smoothInput.value)) } });
    this.smoothValue = el("output", { class: "figure" });
    this.logInput = el("input", { type: "checkbox", on: { change: () => this.setLog(this.logInput.checked) } });
    this.logInput.checked = Boolean(this.log);
    const zoom = [
      button("\u2212", () => this.range.zoom(1.6), { "aria-label": "Zoom out" }),
      button("+", () => this.range.zoom(0.6), { "aria-label": "Zoom in" }),
      button("\u2190", () => this.range.pan(-0.3), { "aria-label": "Pan to earlier steps" }),
      button("\u2192", () => this.range.pan(0.3), { "aria-label": "Pan to later steps" }),
      button("Whole run", () => this.range.all()),
    ];
    return el("div", { class: "toolbar" }, el("label", {}, "Smoothing ", this.smoothInput, this.smoothValue), el("label", {}, this.logInput, " Log scale"), el("span", { class: "group", role: "group", "aria-label": "Steps shown" }, zoom));
  }

  makeChart(panel) {
    const mark = panel.name === "grad_norm" ? clipMark(this.run.settings) : null;
    const chart = new Chart({ ...panel, lines: linesOf(panel, false), range: this.range, mark, marks: this.run.marks ?? [] });
    chart.element.classList.toggle("wide", Boolean(panel.wide));
    chart.element.dataset.name = panel.name;
    chart.log = Boolean(panel.canLog && this.log);
    chart.element.hidden = Boolean(panel.shownIf);
    this.charts.set(panel.name, chart);
    this.grid.append(chart.element);
  }

  async start() {
    await Promise.all([this.curves.load(), plotter()]);
    this.draw();
    this.drawBelow();
  }

  get offset() {
    return this.curves.overview.offset ?? null;
  }

  take(event) {
    if (event.event === "step") {
      if (!this.curves.append(event) || this.curves.crowded) return this.reload();
    } else if (event.event === "eval") this.curves.addEval(event);
    else if (event.event === "memory") this.run.memory = event;
    else if (event.event === "routing") this.run.routing = event;
    else if (event.event === "warning") (this.run.warnings ??= []).push(event);
    else if (event.event === "resume" || event.event === "run_start") return this.reload();
    else return;
    this.scheduleDraw(["memory", "routing", "warning"].includes(event.event));
  }

  reload() {
    this.reloading ??= setTimeout(async () => {
      await this.curves.load();
      this.reloading = null;
      this.draw();
    }, 500);
  }

  scheduleDraw(below) {
    this.below ||= below;
    this.timer ??= setTimeout(() => {
      this.timer = null;
      this.draw();
      if (this.below) this.drawBelow();
      this.below = false;
    }, 150);
  }

  scheduleZoom() {
    this.draw();
    clearTimeout(this.zooming);
    this.zooming = setTimeout(async () => {
      if (await this.curves.zoom(this.range.shown)) this.draw();
    }, 120);
  }

  draw() {
    const part = this.curves.part(this.range.shown);
    if (this.part === part && this.drawnSteps === part.steps.length && this.drawnEvals === this.curves.evals && !this.dirty) return; // panning moves the same data
    Object.assign(this, { part, drawnSteps: part.steps.length, drawnEvals: this.curves.evals, dirty: false });
    this.range.whole = [this.curves.first, Math.max(this.curves.last, this.curves.first + 1)];
    this.fitSmooth();
    for (const panel of panelsOf(this.curves.names)) {
      if (!this.charts.has(panel.name)) this.makeChart(panel);
      const chart = this.charts.get(panel.name);
      const line = { steps: part.steps, values: columnOf(part, panel.name) };
      chart.element.hidden = !isShown(panel, columnOf(this.curves.overview, panel.name));
      if (chart.element.hidden) continue;
      const latest = [this.curves.latest(panel.name)];
      if (panel.name === "loss") chart.set(aligned(this.lossLines(line, part)), { latest: [...latest, ...(this.span ? [null] : []), this.curves.evals.at(-1)?.loss] });
      else chart.set(aligned([line]), { latest });
    }
    for (const panel of metricPanels(this.curves.evals)) {
      if (!this.charts.has(panel.name)) this.makeChart(panel);
      const line = metricLine(this.curves.evals, panel.metric);
      this.charts.get(panel.name).set(aligned([line]), { latest: [line.values.at(-1)] });
    }
  }

  lossLines(line, part) {
    const smooth = this.span ? [{ steps: line.steps, values: smoothLoss(part, this.span) }] : [];
    return [line, ...smooth, evalLine(this.curves.evals)];
  }

  // The span grows with the run.
  fitSmooth() {
    const span = spanOf(this.curves.last, this.smooth);
    if (span > 0 !== this.span > 0) this.charts.get("loss").setLines(linesOf(PANELS[0], span > 0));
    this.span = span;
    this.smoothInput.value = this.smooth;
    this.smoothInput.disabled = !spanOf(this.curves.last, 100);
    this.smoothValue.textContent = span ? `over ${count(span)} steps` : this.smoothInput.disabled ? "none below 50 steps" : "none";
  }

  setSmooth(value) {
    this.smooth = value;
    keep("smooth-percent", value);
    this.dirty = true;
    if (this.part) this.draw();
  }

  setLog(log) {
    this.log = log ? 1 : 0;
    keep("log", this.log);
    this.logInput.checked = Boolean(log);
    for (const panel of PANELS) if (panel.canLog) this.charts.get(panel.name).setLog(Boolean(log));
  }

  drawBelow() {
    for (const chart of this.charts.values()) chart.setMarks(this.run.marks ?? []);
    fill(this.memory, el("h2", {}, "Memory"), memoryTable(this.run.plan, this.run.memory, this.run.end));
    this.routing.hidden = !this.run.routing;
    if (this.run.routing) fill(this.routing, el("h2", {}, "Experts"), routingTable(this.run.routing));
    const warnings = this.run.warnings ?? [];
    const shown = warnings.slice(-50).reverse();
    const lines = shown.map((warning) => el("li", {}, typeof warning === "string" ? warning : warning.text ?? ""));
    const more = warnings.length > shown.length ? [el("p", { class: "dim" }, `The last ${shown.length} of ${count(warnings.length)}.`)] : [];
    fill(this.warnings, el("h2", {}, "Warnings"), warnings.length ? [more, el("ul", { class: "lines" }, lines)] : el("p", { class: "dim" }, "None."));
  }

  close() {
    for (const chart of this.charts.values()) chart.destroy();
    for (const timer of [this.timer, this.zooming, this.reloading]) clearTimeout(timer);
  }
}

function kept(name, usual) {
  try {
    return Number(localStorage.getItem(`graftune-${name}`) ?? usual);
  } catch {
    return usual; // storage is refused to this page
  }
}

function keep(name, value) {
  try {
    localStorage.setItem(`graftune-${name}`, value);
  } catch {
    // As above.
  }
}
