// Makes elements from text and other elements. Nothing here accepts markup, so text from a run folder (a name, a sample,
// a row of data) is always shown as text.

// Makes invisible characters visible: control characters (terminal escape sequences begin with one) become symbols, and
// characters that change the direction of text are named.
const ACTING = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]/g;

export function visible(text) {
  return String(text).replace(ACTING, (character) => {
    const code = character.codePointAt(0);
    if (code < 0x20) return String.fromCodePoint(0x2400 + code);
    if (code === 0x7f) return "\u2421";
    return `\u2039U+${code.toString(16).toUpperCase().padStart(4, "0")}\u203a`;
  });
}

// `attributes`: `on` holds listeners, `style` and `data` are objects, true and false set and leave out, the rest is set
// as it is. Children are elements, strings, numbers, arrays of these; null and false are left out.
export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [type, listener] of Object.entries(value)) element.addEventListener(type, listener);
    else if (name === "style") for (const [key, each] of Object.entries(value)) element.style.setProperty(key, each);
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name === "title" || name === "aria-label") element.setAttribute(name, visible(value));
    else element.setAttribute(name, value === true ? "" : value);
  }
  put(element, children);
  return element;
}

export function put(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(visible(child)));
  }
  return element;
}

export function fill(element, ...children) {
  element.replaceChildren();
  return put(element, children);
}

export function setText(element, text) {
  const shown = visible(text);
  if (element.textContent !== shown) element.textContent = shown;
}

export function button(label, onClick, attributes = {}) {
  return el("button", { type: "button", ...attributes, on: { click: onClick } }, label);
}

// A button that copies `text()` to the clipboard and shows whether that worked.
export function copyButton(label, text) {
  const made = button(label, async () => {
    const done = await copied(text());
    setText(made, done ? "Copied" : "Not copied: select the text instead");
    setTimeout(() => setText(made, label), 2000);
  });
  return made;
}

// A command to run, as text and to copy.
export function command(text) {
  return el("span", { class: "command" }, el("code", {}, text), copyButton("Copy", () => text));
}

async function copied(text) {
  if (navigator.clipboard) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      return false;
    }
  }
  // Over plain http from another machine there is no clipboard API; the old way still works.
  const field = el("textarea", { class: "unseen", "aria-hidden": "true" });
  field.value = text;
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  return done;
}

// A table of `columns` [{title, number}] and rows of text; the caption is read by screen readers.
export function table(caption, columns, rows) {
  const cell = (tag, column, content) => el(tag, { class: column.number ? "number" : null, scope: tag === "th" ? "col" : null }, content);
  return el(
    "table",
    { class: "plain" },
    el("caption", { class: "unseen" }, caption),
    el("thead", {}, el("tr", {}, columns.map((column) => cell("th", column, column.title)))),
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map((content, at) => cell("td", columns[at], content))))),
  );
}
