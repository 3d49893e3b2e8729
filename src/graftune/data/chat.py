"""Records -> texts with the spans that are trained, in characters.

An example's text is the prompt that inference gives plus the answer. For the assistant turn i:

    prompt = render(messages[:i], with the generation prompt)     what inference will have before it answers
    full   = render(messages[:i+1])                               the same conversation, answered
    answer = what `full` has after `prompt`, up to the end of the end-of-turn token

What stands in the contents, marker strings included, cannot move these boundaries. Where `full` does not start with
`prompt` (a generation prompt that opens <think>, a system prompt that only the last turn gets), the answer is what
`full` has after its assistant header, and it is put after the inference prompt: reasoning that the prompt has opened
continues there and is closed. `prompt_form: template` keeps the template's own rendering instead. Both are counted.

Turns are kept in one text where the whole conversation starts with each turn's own text (then every turn sees just what
inference would show it). Where a template rewrites history (Qwen3 drops old reasoning), or EOS had to be added that
inference's history will not have, each assistant turn becomes a text of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from graftune.data.format import REASONING_KEYS, ChatFormat
from graftune.data.probe import ANSWERS, borders, shared_header, shared_start
from graftune.data.record import Message, Record
from graftune.data.row import Refusal
from graftune.data.turn_places import Place, RenderedTurn, places

OTHER_PROMPT = {
    "inference": "the template renders an answered conversation differently from its inference prompt: trained after "
    "the inference prompt (prompt_form: template changes that)",
    "template": "the template renders an answered conversation differently from its inference prompt: trained as "
    "rendered (prompt_form: inference changes that)",
}
NO_REASONING = "reasoning left out: the prompt that inference gives has closed it already"
CLOSED_AT_ONCE = "the prompt opens a reasoning block: answers without reasoning close it at once"
NOT_RENDERED = {
    "system": "system text that the template does not render as written",
    "user": "user text that the template does not render as written",
    "assistant": "assistant text that the template does not render as written",
    "tool": "tool results that the template does not render as written",
    "reasoning": "reasoning that the template does not render",
    "calls": "tool calls that the template does not render as written",
}


class Passage(NamedTuple):
    """One example before tokenising. `messages` and `trained` are what it was rendered from, for cutting it shorter."""

    text: str
    spans: tuple[tuple[int, int], ...]  # what is trained, in characters
    prompts: tuple[int, ...]  # for each span, where the prompt before it ends
    messages: list[Message]
    trained: tuple[int, ...]
    reference: str
    tools: list[Any] | None = None
    notes: tuple[str, ...] = ()
    shortened: bool = False  # whether turns before it were left out

    @property
    def prompt(self) -> str:
        """The text a model continues to give the last trained answer."""
        return self.text[: self.prompts[-1]]

    @property
    def asked(self) -> list[Message]:
        """The messages before the last trained answer."""
        return self.messages[: self.trained[-1]]


@dataclass(frozen=True)
class ChatTurns:
    """Builds passages by one template and the settings that concern it."""

    form: ChatFormat
    prompt_form: Literal["inference", "template"] = "inference"
    train_reasoning: Literal["all", "none", "not_empty"] = "all"

    def passages(self, messages: list[Message], tools: list[Any] | None, trained: Sequence[int]) -> list[Passage]:
        """The texts that train `trained`, one where the template allows it."""
        begun: dict[int, RenderedTurn] = {}
        together = self.together(messages, tools, trained, begun)
        if together is not None:
            return [together]
        return [self._alone(messages[: i + 1], tools, begun.get(i)) for i in trained]

    def together(
        self,
        messages: list[Message],
        tools: list[Any] | None,
        trained: Sequence[int],
        begun: dict[int, RenderedTurn] | None = None,
    ) -> Passage | None:
        """The one text that trains `trained`; None if the template does not allow it. `begun` collects the turns that
        were rendered alone."""
        begun = {} if begun is None else begun
        found = places(lambda some: self._turn(some, tools), messages, trained, begun)
        if found is None:
            return None
        return self.passage(begun[trained[-1]].text, found, messages[: trained[-1] + 1], trained, tools)

    def alone(self, passage: Passage) -> list[Passage]:
        """The passage's turns as texts of their own, for tokenizers that join a turn's end to what follows it."""
        return [self._alone(passage.messages[: i + 1], passage.tools) for i in passage.trained]

    def _alone(self, messages: list[Message], tools: list[Any] | None, turn: RenderedTurn | None = None) -> Passage:
        turn = turn or self._turn(messages, tools)
        return self.passage(turn.text, [turn.place], messages, [len(messages) - 1], tools)

    def passage(
        self,
        text: str,
        turns: Sequence[Place],
        messages: list[Message],
        trained: Sequence[int],
        tools: list[Any] | None,
    ) -> Passage:
        """The passage with this text, whose trained turns lie there."""
        spans = tuple([(turn.start, turn.end) for turn in turns])
        notes = {note: None for turn in turns for note in turn.notes}
        answers = {i: text[turn.prompt : turn.end] for i, turn in zip(trained, turns, strict=True)}
        lost = dict.fromkeys(not_rendered(messages, text, answers))
        if NO_REASONING in notes:
            lost.pop(NOT_RENDERED["reasoning"], None)
        notes |= lost
        reference = (messages[-1]["content"] or "").strip()
        ends = tuple([turn.prompt for turn in turns])
        return Passage(text, spans, ends, messages, tuple(trained), reference, tools, tuple(notes))

    def _turn(self, messages: list[Message], tools: list[Any] | None) -> RenderedTurn:
        """The last message as a trained turn."""
        prompt = self.form.render(messages[:-1], tools, generate=True)
        full = self.form.render(messages, tools)
        body, end = self._ends(full, messages[-1])
        notes: list[str] = []
        if full.startswith(prompt):
            begin = len(prompt)
            answer, blank = full[begin:end], not full[begin:body].strip()
        else:
            begin = self._header(prompt, full, messages, tools)
            answer, blank = full[begin:end], not full[begin:body].strip()
            notes.append(OTHER_PROMPT[self.prompt_form])
            if self.prompt_form == "template":
                prompt = full[:begin]
            else:
                answer, note = self._continued(prompt, answer, messages)
                notes += [note] if note else []
        if blank:
            raise Refusal("refused by the chat template", "it renders nothing for an assistant turn")
        if self.form.append and not answer.endswith(self.form.append):
            answer += self.form.append
        skipped = 0
        if self.train_reasoning != "all":
            skipped, empty = self.form.reasoning.block(answer, opened=self._opens(prompt))
            if self.train_reasoning == "not_empty" and not empty:
                skipped = 0
        text = prompt + answer
        return RenderedTurn(text, Place(len(prompt), len(prompt) + skipped, len(text), tuple(notes)))

    def _opens(self, prompt: str) -> bool:
        tag = self.form.reasoning.open.strip()
        return bool(tag) and prompt.rstrip().endswith(tag)

    def _header(self, prompt: str, full: str, messages: list[Message], tools: list[Any] | None) -> int:
        """Where the generated part of `full` begins if `full` does not start with the inference prompt: after the
        longest part of the prompt's assistant header that `full` has before the answer's own text."""
        control, tag = self.form.control, self.form.reasoning.open.strip()
        history = self.form.render(messages[:-1], tools)
        asked = shared_header(prompt, history, control)
        reach = shared_header(prompt, full, control)
        block = prompt.rfind(tag, asked)
        if block < asked or self._opens(prompt):
            block = len(prompt)  # else the prompt closes what it opens: reasoning in the answer is no part of it
        if reach > asked:
            return min(reach, block)
        content = self._content_start(full, messages, tools)
        for said in ((messages[-2]["content"] or "").strip(), ""):
            begin = prompt.rfind(said) + len(said) if said and said in prompt else asked
            behind = prompt[begin:block]
            for size in sorted(borders(behind, control, len(behind)), reverse=True):
                place = full.rfind(said + behind[:size], 0, content) if (said + behind[:size]).strip() else -1
                if place >= 0:
                    return place + len(said) + size
        return asked if reach == asked == len(history) else content

    def _content_start(self, full: str, messages: list[Message], tools: list[Any] | None) -> int:
        """The latest place where the answer's own text starts: two probe answers differ from their first letter on."""
        probes = [
            self.form.render([*messages[:-1], {"role": "assistant", "content": answer}], tools) for answer in ANSWERS
        ]
        reach = len(shared_start(*probes, full))
        return max(borders(full, self.form.control, reach))

    def _continued(self, prompt: str, answer: str, messages: list[Message]) -> tuple[str, str]:
        """The answer as it continues the inference prompt, and a note for the user."""
        reasoning = self.form.reasoning
        close = reasoning.close.strip()
        ends, _ = reasoning.block(answer, opened=False)
        if self._opens(prompt):
            why, _ = authored_reasoning(self.form, messages[-1])
            if ends:  # the prompt has written the opening tag already
                tag = reasoning.open.strip()
                return answer.lstrip()[len(tag) :].removeprefix("\n"), ""
            if close in answer and not why:
                return answer, ""
            if why and why not in answer:
                return why + reasoning.close + answer.lstrip("\n"), ""
            return reasoning.close + answer.lstrip("\n"), CLOSED_AT_ONCE
        if ends and prompt.rstrip().endswith(close):
            empty = reasoning.block(answer, opened=False)[1]
            return answer[ends:], "" if empty else NO_REASONING
        return answer, ""

    def _ends(self, full: str, message: Message) -> tuple[int, int]:
        """Where the last turn's content ends, and where its end token does."""
        form = self.form
        tails = [(form.suffix, form.end)]
        if message.get("tool_calls") and form.call_suffix:
            tails.insert(0, (form.call_suffix, form.call_end))
        for suffix, end in tails:
            if suffix and full.endswith(suffix):
                body = len(full) - len(suffix)
                return body, body + len(end)
        text = full.rstrip()
        # A turn that closes otherwise than the probes did must close with a control token, or get EOS appended.
        token = next((name for name in form.control if text.endswith(name)), "")
        if not token and not form.append:
            raise Refusal("no end token", "the template does not close this assistant turn with one")
        return len(text) - len(token), len(text)


