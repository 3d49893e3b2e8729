// The frame of the page: chooses the view by the address; theme, help, and texts for screen readers.

import { CompareView } from "./compare_view.js";
import { el, fill, setText } from "./dom.js";
import { forgetShortcuts, shortcutAlways, showHelp } from "./keys.js";
import { ListView } from "./list_view.js";
import { RunView } from "./run_view.js";

const root = document.getElementById("view");
const announcer = document.getElementById("announcer");

const app = {
  chosen: new Set(),
  announce: (sentence) => setText(announcer, sentence),
  setRoot: (folder) => setText(document.getElementById("root"), folder),
};

let shown = null;

// A name from the address bar; a damaged one is used as it is, and is not found.
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function viewOf(address) {
  const [kind, ...rest] = address.replace(/^#\/?/, "").split("/");
  if (kind === "run" && rest[0]) return new RunView(root, app, decoded(rest[0]), rest[1]);
  if (kind === "compare") {
    if (rest[0]) app.chosen = new Set(rest[0].split(",").map(decoded));
    return new CompareView(root, app);
  }
  return new ListView(root, app);
}

function setCurrent(link, current) {
  if (current) link.setAttribute("aria-current", "page");
  else link.removeAttribute("aria-current");
}

async function show() {
  const before = shown;
  before?.close();
  forgetShortcuts();
  document.title = "graftune";
  const focusWasInside = root.contains(document.activeElement);
  const view = viewOf(location.hash);
  shown = view;
  for (const [id, kind] of [["to-runs", ListView], ["to-compare", CompareView]]) setCurrent(document.getElementById(id), view instanceof kind);
  if (before && focusWasInside) root.focus({ preventScroll: true });
  root.setAttribute("aria-busy", "true");
  try {
    await view.start();
  } catch (error) {
    if (shown === view) fill(root, el("h1", {}, "This cannot be shown"), el("p", { class: "error" }, error.message), el("p", {}, el("a", { href: "#/" }, "All runs")));
  }
  if (shown === view) root.setAttribute("aria-busy", "false");
}

const theme = document.getElementById("theme");
const nameTheme = () => setText(theme, `Theme: ${window.graftuneTheme.choice}`);
theme.addEventListener("click", () => window.graftuneTheme.next());
addEventListener("theme", nameTheme);
nameTheme();
document.getElementById("help").addEventListener("click", showHelp);
shortcutAlways("r", "All runs", () => (location.hash = "#/"));
shortcutAlways("t", "Theme: system, light, dark", () => window.graftuneTheme.next());
shortcutAlways("?", "This help", showHelp);

addEventListener("connection", ({ detail: up }) => setText(document.getElementById("connection"), up ? "" : "The server does not answer; trying again."));
addEventListener("hashchange", show);
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address belongs to the views
  root.focus();
});
show();
