"""An Ollama Modelfile: where the weights are, the chat template in Go's template language, and where answers end.

The model's own template is a Jinja program, and Ollama uses another language. The template is rendered with marked
texts, and the strings between two of them are kept by the roles on both sides (start, system, user, assistant, and the
prompt for an answer). Most formats consist of such strings. Then longer conversations are put together from the strings
and compared with what the template renders: for a template that does more (it moves a system text into the last
question, or leaves turns out) the file says that it has no equivalent.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from graftune.data.format import ChatFormat, special_tokens, stop_ids
from graftune.data.row import Refusal
from graftune.errors import GraftuneError
from graftune.tokenizer import ChatTemplate, Tokenizer

START, ANSWER = "start", "answer"  # used like roles: before the first turn, and where the model's answer begins
_CONVERSATIONS = (
    ("user",),
    ("user", "assistant", "user"),
    ("system", "user"),
    ("system", "user", "assistant", "user", "assistant", "user"),
    ("user", "assistant", "user", "assistant", "user"),
)


@dataclass(frozen=True)
class TurnTexts:
    """The text between two contents, by the roles before and after it."""

    between: dict[tuple[str, str], str]

    def render(self, messages: Sequence[dict[str, str]]) -> str:
        """The text that Ollama makes of a conversation."""
        text, before = "", START
        for message in messages:
            text += self.between[before, message["role"]] + message["content"]
            before = message["role"]
        return text + self.between[before, ANSWER]

    def go(self) -> str:
        """A Go template over Ollama's .Messages. It continues a last turn of the assistant instead of answering it."""
        parts = ['{{ $before := "start" }}{{ range .Messages }}']
        for place, role in enumerate(("system", "user", "assistant")):
            parts.append(f'{{{{ {"else " if place else ""}if eq .Role "{role}" }}}}{self._after(role)}')
        parts.append('{{ end }}{{ .Content }}{{ $before = .Role }}{{ end }}{{ if ne $before "assistant" }}')
        return "".join(parts) + _literal(self.between["user", ANSWER]) + "{{ end }}"

    def _after(self, role: str) -> str:
        found = {before: text for (before, after), text in self.between.items() if after == role}
        *others, (_, last) = found.items()
        cases = [f'if eq $before "{before}" }}}}{_literal(text)}' for before, text in others if text != last]
        if not cases:
            return _literal(last)
        return "{{ " + "{{ else ".join(cases) + "{{ else }}" + _literal(last) + "{{ end }}"


def _literal(text: str) -> str:
    """Text for a Go template, which copies everything outside of {{ }}."""
    return text.replace("{{", '{{ "{{" }}')


def recognise(form: ChatFormat, tokenizer: Tokenizer) -> TurnTexts:
    """Finds the texts between turns. Raises a GraftuneError that says why the template cannot be expressed by them."""
    between: dict[tuple[str, str], str] = {}
    for roles in _CONVERSATIONS:
        messages = [{"role": role, "content": f"Zq{place}{role}Q"} for place, role in enumerate(roles)]
        try:
            shown = _rendered(form, messages, tokenizer)
        except Refusal as refusal:
            raise _inexpressible(f"the template refuses {' then '.join(roles)} ({refusal})") from None
        at, before = 0, START
        for message in messages:
            found = shown.find(message["content"], at)
            if found < 0 or shown.count(message["content"]) != 1:
                raise _inexpressible("the template moves, repeats or leaves out turns")
            between.setdefault((before, message["role"]), shown[at:found])
            at, before = found + len(message["content"]), message["role"]
        between.setdefault((before, ANSWER), shown[at:])
        if TurnTexts(between).render(messages) != shown:
            raise _inexpressible("the template treats turns differently by where they stand")
    if any('"""' in text for text in between.values()):
        raise _inexpressible('the template writes """')
    return TurnTexts(between)


def _rendered(form: ChatFormat, messages: list[dict[str, str]], tokenizer: Tokenizer) -> str:
    ended = [m | {"content": m["content"] + form.append} if m["role"] == "assistant" else m for m in messages]
    shown = form.render(ended, None, generate=True)
    # Ollama adds BOS itself where the model needs one.
    return shown.removeprefix(tokenizer.bos_token or "") if tokenizer.add_bos else shown


def _inexpressible(why: str) -> GraftuneError:
    return GraftuneError(f"the chat template cannot be written for Ollama: {why}", fix="write TEMPLATE by hand")


def _prints_date(form: ChatFormat) -> bool:
    """Whether the template writes the day on which it is rendered."""
    template = form.renderer
    if not isinstance(template, ChatTemplate):
        return False
    asked = [{"role": "user", "content": "Zq"}]
    other = template.dated(datetime.datetime(1999, 3, 4))
    return other.render(asked, add_generation_prompt=True) != template.render(asked, add_generation_prompt=True)


def modelfile(
    source: str, adapter: str | None, form: ChatFormat | None, tokenizer: Tokenizer, why: str = ""
) -> tuple[str, tuple[str, ...]]:
    """The file's text, and notes for the user. `source` and `adapter` are paths relative to the file; `why`: the
    reason if there is no `form`."""
    lines, notes = [f"FROM {_quoted(source)}"], []
    if adapter is not None:
        lines.append(f"ADAPTER {_quoted(adapter)}")
    if form is None:
        notes.append(f"{why}, so the Modelfile has none")
        lines.append('TEMPLATE """{{ .Prompt }}"""')
    else:
        try:
            lines.append(f'TEMPLATE """{recognise(form, tokenizer).go()}"""')
            if _prints_date(form):
                notes.append("the chat template prints the date: the Modelfile holds today's")
        except GraftuneError as error:
            notes.append(f"{error.what}; {error.fix}")
    # Ollama compares texts, so only control tokens stop: an end token that is ordinary text (Qwen has "</s>") would cut
    # an answer that writes it.
    control, end = special_tokens(tokenizer), form.end_id if form is not None else None
    ends = [id for id in stop_ids(tokenizer, form) if id in control or id in (tokenizer.eos_id, end)]
    stops = [tokenizer.decode([id]) or tokenizer.token(id) for id in ends]
    if form is not None and form.end_id is None and form.end.strip():
        stops.append(form.end.strip())
    lines += [f"PARAMETER stop {_quoted(stop, always=True)}" for stop in dict.fromkeys(stops) if stop.strip()]
    head = ["# Written by graftune export.", *(f"# {note[0].upper()}{note[1:]}." for note in notes)]
    return "\n".join([*head, *lines]) + "\n", tuple(notes)


def _quoted(text: str, always: bool = False) -> str:
    plain = not always and not any(letter.isspace() or letter in "\"'#" for letter in text)
    return text if plain else '"' + text.replace('"', '\\"') + '"'


def seen_from(folder: Path, path: Path) -> str:
    """The name of a file beside the Modelfile, or the whole path of another one."""
    return f"./{path.name}" if path.parent == folder else str(path.resolve())