def trained_turns(record: Record, train_on: str) -> tuple[int, ...]:
    """Indices of the messages to train; raises Refusal where there is none.

    A turn that says so itself ("train": false, or OpenAI's "weight": 0) is context and not trained."""
    turns = [i for i, message in enumerate(record.messages) if message["role"] == "assistant"]
    if train_on == "flagged" and record.kind in ("messages", "conversations"):
        wrong = [i for i, flag in enumerate(record.flags) if flag and record.messages[i]["role"] != "assistant"]
        if wrong:
            raise Refusal("a flag on a turn that is not the assistant's", f"message {wrong[0] + 1}")
        turns = [i for i in turns if record.flags[i]]
        if not turns:
            raise Refusal("nothing to train", 'no assistant turn has "train": true or "weight": 1')
    wanted = [i for i in (turns[-1:] if train_on == "last" else turns) if record.flags[i] is not False]
    if not wanted:
        which = "the last" if train_on == "last" else "every"
        raise Refusal("nothing to train", f'{which} assistant turn has "train": false or "weight": 0')
    return tuple(wanted)


def authored_reasoning(form: ChatFormat, message: Message) -> tuple[str, str]:
    """(reasoning, the rest of the content) of an assistant message, wherever it was written."""
    for key in REASONING_KEYS:
        if isinstance(message.get(key), str) and message[key].strip():
            return message[key], message["content"] or ""
    return form.reasoning.inline(message["content"] or "")


