// One chart: uPlot with the page's colours, a summary for screen readers, a table beside it, and pan and zoom by mouse,
// keyboard and buttons. All charts of a view share a `Range`, the steps that are shown.

import { el, fill, setText, table } from "./dom.js";
import { axisTicks, count } from "./format.js";

const LINES = ["--line-1", "--line-2", "--line-3", "--line-4", "--line-5", "--line-6", "--line-7", "--line-8"];
const TABLE_ROWS = 60;

export const lineColour = (at) => LINES[at % LINES.length];

// The current colour of a custom property: a canvas does not understand `var()` and `light-dark()`.
export function colour(name) {
  const probe = el("span", { class: "unseen", style: { color: `var(${name})` } });
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

// uPlot draws the charts. The list does without it, so the first view that has charts loads it; report.html has it inside.
export function plotter() {
  window.graftunePlotter ??= new Promise((loaded, failed) => {
    if (window.uPlot) return loaded();
    const fail = () => failed(new Error("The server does not answer; is graftune watch still running?"));
    document.head.append(el("script", { src: "/static/uPlot.js", on: { load: loaded, error: fail } }));
  });
  return window.graftunePlotter;
}

// The steps that are shown: null for the whole run, which then grows with it.
export class Range {
  constructor() {
    this.shown = null;
    this.whole = [0, 1];
    this.listeners = [];
    this.panning = false;
    this.frame = 0;
  }

  onChange(listener) {
    this.listeners.push(listener);
  }

  get now() {
    return this.shown ?? this.whole;
  }

  set(min, max) {
    const [first, last] = this.whole;
    const width = Math.max(4, Math.min(max - min, last - first));
    const from = Math.max(first, Math.min(min, last - width));
    this.shown = width >= last - first ? null : [from, from + width];
    // Once per frame, however many events the mouse sends.
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      for (const listener of this.listeners) listener();
    });
  }

  all() {
    this.set(...this.whole);
  }

  pan(share) {
    const [min, max] = this.now;
    const shift = share * (max - min);
    this.set(min + shift, max + shift);
  }

  zoom(factor, at = 0.5) {
    const [min, max] = this.now;
    const middle = min + at * (max - min);
    this.set(middle - factor * at * (max - min), middle + factor * (1 - at) * (max - min));
  }
}

// One table of steps for lines that were measured at different ones. Where a line has no point it gets `undefined`,
// over which uPlot draws on; a `null` in the data, a loss that was not finite, stays a gap.
export function aligned(lines) {
  if (lines.length === 1) return [lines[0].steps, lines[0].values];
  const same = lines.every((line) => line.steps === lines[0].steps);
  if (same) return [lines[0].steps, ...lines.map((line) => line.values)];
  const steps = [...new Set(lines.flatMap((line) => line.steps))].sort((a, b) => a - b);
  const place = new Map(steps.map((step, at) => [step, at]));
  const columns = lines.map((line) => {
    const column = new Array(steps.length).fill(undefined);
    line.steps.forEach((step, at) => (column[place.get(step)] = line.values[at]));
    return column;
  });
  return [steps, ...columns];
}

