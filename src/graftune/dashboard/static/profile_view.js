// Where a step's time goes: an icicle (each bar as wide as its share, its parts below it) with the tables beside it.

import { get, runPath } from "./api.js";
import { button, command, el, fill, table } from "./dom.js";
import { milliseconds, percent, shellWord } from "./format.js";

const DEEPEST = 6;
const NARROWEST = 0.0015; // of what is shown; narrower bars are in the table only
const SHOWN_ROWS = 15; // of a table; the others unfold
const FAR = 0.05; // by which a profiled step may differ from a plain one

export class ProfileView {
  constructor(root, run) {
    Object.assign(this, { root, run });
  }

  async start() {
    try {
      this.profile = await get(`${runPath(this.run.id)}/profile`);
    } catch (error) {
      if (error.status !== 404) throw error;
      fill(this.root, el("p", { class: "dim" }, "This run was not profiled while it trained (", el("code", {}, "--profile-every"), "). Profile it now:"), el("p", {}, command(`graftune profile ${shellWord(this.run.folder)}`)));
      return;
    }
    this.icicle = el("div", { class: "icicle" });
    this.path = el("nav", { class: "crumbs", "aria-label": "Part of the step that is shown" });
    fill(this.root, this.facts(), this.profile.tree ? [this.path, this.icicle] : null, this.tables());
    if (this.profile.tree) this.show([this.profile.tree]);
  }

  // The profile of a running run is refined. The selected part stays selected.
  async take(event) {
    if (event.event !== "profile") return;
    const names = (this.at ?? []).map((node) => node.name);
    await this.start();
    const path = this.profile?.tree ? [this.profile.tree] : [];
    for (const name of names.slice(1)) {
      const next = path[path.length - 1]?.children?.find((child) => child.name === name);
      if (!next) break;
      path.push(next);
    }
    if (path.length > 1) this.show(path);
  }

  facts() {
    const { profile } = this;
    const facts = [
      ["Step", `${milliseconds(profile.step_ms)} ms`, "with the profiler on"],
      ["Plain step", `${milliseconds(profile.plain_ms)} ms`, "without it"],
      ["Eager step", profile.eager_ms ? `${milliseconds(profile.eager_ms)} ms` : null, "without CUDA graphs"],
      ["Floor", profile.floor_ms ? `${milliseconds(profile.floor_ms)} ms` : null, "the step's products alone"],
      ["Share of the floor", profile.floor_share ? percent(profile.floor_share) : null, "floor over plain step"],
      ["Owned", percent(profile.owned), "of the time has a name"],
      ["Device", profile.gpu ?? profile.device, profile.captured ? "captured in graphs" : "not captured"],
    ].filter(([, value]) => value !== null && value !== undefined);
    const shown = facts.map(([name, value, title]) => el("div", { title }, el("dt", {}, name), el("dd", {}, value)));
    const off = profile.step_ms / profile.plain_ms - 1;
    const far = Math.abs(off) > FAR ? el("p", { class: "error" }, `The profiled step took ${percent(Math.abs(off))} ${off > 0 ? "longer" : "less"} than a plain one: take the shares with care.`) : null;
    return [far, profile.bottleneck ? el("p", { class: "sentence" }, profile.bottleneck) : null, el("dl", { class: "figures" }, shown)];
  }

  show(path) {
    const root = path[path.length - 1];
    const inside = [this.path, this.icicle].some((part) => part.contains(document.activeElement));
    this.at = path;
    const step = (node, at) => (at === path.length - 1 ? el("span", { "aria-current": "true" }, node.name) : button(node.name, () => this.show(path.slice(0, at + 1)), { class: "link" }));
    fill(this.path, path.map((node, at) => [at ? " \u203a " : null, step(node, at)]), el("span", { class: "dim" }, ` ${milliseconds(root.ms)} ms`));
    fill(this.icicle, el("ul", { "aria-label": `Parts of ${root.name}` }, this.node(root, path, root.ms, path.map((node) => tone(node.name)).find(Boolean), 0)));
    if (inside) this.icicle.querySelector("button").focus(); // the button that had the focus is gone
  }

  node(node, path, whole, inherited, depth) {
    const share = whole ? node.ms / whole : 0;
    const parts = (node.children ?? []).filter((child) => child.ms / whole >= NARROWEST);
    const covered = parts.reduce((sum, child) => sum + child.ms, 0);
    const label = `${node.name} ${milliseconds(node.ms)} ms, ${percent(share)}`;
    const own = inherited ?? tone(node.name);
    const below = path[path.length - 1] === node ? path : [...path, node];
    const text = [el("i", {}), el("b", {}, node.name), el("span", {}, milliseconds(node.ms))];
    const bar = button(text, () => this.show(below), { title: label, "aria-label": label, class: "slice", data: { tone: own ?? "part" } });
    const rest = Math.max(0, node.ms - covered);
    const children = depth < DEEPEST && parts.length ? el("ul", {}, parts.map((child) => this.node(child, below, whole, own, depth + 1)), rest ? el("li", { class: "rest", "aria-hidden": "true", style: { "flex-grow": rest } }) : null) : null;
    return el("li", { style: { "flex-grow": node.ms } }, bar, children);
  }

  tables() {
    const { phases = [], operations = [], hotspots = [], layers = [], apart = [], beside = [] } = this.profile;
    const text = (title) => ({ title });
    const number = (title) => ({ title, number: true });
    const section = (title, columns, rows) => {
      const rest = rows.slice(SHOWN_ROWS);
      const more = rest.length ? el("details", { class: "chart-table" }, el("summary", {}, `${rest.length} more`), table(`More ${title.toLowerCase()}`, columns, rest)) : null;
      return rows.length ? el("section", { class: "panel" }, el("h2", {}, title), el("div", { class: "scroll" }, table(title, columns, rows.slice(0, SHOWN_ROWS)), more)) : null;
    };
    return el("div", { class: "tables" }, [
      section("Phases", [text("Phase"), ...["ms", "p50", "p95", "p99", "Share"].map(number)], phases.map((each) => [each.name, milliseconds(each.ms), milliseconds(each.p50), milliseconds(each.p95), milliseconds(each.p99), percent(each.share)])),
      section("Operations", [text("Operation"), text("Phase"), ...["ms", "Calls", "Share"].map(number)], operations.map((each) => [each.name, each.phase, milliseconds(each.ms), each.calls, percent(each.share)])),
      section("Hotspots", [text("Where"), number("ms"), number("Times the mean")], hotspots.map((each) => [each.name, milliseconds(each.ms), each.times_the_mean?.toFixed(2)])),
      section("On other streams, at the same time", [text("Operation"), text("Phase"), number("ms")], apart.map((each) => [each.name, each.phase, milliseconds(each.ms)])),
      section("Between steps", [text("What"), number("ms")], beside.map((each) => [each.name, milliseconds(each.ms)])),
      section("Layers", [text("Layer"), number("Forward ms"), number("Backward ms")], layers.map((each) => [each.layer, milliseconds(each.forward_ms), milliseconds(each.backward_ms)])),
    ]);
  }
}

// The colour of a phase and of all its parts.
function tone(name) {
  if (/backward|recompute/.test(name)) return "backward";
  if (/forward|reference/.test(name)) return "forward";
  if (/adamw|update|norm of|gradient|clip|optim/i.test(name)) return "update";
  return /loss|head/.test(name) ? "loss" : undefined;
}