def check_roles(form: ChatFormat, record: Record, messages: list[Message]) -> None:
    """Refuse what a template would silently leave out: tool calls, and roles that it does not know. The first message
    of each role is looked at; `not_rendered` notes what is missing of the others."""
    seen = {"system", "user", "assistant"}
    for i, message in enumerate(messages):
        if message.get("tool_calls"):
            if not form.renders_calls:
                raise Refusal("refused by the chat template", "it does not render tool calls")
        elif message["role"] not in seen:
            seen.add(message["role"])
            shown = form.render(messages[: i + 1], record.tools)
            marked = {**message, "content": (message["content"] or "") + "?"}
            if shown == form.render([*messages[:i], marked], record.tools):
                raise Refusal("refused by the chat template", f"it does not render the role {message['role']!r}")


def not_rendered(messages: list[Message], whole: str, answers: dict[int, str]) -> Iterator[str]:
    """Notes about parts of the conversation that are missing from its text, one per kind. `answers`: the texts of the
    trained turns."""
    said = set[str]()
    for i, message in enumerate(messages):
        for kind in _lost(message, answers.get(i, whole), said):
            if kind not in said:
                said.add(kind)
                yield NOT_RENDERED[kind]


def _lost(message: Message, text: str, said: set[str]) -> Iterator[str]:
    """The kinds of a message's parts that are missing from `text`. Some kinds that were noted already (`said`) are not
    searched for: a search that finds nothing reads all of the text."""
    content = message["content"]
    kind = message["role"] if message["role"] in NOT_RENDERED else "tool"
    if content and (kind not in said or ("reasoning" not in said and "</think>" in content)):
        why, rest = _without_think(content) if kind == "assistant" else ("", content)
        if rest.strip() not in text:
            yield kind
        elif why not in text:
            yield "reasoning"
    if "reasoning" not in said:
        for key in REASONING_KEYS:
            if isinstance(message.get(key), str) and message[key].strip() not in text:
                yield "reasoning"
    if "calls" not in said:
        for call in message.get("tool_calls") or ():
            if not all(part in text or json.dumps(part)[1:-1] in text for part in _words(call.get("function", call))):
                yield "calls"


def _without_think(content: str) -> tuple[str, str]:
    """Reasoning that is written in the content, and the rest. A prompt may have written its opening tag already."""
    before, tag, after = content.partition("</think>")
    return (before.strip().removeprefix("<think>").strip(), after) if tag else ("", content)


def _words(call: Any) -> Iterator[str]:
    """The name of a tool call and every text and number in its arguments."""
    if isinstance(call, dict):
        for key, value in call.items():
            if key in ("name", "arguments"):
                yield from _leaves(value)


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield str(key)
            yield from _leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner)
    elif isinstance(value, str):
        yield value.strip()
    elif value is not None and not isinstance(value, bool):
        yield json.dumps(value)
