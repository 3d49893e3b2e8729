// One run: its state and figures on top, and one of its parts below. The parts share one stream of events.

import { get, listen, runPath } from "./api.js";
import { ChatView } from "./chat_view.js";
import { CommandView } from "./command_view.js";
import { CurvesView } from "./curves_view.js";
import { DataView } from "./data_view.js";
import { command, el, fill, setText } from "./dom.js";
import { count, date, duration, loss, percent, setting } from "./format.js";
import { shortcut } from "./keys.js";
import { ProfileView } from "./profile_view.js";
import { SamplesView } from "./samples_view.js";
import { isLive, sentenceOf, stateMark } from "./state.js";

export const PARTS = [
  ["curves", "Curves", CurvesView],
  ["data", "Data", DataView],
  ["samples", "Samples", SamplesView],
  ["profile", "Profile", ProfileView],
  ["command", "Command", CommandView],
  ["chat", "Chat", ChatView],
];

const CHECKPOINTS_EVERY = 5000; // milliseconds

export class RunView {
  constructor(root, app, id, part) {
    Object.assign(this, { root, app, id, offset: 0 });
    this.part = PARTS.find(([name]) => name === part) ?? PARTS[0];
    this.state = el("div", { class: "state-line", role: "status" });
    this.figures = el("dl", { class: "figures" });
    this.name = el("h1", {}, id);
    this.facts = el("p", { class: "dim facts" });
    this.body = el("div", { class: "part" });
    const tab = ([name, title], at) => el("a", { href: `#/run/${encodeURIComponent(id)}/${name}`, "aria-current": name === this.part[0] ? "page" : null, title: `${title} (${at + 1})` }, title);
    const tabs = el("nav", { class: "tabs", "aria-label": "Parts of this run" }, PARTS.map(tab));
    fill(root, el("div", { class: "run-head" }, this.name, this.state), this.facts, this.figures, tabs, this.body);
    PARTS.forEach(([name, title], at) => shortcut(String(at + 1), title, () => (location.hash = `#/run/${encodeURIComponent(id)}/${name}`)));
    shortcut("Escape", "Back to all runs", () => (location.hash = "#/"));
  }

  async start() {
    this.run = await this.load();
    if (this.closed) return;
    document.title = `${this.run.name} \u00b7 graftune`;
    setText(this.name, this.run.name);
    this.app.setRoot(this.run.folder ?? "");
    this.draw();
    this.view = new this.part[2](this.body, this.run, this.app);
    await this.view.start();
    if (this.closed) return this.view.close?.();
    // The two answers that the view was made of may be of different moments: the stream begins at the earlier one, and
    // events that the later one contains are skipped.
    this.known = this.run.offset ?? 0;
    this.offset = Math.min(this.known, this.view.offset ?? this.known);
    this.stop = listen(() => `${runPath(this.id)}/events?since=${this.offset}`, (message, type) => this.take(message, type));
    this.clock = setInterval(() => this.draw(), 1000);
  }

  // Times are of the server's clock, which may differ from the browser's.
  async load() {
    const run = await get(runPath(this.id));
    this.ahead = Date.now() / 1000 - (run.now ?? Date.now() / 1000);
    return run;
  }

  take(message, type) {
    if (type === "gone") return this.setState({ state: "gone", sentence: "The folder of this run is not there any more." });
    if (type === "reset") return dispatchEvent(new Event("hashchange")); // another run took its place: begin anew
    if (message.offset > 0 && message.offset <= this.offset) return; // sent again after the connection was lost
    if (message.offset) this.offset = message.offset;
    const event = message.event && typeof message.event === "object" ? message.event : message;
    if (type === "state" || event.event === "state") return this.setState(event);
    if (message.offset <= (event.event === "step" ? this.view.offset ?? 0 : this.known)) return;
    this.age(event);
    if (event.event === "step") Object.assign(this.run, { steps: event.step, last_stepped: event.time, last_loss: event.loss, tok_s: event.tok_s, floor_share: event.floor_share });
    if (event.event === "eval" && event.step > 0 && Number.isFinite(event.loss) && (this.run.best_eval === null || event.loss < this.run.best_eval)) Object.assign(this.run, { best_eval: event.loss, best_eval_step: event.step });
    this.view.take?.(event);
    if (["sample", "phase", "resume", "extend", "run_end"].includes(event.event)) this.refresh();
    else if (this.part[0] === "chat") this.refreshSoon(); // a checkpoint has no event
    this.drawSoon();
  }

