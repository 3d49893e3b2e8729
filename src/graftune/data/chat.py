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

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from graftune.data.format import REASONING_KEYS, ChatFormat, TrainedReasoning
from graftune.data.header import Header, locate, units
from graftune.data.missing import NOT_RENDERED, not_rendered
from graftune.data.row import Refusal, quoted
from graftune.data.tags import TAG, tag_kind, unclosed
from graftune.data.turn_places import RenderedTurn, TurnPlace, places
from graftune.data.turns import Message

OTHER_PROMPT = {
    "inference": "the template renders an answered conversation differently from its inference prompt: trained after "
    "the inference prompt (prompt_form: template changes that)",
    "template": "the template renders an answered conversation differently from its inference prompt: trained as "
    "rendered (prompt_form: inference changes that)",
}
NO_REASONING = "reasoning left out: the prompt that inference gives has closed it already"
CLOSED_AT_ONCE = "the prompt opens a reasoning block: answers without reasoning close it at once"
NO_NAME = "names of the assistant left out of its header: the prompt that inference gives has none"
MOVED = "reasoning in the content put into the block that the template renders before it"
HEADER_TRAINED = (
    "the template gives no generation prompt here: the header before the answer is trained, since the model has to "
    "write it"
)
MORE_ADDED = "the template adds further words to answers: they are trained, since the model has to write them"
MOST_ADDED = 8  # different words of the template that are named
_ROLES = "assistant model bot ai gpt"  # in headers; none of them is a part of an answer that a template adds


class Passage(NamedTuple):
    """One example before tokenising. `messages` and `trained` are what it was rendered from, for cutting it shorter."""

    text: str
    turns: tuple[TurnPlace, ...]  # what is trained, in characters
    messages: list[Message]
    trained: tuple[int, ...]
    tools: list[Any] | None = None
    notes: tuple[str, ...] = ()
    shortened: bool = False  # whether turns before it were left out

    @property
    def prompt(self) -> str:
        """The text a model continues to give the last trained answer."""
        return self.text[: self.turns[-1].prompt]

    @property
    def asked(self) -> list[Message]:
        """The messages before the last trained answer."""
        return self.messages[: self.trained[-1]]

    @property
    def reference(self) -> str:
        """That answer, without blanks around it."""
        return (self.messages[-1]["content"] or "").strip()


