"""Chat templates made up at random, each as Jinja source with a statement of what an answer is.

`Spec` describes a template. transformers renders its source, so what a server's prompt is does not depend on the
package; what the model has to write after that prompt is stated by `Spec.answer` from the description alone.
`conversations` makes up what is rendered.
"""

from __future__ import annotations

import dataclasses
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

Message = dict[str, Any]


class Style(NamedTuple):
    user: str
    user_end: str
    bot: str
    end: str
    after: str  # what follows the end of an answer
    system: str
    system_end: str


STYLES = {
    "chatml": Style("<|im_start|>user\n", "<|im_end|>\n", "<|im_start|>assistant\n", "<|im_end|>", "\n",
                    "<|im_start|>system\n", "<|im_end|>\n"),
    "headers": Style("<|start_header_id|>user<|end_header_id|>\n\n", "<|eot_id|>",
                     "<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>", "",
                     "<|start_header_id|>system<|end_header_id|>\n\n", "<|eot_id|>"),
    "turns": Style("<start_of_turn>user\n", "<end_of_turn>\n", "<start_of_turn>model\n", "<end_of_turn>", "\n",
                   "<start_of_turn>system\n", "<end_of_turn>\n"),
    "roles": Style("<|user|>\n", "<|end|>\n", "<|assistant|>\n", "<|end|>", "\n", "<|system|>\n", "<|end|>\n"),
    "bare": Style("<|user|>", "", "<|assistant|>", "</s>", "", "<|system|>", ""),
    "inst": Style("[INST] ", " [/INST]", "", "</s>", "", "[SYS] ", " [/SYS]"),
    "spaced": Style("USER: ", " ", "ASSISTANT: ", "</s>", "\n", "", "\n\n"),
    "words": Style("### Question:\n", "\n\n", "### Answer:\n", "[over]", "\n\n", "### Task:\n", "\n\n"),
    "unknown_end": Style("<|user|>", "<|end_of_turn|>", "<|assistant|>", "<|end_of_turn|>", "\n", "<|system|>",
                         "<|end_of_turn|>"),
    "channels": Style("<|start|>user<|message|>", "<|end|>", "<|start|>assistant", "<|return|>", "",
                      "<|start|>system<|message|>", "<|end|>"),
}  # fmt: skip
FINAL = "<|channel|>final<|message|>"  # which a model writes itself, after the header
EXTRA_CONTROL = ("<|start|>", "<|message|>", "<|channel|>", "<|return|>", "<|channel>", "<channel|>")
# How reasoning is written: the text before and after it.
TAGS = {
    "think": ("<think>\n", "\n</think>\n\n"),
    "tight": ("<think>", "</think>"),
    "thought": ("<thought>\n", "\n</thought>\n"),
    "square": ("[THINK]", "[/THINK]"),
    "colon": ("<seed:think>", "</seed:think>\n"),
    "pipes": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "channel": ("<|channel>thought\n", "<channel|>"),
    "braces": ("{think}", "{/think}"),
    "heading": ("### Thinking\n", "\n### Reply\n"),
}
UNTAGGED = ("braces", "heading")  # texts that do not look like tags
KEYS = ("reasoning_content", "reasoning", "thinking")
DEFAULT = "You are a made-up helper."
BEFORE, AFTER = "Well then: ", "\nAnything else?"  # words that a template may put around answers
ROLE = re.compile(r"assistant|model|ASSISTANT|Answer")