  // The time for which the run has worked, as the server counts it.
  age({ event, time, step }) {
    if (typeof time !== "number") return;
    if (event === "resume" || event === "run_start") Object.assign(this.run, { last_began: time, last_began_step: step ?? 0 });
    else if (time > this.run.updated) this.run.worked_s += time - this.run.updated;
    this.run.updated = Math.max(time, this.run.updated ?? time);
  }

  setState({ state, sentence }) {
    if (state !== this.run.state) {
      this.app.announce(`${this.run.name}: ${state}. ${sentence ?? ""}`);
      if (state !== "gone") this.refresh();
    }
    Object.assign(this.run, { state, sentence });
    this.draw();
  }

  // Not in the stream: checkpoints, samples with their prompts, marks of resumes, the end.
  async refresh() {
    const run = await this.load();
    if (this.closed) return;
    Object.assign(this.run, run);
    if (this.part[0] === "samples") this.view.update(run.samples ?? []);
    if (this.part[0] === "chat") this.view.update(run);
    if (this.part[0] === "data") this.view.retry();
    this.view.drawBelow?.();
    this.draw();
  }

  refreshSoon() {
    this.refreshing ??= setTimeout(() => {
      this.refreshing = null;
      this.refresh();
    }, CHECKPOINTS_EVERY);
  }

  drawSoon() {
    this.timer ??= setTimeout(() => {
      this.timer = null;
      this.draw();
    }, 200);
  }

  draw() {
    const { run } = this;
    const key = `${run.state} ${run.sentence}`;
    if (this.drawnState !== key) fill(this.state, stateMark(run.state), this.sentence());
    this.drawnState = key;
    const method = [run.method, run.settings?.rank && run.method !== "full" ? `rank ${run.settings.rank}` : null].filter(Boolean).join(", ");
    setText(this.facts, [run.base, run.data, method].filter(Boolean).map(setting).join(" \u00b7 "));
    const now = isLive(run.state) ? Date.now() / 1000 - this.ahead : run.updated;
    const took = run.worked_s === null || run.worked_s === undefined ? null : run.worked_s + Math.max(0, now - run.updated);
    const left = isLive(run.state) ? timeLeft(run, now) : null;
    const figures = [
      ["Step", `${count(run.steps)} / ${count(run.max_steps)}`],
      ["Loss", loss(run.last_loss)],
      ["Best validation", loss(run.best_eval), run.best_eval_step === null || run.best_eval_step === undefined ? "" : `at step ${count(run.best_eval_step)}`],
      isLive(run.state) ? ["Tokens/s", count(run.tok_s)] : null,
      isLive(run.state) && run.floor_share ? ["Share of the floor", percent(run.floor_share)] : null,
      ["Time", duration(took), run.started ? `began ${date(run.started)}` : ""],
      left === null ? null : ["Left, about", duration(left)],
    ].filter(Boolean);
    const text = JSON.stringify(figures);
    if (this.drawnFigures !== text) fill(this.figures, figures.map(([name, value, more]) => el("div", {}, el("dt", {}, name), el("dd", {}, value, more ? el("small", {}, more) : null))));
    this.drawnFigures = text;
  }

  // The command that goes on with a run is to be copied.
  sentence() {
    const [text, resume] = sentenceOf(this.run).split("go on with: ");
    return el("span", {}, resume ? [`${text}go on with `, command(resume)] : text);
  }

  close() {
    this.closed = true;
    this.stop?.();
    clearInterval(this.clock);
    clearTimeout(this.timer);
    clearTimeout(this.refreshing);
    this.view?.close?.();
  }
}

// Seconds left at the last step, by the steps since the run was started or resumed; they pass until the next step is due.
function timeLeft(run, now) {
  const [done, rest] = [run.steps - run.last_began_step, run.max_steps - run.steps];
  if (!(done > 0 && rest > 0)) return null;
  const pace = (run.last_stepped - run.last_began) / done;
  return pace * rest - Math.min(pace, Math.max(0, now - run.last_stepped));
}
