// Several runs in the same charts, a colour each, with the settings in which they differ below.

import { get, listen } from "./api.js";
import { Chart, Range, aligned, lineColour, plotter } from "./chart.js";
import { button, el, fill, setText } from "./dom.js";
import { count, loss, setting } from "./format.js";
import { shortcut } from "./keys.js";
import { PANELS, evalLine } from "./panels.js";
import { Curves } from "./series.js";
import { USUAL, smoothLoss, spanOf } from "./smooth.js";
import { stateMark } from "./state.js";

const OVERLAID = [
  PANELS[0],
  { name: "eval", title: "Validation loss", format: PANELS[0].format, canLog: true },
  ...PANELS.filter((panel) => ["grad_norm", "lr", "tok_s"].includes(panel.name)),
];
const COMPARED = ["loss", "grad_norm", "lr", "tok_s"];
const MOST = 8; // distinct colours

export class CompareView {
  constructor(root, app) {
    Object.assign(this, { root, app, range: new Range(), smooth: USUAL, entries: [], charts: new Map(), waiting: new Set() });
    this.smoothInput = el("input", { type: "range", min: 0, max: 10, step: 0.5, value: this.smooth, on: { input: () => this.setSmooth() } });
    this.smoothValue = el("output", { class: "figure" });
    this.logInput = el("input", { type: "checkbox", on: { change: () => this.setLog() } });
    this.legend = el("ul", { class: "legend", "aria-label": "Runs in the charts" });
    this.grid = el("div", { class: "charts" });
    this.settings = el("section", { class: "panel below" });
    this.note = el("p", { class: "dim" });
    const tools = [el("label", {}, "Smoothing ", this.smoothInput, this.smoothValue), el("label", {}, this.logInput, " Log scale"), button("Whole runs", () => this.range.all())];
    fill(root, el("h1", {}, "Compare"), this.note, this.legend, el("div", { class: "toolbar" }, tools), this.grid, this.settings);
    shortcut("l", "Log scale on and off", () => this.logInput.click());
  }

  async start() {
    const found = await get("/api/runs");
    if (this.closed) return;
    this.app.setRoot(found.root);
    const all = new Map(found.runs.map((run) => [run.id, run]));
    const chosen = [...this.app.chosen].map((id) => all.get(id)).filter(Boolean);
    if (!chosen.length) {
      fill(this.root, el("h1", {}, "Compare"), el("p", {}, "Choose runs in the list of ", el("a", { href: "#/" }, "runs"), " first: the box in front of each, or ", el("kbd", {}, "x"), "."));
      return;
    }
    if (chosen.length > MOST) setText(this.note, `The first ${MOST} of ${chosen.length} chosen runs are drawn: there are no more distinct colours.`);
    this.entries = chosen.slice(0, MOST).map((run, at) => ({ run, colour: lineColour(at), curves: new Curves(run.id, COMPARED), hidden: false }));
    await Promise.all([plotter(), ...this.entries.map((entry) => this.load(entry))]);
    if (this.closed) return;
    for (const panel of OVERLAID) this.makeChart(panel);
    this.drawLegend();
    this.draw();
    this.drawSettings();
    this.range.onChange(() => this.scheduleZoom());
    this.stop = listen(() => "/api/events", (message) => this.take(message));
  }

  async load(entry) {
    const [details] = await Promise.all([get(`/api/runs/${encodeURIComponent(entry.run.id)}`), entry.curves.load()]);
    entry.curves.evals = details.evals ?? [];
  }

  // A running run is loaded again at most every two seconds; the stream of the list says when.
  take(message) {
    const entry = this.entries.find((each) => each.run.id === message.run?.id);
    if (!entry) return;
    Object.assign(entry.run, message.run);
    this.waiting.add(entry);
    this.timer ??= setTimeout(async () => {
      const due = [...this.waiting];
      this.waiting.clear();
      await Promise.all(due.map((each) => this.load(each)));
      this.timer = null;
      if (this.closed) return;
      this.drawLegend();
      this.draw();
    }, 2000);
  }

  makeChart(panel) {
    const chart = new Chart({ ...panel, lines: this.lines(panel), range: this.range, named: Boolean(panel.wide) });
    chart.element.classList.toggle("wide", Boolean(panel.wide));
    chart.element.dataset.name = panel.name;
    this.charts.set(panel.name, chart);
    this.grid.append(chart.element);
  }

  get drawnEntries() {
    return this.entries.filter((entry) => !entry.hidden);
  }

