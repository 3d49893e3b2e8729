// A chat with the base and the tuned model side by side. The server loads them in a separate process, so training is not
// disturbed. Both get the same messages: a conversation continues from the answer of the chosen side.

import { stream } from "./api.js";
import { withCode } from "./code_text.js";
import { button, el, fill, setText } from "./dom.js";
import { shortcut } from "./keys.js";

const SIDES = ["base", "tuned"];
const NOTHING_YET = "This run has no adapter and no checkpoint yet; the chat opens with the first one.";

export class ChatView {
  constructor(root, run, app) {
    Object.assign(this, { root, run, app, turns: [], asking: null });
    this.checkpoint = el("select", { id: "checkpoint" });
    this.temperature = el("input", { type: "number", id: "temperature", min: 0, max: 2, step: 0.1, value: "0" });
    this.length = el("input", { type: "number", id: "length", min: 1, max: 4096, step: 1, value: "256" });
    this.system = el("textarea", { id: "system", rows: 1, placeholder: "none" });
    this.follow = el("select", { id: "follow" }, el("option", { value: "tuned" }, "the tuned answer"), el("option", { value: "base" }, "the base answer"));
    this.log = el("div", { class: "chat", role: "log", "aria-label": "Conversation" });
    this.field = el("textarea", { id: "message", rows: 3, placeholder: "Ask base and tuned (Enter sends, Shift and Enter breaks the line)", "aria-label": "Message", on: { keydown: (event) => this.key(event) } });
    this.send = button("Send", () => this.ask(), { class: "primary" });
    this.stop = button("Stop", () => this.asking?.abort(), { disabled: true });
    this.status = el("p", { class: "dim", role: "status" });
    const label = (text, field) => el("label", { for: field.id }, `${text} `, field);
    const more = [label("System prompt", this.system), label("Temperature", this.temperature), label("New tokens", this.length), label("Go on from", this.follow)];
    const settings = [label("Checkpoint", this.checkpoint), button("New conversation", () => this.clear()), el("details", { class: "settings", open: innerWidth > 700 }, el("summary", {}, "Settings"), el("div", { class: "toolbar" }, more))];
    this.form = el("div", { class: "ask" }, this.field, el("div", { class: "group" }, this.send, this.stop));
    fill(root, el("div", { class: "toolbar" }, settings), this.log, this.form, this.status);
    shortcut("/", "Write a message", () => this.field.focus());
  }

  start() {
    this.update(this.run);
  }

  // Checkpoints come and go while a run trains.
  update(run) {
    const found = run.checkpoints ?? [];
    const before = this.checkpoint.value;
    fill(this.checkpoint, found.map((name) => el("option", { value: name }, name)));
    if (found.includes(before)) this.checkpoint.value = before;
    this.form.hidden = !found.length;
    const empty = NOTHING_YET === this.status.textContent ? "" : this.status.textContent;
    setText(this.status, found.length ? empty : NOTHING_YET);
  }

  key(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this.ask();
  }

  clear() {
    this.asking?.abort();
    this.turns = [];
    fill(this.log);
    this.field.focus();
  }

  messages() {
    const side = this.follow.value;
    const system = this.system.value.trim();
    return [
      ...(system ? [{ role: "system", content: system }] : []),
      ...this.turns.flatMap((turn) => [
        { role: "user", content: turn.user },
        ...(turn.answers ? [{ role: "assistant", content: turn.answers[side] }] : []),
      ]),
    ];
  }

  async ask() {
    const user = this.field.value.trim();
    if (!user || this.asking) return;
    this.field.value = "";
    const turn = { user, answers: null };
    const messages = [...this.messages(), { role: "user", content: user }];
    const shown = this.draw(user);
    this.busy(true);
    setText(this.status, `Loading ${this.checkpoint.value}\u2026`);
    const texts = { base: "", tuned: "" };
    const body = { run: this.run.id, checkpoint: this.checkpoint.value, messages, temperature: Number(this.temperature.value), max_new_tokens: Number(this.length.value) };
    try {
      for await (const piece of stream("/api/chat", body, this.asking.signal)) this.write(piece, texts, shown);
      this.turns.push({ ...turn, answers: texts });
    } catch (error) {
      const stopped = error.name === "AbortError";
      setText(this.status, stopped ? "Stopped." : error.message);
      if (stopped && texts.base && texts.tuned) this.turns.push({ ...turn, answers: texts });
    } finally {
      this.busy(false);
    }
  }

  write(piece, texts, shown) {
    if (piece.error) throw new Error(piece.error);
    const atEnd = this.atEnd();
    const side = shown[piece.who];
    if (!side) return;
    if (piece.text) {
      setText(this.status, "");
      texts[piece.who] += piece.text;
      fill(side.text, withCode(texts[piece.who]));
    }
    if (piece.done) setText(side.reason, piece.reason && piece.reason !== "stop" && piece.reason !== "end" ? piece.reason : "");
    if (atEnd) this.showEnd();
  }

  // The page follows the answer unless one has scrolled up to read.
  atEnd() {
    const { scrollTop, clientHeight, scrollHeight } = document.documentElement;
    return scrollTop + clientHeight > scrollHeight - 60;
  }

  showEnd() {
    document.documentElement.scrollTop = document.documentElement.scrollHeight;
  }

  draw(user) {
    const shown = {};
    const sides = SIDES.map((who) => {
      shown[who] = { text: el("div", { class: "text" }), reason: el("p", { class: "dim" }) };
      return el("div", { class: `answer ${who}` }, el("h2", {}, who), shown[who].text, shown[who].reason);
    });
    this.log.append(el("article", { class: "turn" }, el("div", { class: "prompt text" }, withCode(user)), el("div", { class: "sides" }, sides)));
    this.showEnd();
    return shown;
  }

  busy(busy) {
    this.asking = busy ? new AbortController() : null;
    this.send.disabled = busy;
    this.stop.disabled = !busy;
  }

  close() {
    this.asking?.abort();
  }
}
