"""A whole model as one GGUF file: header and tensors under GGUF's names, written, and read back.

The header has the base's own keys where it is a GGUF, else those that its family writes."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from graftune.errors import GraftuneError
from graftune.exporting.gguf_file import encoded, write_gguf
from graftune.exporting.gguf_mix import TYPES, kind_of
from graftune.exporting.gguf_vocab import CONTROL, vocabulary
from graftune.io.json_file import read_object
from graftune.model.families import family_of
from graftune.model.frozen.interface import TensorRows
from graftune.model.rotary import RopeSpec
from graftune.weights import experts, rows
from graftune.weights.base import Base, open_base
from graftune.weights.gguf_io import header_bytes, read_gguf
from graftune.weights.streamed import UNWATCHED, OutputTensor, Watcher, carried_outputs

# Keys that describe the file that was read, not the new one, and chat templates: one of these is checked and written.
_DROPPED = ("split.", "quantize.imatrix.", "general.alignment", "tokenizer.chat_template")
_NAMING = ("family", "module", "names", "tiled")  # fields of a spec that say nothing about what is computed


def gguf_tensors(base: Base, mix: str) -> list[OutputTensor]:
    """Every tensor of a model under GGUF's name and in GGUF's order."""
    family = family_of(base.spec)
    stated = family.gguf_tensors(base.spec)
    found = [OutputTensor(name, TensorRows(values), "F32") for name, values in stated.items()]
    plain, stacks = experts.to_gguf(base.tensors, base.spec)
    for ours in sorted(plain, key=_place):
        if ours == "lm_head.weight" and base.spec.tied:
            continue
        stored_as = family.to_gguf(ours)
        if not stored_as:
            raise GraftuneError(f"{ours} has no name in GGUF", where=str(base.path), fix="export to merged or peft")
        source = rows.to_file(base.tensors[ours], "gguf", base.spec, ours)
        sizes = rows.gguf_rows(base.spec, ours, source.shape[0], len(stored_as))
        for name, part in zip(stored_as, rows.divided(source, sizes), strict=True):
            found.append(OutputTensor(name, part, kind_of(name, part, mix, base.spec)))
    found += [OutputTensor(n, s, kind_of(n, s, mix, base.spec)) for n, s in stacks.items()]
    return [*found, *carried_outputs(base.carried_to("gguf"))]


def _place(name: str) -> tuple[int, int]:
    """Sort key: embedding, layers in order, final norm, head, which is the order in which a reader uses them."""
    layer = re.match(r"layers\.(\d+)\.", name)
    return (1, int(layer[1])) if layer else ({"embed_tokens.weight": 0, "norm.weight": 2}.get(name, 3), 0)


def write_model_gguf(
    path: Path,
    base: Base,
    tensors: list[OutputTensor],
    mix: str,
    name: str,
    end_of_turn: int | None,
    watcher: Watcher = UNWATCHED,
) -> None:
    """Writes the file and reads it back, including the tokenizer and the model's shape."""
    write_gguf(path, model_keys(base, name, int(TYPES[mix][1]), end_of_turn), tensors, watcher)
    _check(path, base)


def model_keys(base: Base, name: str, file_type: int, end_of_turn: int | None) -> dict[str, bytes]:
    """The header of a whole model; `base` is the merged one."""
    keys = _kept_keys(base) if base.kind == "gguf" else _own_keys(base, name, end_of_turn)
    keys |= {"general.file_type": encoded(file_type), "general.quantization_version": encoded(2)}
    if base.tokenizer.template is not None:
        keys["tokenizer.chat_template"] = encoded(base.tokenizer.template.checked_source())
    return keys


def _kept_keys(base: Base) -> dict[str, bytes]:
    """The keys of the GGUF that the base was read from, with the new tokens added."""
    keys = {k: v for k, v in header_bytes(base.path).items() if not k.startswith(_DROPPED)}
    metadata = read_gguf(base.path).metadata
    new = [base.tokenizer.token(id) for id in range(len(metadata["tokenizer.ggml.tokens"]), base.spec.vocab)]
    if new:
        longer = {"tokens": new, "token_type": [CONTROL] * len(new), "scores": [-1000.0] * len(new)}
        for key, more in longer.items():
            if (stored := f"tokenizer.ggml.{key}") in keys:
                keys[stored] = encoded(metadata[stored] + more)
        if (size := f"{family_of(base.spec).arch}.vocab_size") in keys:
            keys[size] = encoded(base.spec.vocab)
    return keys


def _own_keys(base: Base, name: str, end_of_turn: int | None) -> dict[str, bytes]:
    family = family_of(base.spec)
    values = {"general.architecture": family.arch, "general.type": "model", "general.name": name}
    of_model = family.gguf_keys(base.spec, base.name)
    if base.config_file is not None:
        of_model |= family.gguf_vision_keys(read_object(base.config_file))
    values |= {f"{family.arch}.{key}": value for key, value in of_model.items()}
    keys = {key: encoded(value) for key, value in values.items()}
    return keys | vocabulary(base.tokenizer, base.spec.vocab, end_of_turn)


def _check(path: Path, base: Base) -> None:
    back = open_base(str(path))
    want, got = (dict(_values(each.spec)) for each in (base, back))
    for place in want | got:
        if not _same(want.get(place), got.get(place)):
            raise GraftuneError(
                f"a GGUF of the family {base.spec.family} cannot say that {place} is {want.get(place)}"
                f" (it reads back as {got.get(place)})",
                fix="export to merged or peft",
            )


def _same(want: Any, got: Any) -> bool:
    return math.isclose(want, got, rel_tol=1e-5) if isinstance(want, float) and isinstance(got, float) else want == got


def _values(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (path of a field, value) of a spec. Ropes are given by their frequencies, which files may state in several
    ways; the family is left out, since some share an architecture, and so are the names of a folder's tensors."""
    if isinstance(value, RopeSpec):
        rope = value.build()
        value = (*rope.frequencies.tolist(), rope.scaling, rope.temperature, rope.temperature_length)
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            skipped = field.name in ("branches", "parts", "part")  # left out of the paths in messages
            inner = place if skipped else f"{place}.{field.name}".removeprefix(".")
            yield from _values(getattr(value, field.name), inner) if field.name not in _NAMING else ()
    elif isinstance(value, tuple):
        for index, each in enumerate(value):
            yield from _values(each, f"{place}.{index}")
    else:
        yield place, value
