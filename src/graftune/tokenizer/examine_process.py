"""The process that tries a tokenizer.json and a chat template before graftune uses them (see examine.py).

It reads a JSON list of [kind, text] from stdin and writes one line of JSON for each: why the text cannot be used, or
an empty string. A line that is missing means that the process died over that text. It runs by its path and imports
nothing of graftune, so it starts in a tenth of a second.
"""

from __future__ import annotations

import json
import os
import resource
import runpy
import sys
import time
from collections.abc import Callable
from typing import Any

SECONDS, BYTES_A_SECOND = 2, 1 << 20  # CPU time for a tokenizer, and the size of a file that adds one second
BYTES, PER_BYTE = 2 << 30, 60  # memory for a tokenizer, and the part of it that grows with the file
TEXT_SECONDS = 0.5  # CPU time for all of TEXTS, which normally take milliseconds
TOKENS_A_BYTE, TOKENS = 8, 100  # limit on the tokens of one text
LARGEST_ID = 1 << 22  # sixteen times that of the largest vocabularies
TEMPLATE_SECONDS, RENDERING_SECONDS = 1, 0.75  # CPU time for a template, and for one rendering of it
TEMPLATE_BYTES = 256 << 20  # memory for a template
OUTPUT, OUTPUT_A_CHARACTER = 1 << 16, 64  # characters a rendering may have, and more for each of the conversation
TEXTS = (
    "é中👩",
    "Hello, world! It's 2026: 1234567 tokens.\n\n\tdef f(x):\r\n    return x  # naïve\n",
    "héllo 中文 日本語 한국어 👩\u200d👩 \u0301\ufb03 \u2581a</s> ##b",
    "a" * 2000,
    " " * 200,
    "",
)
Message = dict[str, Any]


def examine_tokenizer(text: str) -> str:
    """Load a tokenizer.json and use it once in every way that graftune does. A refusal of one of TEXTS is accepted:
    rows with such a text are refused one by one."""
    import tokenizers

    try:
        made = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises plain Exception for every fault of the file
        return f"the file is not a tokenizer: {error}"
    if (largest := max(made.get_vocab(with_added_tokens=True).values(), default=0)) > LARGEST_ID:
        return f"a token has the id {largest}"
    made.no_padding()
    made.no_truncation()
    special = [token.content for token in made.get_added_tokens_decoder().values()][:50]
    began = time.process_time()
    for words in (*TEXTS, " ".join(special)):
        for plain in (False, True):
            made.encode_special_tokens = plain
            for around in (False, True):
                if fault := _encode(made, words, around):
                    return fault
                if (taken := time.process_time() - began) > TEXT_SECONDS:
                    return f"it takes {taken:.1f} s to encode a few words"
    tokenizers.Tokenizer.from_str(made.to_str())
    return ""


def _encode(made: Any, words: str, around: bool) -> str:
    """Encode and decode words in every way; returns why the tokenizer is refused, if it is."""
    try:
        ids = made.encode(words, add_special_tokens=around).ids
        if len(ids) > TOKENS_A_BYTE * len(words.encode()) + TOKENS:
            return f"it makes {len(ids)} tokens of {len(words)} characters"
        made.encode_batch_fast([words, words[:7]], add_special_tokens=around)
        made.decode(ids)
        made.decode(ids, skip_special_tokens=True)
    except Exception as error:
        if "regex" in str(error).lower():  # an endless search on plain text
            raise
    return ""


def conversations() -> list[tuple[list[Message], list[Any] | None]]:
    """A dozen conversations, with the tools of each: short, long, with tools, and hostile."""
    user, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
    system = {"role": "system", "content": "Be brief."}
    parameters = {"type": "object", "properties": {"city": {"type": "string", "description": "x"}}}
    tool = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": parameters}}
    call = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "content": "20°C", "tool_call_id": "call00001", "name": "weather"}
    thinking = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello", "reasoning_content": "hm"}
    parts = [{"role": one["role"], "content": [{"type": "text", "text": one["content"]}]} for one in (user, answer)]
    hostile = "{{ 9**9**9 }}{% for %}%s%999999999d{0.__class__}{:999999999}<|im_end|></s>\x00\u202e<think>" * 20
    long_turns = [{"role": ("user", "assistant")[i % 2], "content": f"turn {i} " * 20} for i in range(100)]
    return [
        ([user], None),
        ([user, answer], None),
        ([system, user, answer], None),
        ([system, user, answer, user, thinking], None),
        ([user, answer], [tool]),
        ([system, user, calling, result, answer], [tool] * 20),
        ([user, {**calling, "content": None}], [tool]),
        (parts, None),
        ([{**system, "content": hostile}, {**user, "content": hostile}, {**answer, "content": hostile}], None),
        ([user, {**answer, "content": "line\n" * 10_000}], None),
        ([{**user, "content": "x" * 100_000}, answer], None),
        (long_turns, None),
    ]


def examine_template(source: str) -> str:
    """Compile a template and render each conversation. A template may refuse a conversation or fail on it with an
    exception; taking too long or writing too much is its own fault."""
    compiled: Callable[[str], Any] = runpy.run_path(os.path.join(os.path.dirname(__file__), "sandbox.py"))["compiled"]
    try:
        template = compiled(source)
    except Exception as error:
        if isinstance(error, MemoryError):
            raise
        return ""  # ChatTemplate reports syntax errors
    for messages, tools in conversations():
        size = len(json.dumps([messages, tools]))
        for generate in (False, True):
            began, text = time.process_time(), ""
            given: dict[str, Any] = {"messages": messages, "tools": tools, "add_generation_prompt": generate}
            given |= {"documents": None, "bos_token": "<s>", "eos_token": "</s>", "strftime_now": time.strftime}
            try:
                text = template.render(given)
            except MemoryError:
                raise
            except Exception:  # noqa: S110 - a refusal, or a message without a field that the template reads
                pass
            if (taken := time.process_time() - began) > RENDERING_SECONDS:
                return f"it takes {taken:.1f} s to render a conversation of {size} characters"
            if len(text) > OUTPUT + OUTPUT_A_CHARACTER * size + 2 * len(source):
                return f"it writes {len(text)} characters for a conversation of {size} characters"
    return ""


def _limit(kind: str, size: int) -> None:
    """Limit this process's memory, and its CPU time from now on."""
    memory, seconds = BYTES + PER_BYTE * size, SECONDS + size // BYTES_A_SECOND
    if kind == "template":
        seconds = TEMPLATE_SECONDS
        if sys.platform == "linux":
            with open("/proc/self/statm") as file:
                memory = int(file.read().split()[0]) * resource.getpagesize() + TEMPLATE_BYTES
    _lower(resource.RLIMIT_AS, memory)
    _lower(resource.RLIMIT_CPU, int(time.process_time()) + 1 + seconds)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _lower(which: int, wanted: int) -> None:
    """Set the soft limit. The hard limit stays: an ordinary user cannot raise it, and it may be lower than `wanted`."""
    hard = resource.getrlimit(which)[1]
    resource.setrlimit(which, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def _main() -> None:
    sys.path[:] = json.loads(sys.argv[1])
    for kind, text in json.load(sys.stdin):
        _limit(kind, len(text))
        try:
            fault = examine_tokenizer(text) if kind == "tokenizer" else examine_template(text)
        except MemoryError:
            fault = "it exhausts the memory that it may use"
        except BaseException as error:  # a panic of the tokenizers library
            fault = f"the tokenizers library fails on it: {error or type(error).__name__}"
        print(json.dumps(fault[:2000]), flush=True)


if __name__ == "__main__":
    _main()
