// Tokens per expert of a mixture: a row for each layer, with a bar for each expert.

import { el } from "./dom.js";
import { count, percent } from "./format.js";

const MOST_LAYERS = 200;

export function routingTable(routing) {
  const layers = (Array.isArray(routing?.layers) ? routing.layers : []).filter((one) => Array.isArray(one?.tokens)).slice(0, MOST_LAYERS);
  if (!layers.length) return el("p", { class: "dim" }, "This model has no experts.");
  const row = ({ layer, entropy, tokens }) => {
    const most = Math.max(1, ...tokens);
    const total = Math.max(1, tokens.reduce((sum, each) => sum + each, 0));
    const bars = tokens.map((each) => el("i", { style: { "--share": `${(100 * each) / most}%` } }));
    const spoken = `Layer ${layer}: tokens of each expert: ${tokens.map(count).join(", ")}`;
    const figures = [percent(entropy ?? 0), percent(Math.max(...tokens) / total), String(tokens.filter((each) => !each).length)];
    return el("tr", {}, el("th", { scope: "row" }, String(layer)), figures.map((text) => el("td", { class: "number" }, text)), el("td", { class: "loads" }, el("span", { role: "img", "aria-label": spoken, title: spoken }, bars)));
  };
  const titles = ["Layer", "Entropy", "Busiest", "Idle", `Tokens per expert, step ${count(routing.step ?? 0)}`];
  return el(
    "table",
    { class: "plain routing" },
    el("caption", { class: "unseen" }, "Tokens per expert of each layer"),
    el("thead", {}, el("tr", {}, titles.map((title, at) => el("th", { scope: "col", class: at > 0 && at < 4 ? "number" : null }, title)))),
    el("tbody", {}, layers.map(row)),
  );
}
