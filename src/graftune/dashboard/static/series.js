// The curves of one run as the page holds them: an overview of the whole run, a finer part where one has zoomed in, and
// the steps that arrive while it runs. The server downsamples anything longer than `POINTS`, keeping spikes.

import { series } from "./api.js";

export const POINTS = 2000;

export class Curves {
  constructor(id, names) {
    Object.assign(this, { id, names, overview: empty(names), detail: null, evals: [], asking: null });
  }

  async load() {
    this.overview = await this.ask({});
    this.detail = null;
  }

  async ask(part, signal) {
    const found = await series(this.id, this.names, { points: POINTS, ...part }, signal);
    const column = (name) => found.values[name] ?? found.steps.map(() => null);
    const values = Object.fromEntries(this.names.map((name) => [name, column(name)]));
    return { steps: found.steps, values: { ...values, loss_mean: found.values.loss_mean ?? values.loss }, offset: found.offset };
  }

  get last() {
    return this.overview.steps.length ? this.overview.steps[this.overview.steps.length - 1] : 0;
  }

  get first() {
    return Math.min(this.overview.steps[0] ?? 0, this.evals[0]?.step ?? Infinity);
  }

  // Adds a new step. False if a resumed run has discarded steps: then everything has to be loaded again.
  append(event) {
    const { steps } = this.overview;
    if (event.step <= this.last && steps.length) return steps.includes(event.step);
    steps.push(event.step);
    const { values } = this.overview;
    for (const name of this.names) values[name].push(number(event[name]));
    if (values.loss_mean !== values.loss) values.loss_mean.push(number(event.loss));
    return true;
  }

  latest(name) {
    return this.overview.values[name].at(-1);
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

const empty = (names) => ({ steps: [], values: Object.fromEntries(names.map((name) => [name, []])) });