@dataclass(frozen=True)
class ChatTurns:
    """Builds passages by one template and the settings that concern it."""

    form: ChatFormat
    prompt_form: Literal["inference", "template"] = "inference"
    train_reasoning: TrainedReasoning = "all"
    # Text that the template writes before an answer, role before it -> whether it is a header that the prompt lacks.
    headers: dict[tuple[str, str], bool] = field(default_factory=dict, compare=False)
    added: dict[str, None] = field(default_factory=dict, compare=False)  # the notes about words around answers

    def passages(self, messages: list[Message], tools: list[Any] | None, trained: Sequence[int]) -> list[Passage]:
        """The texts that train `trained`, one where the template allows it."""
        begun: dict[int, RenderedTurn] = {}
        together = self.together(messages, tools, trained, begun)
        return self.alone(messages, tools, trained, begun) if together is None else [together]

    def together(
        self, messages: list[Message], tools: list[Any] | None, trained: Sequence[int], begun: dict[int, RenderedTurn]
    ) -> Passage | None:
        """The one text that trains `trained`; None if the template does not allow it. `begun` collects the turns that
        were rendered alone."""
        found = places(lambda some: self._turn(some, tools), messages, trained, begun)
        # A prompt may end before the end of the answer before it, where a template leaves the last answer open.
        if found is None or (self.form.append and any(one.end > other.prompt for one, other in pairwise(found))):
            return None
        return self.passage(begun[trained[-1]].text, found, messages[: trained[-1] + 1], trained, tools)

    def alone(
        self, messages: list[Message], tools: list[Any] | None, trained: Sequence[int], begun: dict[int, RenderedTurn]
    ) -> list[Passage]:
        """The turns as texts of their own: where the template asks for it, and for tokenizers that join a turn's end to
        what follows it. `begun`: those that are rendered already."""
        made = []
        for i in trained:
            turn = begun.get(i) or self._turn(messages[: i + 1], tools)
            made.append(self.passage(turn.text, [turn.place], messages[: i + 1], [i], tools))
        return made

    def passage(
        self,
        text: str,
        turns: Sequence[TurnPlace],
        messages: list[Message],
        trained: Sequence[int],
        tools: list[Any] | None,
    ) -> Passage:
        """The passage with this text, whose trained turns lie there."""
        notes = {note: None for turn in turns for note in turn.notes}
        answers = {i: text[turn.prompt : turn.end] for i, turn in zip(trained, turns, strict=True)}
        lost = dict.fromkeys(not_rendered(messages, text, answers, self.form.reasoning))
        if NO_REASONING in notes:
            lost.pop(NOT_RENDERED["reasoning"], None)
        notes |= lost
        return Passage(text, tuple(turns), messages, tuple(trained), tools, tuple(notes))

    def _turn(self, messages: list[Message], tools: list[Any] | None) -> RenderedTurn:
        """The last message as a trained turn."""
        form, notes = self.form, list[str]()
        prompt = form.render(messages[:-1], tools, generate=True)
        if self.prompt_form == "inference" and form.reasoning.closed_by(prompt):
            why, rest = form.reasoning.in_message(messages[-1])
            if why:
                bare = {key: value for key, value in messages[-1].items() if key not in REASONING_KEYS}
                messages = [*messages[:-1], bare | {"content": rest}]
                notes.append(NO_REASONING)
        full = form.render(messages, tools)
        if form.reasoning.key and (moved := self._moved_reasoning(messages, full)):
            messages, full = moved, form.render(moved, tools)
            notes.append(MOVED)
        if "name" in messages[-1]:  # the prompt names no speaker
            nameless = [*messages[:-1], {key: value for key, value in messages[-1].items() if key != "name"}]
            if (shown := form.render(nameless, tools)) != full:
                messages, full = nameless, shown
                notes.append(NO_NAME)
        body, end = self._ends(full, messages[-1])
        if full.startswith(prompt):
            answer, blank = full[len(prompt) : end], not full[len(prompt) : body].strip()
            if not blank:
                answer, note = self._completed(prompt, answer, messages, tools)
                notes += [note] if note else []
        else:
            found = locate(functools.partial(form.render, tools=tools), messages, prompt, full, form.control)
            blank = not full[found.start : body].strip()
            notes.append(OTHER_PROMPT[self.prompt_form])
            if blank:
                answer = ""
            elif self.prompt_form == "template":
                begin = found.begin if self._is_generated(full, found) else found.start
                prompt, answer = full[:begin], full[begin:end]
            else:
                answer, note = self._continued(prompt, full[:end], found, messages, tools)
                notes += [note] if note else []
        if blank:
            raise Refusal("refused by the chat template", "it renders nothing for an assistant turn")
        append = (form.call_append if messages[-1].get("tool_calls") else "") or form.append
        if form.append and not answer.endswith(append):
            answer += append
        notes += self._added(answer, messages[-1], header=HEADER_TRAINED in notes)
        skipped = 0
        if self.train_reasoning != "all":
            skipped, empty = form.reasoning.block(answer, opened=form.reasoning.opened_by(prompt))
            if self.train_reasoning == "not_empty" and not empty:
                skipped = 0
        text = prompt + answer
        return RenderedTurn(text, TurnPlace(len(prompt), len(prompt) + skipped, len(text), tuple(notes)))

    def _moved_reasoning(self, messages: list[Message], full: str) -> list[Message] | None:
        """The conversation with reasoning moved from the last content to the field that the template reads, where
        the template has written an empty block before it; None if it has not."""
        reasoning, content = self.form.reasoning, messages[-1]["content"] or ""
        if reasoning.tags[1] not in content:
            return None
        (why, rest), place = reasoning.inline(content), full.rfind(content.strip())
        words = self.form.before.rpartition(reasoning.tags[1])[2].strip()  # of the template, behind the block
        if not why or place < 0 or not reasoning.closed_by(full[:place].rstrip().removesuffix(words)):
            return None
        return [*messages[:-1], {**messages[-1], "content": rest, reasoning.key: why}]

    def _completed(self, prompt: str, answer: str, messages: list[Message], tools: list[Any] | None) -> tuple[str, str]:
        """What the rendering has after the prompt, and a note for the user."""
        reasoning, content = self.form.reasoning, messages[-1]["content"] or ""
        if self.prompt_form == "inference" and reasoning.opened_by(prompt) and reasoning.tags[1] not in answer:
            why, _ = reasoning.in_message(messages[-1])
            return why + reasoning.close + answer, OTHER_PROMPT["inference"] if why else CLOSED_AT_ONCE
        if not answer.startswith(content[:16] or "\n"):
            # The template writes something before the answer. Is it a header that the prompt does not give?
            control, calls = self.form.control, messages[-1].get("tool_calls")
            name = calls[0].get("function", {}).get("name", "") if calls else ""
            first = [
                content,
                reasoning.in_message(messages[-1])[1],
                name,
                *(messages[-1].get(key) for key in REASONING_KEYS),
            ]
            places = [answer.find(text.strip()) for text in first if isinstance(text, str) and text.strip()]
            before = answer[: min((place for place in places if place >= 0), default=0)]
            written = _words(before, control) - _words(reasoning.open + reasoning.close, control)
            if calls:  # beside the syntax of a call
                written &= _words(self.form.header, control)
            if written:
                key = before, messages[-2]["role"]
                if key not in self.headers:  # rendered once, not for every turn
                    self.headers[key] = self.form.render(messages[:-1], tools).startswith(prompt)
                return answer, HEADER_TRAINED if self.headers[key] else ""
        return answer, ""

    def _added(self, answer: str, message: Message, *, header: bool) -> list[str]:
        """A note about words of an answer that are neither the author's nor tags of reasoning nor the end token.
        `header`: those before it are reported as such. Calls are not looked at, since their syntax is the template's.
        """
        if message.get("tool_calls") or answer == (message["content"] or "") + self.form.closing:
            return []
        found: list[str] = []
        for place, text in enumerate(self._around(answer, message)):
            for tag in filter(None, self.form.reasoning.tags):
                text = text.replace(tag, "")
            if text.strip() and (place == 2 or not header):
                found.append(f"{quoted(text.strip())} {'before' if place < 2 else 'after'}")
        note = f"the template adds {' and '.join(found)} answers: it is trained, since the model has to write it"
        if found and len(self.added) < MOST_ADDED:
            self.added[note] = None
        return [note if note in self.added else MORE_ADDED] if found else []

    def _around(self, answer: str, message: Message) -> tuple[str, ...]:
        """The template's texts in an answer: before its reasoning, between that and the content, and after the
        content; nothing for a content that is not rendered as written, which is counted."""
        form, content = self.form, (message["content"] or "").strip()
        body = answer.removesuffix(form.closing)
        if body == answer:  # closed with another token
            body = answer.removesuffix(next(filter(answer.endswith, form.control), ""))
        why, rest = form.reasoning.in_message(message)
        if why in content and content in answer:
            why, rest = "", content
        why, rest = why.strip(), rest.strip()
        usual = form.before if body.startswith(form.before) else ""  # a short content may occur in it
        body = body[len(usual) :]
        before, _, left = body.partition(why) if why and why in body else ("", "", body)
        between, found, after = left.partition(rest) if rest else ("", "", "")
        return (usual + before, between, after) if found else ()

    def _is_generated(self, full: str, found: Header) -> bool:
        """Whether the text between the prompt's header and the author's text is one that the model has to write: a
        reasoning tag, or a header of its own that shares nothing with the prompt's."""
        control, reasoning = self.form.control, self.form.reasoning
        written, block = self._written(full, found), _words(reasoning.open + reasoning.close, control)
        if not written:
            return True
        # The prompt may end with a whole block that names its channel: <|channel>thought<channel|>.
        tag, extra = reasoning.tags[0], found.extra
        whole = bool(tag) and extra.lstrip().startswith(tag) and reasoning.closed_by(extra)
        opened = whole or _words(extra, control) <= block
        return opened and written.isdisjoint(_words(found.prompt_tail + _ROLES, control))

    def _written(self, full: str, found: Header) -> set[str]:
        """What the template writes between the prompt's header and the author's text, without tags of reasoning."""
        reasoning, control = self.form.reasoning, self.form.control
        return _words(full[found.begin : found.start], control) - _words(reasoning.open + reasoning.close, control)

    def _continued(
        self, prompt: str, full: str, found: Header, messages: list[Message], tools: list[Any] | None
    ) -> tuple[str, str]:
        """The answer at the end of `full` as it continues the inference prompt, and a note for the user."""
        reasoning, control = self.form.reasoning, self.form.control
        if not self._is_generated(full, found):
            if not found.extra.strip() and self.form.render(messages[:-1], tools).startswith(prompt):
                return full[found.begin :], HEADER_TRAINED
            raise Refusal(
                "the template's header is not recognised",
                f"its prompt ends with {quoted(found.prompt_tail)}, and it renders "
                f"{quoted(full[found.begin : found.start])} before the answer; prompt_form: template trains it",
            )
        answer = full[found.begin :]
        own = answer if self._written(full, found) else full[found.start :]
        if not reasoning.opened_by(prompt):
            known = self.form.header + self.form.suffix + self.form.call_suffix + reasoning.open + reasoning.close
            words = _words(known, control)
            extra = "".join(unit for unit in units(found.extra, control) if unit.casefold() not in words)
            closed = not unclosed(extra) and any(tag_kind(tag)[1] == "close" for tag in TAG.findall(extra))
            if _words(extra, control) and not closed and not reasoning.closed_by(prompt):
                raise _left_open(found.extra.strip())
            blank = not full[found.begin : found.start].strip()
            return (own if blank and found.extra.strip() else answer), ""
        close = reasoning.close.strip()
        if not close:
            raise _left_open(reasoning.open.strip())
        why, _ = reasoning.in_message(messages[-1])
        if (size := reasoning.opening(answer.lstrip())) and close in answer:  # the prompt has it already
            rest, blanks = answer.lstrip()[size:], prompt[len(prompt.rstrip()) :]
            return rest.removeprefix(blanks) if rest.startswith(blanks) else rest.lstrip("\n"), ""
        before, tag, block = answer.partition(reasoning.tags[0])
        if why and tag and why.strip() in block and close in block:  # the template's words stand before the block
            return why + reasoning.close + before.lstrip() + block.partition(close)[2].lstrip("\n"), ""
        if why and (why.strip() not in answer or close not in answer):
            behind = own.lstrip()  # it closes the block itself where the template writes an empty one
            own = behind.removeprefix(close).lstrip("\n") if behind.startswith(close) else own
            return why + reasoning.close + own, ""
        return (answer, "") if close in answer else (reasoning.close + own, CLOSED_AT_ONCE)

    def _ends(self, full: str, message: Message) -> tuple[int, int]:
        """Where the last turn's content ends, and where its end token does."""
        form = self.form
        tails = [(form.suffix, form.end)]
        if message.get("tool_calls") and form.call_suffix:
            tails.insert(0, (form.call_suffix, form.call_end))
        for suffix, end in tails:
            if full.endswith(suffix) and (suffix or form.append):
                body = len(full) - len(suffix)
                return body, body + len(end)
        text = full.rstrip()
        # A turn that closes otherwise than the probes did must close with a control token, or get EOS appended.
        token = next((name for name in form.control if text.endswith(name)), "")
        if not token and not form.append:
            raise Refusal("no end token", "the template does not close this assistant turn with one")
        return len(text) - len(token), len(text)


def _words(text: str, control: tuple[str, ...]) -> set[str]:
    """The control tokens, tags and words of a template's text, without regard to case."""
    return {unit.casefold() for unit in units(text, control) if len(unit) > 1 or unit.isalnum()}


def _left_open(tag: str) -> Refusal:
    return Refusal(
        "the prompt opens a block that nothing closes",
        f"the generation prompt opens {quoted(tag)}, and the template does not show how it is closed; "
        "prompt_form: template trains answers as the template renders them",
    )
