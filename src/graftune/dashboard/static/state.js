// The state of a run: a word, a dot whose shape and colour say the same, and the sentence of the server.

import { el } from "./dom.js";

const LIVE = new Set(["preparing", "compiling", "sampling", "training", "evaluating", "finalising"]);
const KNOWN = new Set([...LIVE, "finished", "stopped", "died"]);

export const isLive = (state) => LIVE.has(state);

// The sentence without the word that is shown next to it.
export function sentenceOf({ state, sentence }) {
  const text = sentence ?? "";
  return state && text.startsWith(state) ? text.slice(state.length).replace(/^[\s,;:]+/, "") : text;
}

export function stateMark(state) {
  const kind = isLive(state) ? "live" : KNOWN.has(state) ? state : "unknown";
  return el("span", { class: "state", data: { kind, state } }, el("i", { class: "dot", "aria-hidden": "true" }), state ?? "unknown");
}
