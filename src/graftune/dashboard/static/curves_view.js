// The curves of one run, growing while it trains, with its memory and its warnings below.

import { Chart, Range, aligned, plotter } from "./chart.js";
import { button, el, fill, setText } from "./dom.js";
import { count } from "./format.js";
import { shortcut } from "./keys.js";
import { memoryTable } from "./memory.js";
import { NAMES, PANELS, clipMark, evalLine, linesOf } from "./panels.js";
import { Curves } from "./series.js";
import { smoothed } from "./smooth.js";

const SMOOTH = [0, 0.6, 0.9, 0.97, 0.99];

export class CurvesView {
  constructor(root, run) {
    Object.assign(this, { root, run, range: new Range(), curves: new Curves(run.id, NAMES), charts: new Map(), smooth: kept("smooth", 0.9), log: kept("log", 0) });
    this.curves.evals = [...(run.evals ?? [])].sort((a, b) => a.step - b.step);
    this.grid = el("div", { class: "charts" });
    this.memory = el("section", { class: "panel" });
    this.warnings = el("section", { class: "panel" });
    fill(root, this.toolbar(), this.grid, el("div", { class: "columns" }, this.memory, this.warnings));
    for (const panel of PANELS) this.makeChart(panel);
    this.range.onChange(() => this.scheduleZoom());
    shortcut("l", "Log scale on and off", () => this.setLog(!this.log));
    shortcut("s", "More smoothing, then none", () => this.setSmooth(SMOOTH[(SMOOTH.findIndex((each) => each >= this.smooth) + 1) % SMOOTH.length]));
  }

  toolbar() {
    this.smoothInput = el("input", { type: "range", min: 0, max: 0.99, step: 0.01, "aria-label": "Smoothing of the training loss", on: { input: () => this.setSmooth(Number(this.smoothInput.value)) } });
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
    const chart = new Chart({ ...panel, lines: linesOf(panel, this.smooth > 0), range: this.range, mark });
    chart.element.classList.toggle("wide", Boolean(panel.wide));
    chart.element.dataset.name = panel.name;
    chart.log = Boolean(panel.canLog && this.log);
    chart.element.hidden = Boolean(panel.optional);
    this.charts.set(panel.name, chart);
    this.grid.append(chart.element);
  }

  async start() {
    this.setSmooth(this.smooth);
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
    else if (event.event === "warning") (this.run.warnings ??= []).push(event);
    else if (event.event === "resume" || event.event === "run_start") return this.reload();
    else return;
    this.scheduleDraw(event.event === "memory" || event.event === "warning");
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
    for (const panel of PANELS) {
      const chart = this.charts.get(panel.name);
      const line = { steps: part.steps, values: part.values[panel.name] };
      if (panel.optional) chart.element.hidden = !line.values.some((value) => value !== null);
      if (chart.element.hidden) continue;
      if (panel.name === "skipped") setText(chart.note, line.values.some((value) => value > 0) ? "" : "none");
      chart.set(aligned(panel.name === "loss" ? this.lossLines(line) : [line]));
    }
  }

  lossLines(line) {
    const soft = this.smooth > 0 ? [{ steps: line.steps, values: smoothed(line.steps, line.values, this.smooth) }] : [];
    return [line, ...soft, evalLine(this.curves.evals)];
  }

  setSmooth(value) {
    const turned = this.smooth > 0 !== value > 0;
    this.smooth = value;
    keep("smooth", value);
    this.smoothInput.value = value;
    this.smoothValue.textContent = value ? value.toFixed(2) : "none";
    if (turned) this.charts.get("loss").setLines(linesOf(PANELS[0], value > 0));
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
    fill(this.memory, el("h2", {}, "Memory"), memoryTable(this.run.plan, this.run.memory, this.run.end));
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
