// How the run was started, exactly, and every setting it ran with.

import { copyButton, el, fill } from "./dom.js";
import { NONE } from "./format.js";

export class CommandView {
  constructor(root, run) {
    Object.assign(this, { root, run });
  }

  start() {
    const block = (title, text, none) =>
      el("section", { class: "panel" }, el("div", { class: "panel-head" }, el("h2", {}, title), text ? copyButton("Copy", () => text) : null), text ? el("pre", { tabindex: "0" }, text) : el("p", { class: "dim" }, none));
    fill(this.root, block("Command", this.run.command, `${NONE} This run did not write down its command.`), block("Configuration", this.run.config_yaml, "There is no config.yaml."));
  }
}