  lines(panel) {
    const noisy = panel.name === "grad_norm" || panel.name === "tok_s";
    return this.drawnEntries.map((entry) => ({ label: entry.run.name, colour: entry.colour, width: noisy ? 1 : 1.5, points: panel.name === "eval" }));
  }

  draw() {
    const entries = this.drawnEntries;
    const first = Math.min(...entries.map((entry) => entry.curves.first));
    const last = Math.max(...entries.map((entry) => entry.curves.last));
    this.range.whole = entries.length ? [first, Math.max(last, first + 1)] : [0, 1];
    for (const panel of OVERLAID) {
      const chart = this.charts.get(panel.name);
      if (!entries.length) continue;
      const lines = entries.map((entry) => this.line(entry, panel.name));
      const drawn = lines.map(({ steps, values, smooth = values }) => ({ steps, values: smooth }));
      chart.set(aligned(lines), { drawn: aligned(drawn), latest: entries.map(({ curves }) => (panel.name === "eval" ? curves.evals.at(-1)?.loss : curves.latest(panel.name))) });
    }
    setText(this.smoothValue, this.smooth ? `over ${this.smooth}% of each run` : "none");
  }

  // `smooth`: what is drawn instead of the values.
  line({ curves }, name) {
    if (name === "eval") return evalLine(curves.evals);
    const part = curves.part(this.range.shown);
    const line = { steps: part.steps, values: part.values[name] };
    return name === "loss" ? { ...line, smooth: smoothLoss(part, spanOf(curves.last, this.smooth)) } : line;
  }

  drawLegend() {
    const item = (entry) => {
      const box = el("input", { type: "checkbox", on: { change: () => this.toggle(entry, !box.checked) } });
      box.checked = !entry.hidden;
      const name = el("a", { href: `#/run/${encodeURIComponent(entry.run.id)}` }, entry.run.name);
      const figures = el("span", { class: "dim" }, ` step ${count(entry.run.steps)}, loss ${loss(entry.run.last_loss)}, best validation ${loss(entry.run.best_eval)}`);
      const label = el("label", {}, box, el("i", { class: "swatch", style: { background: `var(${entry.colour})` } }), el("span", { class: "unseen" }, `Draw ${entry.run.name}`));
      return el("li", {}, label, name, stateMark(entry.run.state), figures);
    };
    fill(this.legend, this.entries.map(item));
  }

  toggle(entry, hidden) {
    entry.hidden = hidden;
    for (const panel of OVERLAID) this.charts.get(panel.name).setLines(this.lines(panel));
    this.draw();
  }

  drawSettings() {
    const names = [...new Set(this.entries.flatMap((entry) => Object.keys(entry.run.settings ?? {})))];
    const text = (entry, name) => setting(entry.run.settings?.[name]);
    const different = names.filter((name) => new Set(this.entries.map((entry) => text(entry, name))).size > 1);
    const head = el("tr", {}, el("th", { scope: "col" }, "Setting"), this.entries.map((entry) => el("th", { scope: "col" }, el("i", { class: "swatch", style: { background: `var(${entry.colour})` } }), entry.run.name)));
    const rows = different.map((name) => el("tr", {}, el("th", { scope: "row", class: "code" }, name), this.entries.map((entry) => el("td", {}, text(entry, name)))));
    const made = el("table", { class: "plain" }, el("caption", { class: "unseen" }, "Settings that differ"), el("thead", {}, head), el("tbody", {}, rows));
    fill(this.settings, el("h2", {}, "Settings that differ"), different.length ? el("div", { class: "scroll" }, made) : el("p", { class: "dim" }, "None."));
  }

  scheduleZoom() {
    this.draw();
    clearTimeout(this.zooming);
    this.zooming = setTimeout(async () => {
      const found = await Promise.all(this.entries.map((entry) => entry.curves.zoom(this.range.shown)));
      if (!this.closed && found.some(Boolean)) this.draw();
    }, 120);
  }

  setSmooth() {
    this.smooth = Number(this.smoothInput.value);
    this.draw();
  }

  setLog() {
    for (const panel of OVERLAID) if (panel.canLog) this.charts.get(panel.name).setLog(this.logInput.checked);
  }

  close() {
    this.closed = true;
    this.stop?.();
    for (const timer of [this.timer, this.zooming]) clearTimeout(timer);
    for (const chart of this.charts.values()) chart.destroy();
  }
}
