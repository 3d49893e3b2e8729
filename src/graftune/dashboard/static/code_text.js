// Text of a model with its code in a monospaced face: fenced blocks (``` or ~~~, an open one up to the end, as while the
// answer streams) and `inline` code. Nothing else of Markdown is read, and everything stays text: dom.js makes the nodes.

import { el } from "./dom.js";

const FENCE = /^\s*(`{3,}|~{3,})([^`]*)$/;
const INLINE = /(?<!`)(`+)(?!`)([^\n]*?[^`\n])\1(?!`)/g;

export function withCode(text) {
  const [made, prose, code] = [[], [], []];
  let fence = null;
  const endProse = () => prose.length && made.push(...inline(prose.splice(0).join("\n")));
  const endCode = () => made.push(el("pre", { tabindex: "0" }, el("code", {}, code.splice(0).join("\n"))));
  for (const line of text.split("\n")) {
    const found = line.match(FENCE);
    if (!fence && found) {
      endProse();
      fence = found[1];
    } else if (fence && found && found[1].startsWith(fence) && !found[2].trim()) {
      endCode();
      fence = null;
    } else (fence ? code : prose).push(line);
  }
  if (fence) endCode();
  endProse();
  return made;
}

function inline(text) {
  const made = [];
  let end = 0;
  for (const found of text.matchAll(INLINE)) {
    made.push(text.slice(end, found.index), el("code", {}, found[2].trim() || found[2]));
    end = found.index + found[0].length;
  }
  return [...made, text.slice(end)];
}
