// Keyboard shortcuts: those of the whole page and those of the view that is shown, listed by the help dialog.

import { el, fill } from "./dom.js";

const always = new Map();
let ofView = new Map();

export function shortcut(key, meaning, act) {
  ofView.set(key, { meaning, act });
}

export function shortcutAlways(key, meaning, act) {
  always.set(key, { meaning, act });
}

export function forgetShortcuts() {
  ofView = new Map();
}

export function showHelp() {
  const dialog = document.getElementById("help-dialog");
  const rows = [...ofView, ...always].map(([key, { meaning }]) => [el("dt", {}, el("kbd", {}, key)), el("dd", {}, meaning)]);
  const chart = [
    ["\u2190 \u2192", "Pan a chart that has the focus"],
    ["+ \u2212", "Zoom it in and out"],
    ["0", "Show the whole run in it"],
    ["Enter, Escape", "In a search field: keep what was found, or empty the field"],
    ["Drag", "Zoom to what is selected; with Shift: pan. Ctrl and the wheel zoom; a double click shows the whole run"],
  ].map(([key, meaning]) => [el("dt", {}, el("kbd", {}, key)), el("dd", {}, meaning)]);
  fill(document.getElementById("help-keys"), rows, chart);
  dialog.showModal();
}

// On Escape, the browser empties a search field without an input event if the field loses the focus.
function leave(event) {
  const field = event.target;
  if (field.type === "search" && field.value) {
    event.preventDefault();
    field.value = "";
    field.dispatchEvent(new Event("input", { bubbles: true }));
  }
  field.blur();
}

const WRITES = "input:not([type=checkbox]):not([type=range]), textarea, select";

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
  if (document.getElementById("help-dialog").open) return; // it closes itself
  if (event.target.matches?.(WRITES)) {
    if (event.key === "Escape") leave(event);
    if (event.key === "Enter" && event.target.type === "search") event.target.blur(); // on to what was found
    return;
  }
  const found = ofView.get(event.key) ?? always.get(event.key);
  if (!found) return;
  event.preventDefault();
  found.act(event);
});
