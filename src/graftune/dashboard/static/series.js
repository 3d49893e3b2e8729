// The curves of one run as the page holds them: an overview of the whole run, a finer part where one has zoomed in, and
// the steps that arrive while it runs. The server downsamples anything longer than `POINTS`, keeping spikes.

import { series } from "./api.js";

export const POINTS = 2000;

export class Curves {
  // Without `names` all figures of the steps are loaded, also those that appear while the run goes on.
  constructor(id, names = null) {
    Object.assign(this, { id, asked: names, names: names ?? [], known: new Set(), overview: { steps: [], values: {} }, detail: null, evals: [], asking: null });
  }

  async load() {
    this.overview = await this.ask({});
    this.names = this.overview.names;
    this.detail = null;
  }

  async ask(part, signal) {
    const found = await series(this.id, this.asked, { points: POINTS, ...part }, signal);
    const names = this.asked ?? [...new Set(["loss", ...found.names])];
    for (const name of ["event", "time", "step", ...found.available]) this.known.add(name);
    const values = Object.fromEntries(names.map((name) => [name, columnOf(found, name)]));
    return { names, steps: found.steps, values: { ...values, loss_mean: found.values.loss_mean ?? values.loss }, offset: found.offset };
  }

  get last() {
    return this.overview.steps.length ? this.overview.steps[this.overview.steps.length - 1] : 0;
  }

  get first() {
    return Math.min(this.overview.steps[0] ?? 0, this.evals[0]?.step ?? Infinity);
  }

  // Adds a new step. False if a resumed run has discarded steps or the step has a figure that earlier ones lack: then
  // everything has to be loaded again.
  append(event) {
    const { steps } = this.overview;
    const fresh = this.asked ? [] : Object.keys(event).filter((name) => !this.known.has(name) && number(event[name]) !== null);
    for (const name of fresh) this.known.add(name);
    if (fresh.length) return false;
    if (event.step <= this.last && steps.length) return steps.includes(event.step);
    steps.push(event.step);
    const { values } = this.overview;
    for (const name of this.names) values[name].push(Object.hasOwn(event, name) ? number(event[name]) : null);
    if (values.loss_mean !== values.loss) values.loss_mean.push(number(event.loss));
    return true;
  }

  latest(name) {
    return columnOf(this.overview, name).at(-1);
  }

  get crowded() {
    return this.overview.steps.length > 2 * POINTS;
  }

  addEval(event) {
    this.evals = [...this.evals.filter((each) => each.step !== event.step), event].sort((a, b) => a.step - b.step);
  }

  // Finer data for a part of the run, with as much again on either side to pan into. True if there is something new.
  async zoom(range) {
    if (!range) {
      this.detail = null;
      return true;
    }
    const [min, max] = range;
    const inside = this.overview.steps.filter((step) => step >= min && step <= max).length;
    if (inside >= max - min) return false; // every step is here already
    if (this.detail && this.detail.from <= min && this.detail.to >= max && max - min > (this.detail.to - this.detail.from) / 6) return false;
    this.asking?.abort();
    this.asking = new AbortController();
    const [from, to] = [Math.max(0, min - (max - min)), max + (max - min)];
    try {
      this.detail = { ...(await this.ask({ from, to }, this.asking.signal)), from, to };
    } catch (error) {
      if (error.name === "AbortError") return false;
      throw error;
    }
    return true;
  }

  // What to draw: the finer part where it covers the range.
  part(range) {
    const covers = this.detail && range && this.detail.from <= range[0] && this.detail.to >= Math.min(range[1], this.last);
    return covers ? this.detail : this.overview;
  }
}

// Booleans are counted: a skipped update is 1.
export const number = (value) => (value === true ? 1 : value === false ? 0 : typeof value === "number" ? value : null);

// The values of one figure at the steps of `part`, null where it has none.
export const columnOf = (part, name) => (Object.hasOwn(part.values, name) ? part.values[name] : part.steps.map(() => null));
