// All runs: state, figures and the settings in which they differ, sorted, filtered, and chosen for a comparison.

import { get, listen } from "./api.js";
import { button, command, el, fill, setText } from "./dom.js";
import { ago, count, date, loss, setting, shellWord } from "./format.js";
import { shortcut } from "./keys.js";
import { stateMark } from "./state.js";

const [FIRST_ROWS, MORE_ROWS] = [50, 100]; // drawn at once, and when the end of the table comes into sight
const [LEAST_SETTINGS, MOST_SETTINGS] = [2, 8]; // columns of settings, as many as the width has room for
const FIRST_SETTINGS = ["lr", "rank", "method", "tokens_per_step", "epochs", "max_seq_len", "schedule"]; // of those that differ; then by name
const BY_NAME = new Intl.Collator("en", { numeric: true });

const FIGURES = [
  { key: "state", title: "State", value: (run) => run.state, show: (run) => stateMark(run.state) },
  { key: "name", title: "Run", value: (run) => run.name, show: (run) => link(run), head: true },
  { key: "base", title: "Base", value: (run) => run.base, show: (run) => el("span", { class: "clip", title: run.base ?? "" }, lastPart(run.base)) },
  { key: "data", title: "Data", value: (run) => run.data, show: (run) => el("span", { class: "clip", title: run.data ?? "" }, lastPart(run.data)) },
  { key: "steps", title: "Steps", number: true, value: (run) => run.steps, show: (run) => progress(run) },
  { key: "last_loss", title: "Loss", number: true, value: (run) => run.last_loss, show: (run) => loss(run.last_loss) },
  { key: "best_eval", title: "Best validation", number: true, value: (run) => run.best_eval, show: (run) => best(run) },
  { key: "tok_s", title: "Tokens/s", number: true, value: (run) => run.tok_s, show: (run) => count(run.tok_s) },
  { key: "updated", title: "Updated", number: true, value: (run) => run.updated, show: (run) => el("span", { title: date(run.updated) }, ago(run.updated)) },
];

const lastPart = (path) => setting(path).split("/").filter(Boolean).slice(-1)[0] ?? setting(path);
const link = (run) => el("a", { href: `#/run/${encodeURIComponent(run.id)}`, title: run.sentence ?? "" }, above(run), run.name);
// The folders between the watched one and the run.
const above = (run) => (run.id.endsWith(`/${run.name}`) ? el("span", { class: "dim" }, run.id.slice(0, -run.name.length)) : null);
const best = (run) => (run.best_eval === null || run.best_eval === undefined ? loss(null) : el("span", { title: `at step ${run.best_eval_step}` }, loss(run.best_eval)));

function progress(run) {
  const share = run.max_steps ? Math.min(1, (run.steps ?? 0) / run.max_steps) : 0;
  return [el("span", {}, `${count(run.steps)} / ${count(run.max_steps)}`), el("i", { class: "progress", "aria-hidden": "true", style: { "--share": `${100 * share}%` } })];
}

const kindOf = (column) => [column.number && "number", column.setting && "setting"].filter(Boolean).join(" ") || null;

export class ListView {
  constructor(root, app) {
    Object.assign(this, { root, app, runs: new Map(), differing: [], sort: { key: "updated", down: true }, text: "", state: "", rows: FIRST_ROWS, fit: MOST_SETTINGS });
    this.filter = el("input", { type: "search", id: "filter", placeholder: "Filter by text", "aria-label": "Filter the runs by text", on: { input: () => this.refilter() } });
    this.states = el("select", { "aria-label": "Filter by state", on: { change: () => this.refilter() } }, el("option", { value: "" }, "Every state"));
    this.summary = el("p", { class: "summary", role: "status" });
    this.compare = button("Compare", () => this.openCompare(), { class: "primary", disabled: true });
    this.sortSelect = el("select", { class: "phone-only", "aria-label": "Sort by", on: { change: (event) => this.sortBy(event.target.value) } });
    this.turnSort = button("", () => this.sortBy(this.sort.key), { class: "phone-only" });
    this.table = el("table", { class: "runs" });
    this.place = el("div", { class: "scroll" }, this.table);
    this.empty = el("p", {});
    this.resize = new ResizeObserver(() => this.columns && this.fitted !== this.fittedNow && this.scheduleDraw());
    this.resize.observe(this.place);
    this.more = button("", () => this.showMore(), { hidden: true });
    this.sight = new IntersectionObserver((found) => found.some((each) => each.isIntersecting) && this.showMore(), { rootMargin: "400px" });
    this.sight.observe(this.more);
    fill(root, el("h1", { class: "unseen" }, "Runs"), el("div", { class: "toolbar" }, this.filter, this.states, this.sortSelect, this.turnSort, this.compare, this.summary), this.empty, this.place, this.more);
    shortcut("/", "Filter the runs", () => this.filter.focus());
    shortcut("j", "Next run", () => this.move(1));
    shortcut("k", "Previous run", () => this.move(-1));
    shortcut("x", "Choose the run that has the focus for the comparison", () => document.activeElement.closest("tr")?.querySelector("input")?.click());
    shortcut("c", "Compare the chosen runs", () => this.openCompare());
  }

