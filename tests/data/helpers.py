"""A small real tokenizer for these tests: byte-level BPE with merges, and the control tokens of many model families."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from graftune.batch import Example
from graftune.tokenizer import ChatTemplate, Tokenizer

TEMPLATES = Path(__file__).parents[1] / "fixtures" / "chat_templates"
NO_END = ("amberchat", "chatqa", "falcon-instruct", "solar-instruct")
STOPS = ("</s>", "<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|end_of_text|>")
CONTROL = (
    "<s>",
    *STOPS,
    "<|end_of_turn|>",  # a special token that is not among the stop tokens
    "<|im_start|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<start_of_turn>",
    "<|start_of_role|>",
    "<|end_of_role|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
)
_CORPUS = [
    "The quick answer is that a question about the weather in Paris gets a short answer, and then another answer.",
    "### Instruction:\nUSER: ASSISTANT: user\nassistant\nsystem\nGPT4 Correct Assistant: [INST] [/INST] </think>\n\n",
    "What is it? It is what it is. Where and when and why. One two three four five six seven eight nine ten.",
] * 3


@functools.cache
def tokenizer() -> Tokenizer:
    """BOS <s>, EOS </s>, no template, add_bos off."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(CONTROL),
        show_progress=False,
    )
    backend.train_from_iterator(_CORPUS, trainer)
    ids = {text: backend.token_to_id(text) for text in CONTROL}
    return Tokenizer(
        backend, bos_id=ids["<s>"], eos_id=ids["</s>"], stop_ids=tuple(sorted(ids[text] for text in STOPS))
    )


def with_template(source: str, name: str = "template", **changes: object) -> Tokenizer:
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>", name=name)
    return dataclasses.replace(tokenizer(), template=template, **changes)  # type: ignore[arg-type]


def shipped(name: str) -> Tokenizer:
    return with_template((TEMPLATES / f"{name}.jinja").read_text(), name)


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def trained_runs(example: Example) -> list[str]:
    """The text of each run of trained tokens."""
    runs: list[list[int]] = []
    before = False
    for token, on in zip(example.tokens, example.supervised, strict=True):
        if on:
            runs = runs if before else [*runs, []]
            runs[-1].append(token)
        before = on
    return [tokenizer().decode(run) for run in runs]


def turns(*texts: str, system: str = "") -> list[dict[str, str]]:
    """User and assistant by turns."""
    head = [{"role": "system", "content": system}] if system else []
    return head + [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
