// Which charts a run has and how their figures are written. The page and report.html draw the same ones.

import { count, loss, percent, short } from "./format.js";

const known = (value) => value !== null;

export const PANELS = [
  { name: "loss", title: "Loss", format: loss, height: 280, wide: true, canLog: true },
  { name: "grad_norm", title: "Gradient norm", format: short, canLog: true },
  { name: "lr", title: "Learning rate", format: short },
  { name: "tok_s", title: "Tokens per second", format: count, axis: (ticks) => ticks.map(count) },
  { name: "floor_share", title: "Share of the floor", format: percent, axis: (ticks) => ticks.map(percent), shownIf: known },
  { name: "router_entropy", title: "Router entropy, of the largest", format: percent, axis: (ticks) => ticks.map(percent), shownIf: known },
  { name: "busiest_expert", title: "Busiest expert, times an equal share", format: short, shownIf: known },
  { name: "idle_experts", title: "Experts without tokens", format: percent, axis: (ticks) => ticks.map(percent), shownIf: (value) => value > 0 },
  { name: "reward", title: "Reward", format: short, shownIf: known },
  { name: "answer_tokens", title: "Tokens of an answer", format: short, shownIf: known },
  { name: "truncated", title: "Truncated answers", format: percent, axis: (ticks) => ticks.map(percent), shownIf: known },
  { name: "skipped_groups", title: "Groups with equal rewards", format: short, shownIf: known },
  { name: "reward_failed", title: "Answers without a reward", format: short, shownIf: known },
  { name: "sample_tok_s", title: "Tokens sampled per second", format: count, axis: (ticks) => ticks.map(count), shownIf: known },
  { name: "sample_s", title: "Seconds of a round: sampling", format: short, shownIf: known },
  { name: "reward_s", title: "Seconds of a round: rewards", format: short, shownIf: known },
  { name: "train_s", title: "Seconds of a step: training", format: short, shownIf: known },
  { name: "skipped", title: "Skipped updates", format: short, shownIf: (value) => value > 0 },
];

const OWNED = new Set(PANELS.map((panel) => panel.name));

// The charts of a run: those above, and one for each other figure of its steps, as its loss and its rewards name them.
export function panelsOf(names) {
  const title = (name) => name.charAt(0).toUpperCase() + name.slice(1).replaceAll("_", " ");
  return [...PANELS, ...names.filter((name) => !OWNED.has(name)).map((name) => ({ name, title: title(name), format: short, shownIf: known }))];
}

// The lines of a panel for one run, and their data out of `part` {steps, values} and the evaluations.
export function linesOf(panel, smooth) {
  if (panel.name !== "loss") return [{ label: panel.title.toLowerCase(), colour: "--line-1", points: Boolean(panel.metric) }];
  const training = smooth ? [{ label: "training", colour: "--raw" }, { label: "smoothed", colour: "--line-1", width: 1.75, smooth: true }] : [{ label: "training", colour: "--line-1" }];
  return [...training, { label: "validation", colour: "--line-2", width: 1.75, points: true }];
}

// Whether a chart is drawn: those of rare figures only where there are some.
export const isShown = (panel, values) => !panel.shownIf || values.some(panel.shownIf);

// From the evaluation before step 1, at step 0, to the last one.
export function evalLine(evals) {
  return { steps: evals.map((each) => each.step), values: evals.map((each) => each.loss ?? null) };
}

// A chart for each metric of the evaluations, and its line.
export function metricPanels(evals) {
  const names = new Set(evals.flatMap((each) => Object.keys(each.metrics ?? {})));
  const failed = Math.max(0, ...evals.map((each) => each.metric_failed ?? 0));
  const calls = failed ? ` (up to ${failed} calls failed)` : "";
  return [...names].slice(0, 16).map((metric) => ({ name: `metric ${metric}`, title: `Metric: ${metric}${calls}`, format: short, metric }));
}

export function metricLine(evals, metric) {
  const value = (each) => (Number.isFinite(each.metrics?.[metric]) ? each.metrics[metric] : null);
  return { steps: evals.map((each) => each.step), values: evals.map(value) };
}

export function clipMark(settings) {
  const clip = Number(settings?.clip);
  return clip > 0 ? { value: clip, label: `clipped at ${short(clip)}` } : null;
}
