"""Chat templates made up at random, each as Jinja source and, written apart from it, as a Python function.

The function is the judge: it renders a conversation from the same description without Jinja and without any code of
the package, and it knows by construction what the prompt of inference is, what the answer behind it is and where that
ends. `Spec` describes a template, `conversation` makes up one to render.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]

# (user's opening, its closing, the assistant's opening, its end token, what follows that, system's opening, closing)
STYLES = {
    "chatml": ("<|im_start|>user\n", "<|im_end|>\n", "<|im_start|>assistant\n", "<|im_end|>", "\n",
               "<|im_start|>system\n", "<|im_end|>\n"),
    "headers": ("<|start_header_id|>user<|end_header_id|>\n\n", "<|eot_id|>",
                "<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>", "",
                "<|start_header_id|>system<|end_header_id|>\n\n", "<|eot_id|>"),
    "turns": ("<start_of_turn>user\n", "<end_of_turn>\n", "<start_of_turn>model\n", "<end_of_turn>", "\n",
              "<start_of_turn>system\n", "<end_of_turn>\n"),
    "roles": ("<|user|>\n", "<|end|>\n", "<|assistant|>\n", "<|end|>", "\n", "<|system|>\n", "<|end|>\n"),
    "inst": ("[INST] ", " [/INST]", "", "</s>", "", "[SYS] ", " [/SYS]"),
    "spaced": ("USER: ", " ", "ASSISTANT: ", "</s>", "\n", "", "\n\n"),
    "words": ("### Question:\n", "\n\n", "### Answer:\n", "[over]", "\n\n", "### Task:\n", "\n\n"),
    "unknown_end": ("<|user|>", "<|end_of_turn|>", "<|assistant|>", "<|end_of_turn|>", "\n", "<|system|>",
                    "<|end_of_turn|>"),
}  # fmt: skip
EMPTY = "<think>\n\n</think>\n\n"
DEFAULT = "You are a made-up helper."


@dataclass(frozen=True)
class Spec:
    style: str
    bos: bool
    default_system: bool
    system: str  # turn | first_user | only_last (the prompt has it, the answered conversation lacks it) | refused
    generation: str  # header | opens (a think block) | closes (an empty one)
    thinking: str  # plain | drops_old (in turns before the last question) | block (an empty one where there is none)
    trim: bool
    tools: str  # none | object | text (the form that arguments are wanted in)
    eos_last: bool

    @staticmethod
    def random(draw: random.Random) -> Spec:
        thinking = draw.choice(("plain", "plain", "drops_old", "block"))
        generation = draw.choice(("header", "header", "opens", "closes")) if thinking != "block" else "header"
        style = draw.choice(sorted(STYLES))
        return Spec(
            style,
            bos=draw.random() < 0.5,
            default_system=draw.random() < 0.3,
            system=draw.choice(("turn", "turn", "first_user", "only_last", "refused")),
            generation="header" if style in ("inst", "spaced") else generation,
            thinking=thinking,
            trim=draw.random() < 0.4,
            tools=draw.choice(("none", "object", "text")),
            eos_last=draw.random() < 0.2,
        )

    @property
    def end(self) -> str:
        """Of an answer. Ordinary text ends none by itself, so EOS behind it is part of the end."""
        end, after = STYLES[self.style][3:5]
        return f"{end}{after}</s>" if self.style == "words" and self.eos_last else end

    # The template, as Jinja.

    def source(self) -> str:
        user, user_end, bot, end, after, system, system_end = (json.dumps(part) for part in STYLES[self.style])
        content = "m.content | trim" if self.trim else "m.content"
        lines = ["{%- set ns = namespace(last=-1) -%}"]
        lines.append("{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
                     "{% endfor -%}")  # fmt: skip
        lines.append("{{- bos_token -}}" if self.bos else "")
        if self.tools != "none":
            lines.append("{%- if tools -%}{{- 'TOOLS ' + (tools | tojson) + '\\n' -}}{%- endif -%}")
        if self.default_system:
            lines.append("{%- if messages[0].role != 'system' -%}")
            lines.append(f"{{{{- {system} + {json.dumps(DEFAULT)} + {system_end} -}}}}{{%- endif -%}}")
        lines.append("{%- for m in messages -%}")
        lines.append("{%- if m.role == 'system' -%}")
        if self.system == "refused":
            lines.append("{{- raise_exception('no system here') -}}")
        elif self.system == "turn":
            lines.append(f"{{{{- {system} + ({content}) + {system_end} -}}}}")
        lines.append("{%- elif m.role == 'user' -%}")
        before = "''"
        if self.system == "first_user":
            before = "(messages[0].content + '\\n\\n' if messages[0].role == 'system' and loop.index0 == 1 else '')"
        elif self.system == "only_last":
            before = "(messages[0].content + '\\n\\n' if messages[0].role == 'system' and loop.last else '')"
        lines.append(f"{{{{- {user} + {before} + ({content}) + {user_end} -}}}}")
        lines.append("{%- elif m.role == 'tool' -%}{{- '<result>' + m.content + '</result>\\n' -}}")
        lines.append("{%- else -%}")
        lines.append(f"{{{{- {bot} -}}}}")
        lines.append("{%- set text = (m.content or '') -%}")
        if self.thinking == "drops_old":
            lines.append("{%- if loop.index0 < ns.last and '</think>' in text -%}"
                         "{%- set text = text.split('</think>')[-1].lstrip('\\n') -%}{%- endif -%}")  # fmt: skip
        if self.thinking == "block":
            lines.append("{%- if loop.index0 > ns.last -%}{{- '<think>\\n' + (m.reasoning_content or '') + "
                         "'\\n</think>\\n\\n' -}}{%- endif -%}")  # fmt: skip
        lines.append("{{- (text | trim) -}}" if self.trim else "{{- text -}}")
        if self.tools != "none":
            arguments = "c.function.arguments | tojson" if self.tools == "object" else "c.function.arguments"
            lines.append("{%- for c in m.tool_calls or [] -%}{{- '\\n<call>' + c.function.name + ' ' + "
                         f"({arguments}) + '</call>' -}}}}{{%- endfor -%}}")  # fmt: skip
        lines.append(f"{{{{- {end} + {after} -}}}}")
        lines.append("{%- endif -%}{%- endfor -%}")
        if self.eos_last:
            lines.append("{%- if not add_generation_prompt -%}{{- eos_token -}}{%- endif -%}")
        opening = {"header": "''", "opens": "'<think>\\n'", "closes": json.dumps(EMPTY)}[self.generation]
        lines.append(f"{{%- if add_generation_prompt -%}}{{{{- {bot} + {opening} -}}}}{{%- endif -%}}")
        return "".join(lines)

    # The same, by hand.

    def prompt(self, messages: list[Message], tools: list[Any] | None) -> str:
        opening = {"header": "", "opens": "<think>\n", "closes": EMPTY}[self.generation]
        return self._conversation(messages, tools) + STYLES[self.style][2] + opening

    def full(self, messages: list[Message], tools: list[Any] | None) -> str:
        return self._conversation(messages, tools) + ("</s>" if self.eos_last else "")

    def answer(self, messages: list[Message]) -> str:
        """What a model writes behind `prompt` to give the last message, with its end."""
        message, last = messages[-1], len(messages) - 1
        body = self._body(message, last, messages)
        why = bool(message.get("reasoning_content")) or "</think>" in (message["content"] or "")
        if self.generation == "opens":
            inline = body.startswith("<think>\n")
            return (body.removeprefix("<think>\n") if inline else "\n</think>\n\n" + body.lstrip("\n")) + self.end
        if self.generation == "closes" and why and body.startswith("<think>"):
            return body.split("</think>", 1)[1].lstrip() + self.end
        return body + self.end

    def _conversation(self, messages: list[Message], tools: list[Any] | None) -> str:
        user, user_end, bot, end, after, system, system_end = STYLES[self.style]
        text = "<s>" if self.bos else ""
        if self.tools != "none" and tools:
            text += "TOOLS " + json.dumps(tools, ensure_ascii=False) + "\n"
        if self.system == "refused" and messages[0]["role"] == "system":
            joined = messages[0]["content"] + "\n\n" if messages[0]["content"].strip() else ""
            messages = [{**messages[1], "content": joined + messages[1]["content"]}, *messages[2:]]
        given = messages[0]["content"] if messages[0]["role"] == "system" else None
        if given is None and self.default_system:
            text += system + DEFAULT + system_end
        for i, message in enumerate(messages):
            content = self._trimmed(message["content"] or "")
            if message["role"] == "system":
                text += system + content + system_end if self.system == "turn" else ""
            elif message["role"] == "user":
                here = i == 1 if self.system == "first_user" else self.system == "only_last" and i == len(messages) - 1
                text += user + (given + "\n\n" if given is not None and here else "") + content + user_end
            elif message["role"] == "tool":
                text += f"<result>{message['content']}</result>\n"
            else:
                text += bot + self._body(message, i, messages) + end + after
        return text

    def _body(self, message: Message, place: int, messages: list[Message]) -> str:
        last = max(i for i, m in enumerate(messages) if m["role"] == "user")
        text = message["content"] or ""
        if self.thinking == "drops_old" and place < last and "</think>" in text:
            text = text.split("</think>")[-1].lstrip("\n")
        text = self._trimmed(text)
        if self.thinking == "block" and place > last:
            text = "<think>\n" + message.get("reasoning_content", "") + "\n</think>\n\n" + text
        if self.tools != "none":
            for call in message.get("tool_calls", ()):
                arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
                text += f"\n<call>{call['function']['name']} {arguments}</call>"
        return text

    def _trimmed(self, text: str) -> str:
        return text.strip() if self.trim else text


_BITS = (
    "<thin",
    "</b>",
    "[x]",
    "{{ y }}",
    "12345",
    "é",
    "日本",
    "🎉",
    "a  b",
    "don't",
    "x=1;",
    "<|",
    "|>",
    "user",
    "\n\n",
)
TOOLS = [{"type": "function", "function": {"name": "look_up", "description": "d", "parameters": {"type": "object"}}}]


def conversation(draw: random.Random, spec: Spec) -> tuple[list[Message], list[Any] | None]:
    """Turns with words that occur once; now and then with odd blanks, reasoning, tool calls, an empty system turn."""
    words = (f"w{draw.randrange(10**6)}q{i}" for i in range(10**6))

    def text() -> str:
        parts = [draw.choice(_BITS) if draw.random() < 0.3 else next(words) for _ in range(draw.randrange(1, 6))]
        made = " ".join([next(words), *parts, next(words)])
        return draw.choice(("", " ", "\n")) + made + draw.choice(("", " ", "\n\n")) if draw.random() < 0.2 else made

    messages: list[Message] = []
    if draw.random() < 0.4:
        messages.append({"role": "system", "content": "" if draw.random() < 0.1 else f"be {next(words)}"})
    for _ in range(draw.randrange(1, 4)):
        messages.append({"role": "user", "content": text()})
        answer: Message = {"role": "assistant", "content": text()}
        if draw.random() < 0.25:
            if spec.thinking == "block":
                answer["reasoning_content"] = f"hm {next(words)}"
            else:
                answer["content"] = f"<think>\nhm {next(words)}\n</think>\n\n{answer['content'].strip()}"
        elif spec.tools != "none" and draw.random() < 0.3:
            call = {"type": "function", "function": {"name": "look_up", "arguments": {"key": next(words), "n": 3}}}
            messages.append({"role": "assistant", "content": draw.choice((None, "", "hm")), "tool_calls": [call]})
            messages.append({"role": "tool", "content": f"found {next(words)}"})
        messages.append(answer)
    return messages, TOOLS if spec.tools != "none" and draw.random() < 0.7 else None
