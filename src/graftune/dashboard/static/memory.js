// Memory by owner as it was planned, and the measured peak against it.

import { el } from "./dom.js";
import { bytes, percent } from "./format.js";

export function memoryTable(plan, memory, end) {
  const owners = Object.entries(memory?.owners ?? plan?.owners ?? {}).filter(([, size]) => size > 0);
  if (!owners.length) return el("p", { class: "dim" }, "No plan was written for this run.");
  owners.sort((a, b) => b[1] - a[1]);
  const planned = memory?.planned ?? plan?.expected ?? owners.reduce((sum, [, size]) => sum + size, 0);
  const measured = end?.peak_device_memory ?? end?.peak_memory ?? memory?.measured ?? null;
  const widest = Math.max(planned, measured ?? 0);
  const bar = (size, kind) => el("td", { class: "bar-cell" }, el("i", { class: `bar-fill ${kind}`, "aria-hidden": "true", style: { "--share": `${(100 * size) / widest}%` } }));
  const row = (name, size, kind, note = "") => el("tr", { class: kind }, el("th", { scope: "row" }, name), el("td", { class: "number" }, bytes(size)), el("td", { class: "number" }, note), bar(size, kind));
  const off = measured === null ? "" : `${measured >= planned ? "+" : "\u2212"}${percent(Math.abs(measured / planned - 1))}`;
  return el(
    "table",
    { class: "plain memory" },
    el("caption", { class: "unseen" }, "Memory by owner, planned and measured"),
    el("thead", {}, el("tr", {}, ["Owner", "Bytes", "Share", ""].map((title, at) => el("th", { scope: "col", class: at === 1 || at === 2 ? "number" : null }, title)))),
    el("tbody", {}, owners.map(([name, size]) => row(name, size, "owner", percent(size / planned)))),
    el("tbody", {}, row("Planned in all", planned, "planned"), measured === null ? null : row("Measured peak", measured, "measured", off)),
  );
}
