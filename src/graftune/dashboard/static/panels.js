// Which charts a run has and how their figures are written. The page and report.html draw the same ones.

import { count, loss, percent, short } from "./format.js";

const tick = (format) => (value, onAxis) => (onAxis ? short(value) : format(value));

export const PANELS = [
  { name: "loss", title: "Loss", format: tick(loss), height: 280, wide: true, smooth: true, canLog: true },
  { name: "grad_norm", title: "Gradient norm", format: tick(short), canLog: true },
  { name: "lr", title: "Learning rate", format: short },
  { name: "tok_s", title: "Tokens per second", format: count },
  { name: "floor_share", title: "Share of the floor", format: percent, optional: true },
  { name: "skipped", title: "Skipped updates", format: short },
];

export const NAMES = PANELS.map((panel) => panel.name);

// The lines of a panel for one run, and their data out of `part` {steps, values} and the evaluations.
export function linesOf(panel, smooth) {
  if (panel.name !== "loss") return [{ label: panel.title.toLowerCase(), colour: "--line-1", points: false }];
  const training = smooth ? [{ label: "training", colour: "--line-1", width: 1, faint: true }, { label: "smoothed", colour: "--line-1", width: 1.75 }] : [{ label: "training", colour: "--line-1" }];
  return [...training, { label: "validation", colour: "--line-2", width: 1.75, points: true }];
}

// From the evaluation before step 1, at step 0, to the last one.
export function evalLine(evals) {
  return { steps: evals.map((each) => each.step), values: evals.map((each) => each.loss ?? null) };
}

export function clipMark(settings) {
  const clip = Number(settings?.clip);
  return clip > 0 ? { value: clip, label: `clipped at ${short(clip)}` } : null;
}
