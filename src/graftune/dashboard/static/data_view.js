// The data as the run sees it: every token, in colour where the loss is taken, page by page, with search.

import { get, runPath } from "./api.js";
import { button, el, fill, setText } from "./dom.js";
import { count, percent } from "./format.js";
import { shortcut } from "./keys.js";

const SIZE = 20;

export class DataView {
  constructor(root, run) {
    Object.assign(this, { root, run, page: 0, total: 0, search: "" });
    this.field = el("input", { type: "search", id: "search", placeholder: "Search the examples", "aria-label": "Search the examples", on: { input: () => this.searchSoon() } });
    this.borders = el("input", { type: "checkbox", on: { change: () => this.list.classList.toggle("borders", this.borders.checked) } });
    this.back = button("\u2190 Previous", () => this.turn(-1));
    this.forth = button("Next \u2192", () => this.turn(1));
    this.where = el("span", { class: "figure", role: "status" });
    this.note = el("p", { class: "dim" });
    this.list = el("div", { class: "examples" });
    const key = el("span", { class: "key" }, el("mark", { class: "trained" }, "trained"), " the loss is taken on these tokens; ", el("span", { class: "context" }, "the rest"), " is only read");
    fill(root, el("div", { class: "toolbar" }, this.field, el("label", {}, this.borders, " Token borders"), el("span", { class: "group" }, this.back, this.where, this.forth)), el("p", {}, key), this.note, this.list);
    shortcut("/", "Search the data", () => this.field.focus());
    shortcut("[", "Previous page", () => this.turn(-1));
    shortcut("]", "Next page", () => this.turn(1));
  }

  start() {
    return this.load();
  }

  // A run that is preparing has no examples to show yet.
  retry() {
    if (this.failed) this.load();
  }

  searchSoon() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => {
      this.search = this.field.value;
      this.page = 0;
      this.load();
    }, 250);
  }

  get pages() {
    return Math.max(1, Math.ceil(this.total / SIZE));
  }

  turn(by) {
    const page = Math.max(0, Math.min(this.pages - 1, this.page + by));
    if (page === this.page) return;
    this.page = page;
    this.load();
  }

  async load() {
    this.asking?.abort();
    this.asking = new AbortController();
    const query = new URLSearchParams({ page: this.page, size: SIZE, search: this.search });
    let found;
    try {
      found = await get(`${runPath(this.run.id)}/preview?${query}`, this.asking.signal);
    } catch (error) {
      if (error.name === "AbortError") return;
      this.failed = true;
      fill(this.list, el("p", { class: "error" }, error.message));
      return;
    }
    this.failed = false;
    this.total = found.total;
    setText(this.note, found.note ?? "");
    setText(this.where, found.total ? `page ${count(this.page + 1)} of ${count(this.pages)}, ${count(found.total)} examples` : "no examples");
    this.back.disabled = this.page === 0;
    this.forth.disabled = this.page >= this.pages - 1;
    const none = this.search ? "No example has this text." : "There are no examples to show.";
    fill(this.list, found.examples.length ? grouped(found.examples) : el("p", { class: "dim" }, none));
  }

  close() {
    clearTimeout(this.timer);
    this.asking?.abort();
  }
}

// The two answers of a pair stand side by side.
function grouped(examples) {
  const made = [];
  examples.forEach((one, at) => {
    const before = examples[at - 1];
    const joins = one.side === "rejected" && before?.side === "chosen" && before.group === one.group;
    if (joins) made.push(el("div", { class: "pair" }, made.pop(), example(one)));
    else made.push(example(one));
  });
  return made;
}

// Rows are numbered as `graftune data` numbers them; a folder of an earlier version has no such numbers.
function example({ index, row, tokens, trained, truncated, weights, side, numbers }) {
  const supervised = trained.reduce((sum, each) => sum + (each ? 1 : 0), 0);
  const named = Object.entries(numbers ?? {}).map(([name, value]) => `, ${name} ${value}`).join("");
  const facts = `${count(supervised)} of ${count(tokens.length)} tokens trained (${percent(tokens.length ? supervised / tokens.length : 0)})${named}`;
  const head = el("h2", {}, row ? `Row ${count(row)}` : `Example ${count(index + 1)}`, side ? el("span", { class: "tag" }, side) : null, el("span", { class: "dim" }, ` ${facts}`), truncated ? el("span", { class: "tag" }, "truncated") : null);
  return el("article", { class: "example", data: { index } }, head, el("p", { class: "tokens" }, pieces(tokens, trained, weights)));
}

// Neighbours of one kind share an element, so that a screen reader says once that they are marked. Each token keeps its
// own inside.
function pieces(tokens, trained, weights) {
  const made = [];
  tokens.forEach((token, at) => {
    const kind = trained[at] ? "trained" : "context";
    if (made.length === 0 || made[made.length - 1].className !== kind) made.push(el(trained[at] ? "mark" : "span", { class: kind }));
    const weight = weights?.[at];
    const title = `token ${at}${weight === undefined ? "" : `, weight ${weight}`}`;
    made[made.length - 1].append(el("span", { class: "token", title, data: { trained: trained[at] ? 1 : 0 } }, whitespaceShown(token)));
  });
  return made;
}

// A line break is seen as a sign and still breaks the line.
const whitespaceShown = (token) => token.replaceAll("\n", "\u23ce\n").replaceAll("\t", "\u21e5\t");