export class Chart {
  // Lines that jump up and down are one pixel wide: wider ones take a CPU several times as long to draw.
  // `lines`: [{label, colour (a custom property), width, points, smooth (has no figure of its own)}]; `format` writes a
  // value, `axis` the ticks; `mark`: {value, label} is a horizontal line; `marks`: [{step, label}] are vertical ones;
  // `height` in pixels; `named`: figures under the cursor with their lines' labels.
  constructor({ title, lines, format, axis = axisTicks, range, mark = null, marks = [], height = 180, wide = false, named = true, note = "" }) {
    Object.assign(this, { title, lines, format, axis, range, mark, marks, height, wide, named, log: false, data: [[], ...lines.map(() => [])] });
    this.readout = el("span", { class: "readout" });
    this.note = el("span", { class: "chart-note" }, note);
    this.plot = el("div", { class: "plot", style: { "min-height": `${height}px` }, tabindex: "0", role: "group", "aria-roledescription": "chart", on: { keydown: (event) => this.key(event), wheel: (event) => this.wheel(event) } });
    this.details = el("details", { class: "chart-table", on: { toggle: () => this.fillTable() } }, el("summary", {}, "Table"));
    this.element = el("figure", { class: "chart" }, el("figcaption", {}, el("h2", {}, title), this.note, this.readout), this.plot, this.details);
    this.resize = new ResizeObserver(() => this.uplot?.setSize(this.size()));
    this.onTheme = () => this.redraw();
    addEventListener("theme", this.onTheme);
    range.onChange(() => this.refresh());
    // A chart outside of the visible area is drawn when it comes back: panning draws all visible charts at every frame.
    this.seen = false;
    this.stale = false;
    this.sight = new IntersectionObserver((found) => this.look(found[found.length - 1].isIntersecting), { rootMargin: "100px" });
    this.sight.observe(this.plot);
    this.onPrint = () => this.look(true);
    addEventListener("beforeprint", this.onPrint);
  }

  look(seen) {
    this.seen = seen;
    if (seen && this.stale) this.refresh();
  }

  // Draw, or remember to draw later.
  refresh() {
    this.stale = !this.seen;
    if (this.stale || !this.raw) return;
    if (!this.uplot) this.draw();
    else if (this.drawn !== this.data) this.uplot.setData(this.data, false);
    this.drawn = this.data;
    this.applyRange();
    this.read(this.uplot);
  }

  redraw() {
    this.uplot?.destroy();
    this.uplot = null;
    this.refresh();
  }

  size() {
    return { width: Math.max(160, this.plot.clientWidth), height: this.height };
  }

  // `data`: what figures and tables show; `drawn`: the lines, where they are smoothed; `latest`: the last value of each
  // line, where `data` ends before the run does.
  set(data, { drawn = data, latest = null } = {}) {
    this.data = this.log ? [drawn[0], ...drawn.slice(1).map(positive)] : drawn;
    Object.assign(this, { raw: data, given: { drawn, latest } });
    this.refresh();
    this.describe();
    if (this.details.open) this.fillTable();
  }

  setLog(log) {
    if (this.log === log) return;
    this.log = log;
    this.uplot?.destroy();
    this.uplot = null;
    if (this.raw) this.set(this.raw, this.given);
  }

  setLines(lines) {
    this.lines = lines;
    this.uplot?.destroy();
    this.uplot = null;
  }

  setMarks(marks) {
    if (JSON.stringify(marks) === JSON.stringify(this.marks)) return;
    this.marks = marks;
    this.uplot?.redraw(false);
    if (this.raw) this.describe();
  }

  applyRange() {
    const [min, max] = this.range.now;
    this.uplot.setScale("x", { min, max });
  }

