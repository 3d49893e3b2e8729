"""A conversation with a model on a terminal: its messages, what fits the context, and the commands.

An exchange is kept as it was shown, also when Ctrl-C stopped the answer, so that the conversation is always what the
screen shows. When the context is full, the oldest exchanges are left out as a whole and the system message stays: half
a message misleads a model more than a missing one. Rejected: summarising them, which would take another answer of the
model.
"""

from __future__ import annotations

import importlib
import json
import select
import sys
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

from graftune.errors import GraftuneError
from graftune.observe.console import AnswerRow, Console

Message = dict[str, str]
HELP = (
    ("/system TEXT", "set the system message; without TEXT, remove it"),
    ("/undo", "take back the last message and its answer"),
    ("/retry", "answer the last message again"),
    ("/save FILE", "append the conversation to FILE as one line of JSON, which graftune can train on"),
    ("/reset", "forget the conversation"),
    ("/quit", "leave (so does Ctrl-D, or Ctrl-C twice)"),
    ('"""', 'begins a message of several lines, which ends with """; or end a line with \\'),
    ("Ctrl-C", "stops an answer; the part that was shown stays"),
)


class Exchange(NamedTuple):
    asked: str
    answers: dict[str, str]  # by side: tuned, and base


class Talk:
    """One conversation: the exchanges so far, of the tuned model and (comparing) of the base beside it."""

    def __init__(self, run: Any, console: Console, sampling: dict[str, Any], *, system: str, compare: bool) -> None:
        self._run, self._console, self._sampling = run, console, sampling
        self.system, self._sides = system, ("base", "tuned") if compare else ("tuned",)
        self._noted_full = False
        self.reset()

    def reset(self) -> None:
        self.exchanges: list[Exchange] = []
        self._first = 0  # index of the first exchange that still fits the context
        self._retries = 0
        self._current = Exchange("", {})  # the exchange under way

    def answer(self, text: str) -> None:
        """Answer one message: streamed, side by side, or as JSON."""
        console, comparing = self._console, len(self._sides) == 2
        self._current = Exchange(text, {})
        self._drop_oldest(text)
        for side in self._sides:
            label = f"asking the {'base' if side == 'base' else 'tuned model'}"
            with console.working(label) if comparing else nullcontext():
                self._generate(side, text)
        names = {"tuned": "answer", "base": "base_answer"}
        console.result({"prompt": text} | {names[side]: answer for side, answer in self._current.answers.items()})
        if not comparing and not console.json:
            console.line()
        self._keep()

    def ask(self, text: str) -> bool:
        """Answer a message that was typed, and return whether it is part of the conversation now. Ctrl-C stops the
        answer, and a message that is refused is a warning."""
        try:
            self.answer(text)
            return True
        except KeyboardInterrupt:
            return self._stopped()
        except GraftuneError as error:
            self._console.warn(str(error))
            return False

    def _stopped(self) -> bool:
        """The part of an answer that was shown is kept, if every model had begun."""
        console = self._console
        if not console.json:
            console.line()
        if any(not self._current.answers.get(side, "").strip() for side in self._sides):
            console.note("stopped before the answer began; the conversation is unchanged")
            return False
        self._keep()
        console.note("stopped; /undo takes the message back, /retry asks it again")
        return True

    def undo(self) -> str | None:
        """Take the last exchange back; its message, or None if there is none."""
        if not self.exchanges:
            return None
        self._first = 0  # exchanges that were left out may fit again
        return self.exchanges.pop().asked

    def retry(self) -> None:
        if not self.exchanges:
            self._console.warn("there is nothing to answer again")
            return
        if not self._sampling["temperature"]:
            self._console.note("at temperature 0 an answer is always the same; begin with --temperature 0.8 to vary it")
        self._retries += 1
        last = self.exchanges[-1]
        self.undo()
        if not self.ask(last.asked):
            self.exchanges.append(last)

    def save(self, file: str) -> None:
        if not file or not self.exchanges:
            self._console.warn("there is nothing to save yet" if file else "/save needs the name of a file")
            return
        line = json.dumps({"messages": self._messages("tuned", 0)}, ensure_ascii=False)
        try:
            with open(Path(file).expanduser(), "a", encoding="utf-8") as out:
                out.write(line + "\n")
        except OSError as error:
            self._console.warn(f"{file}: {error.strerror or error}")
            return
        count = len(self.exchanges)
        self._console.note(f"saved {count} {'exchange' if count == 1 else 'exchanges'} to {file}")

    def set_system(self, text: str) -> None:
        self.system, self._first = text, 0
        self._console.note(
            "the system message is set, from the next answer on" if text else "no system message any more"
        )

    def _generate(self, side: str, text: str) -> None:
        """Adds each piece to the current answers, so that a stopped answer is known, and shows it unless two are to
        stand side by side."""

        answers = self._current.answers

        def on_text(piece: str) -> None:
            answers[side] = answers.get(side, "") + piece
            if len(self._sides) == 1 and not self._console.json:
                self._console.stream(piece)

        messages = [*self._messages(side, self._first), {"role": "user", "content": text}]
        sampling = self._sampling | {"seed": self._sampling["seed"] + self._retries}
        answers[side] = self._run.chat(messages, adapted=side == "tuned", on_text=on_text, **sampling)

    def _keep(self) -> None:
        if len(self._sides) == 2 and not self._console.json:
            asked, answers = self._current
            self._console.side_by_side("", [AnswerRow(asked, answers["base"], answers["tuned"])])
        self.exchanges.append(self._current)

    def _messages(self, side: str, first: int) -> list[Message]:
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for exchange in self.exchanges[first:]:
            messages.append({"role": "user", "content": exchange.asked})
            messages.append({"role": "assistant", "content": exchange.answers[side]})
        return messages

    def _drop_oldest(self, text: str) -> None:
        """Leave out the oldest exchanges until the message and an answer fit; half the context at most is kept free for
        the answer."""
        context: int = self._run.context
        answer = min(self._sampling["max_new_tokens"], context // 2)
        message = {"role": "user", "content": text}
        while self._first < len(self.exchanges):
            prompts = [[*self._messages(side, self._first), message] for side in self._sides]
            if max(map(self._run.prompt_tokens, prompts)) + answer <= context:
                return
            self._first += 1
            if not self._noted_full:
                self._noted_full = True
                self._console.note(
                    f"the context of {context} tokens is full: from here on the oldest messages are left out"
                )


def converse(talk: Talk, console: Console) -> int:
    """The loop on a terminal. Ctrl-D and /quit end it with 0, Ctrl-C twice at the prompt with 130."""
    with suppress(ImportError):  # line editing and history for input(), where Python was built with it
        importlib.import_module("readline")
    console.note('/help lists the commands, """ begins a message of several lines, Ctrl-D leaves')
    leaving = False
    while True:
        try:
            text = read_message()
        except EOFError:
            console.line()
            return 0
        except KeyboardInterrupt:
            console.line()
            if leaving:
                return 130
            leaving = True
            console.note("Ctrl-C once more, /quit or Ctrl-D leaves")
            continue
        leaving = False
        if text in ("/quit", "/exit"):
            return 0
        if not _command(talk, console, text) and text:
            talk.ask(text)


def _command(talk: Talk, console: Console, text: str) -> bool:
    """Carry out a command; False for a message. An unknown word after a slash is refused only if it stands alone:
    people paste paths."""
    name, _, rest = text.partition(" ")
    if "\n" in name or not name.startswith("/"):
        return False
    rest = rest.strip()
    if name == "/help":
        console.table("commands", ("type", "to"), HELP)
    elif name == "/reset":
        talk.reset()
        console.note("the conversation starts over")
    elif name == "/system":
        talk.set_system(rest)
    elif name == "/undo":
        taken = talk.undo()
        console.note("there is nothing to take back" if taken is None else f"taken back: {taken}")
    elif name == "/retry":
        talk.retry()
    elif name == "/save":
        talk.save(rest)
    elif not rest:
        console.warn(f"{name} is not a command; /help lists them")
    else:
        return False
    return True


def read_message() -> str:
    """Read one message: a line, lines that end with a backslash and the one after them, a block in triple quotes, or
    all lines of a paste."""
    text = input("\n> ")
    if text.lstrip().startswith('"""'):
        return _block(text.lstrip()[3:])
    lines = [text]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input("... "))
    while not text.startswith("/") and _more_waits():
        lines.append(input())
    return "\n".join(lines).strip()


def _block(line: str) -> str:
    lines = []
    while not line.rstrip().endswith('"""'):
        lines.append(line)
        line = input("... ")
    return "\n".join([*lines, line.rstrip()[:-3]]).strip()


def _more_waits() -> bool:
    """Whether another line is there already, which means that it was pasted."""
    try:
        return bool(select.select([sys.stdin], [], [], 0.02)[0])
    except (OSError, ValueError):  # no file behind it, or a system whose select takes sockets only
        return False