@dataclass(frozen=True)
class Spec:
    style: str
    bos: bool
    default_system: bool
    system: str  # turn | first_user | only_last (the prompt has it, the answered conversation lacks it) | refused
    header: str  # how the generation prompt's header differs: same | case | before | after | fewer | typo
    when: str  # when there is a generation prompt: always | user (after user turns only) | no_tool | never
    block: str  # what the generation prompt does with a reasoning block: "" | opens | empty | closes
    name: str  # of the speaker, in the header: "" | beside | instead
    twice: str  # two answers in a row: apart | joined | other_end (in the middle of a conversation)
    last: str  # the end of the last answer: same | open | eos (after it)
    tag: str
    field: str  # of reasoning: none | shown | always (an empty block without) | fresh (after the last question)
    key: str
    inline: str  # reasoning in the content: raw | split (treated like the field) | cut | cut_old
    trim: str  # none | all | answers
    calls: str  # none | whole | wrapped | xml
    arguments: str  # object | text
    result: str  # a tool's: own | user
    beside: bool  # calls are rendered only beside reasoning
    added: str  # words around answers without calls: "" | before | after | around | tool (after results) | later

    @staticmethod
    def random(draw: random.Random) -> Spec:
        style = draw.choice(sorted(STYLES))
        plain = style in ("inst", "spaced", "channels")
        field = draw.choice(("none", "none", "shown", "always", "fresh")) if not plain else "none"
        inline = draw.choice(("raw", "raw", "split", "cut", "cut_old")) if not plain else "raw"
        calls = draw.choice(("none", "whole", "wrapped", "xml"))
        made = Spec(
            style,
            bos=draw.random() < 0.5,
            default_system=draw.random() < 0.3,
            system=draw.choice(("turn", "turn", "turn", "first_user", "only_last", "refused")),
            header=draw.choice(("same", "same", "same", "case", "before", "after", "fewer", "typo")),
            when=draw.choice(("always", "always", "always", "always", "user", "no_tool", "never")),
            block=draw.choice(("", "", "", "opens", "empty", "closes")) if not plain else "",
            name=draw.choice(("", "", "", "beside", "instead")) if style not in ("inst", "channels") else "",
            twice=draw.choice(("apart", "apart", "joined", "other_end")),
            last=draw.choice(("same", "same", "same", "open", "eos")) if style != "words" else "same",
            tag=draw.choice(sorted(TAGS)),
            field=field,
            key=draw.choice(KEYS),
            inline=inline,
            trim=draw.choice(("none", "none", "all", "answers")),
            calls=calls,
            arguments="object" if calls == "whole" else draw.choice(("object", "text")),
            result=draw.choice(("own", "user")),
            beside=field in ("shown", "always") and draw.random() < 0.08,
            added=draw.choice(("", "", "", "", "", "before", "after", "around", "tool", "later")),
        )
        if made.tag in UNTAGGED and made.field == "none" and made.block == "closes":
            return dataclasses.replace(made, block="empty")  # nothing would say how a block is opened
        if made.tag in UNTAGGED and made.field != "none":
            return dataclasses.replace(made, added="")  # nor where the text that closes it ends and other words begin
        return made

    # The template, as Jinja.

    @property
    def prompt_header(self) -> str:
        """The generation prompt's, as it differs from the one before an answer."""
        bot = STYLES[self.style].bot
        if self.header == "case":
            return ROLE.sub(lambda m: m[0].capitalize() if m[0].islower() else m[0].lower(), bot)
        if self.header == "typo":
            return ROLE.sub(lambda m: m[0][:2] + m[0][3:], bot)
        return {"before": "\n" + bot, "after": bot + "\n", "fewer": bot.rstrip()}.get(self.header, bot)

    @property
    def prompt_block(self) -> str:
        opening, close = TAGS[self.tag]
        return {"": "", "opens": opening, "empty": opening + close, "closes": close.lstrip()}[self.block]

    def source(self) -> str:
        style = STYLES[self.style]
        q = json.dumps
        opening, close = (q(text) for text in TAGS[self.tag])
        tag, end_tag = (q(text.strip()) for text in TAGS[self.tag])
        text = "(m.content or '') | trim" if self.trim == "all" else "m.content or ''"
        lines = ["{%- set ns = namespace(last=-1) -%}"]
        lines.append("{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
                     "{% endfor -%}")  # fmt: skip
        lines.append("{{- bos_token -}}" if self.bos else "")
        if self.calls != "none":
            lines.append("{%- if tools -%}{{- 'TOOLS ' + (tools | tojson) + '\\n' -}}{%- endif -%}")
        if self.default_system:
            lines.append("{%- if messages[0].role != 'system' -%}")
            lines.append(f"{{{{- {q(style.system + DEFAULT + style.system_end)} -}}}}{{%- endif -%}}")
        lines.append("{%- for m in messages -%}")
        lines.append("{%- if m.role == 'system' -%}")
        if self.system == "refused":
            lines.append("{{- raise_exception('no system here') -}}")
        elif self.system == "turn":
            lines.append(f"{{{{- {q(style.system)} + ({text}) + {q(style.system_end)} -}}}}")
        lines.append("{%- elif m.role == 'user' -%}")
        before = "''"
        if self.system == "first_user":
            before = "(messages[0].content + '\\n\\n' if messages[0].role == 'system' and loop.index0 == 1 else '')"
        elif self.system == "only_last":
            before = "(messages[0].content + '\\n\\n' if messages[0].role == 'system' and loop.last else '')"
        lines.append(f"{{{{- {q(style.user)} + {before} + ({text}) + {q(style.user_end)} -}}}}")
        result = ("<result>", "</result>\n")
        if self.result == "user":
            result = (style.user + result[0], result[1] + style.user_end)
        lines.append(f"{{%- elif m.role == 'tool' -%}}{{{{- {q(result[0])} + m.content + {q(result[1])} -}}}}")
        lines.append("{%- else -%}")
        lines += self._answer_source(style, q, (opening, close, tag, end_tag))
        lines.append("{%- endif -%}{%- endfor -%}")
        if self.last == "eos":
            lines.append("{%- if not add_generation_prompt -%}{{- eos_token -}}{%- endif -%}")
        condition = {"user": " and messages[-1].role == 'user'", "no_tool": " and messages[-1].role != 'tool'"}
        if self.when != "never":
            lines.append(f"{{%- if add_generation_prompt{condition.get(self.when, '')} -%}}")
            lines.append(f"{{{{- {q(self.prompt_header + self.prompt_block)} -}}}}{{%- endif -%}}")
        return "".join(lines)

    def _answer_source(self, style: Style, q: Any, tags: tuple[str, str, str, str]) -> Iterator[str]:
        opening, close, tag, end_tag = tags
        header = q(style.bot)
        if self.name == "beside":
            joined = ROLE.sub(lambda m: m[0] + "@", style.bot, count=1).split("@")
            header = f"{q(joined[0])} + (' ' + m.name if m.name else '') + {q(joined[1])}"
        elif self.name == "instead":
            start, role, rest = ROLE.split(style.bot, 1)[0], ROLE.search(style.bot)[0], ROLE.split(style.bot, 1)[1]  # type: ignore[index]
            header = f"{q(start)} + (m.name or {q(role)}) + {q(rest)}"
        second = "not loop.first and messages[loop.index0 - 1].role == 'assistant'"
        yield (
            f"{{%- if not ({second}) -%}}{{{{- {header} -}}}}{{%- endif -%}}"
            if self.twice == "joined"
            else (f"{{{{- {header} -}}}}")
        )
        yield f"{{{{- {q(FINAL)} -}}}}" if self.style == "channels" else ""
        yield "{%- set text = m.content or '' -%}{%- set why = '' -%}"
        if self.field != "none":
            yield f"{{%- set why = m.{self.key} or '' -%}}"
        if self.inline != "raw":
            old = " and loop.index0 < ns.last" if self.inline == "cut_old" else ""
            yield f"{{%- if {end_tag} in text{old} -%}}"
            if self.inline == "split":
                yield f"{{%- set why = text.split({end_tag})[0].split({tag})[-1].strip('\\n') -%}}"
            yield f"{{%- set text = text.split({end_tag})[-1].lstrip('\\n') -%}}{{%- endif -%}}"
        shown = {"shown": "why", "always": "true", "fresh": "loop.index0 > ns.last"}.get(self.field, "false")
        if self.inline == "split" and self.field == "none":
            shown = "why"
        if shown != "false":
            yield f"{{%- if {shown} -%}}{{{{- {opening} + why + {close} -}}}}{{%- endif -%}}"
        before, after = self._words_source()
        yield before
        yield "{{- (text | trim) -}}" if self.trim != "none" else "{{- text -}}"
        yield after
        if self.calls != "none":
            yield "{%- if why -%}" if self.beside else ""
            yield "{%- for c in m.tool_calls or [] -%}" + self._call_source() + "{%- endfor -%}"
            yield "{%- endif -%}" if self.beside else ""
        end = q(style.end)
        following = "not loop.last and messages[loop.index0 + 1].role == 'assistant'"
        if self.twice == "other_end":
            end = f"('<|end_of_text|>' if {following} else {end})"
        close_turn = f"{{{{- {end} + {q(style.after)} -}}}}"
        if self.twice == "joined":
            close_turn = f"{{%- if {following} -%}}{{{{- '\\n' -}}}}{{%- else -%}}{close_turn}{{%- endif -%}}"
        yield f"{{%- if not loop.last -%}}{close_turn}{{%- endif -%}}" if self.last == "open" else close_turn

    def _words_source(self) -> tuple[str, str]:
        """What prints the words before and after an answer."""
        role = "messages[loop.index0 - 1].role"
        condition = {"tool": f" and {role} == 'tool'", "later": " and loop.index0 > 2"}.get(self.added, "")
        made = [f"{{%- if not m.tool_calls{condition} -%}}{{{{- {json.dumps(words)} -}}}}{{%- endif -%}}"
                for words in (BEFORE, AFTER)]  # fmt: skip
        return (
            made[0] if self.added in ("before", "around", "tool") else "",
            made[1] if self.added in ("after", "around", "later") else "",
        )

    def words_around(self, messages: list[Message]) -> tuple[str, str]:
        """The words that the template puts before and after the last message, an answer."""
        found = not messages[-1].get("tool_calls") and {
            "tool": messages[-2]["role"] == "tool",
            "later": len(messages) > 3,
        }.get(self.added, True)
        return (
            BEFORE if found and self.added in ("before", "around", "tool") else "",
            AFTER if found and self.added in ("after", "around", "later") else "",
        )

    def _call_source(self) -> str:
        if self.calls == "whole":
            return "{{- '\\nCALL ' + (c | tojson) -}}"
        arguments = "c.function.arguments | tojson" if self.arguments == "object" else "c.function.arguments"
        if self.calls == "wrapped":
            return f"{{{{- '\\n<call>' + c.function.name + ' ' + ({arguments}) + '</call>' -}}}}"
        if self.arguments == "text":
            return f"{{{{- '\\n<fn name=' + c.function.name + '>' + ({arguments}) + '</fn>' -}}}}"
        return (
            "{{- '\\n<fn name=' + c.function.name + '>' -}}{%- for k, v in c.function.arguments.items() -%}"
            "{{- '<arg k=' + k + '>' + (v | string) + '</arg>' -}}{%- endfor -%}{{- '</fn>' -}}"
        )

    # What the model has to write, without the template.

    @property
    def closes_known(self) -> bool:
        """Whether the template, or everyone's use, says how reasoning that the prompt opened is closed."""
        return self.tag in ("think", "tight") or self.field != "none" or self.inline != "raw"

    def prompted(self, messages: list[Message]) -> bool:
        """Whether these messages are followed by a generation prompt."""
        role = messages[-1]["role"]
        return {"always": True, "never": False, "user": role == "user", "no_tool": role != "tool"}[self.when]

    def refuses(self, messages: list[Message]) -> bool:
        """Whether a refusal is right: calls that are dropped, no place for a system text, no sign of a header."""
        roles = [message["role"] for message in messages]
        twice = any(i and roles[i - 1 : i + 1] == ["assistant"] * 2 for i in range(len(roles)))
        return (
            (self.beside and self.block in ("empty", "closes") and any(m.get("tool_calls") for m in messages))
            # Where words before it belong to a text that ends answers, nothing says what ends a call.
            or (
                self.style == "words"
                and self.added in ("after", "around")
                and any(m.get("tool_calls") for m in messages)
            )
            or (self.beside and any(m.get("tool_calls") and not any(m.get(key) for key in KEYS) for m in messages))
            or (self.system == "refused" and roles[:2] == ["system", "assistant"])
            or (twice and self.twice == "joined" and (self.style == "channels" or self.added in ("before", "around")))
            or (self.block == "opens" and not self.closes_known)
            # Nothing says whether a text without tags that the prompt adds is an open block or a closed one.
            or (self.block in ("empty", "closes") and self.tag in UNTAGGED and not self.closes_known)
            or (twice and self.twice == "other_end" and (self.when != "always" or self.style == "inst"))
        )

    def answer(self, messages: list[Message]) -> re.Pattern[str] | None:
        """What a model writes after the prompt of `messages[:-1]` to give the last message. Blanks of the template
        around it may vary; those of the author may not. None: nothing says what it has to write."""
        message, place = messages[-1], len(messages) - 1
        style, (opening, close) = STYLES[self.style], TAGS[self.tag]
        why, text, block = self._parts(message, place, messages)
        given = self.block if self.prompted(messages[:-1]) else ""
        authored = self._authored(message)
        if block and not why and self.field != "none" and self.inline in ("raw", "cut_old"):
            why, text = authored  # not a second time after an empty block
        parts: list[str] = []
        if not self.prompted(messages[:-1]) and not (self.twice == "joined" and messages[-2]["role"] == "assistant"):
            parts.append(style.bot)  # without a name
        if self.style == "channels":
            parts.append(FINAL)
        if given == "opens":
            if not self.closes_known and not (authored[0] and authored[1] != (message["content"] or "")):
                return None
            parts += [authored[0], close]
            text = authored[1] if not block and self.inline in ("raw", "cut_old") else text
        elif given:
            text = authored[1] if self.inline in ("raw", "cut_old") else text
        elif block:
            parts += [opening, why, close]
        pattern = r"\s*".join(re.escape(part.strip()) for part in parts)
        prompted = self.prompted(messages[:-1]) and self.style != "inst"
        if self.last == "open" and messages[-2]["role"] == "assistant" and not prompted:
            pattern = rf"(?:{re.escape(style.end)}|<\|end_of_text\|>)?\s*{pattern}"
        text = text.strip() if self.trim != "none" else text
        body = re.escape(text) if not (given and self.trim == "none") else r"\s*" + re.escape(text.lstrip("\n"))
        calls = "" if self.beside and not why else "".join(map(self._call, message.get("tool_calls") or ()))
        end = f"{style.end}{style.after}</s>" if self.style == "words" and self.last == "eos" else style.end
        before, after = map(re.escape, self.words_around(messages))
        return re.compile(rf"\s*{pattern}\s*?{before}{body}{after}{re.escape(calls)}{re.escape(end)}", re.DOTALL)

    def _authored(self, message: Message) -> tuple[str, str]:
        """The author's reasoning and the rest of the content."""
        text = message["content"] or ""
        for key in KEYS:
            if message.get(key):
                return message[key], text
        tag, close = (part.strip() for part in TAGS[self.tag])
        if text.lstrip().startswith(tag) and close in text:
            before, after = text.split(close, 1)
            return before.split(tag, 1)[1].strip("\n"), after.lstrip("\n")
        return "", text

    def _parts(self, message: Message, place: int, messages: list[Message]) -> tuple[str, str, bool]:
        """(reasoning, content, whether a block is rendered) as the template has them."""
        last = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
        text, why = message["content"] or "", ""
        tag, close = (part.strip() for part in TAGS[self.tag])
        if self.field != "none":
            why = next((message[key] for key in KEYS if message.get(key)), "")
        if close in text and (self.inline in ("split", "cut") or (self.inline == "cut_old" and place < last)):
            if self.inline == "split":
                why = text.split(close)[0].split(tag)[-1].strip("\n")
            text = text.split(close)[-1].lstrip("\n")
        if self.field == "none":
            shown = self.inline == "split" and bool(why)
        else:
            shown = {"shown": bool(why), "always": True, "fresh": place > last}[self.field]
        return why, text, shown

    def _call(self, call: Message) -> str:
        function = call["function"]
        arguments = function["arguments"]
        arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        if self.calls == "none":
            return ""
        if self.calls == "whole":
            return "\nCALL " + json.dumps(call, ensure_ascii=False)
        if self.calls == "wrapped":
            return f"\n<call>{function['name']} {arguments}</call>"
        if self.arguments == "text":
            return f"\n<fn name={function['name']}>{arguments}</fn>"
        inner = "".join(f"<arg k={k}>{v}</arg>" for k, v in function["arguments"].items())
        return f"\n<fn name={function['name']}>{inner}</fn>"