  async start() {
    await this.load();
    if (this.closed) return; // another view came while the list was on its way: its streams are the page's
    this.stop = listen(() => "/api/events", (message) => this.take(message), () => this.late());
    this.clock = setInterval(() => this.scheduleDraw(), 10000); // "12 s ago" grows old
  }

  // A reopened stream may have missed changes.
  late() {
    if (this.opened) this.load();
    this.opened = true;
  }

  async load() {
    const found = await get("/api/runs");
    if (this.closed) return;
    this.app.setRoot(found.root);
    this.folder = found.root;
    this.runs = new Map(found.runs.map((run) => [run.id, run]));
    this.app.runs = this.runs;
    for (const id of [...this.app.chosen]) if (!this.runs.has(id)) this.app.chosen.delete(id);
    this.draw();
  }

  take(message) {
    if (message.gone !== undefined) this.runs.delete(message.gone);
    else if (message.run) {
      const before = this.runs.get(message.run.id);
      if (before && before.state !== message.run.state) this.app.announce(`${message.run.name}: ${message.run.state}. ${message.run.sentence ?? ""}`);
      this.runs.set(message.run.id, message.run);
    }
    this.scheduleDraw();
  }

  scheduleDraw() {
    this.timer ??= setTimeout(() => {
      this.timer = null;
      this.draw();
    }, 200);
  }

  refilter() {
    this.text = this.filter.value.trim().toLowerCase();
    this.state = this.states.value;
    this.rows = FIRST_ROWS;
    this.draw();
  }

  sortBy(key) {
    const column = this.columns.find((each) => each.key === key);
    const down = this.sort.key === key ? !this.sort.down : Boolean(column.number && key !== "best_eval" && key !== "last_loss");
    this.sort = { key, down };
    this.rows = FIRST_ROWS;
    this.draw();
  }

  findDiffering() {
    const names = new Set();
    for (const run of this.runs.values()) for (const name of run.differing ?? []) names.add(name);
    for (const shown of ["base", "data", "out", "max_steps"]) names.delete(shown); // these have their columns
    return [...FIRST_SETTINGS.filter((name) => names.delete(name)), ...names];
  }

  makeColumns() {
    const settings = this.differing.slice(0, MOST_SETTINGS).map((name) => ({
      key: `setting ${name}`,
      title: name,
      number: true,
      setting: true,
      value: (run) => run.settings?.[name],
      show: (run) => setting(run.settings?.[name]),
    }));
    const figures = FIGURES.filter((column) => column.key !== "tok_s" || [...this.runs.values()].some((run) => run.tok_s));
    return [...figures.slice(0, 7), ...settings, ...figures.slice(7)];
  }

  shown() {
    const words = this.text.split(/\s+/).filter(Boolean);
    const matches = (run) => {
      if (this.state && run.state !== this.state) return false;
      const text = [run.name, run.id, run.state, run.base, run.data, run.method, ...this.differing.map((name) => `${name}=${setting(run.settings?.[name])}`)].join(" ").toLowerCase();
      return words.every((word) => text.includes(word));
    };
    const column = this.columns.find((each) => each.key === this.sort.key) ?? this.columns[1];
    const sign = this.sort.down ? -1 : 1;
    const kept = [...this.runs.values()].filter(matches).map((run) => [column.value(run), run]);
    kept.sort(([a, one], [b, other]) => {
      const [noA, noB] = [a === null || a === undefined, b === null || b === undefined];
      if (noA || noB) return noA - noB; // what is not known stands last, whichever way it is sorted
      const order = typeof a === "number" && typeof b === "number" ? a - b : BY_NAME.compare(String(a), String(b));
      return sign * order || BY_NAME.compare(String(one.name), String(other.name));
    });
    return kept.map(([, run]) => run);
  }

  draw() {
    this.differing = this.findDiffering(); // once: every row asks for it
    this.columns = this.makeColumns();
    const runs = this.shown();
    this.drawStates();
    const focused = document.activeElement.closest?.("tr[data-id]")?.dataset.id;
    const onBox = document.activeElement.matches?.("input[type=checkbox]");
    const onHead = this.table.tHead?.contains(document.activeElement) ? document.activeElement.closest("th").dataset.key : null;
    if (this.fitted !== this.fittedNow) Object.assign(this, { fitted: this.fittedNow, fit: MOST_SETTINGS });
    this.fill(runs);
    if (this.leaveOut()) this.fill(runs);
    const [body] = this.table.tBodies;
    this.rest = runs.slice(this.rows);
    this.drawMore();
    if (focused) [...body.children].find((row) => row.dataset.id === focused)?.querySelector(onBox ? "input" : "a").focus();
    if (onHead) [...this.table.tHead.rows[0].cells].find((cell) => cell.dataset.key === onHead)?.querySelector("button").focus();
    this.drawSummary(runs.length);
    this.drawChosen();
  }

