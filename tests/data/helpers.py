"""A small real tokenizer for these tests: byte-level BPE with merges, and the control tokens of many model families."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from graftune.batch import Example
from graftune.data.dataset import Dataset, prepare
from graftune.data.fit import Built
from graftune.data.kind import ANSWERS, DataKind
from graftune.data.row import Row
from graftune.data.row_encoder import RowEncoder
from graftune.settings.sections import DataConfig
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


def jsonl(path: Path, *rows: object) -> str:
    """A file of these rows; those that are text are lines already."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def load(tmp_path: Path, *rows: Any, chat: Tokenizer | None = None, kind: DataKind = ANSWERS, **config: Any) -> Dataset:
    path = jsonl(tmp_path / "d.jsonl", *rows)
    return prepare(path, chat or with_template(CHATML), DataConfig(**config), kind=kind)


def prepared(tmp_path: Path, record: dict[str, Any], chat: Tokenizer, **config: Any) -> Dataset:
    """The examples of one row; an error where it is refused."""
    return load(tmp_path, record, chat=chat, strict=True, **config)


def built(row: dict[str, Any], chat: Tokenizer, **config: Any) -> list[Built]:
    """The examples of one row with how they were made; raises Refusal."""
    return built_by(RowEncoder(chat, DataConfig(**config), "data"), row)


def built_by(encoder: RowEncoder, row: dict[str, Any]) -> list[Built]:
    pending = encoder._rendered(Row(1, row))
    if pending.refusal is not None:
        raise pending.refusal
    return encoder._built(pending, encoder.tokenizer.encode_batch(pending.texts))


def trained_runs(example: Example, chat: Tokenizer | None = None) -> list[str]:
    """The text of each run of trained tokens."""
    runs: list[list[int]] = []
    before = False
    for token, on in zip(example.tokens, example.supervised, strict=True):
        if on:
            runs = runs if before else [*runs, []]
            runs[-1].append(token)
        before = on
    return [(chat or tokenizer()).decode(run) for run in runs]


def turns(*texts: str, system: str = "") -> list[dict[str, str]]:
    """User and assistant by turns."""
    head = [{"role": "system", "content": system}] if system else []
    return head + [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def all_runs(data: Dataset) -> list[str]:
    return [run for example in data.examples for run in trained_runs(example)]