  draw() {
    const [dim, grid, ink] = ["--dim", "--grid", "--ink"].map(colour);
    const font = "11px system-ui, sans-serif";
    const axis = { stroke: dim, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1, size: 4 }, font };
    this.uplot = new window.uPlot(
      {
        ...this.size(),
        legend: { show: false },
        padding: [8, 24, 0, 0],
        scales: { x: { time: false }, y: this.log ? { distr: 3 } : { range: (_, min, max) => this.bounds(min, max) } },
        axes: [
          { ...axis, size: 26, gap: 2, values: (_, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? count(tick) : "")) },
          { ...axis, size: 58, gap: 4, values: (_, ticks) => this.axis(ticks, this.log) },
        ],
        cursor: {
          drag: { x: true, y: false, setScale: false, dist: 6 },
          points: { size: 6 },
          sync: { key: "steps", setSeries: false, filters: { pub: moves, sub: moves } },
          bind: { mousedown: (u, target, handler) => (event) => (event.shiftKey ? this.startPan(event) : handler(event)), dblclick: () => () => this.range.all() },
        },
        series: [{}, ...this.lines.map((line) => this.line(line))],
        hooks: { setSelect: [(u) => this.selected(u)], setCursor: [(u) => this.read(u)], draw: [(u) => this.drawMark(u, ink), (u) => this.drawMarks(u, dim)] },
      },
      this.data,
      this.plot,
    );
    this.resize.observe(this.plot);
  }

  line({ label, colour: name, width = 1, points = false }) {
    const stroke = colour(name);
    return { label, stroke, width, spanGaps: false, points: { show: points, size: 6, fill: stroke, stroke } };
  }

  // The y range: all that is shown, with room, from 0 where that is near; the mark too unless it is far above.
  bounds(min, max) {
    if (min === null || max === null || (min === 0 && max === 0)) return [0, 1];
    if (this.mark && this.mark.value <= 4 * max) [min, max] = [Math.min(min, this.mark.value), Math.max(max, this.mark.value)];
    if (min > 0 && min < 0.4 * max) min = 0;
    const room = 0.06 * (max - min || Math.abs(max) || 1);
    return [min === 0 ? 0 : min - room, max + room];
  }

  drawMark(u, ink) {
    if (!this.mark) return;
    const y = Math.floor(u.valToPos(this.mark.value, "y", true)) + 0.5;
    const { left, top, width, height } = u.bbox;
    const there = y >= top && y <= top + height;
    setText(this.note, there ? this.mark.label : `${this.mark.label}, outside of what is shown`);
    if (there) dashed(u.ctx, ink, [5, 4], [left, y], [left + width, y]);
  }

  // Where the run was resumed or got another length; with labels in a wide chart, unless one would cover another.
  drawMarks(u, ink) {
    const { left, top, width, height } = u.bbox;
    const context = u.ctx;
    let free = left; // of labels so far
    for (const { step, label } of this.marks) {
      const x = Math.floor(u.valToPos(step, "x", true)) + 0.5;
      if (x < left || x > left + width) continue;
      dashed(context, ink, [2, 3], [x, top], [x, top + height]);
      if (!this.wide) continue;
      context.save();
      context.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
      context.fillStyle = ink;
      context.textAlign = "left";
      context.textBaseline = "top";
      const [wide, gap] = [context.measureText(label).width, 4 * devicePixelRatio];
      const from = x + gap + wide <= left + width ? x + gap : x - gap - wide;
      if (from >= free) context.fillText(label, from, top);
      free = Math.max(free, from + wide + gap);
      context.restore();
    }
  }

  read(u) {
    if (this.range.panning || !this.raw) return; // what is under the mouse stays there, and text takes time
    // Without a cursor the latest numbers are shown, which also serve as the legend.
    const latest = u.cursor.idx === null || u.cursor.idx === undefined;
    const at = latest ? this.raw[0].length - 1 : u.cursor.idx;
    if (at < 0) return fill(this.readout);
    const parts = this.lines.map((line, number) => {
      if (latest && line.smooth) return null;
      const value = latest && this.given.latest ? this.given.latest[number] : nearest(this.raw[number + 1], at, latest);
      if (value === undefined || value === null) return null;
      if (this.lines.length === 1 && line.colour === lineColour(0)) return el("b", {}, this.format(value)); // the title says what it is
      return el("span", {}, el("i", { class: "swatch", style: { background: `var(${line.colour})` } }), this.named ? `${line.label} ` : null, el("b", {}, this.format(value)));
    });
    fill(this.readout, el("span", {}, latest ? "latest" : `step ${count(this.raw[0][at])}`), parts);
  }

  selected(u) {
    const { left, width } = u.select;
    if (width > 4) this.range.set(u.posToVal(left, "x"), u.posToVal(left + width, "x"));
    u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  }

  startPan(event) {
    const width = this.uplot.over.clientWidth;
    const [min, max] = this.range.now;
    const from = event.clientX;
    const move = (moved) => {
      const shift = ((from - moved.clientX) / width) * (max - min);
      this.range.set(min + shift, max + shift);
    };
    this.range.panning = true;
    addEventListener("mousemove", move);
    addEventListener(
      "mouseup",
      () => {
        this.range.panning = false;
        removeEventListener("mousemove", move);
      },
      { once: true },
    );
  }

  wheel(event) {
    if (event.ctrlKey) {
      const box = this.uplot.over.getBoundingClientRect();
      this.range.zoom(event.deltaY > 0 ? 1.25 : 0.8, Math.min(1, Math.max(0, (event.clientX - box.left) / box.width)));
    } else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.range.pan(event.deltaX / this.uplot.over.clientWidth);
    else return; // scrolling the page stays what it is
    event.preventDefault();
  }

  key(event) {
    const acts = { ArrowLeft: () => this.range.pan(-0.2), ArrowRight: () => this.range.pan(0.2), "+": () => this.range.zoom(0.6), "=": () => this.range.zoom(0.6), "-": () => this.range.zoom(1.6), 0: () => this.range.all() };
    if (!acts[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    acts[event.key]();
  }

  describe() {
    const parts = this.lines.map((line, number) => {
      const known = this.raw[number + 1].map((value, at) => [this.raw[0][at], value]).filter(([, value]) => Number.isFinite(value));
      if (!known.length || line.smooth) return null;
      const [first, last] = [known[0], known[known.length - 1]];
      return `${line.label} from ${this.format(first[1])} at step ${first[0]} to ${this.format(last[1])} at step ${last[0]}`;
    });
    const summary = [...parts, ...this.marks.map(({ step, label }) => `${label} at step ${step}`)].filter(Boolean).join("; ") || "no data yet";
    this.plot.setAttribute("aria-label", `${this.title}: ${summary}. Arrow keys pan, plus and minus zoom.`);
  }

  // Rows at equal distances over the visible steps, made on demand.
  fillTable() {
    if (!this.details.open || !this.raw) return;
    const [min, max] = this.range.now;
    const inside = this.raw[0].map((step, at) => [step, at]).filter(([step]) => step >= min && step <= max);
    const every = Math.max(1, Math.ceil(inside.length / TABLE_ROWS));
    const rows = inside.filter((_, at) => at % every === 0 || at === inside.length - 1);
    const columns = [{ title: "Step", number: true }, ...this.lines.map((line) => ({ title: line.label, number: true }))];
    const made = table(this.title, columns, rows.map(([step, at]) => [count(step), ...this.raw.slice(1).map((column) => this.format(column[at]))]));
    this.details.replaceChildren(this.details.firstElementChild, el("div", { class: "scroll", tabindex: "0" }, made));
  }

  destroy() {
    removeEventListener("theme", this.onTheme);
    removeEventListener("beforeprint", this.onPrint);
    this.sight.disconnect();
    this.resize.disconnect();
    this.uplot?.destroy();
    this.uplot = null;
  }
}

function dashed(context, ink, pattern, from, to) {
  context.save();
  context.strokeStyle = ink;
  context.lineWidth = devicePixelRatio;
  context.setLineDash(pattern.map((length) => length * devicePixelRatio));
  context.beginPath();
  context.moveTo(...from);
  context.lineTo(...to);
  context.stroke();
  context.restore();
}

const moves = (type) => type === "mousemove" || type === "mouseleave";
const positive = (column) => column.map((value) => (value > 0 ? value : value === undefined ? undefined : null));

// The value at a row of the table, or the last one before it, since not all lines have a value at every step. After the
// end of a line there is none, unless the latest value is requested.
function nearest(column, at, latest) {
  if (!latest && !column.slice(at).some((value) => value !== undefined)) return undefined;
  for (let place = at; place >= 0; place--) if (column[place] !== undefined) return column[place];
  return undefined;
}