  // What the number of settings depends on.
  get fittedNow() {
    return `${this.place.clientWidth} ${this.differing}`;
  }

  fill(runs) {
    let left = this.fit;
    this.drawn = this.columns.filter((column) => !column.setting || left-- > 0);
    const body = el("tbody", {}, runs.slice(0, this.rows).map((run) => this.row(run)));
    fill(this.table, el("caption", { class: "unseen" }, "Runs in the watched folder"), this.head(), body);
  }

  // Leaves out the last settings where the table is wider than the page. True if there are fewer now.
  leaveOut() {
    const heads = [...this.table.tHead.querySelectorAll("th.setting")];
    const before = heads.length;
    let excess = this.table.offsetWidth - this.place.clientWidth;
    while (excess > 0 && heads.length > LEAST_SETTINGS) excess -= heads.pop().offsetWidth;
    if (heads.length < before) this.fit = heads.length;
    return heads.length < before;
  }

  showMore() {
    const next = (this.rest ?? []).splice(0, MORE_ROWS);
    this.rows += next.length;
    this.table.tBodies[0]?.append(...next.map((run) => this.row(run)));
    this.drawMore();
  }

  drawMore() {
    this.more.hidden = !this.rest.length;
    setText(this.more, `Show more (${count(this.rest.length)})`);
  }

  drawSummary(shown) {
    const all = this.runs.size;
    const hidden = this.differing.length - this.fit;
    const more = hidden > 0 ? `; ${hidden} more settings differ (a run's Command shows all)` : "";
    this.empty.hidden = all > 0;
    if (!all) {
      setText(this.summary, "There are no runs in this folder yet.");
      fill(this.empty, "A run appears here when it starts. With the bundled sample: ", command(`graftune train --out ${shellWord(`${this.folder}/first`)}`));
    } else setText(this.summary, (shown === all ? `${count(all)} runs` : `${count(shown)} of ${count(all)} runs`) + more);
  }

  drawStates() {
    const found = [...new Set([...this.runs.values()].map((run) => run.state))].sort();
    fill(this.states, el("option", { value: "" }, "Every state"), found.map((state) => el("option", { value: state }, state)));
    this.states.value = found.includes(this.state) ? this.state : "";
    fill(this.sortSelect, this.columns.map((column) => el("option", { value: column.key }, `Sort by ${column.title.toLowerCase()}`)));
    this.sortSelect.value = this.sort.key;
    setText(this.turnSort, this.sort.down ? "\u2193 descending" : "\u2191 ascending");
  }

  head() {
    const heads = this.drawn.map((column) => {
      const sorted = this.sort.key === column.key;
      const direction = sorted ? (this.sort.down ? "descending" : "ascending") : null;
      const label = [column.title, el("span", { class: "arrow", "aria-hidden": "true" }, sorted ? (this.sort.down ? "\u2193" : "\u2191") : "")];
      return el("th", { scope: "col", "aria-sort": direction, class: kindOf(column), data: { key: column.key } }, button(label, () => this.sortBy(column.key), { class: column.setting ? "sorter code" : "sorter" }));
    });
    return el("thead", {}, el("tr", {}, el("th", { scope: "col" }, el("span", { class: "unseen" }, "Chosen")), heads));
  }

  row(run) {
    const box = el("input", { type: "checkbox", "aria-label": `Choose ${run.name} for the comparison`, on: { change: () => this.choose(run.id, box.checked) } });
    box.checked = this.app.chosen.has(run.id);
    const cells = this.drawn.map((column) => el(column.head ? "th" : "td", { scope: column.head ? "row" : null, class: kindOf(column), data: { title: column.title, key: column.key } }, column.show(run)));
    return el("tr", { data: { id: run.id } }, el("td", { class: "choose" }, box), cells);
  }

  choose(id, chosen) {
    if (chosen) this.app.chosen.add(id);
    else this.app.chosen.delete(id);
    this.drawChosen();
  }

  drawChosen() {
    const number = this.app.chosen.size;
    this.compare.disabled = number < 1;
    setText(this.compare, number ? `Compare ${number} chosen` : "Compare");
  }

  openCompare() {
    if (this.app.chosen.size) location.hash = `#/compare/${[...this.app.chosen].map(encodeURIComponent).join(",")}`;
  }

  move(by) {
    const links = [...this.table.querySelectorAll("tbody th a")];
    const at = links.indexOf(document.activeElement.closest("tr")?.querySelector("th a"));
    links[Math.max(0, Math.min(links.length - 1, at + by))]?.focus();
  }

  close() {
    this.closed = true;
    this.sight.disconnect();
    this.resize.disconnect();
    clearInterval(this.clock);
    clearTimeout(this.timer);
    this.stop?.();
  }
}
