"""The header of an exported GGUF: the base's own keys where it is one, else those that its family writes."""

from __future__ import annotations

from typing import Any

from gguf.constants import GGUFValueType

from graftune.exporting import gguf_file
from graftune.exporting.gguf_vocab import CONTROL, vocabulary
from graftune.model.families import family_of
from graftune.weights.base import Base
from graftune.weights.gguf_io import read_gguf

# True of the file that was read, not of what is written now; and templates, of which one is checked and written.
_DROPPED = ("split.", "quantize.imatrix.", "general.alignment", "tokenizer.chat_template")


def model_keys(base: Base, name: str, file_type: int, end_of_turn: int | None) -> dict[str, bytes]:
    """Of a whole model; `base` is the merged one."""
    keys = _kept(base) if base.kind == "gguf" else _written(base, name, end_of_turn)
    keys["general.file_type"] = gguf_file.number(file_type)
    keys["general.quantization_version"] = gguf_file.number(2)
    template = base.tokenizer.template
    if template is not None:
        keys["tokenizer.chat_template"] = gguf_file.text(template.checked_source())
    return keys


def _kept(base: Base) -> dict[str, bytes]:
    keys = {k: v for k, v in gguf_file.header_of(base.path).items() if not k.startswith(_DROPPED)}
    metadata = read_gguf(base.path).metadata
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    new = [base.tokenizer.token(id) for id in range(len(tokens), base.spec.vocab)]
    if new:
        longer: dict[str, tuple[list[Any], GGUFValueType]] = {
            "tokens": (new, GGUFValueType.STRING),
            "token_type": ([CONTROL] * len(new), GGUFValueType.INT32),
            "scores": ([-1000.0] * len(new), GGUFValueType.FLOAT32),
        }
        for key, (more, kind) in longer.items():
            if (stored := f"tokenizer.ggml.{key}") in keys:
                keys[stored] = gguf_file.array(metadata[stored] + more, kind)
        if (size := f"{family_of(base.spec).arch}.vocab_size") in keys:
            keys[size] = gguf_file.number(base.spec.vocab)
    return keys


def _written(base: Base, name: str, end_of_turn: int | None) -> dict[str, bytes]:
    family = family_of(base.spec)
    general = {"architecture": family.arch, "type": "model", "name": name}
    keys = {f"general.{key}": gguf_file.text(value) for key, value in general.items()}
    for key, value in family.gguf_keys(base.spec, base.name).items():
        keys[f"{family.arch}.{key}"] = _encoded(value)
    return keys | vocabulary(base.tokenizer, base.spec.vocab, end_of_turn)


def _encoded(value: int | float | str | list[bool] | list[int]) -> bytes:
    if isinstance(value, list):
        return gguf_file.array(value, GGUFValueType.BOOL if isinstance(value[0], bool) else GGUFValueType.INT32)
    return gguf_file.text(value) if isinstance(value, str) else gguf_file.number(value)
