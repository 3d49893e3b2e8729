// Sample answers: base and tuned side by side, at a step that is chosen, and how each answer changed over the run.

import { withCode } from "./code_text.js";
import { command, el, fill, setText } from "./dom.js";
import { count, shellWord, short } from "./format.js";
import { shortcut } from "./keys.js";

export class SamplesView {
  constructor(root, run) {
    Object.assign(this, { root, run, samples: run.samples ?? [], follows: true });
    this.slider = el("input", { type: "range", min: 0, step: 1, id: "sample-step", on: { input: () => this.choose() } });
    this.value = el("output", { class: "figure", for: "sample-step" });
    this.bar = el("div", { class: "toolbar" }, el("label", { for: "sample-step" }, "Answers at step "), this.slider, this.value);
    this.list = el("div", { class: "samples" });
    this.round = el("div", { class: "samples" });
    fill(root, this.bar, this.list, this.round);
    shortcut("[", "Answers at an earlier step", () => this.turn(-1));
    shortcut("]", "Answers at a later step", () => this.turn(1));
  }

  start() {
    this.draw();
  }

  // Called with all answers when new ones were written.
  update(samples) {
    this.samples = samples;
    this.draw();
  }

  get steps() {
    return [...new Set(this.samples.map((sample) => sample.step))].sort((a, b) => a - b);
  }

  turn(by) {
    this.slider.value = Number(this.slider.value) + by;
    this.choose();
  }

  choose() {
    this.follows = Number(this.slider.value) === this.steps.length - 1;
    this.draw();
  }

  draw() {
    const steps = this.steps;
    fill(this.round, roundAnswers(this.run.answers));
    this.bar.hidden = !steps.length;
    if (!steps.length) {
      fill(this.list, el("p", { class: "dim" }, "There are no answers yet. A run answers a few validation prompts at its end, and during training with ", el("code", {}, "--sample-every"), "."), el("p", {}, "Ask base and tuned yourself: ", command(`graftune chat ${shellWord(this.run.folder)} --compare`)));
      return;
    }
    this.slider.max = steps.length - 1;
    if (this.follows) this.slider.value = steps.length - 1;
    const step = steps[Number(this.slider.value)];
    setText(this.value, `${count(step)} (${Number(this.slider.value) + 1} of ${steps.length})`);
    const prompts = byPrompt(this.samples);
    const open = new Set([...this.list.querySelectorAll("details[open]")].map((each) => each.dataset.at));
    fill(this.list, prompts.map((answers, at) => this.prompt(answers[0].prompt ?? `Prompt ${at + 1} (its text was not recorded)`, answers, step, at, open)));
  }

  prompt(prompt, answers, step, at, open) {
    const now = answers.filter((sample) => sample.step <= step).pop();
    const base = answers.map((sample) => sample.base).find((text) => text !== null && text !== undefined);
    const reference = answers.map((sample) => sample.reference).find(Boolean);
    const column = (who, text, none) => el("div", { class: `answer ${who}` }, el("h2", {}, who), text === null || text === undefined ? el("p", { class: "dim" }, none) : el("div", { class: "text" }, withCode(text)));
    const sides = el("div", { class: "sides" }, column("base", base, "The base has no answer."), column("tuned", now?.tuned, "No answer at this step yet."), reference ? column("reference", reference, "") : null);
    return el("article", { class: "sample" }, el("div", { class: "prompt text" }, withCode(prompt)), sides, changes(answers, at, open));
  }
}

// The answers to each prompt in the order of their steps. Within a step, a prompt is identified by its position.
function byPrompt(samples) {
  const [groups, places] = [[], new Map()];
  for (const sample of [...samples].sort((a, b) => a.step - b.step)) {
    const place = places.get(sample.step) ?? 0;
    places.set(sample.step, place + 1);
    (groups[place] ??= []).push(sample);
  }
  return groups;
}

// The best and the worst answers of the last round of reinforcement learning.
function roundAnswers(round) {
  if (!round) return null;
  const one = (answer) => el("article", { class: "sample" }, el("div", { class: "prompt text" }, withCode(String(answer.prompt))), el("div", { class: "answer" }, el("h2", {}, `reward ${short(answer.reward)}`), el("div", { class: "text" }, withCode(String(answer.answer)))));
  return ["best", "worst"].flatMap((kind) => [el("h2", {}, `The ${kind} answers of the round at step ${count(round.step)}`), ...(round[kind] ?? []).map(one)]);
}

// Only the steps at which an answer changed.
function changes(answers, at, open) {
  const answered = answers.filter((sample) => sample.tuned !== null && sample.tuned !== undefined);
  const changed = answered.filter((sample, place) => place === 0 || sample.tuned !== answered[place - 1].tuned);
  if (answered.length < 2) return null;
  const summary = `${changed.length} different answers over ${answered.length} steps asked`;
  const rows = changed.map((sample) => el("li", {}, el("span", { class: "figure" }, `step ${count(sample.step)}`), el("span", { class: "text" }, sample.tuned)));
  return el("details", { data: { at }, open: open.has(String(at)) }, el("summary", {}, summary), el("ol", { class: "changes" }, rows));
}