TOOLS = [{"type": "function", "function": {"name": "look_up", "description": "d", "parameters": {"type": "object"}}}]


def conversations(draw: random.Random, tag: str = "think") -> Iterator[tuple[str, list[Message], list[Any] | None]]:
    """(name, messages, tools) of about forty conversations, with words that occur once."""
    count = iter(range(10**6))

    def word() -> str:
        return f"w{draw.randrange(10**6)}q{next(count)}"

    def user(text: str = "") -> Message:
        return {"role": "user", "content": text or f"{word()} {word()}?"}

    def bot(text: str | None = "", **more: Any) -> Message:
        return {"role": "assistant", "content": f"{word()} {word()}." if text == "" else text, **more}

    def call(*keys: str) -> Message:
        function: Message = {"name": "look_up", "arguments": {"key": word(), "n": 3}}
        made = {"id": f"c{next(count):08d}", "type": "function", "function": function}
        if "order" in keys:
            made = {"function": {"arguments": function["arguments"], "name": "look_up"}, "type": "function"}
        return made

    def result() -> Message:
        return {"role": "tool", "content": f"found {word()}", "name": "look_up", "tool_call_id": "c00000000"}

    system = {"role": "system", "content": f"Be {word()}."}
    opening, close = TAGS[tag]

    def thought() -> str:
        return f"{opening}hm {word()}{close}{word()}."

    yield "one", [user(), bot()], None
    yield "two", [user(), bot(), user(), bot()], None
    yield "three", [user(), bot(), user(), bot(), user(), bot()], None
    yield "system", [system, user(), bot()], None
    yield "system two", [system, user(), bot(), user(), bot()], None
    yield "empty system", [{"role": "system", "content": ""}, user(), bot()], None
    for name, before, after in (("before", "  ", ""), ("after", "", " \n"), ("around", "\n", "  ")):
        yield f"blanks {name}", [user(), bot(f"{before}{word()}{after}")], None
        yield f"blanks {name} two", [user(), bot(f"{before}{word()}{after}"), user(), bot()], None
    yield "lines", [user(), bot(f"{word()}\n\n- {word()}\n\n{word()}")], None
    yield "user blanks", [user(f" {word()}\n\n"), bot()], None
    yield "unicode", [user(), bot(f"é {word()} 日本🎉")], None
    yield "letters", [user("a"), bot("a"), user("a"), bot("a")], None
    yield "repeats", [user("same words"), bot("same words"), user("same words"), bot("same words")], None
    yield "role words", [user(), bot("assistant"), user(), bot("model\nassistant:")], None
    yield "end token", [user(), bot(f"<|im_end|> {word()}"), user(), bot()], None
    yield "unclosed tag", [user(), bot(f"<thin {word()} <|")], None
    yield "tools", [user(), bot()], TOOLS
    for name, content in (("null", None), ("blank", ""), ("text", "look")):
        yield f"call {name}", [user(), {"role": "assistant", "content": content, "tool_calls": [call()]}], TOOLS
    yield "call order", [user(), bot(None, tool_calls=[call("order")])], TOOLS
    yield "call result", [user(), bot(None, tool_calls=[call()]), result(), bot()], TOOLS
    yield "two calls", [user(), bot(None, tool_calls=[call(), call()]), result(), result(), bot()], TOOLS
    yield "call call", [user(), bot(None, tool_calls=[call()]), result(),
                        bot(f"{word()}", tool_calls=[call()]), result(), bot(), user(), bot()], TOOLS  # fmt: skip
    key = draw.choice(KEYS)
    yield "reasoning", [user(), bot(**{key: f"hm {word()}"})], None
    yield "reasoning two", [user(), bot(**{key: f"hm {word()}"}), user(), bot(**{key: f"so {word()}"})], None
    yield "inline", [user(), bot(thought())], None
    yield "inline two", [user(), bot(thought()), user(), bot(thought())], None
    yield "inline then none", [user(), bot(thought()), user(), bot()], None
    yield "reasoning call", [user(), bot(None, tool_calls=[call()], **{key: f"hm {word()}"})], TOOLS
    yield "reasoning call result", [user(), bot(None, tool_calls=[call()], **{key: f"hm {word()}"}), result(),
                                    bot(**{key: f"so {word()}"})], TOOLS  # fmt: skip
    yield "twice", [user(), bot(), bot()], None
    yield "twice then more", [user(), bot(), bot(), user(), bot()], None
    yield "name", [user(), bot(name="Bob"), user(), bot(name="Eve")], None
    yield "bot first", [bot(), user(), bot()], None
    yield "system bot first", [system, bot(), user(), bot()], None
    yield "empty answer", [user(), bot(" "), user(), bot()], None
    yield "empty last", [user(), bot(), user(), bot("\n")], None
    yield "trailing user", [user(), bot(), user()], None
    yield "weight", [user(), bot(weight=0), user(), bot()], None
