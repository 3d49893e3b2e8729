"""Opens a base (a GGUF file, a Hugging Face folder or a Hub name) without loading it.

Opening reads headers, metadata and tokenizer; weights stay in the file as row sources until load.py loads them.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graftune import tokenizer as tok
from graftune.errors import GraftuneError
from graftune.io import digest
from graftune.io.files import check_inside
from graftune.model.families import family_of, from_config, from_gguf, is_multimodal
from graftune.model.frozen import RowSource
from graftune.model.frozen.formats import assembled, check_quantisation
from graftune.model.lora import norm_names
from graftune.model.spec import ModelSpec
from graftune.settings.recognise import default_base
from graftune.weights import experts, hub, names, safetensors_io
from graftune.weights import rows as rows_
from graftune.weights.names import NamingScheme
from graftune.weights.opening import read_json, sensible
from graftune.weights.safetensors_io import CarriedTensor

PREDICTION = "mtp."  # prefix of a folder's blocks that predict further tokens


@dataclass
class Base:
    name: str  # as the user gave it
    path: Path
    kind: str  # gguf | safetensors | config (no weights: a model to train from scratch)
    spec: ModelSpec
    tokenizer: tok.Tokenizer
    tensors: Mapping[str, RowSource] = field(repr=False)  # by our names
    parts: tuple[Path, ...] = ()  # the files of a GGUF; `path` is the first
    from_hub: bool = False
    carried: Mapping[str, CarriedTensor] = field(default_factory=dict, repr=False)  # by the file's names: never loaded
    scheme: NamingScheme = names.TEXT  # of a folder's tensors
    multimodal: bool = False  # its configuration also describes a vision tower: adapters use that class's names

    @functools.cached_property
    def sha256(self) -> str:
        """Hash of the GGUF file, or of a folder's weight files in order of name; without weights, of the
        description."""
        if self.kind == "config":
            described = [self.path, self.path.with_name("tokenizer.json"), self.path.with_name("tokenizer_config.json")]
            return digest.sha256([file for file in described if file.is_file()])
        return digest.sha256(self.files)

    @property
    def files(self) -> list[Path]:
        return list(self.parts) or [self.path / name for name in safetensors_io.weight_files(self.path)]

    @property
    def reference(self) -> str:
        """The name by which another program finds it: the path of a file or folder of the user's own, or the Hub
        name."""
        return self.name if self.from_hub else str(self.path.resolve())

    @property
    def folder(self) -> Path:
        """The folder of the weights and the files beside them."""
        return self.path if self.path.is_dir() else self.path.parent

    def carried_to(self, kind: str) -> Mapping[str, CarriedTensor]:
        """The tensors outside the text model that an export of this kind has a place for."""
        return self.carried if self.kind == kind else {}

    @property
    def config_file(self) -> Path | None:
        """The Hugging Face configuration it was read from, if it was."""
        return {"config": self.path, "safetensors": self.path / "config.json"}.get(self.kind)

    def describe(self) -> dict[str, Any]:
        dtypes = sorted({t.dtype_name for t in self.tensors.values()})
        return {
            "base": self.name,
            "path": str(self.path),
            "kind": self.kind,
            "stored_as": dtypes,
        } | self.spec.describe()


def with_new_tokens(base: Base, new: Sequence[str]) -> Base:
    """The base with tokens added after its tokenizer's last one; `base` itself if there are none to add. Rows that only
    pad the table are dropped, so that the rows of the new tokens follow directly."""
    if not new:
        return base
    if base.spec.layer_inputs is not None:
        raise GraftuneError(
            "has an embedding of every token in each layer, so that no tokens can be added",
            where=base.name,
            fix="leave new_tokens out",
        )
    count = base.tokenizer.vocab_size
    tensors = dict(base.tensors)
    for name in ("embed_tokens.weight", "lm_head.weight"):
        if name in tensors and tensors[name].shape[0] > count:
            tensors[name] = rows_.RowRange(tensors[name], count)
    spec = base.spec.with_vocab(count)
    return dataclasses.replace(base, spec=spec, tensors=tensors, tokenizer=base.tokenizer.with_tokens(new))


def open_base(name: str = "", revision: str = "", *, weights: bool = True) -> Base:
    """Opens a base. Without `weights`, only the model's shape and tokenizer are read; the weights need not exist."""
    base = _fitted(_open(name, revision, weights), trained=weights)
    if not weights:
        return dataclasses.replace(base, tensors={})
    _check_tensors(base)
    return base


def described(name: str = "", revision: str = "") -> Base:
    """The shape and the tokenizer of a trained model. No weights are downloaded from the Hub, except with a GGUF, which
    is one file."""
    return dataclasses.replace(_fitted(_open(name, revision, weights=False), trained=True), tensors={})


def _fitted(base: Base, trained: bool) -> Base:
    """Checks that the tokenizer has no more tokens than the embedding has rows. A model that will be trained from
    scratch needs a row for each token; a trained one may lack rows of special tokens that it never reads."""
    if base.tokenizer.vocab_size > base.spec.vocab and trained and base.tokenizer.special_beyond(base.spec.vocab):
        # Gemma 3's small models: the tokenizer is that of the large ones, which also read images.
        base = dataclasses.replace(base, tokenizer=dataclasses.replace(base.tokenizer, rows=base.spec.vocab))
    elif base.tokenizer.vocab_size > base.spec.vocab:
        raise GraftuneError(
            f"the tokenizer has {base.tokenizer.vocab_size} tokens and the embedding {base.spec.vocab} rows",
            where=str(base.path),
            fix="the two belong to different models: download the base again" if trained else "raise vocab_size",
        )
    return base


def _check_tensors(base: Base) -> None:
    """Checks that every weight exists in the shape that the configuration says. Reads headers only, before anything is
    allocated, so that a damaged header cannot claim sizes that the file does not have."""
    unread = set(base.tensors)
    for name, shape in tensor_shapes(base.spec):
        unread.discard(name)
        found = base.tensors.get(name)
        if found is None:
            raise GraftuneError(f"tensor {name} is missing", where=str(base.path), fix="download the model again")
        if tuple(found.shape) != shape:
            raise GraftuneError(
                f"tensor {name} is {list(found.shape)} where the configuration says {list(shape)}",
                where=str(base.path),
                fix="the weights and the configuration belong to different models: download both again",
            )
    unread -= {"lm_head.weight"}  # some tied models store their table twice
    if unread:
        raise GraftuneError(
            f"holds {min(unread)}, which {base.spec.family} models do not have here",
            where=str(base.path),
            fix="this variant is not supported",
        )


def tensor_shapes(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "embed_tokens.weight", (spec.vocab, spec.width)
    if not spec.tied:
        yield "lm_head.weight", (spec.vocab, spec.width)
    if spec.layer_inputs is not None:
        yield from spec.layer_inputs.tensors.items()
    for index, layer in enumerate(spec.layers):
        for name, shape in layer.weights.items():
            yield f"layers.{index}.{name}", shape
    for _, name, width in norm_names(spec):
        yield name, (width,)


def _checked_spec(spec: ModelSpec) -> ModelSpec:
    if wrong := spec.wrong():
        raise ValueError(wrong)
    return spec


def _open(name: str, revision: str, weights: bool) -> Base:
    path = default_base() if not name else Path(name).expanduser()
    if path.is_file() and path.suffix == ".json" and not weights:
        return _open_config(name, path)
    from_hub = not path.exists()
    if from_hub and not hub.is_name(name):
        raise GraftuneError("no such file or folder", where=name, fix="give a .gguf file, a model folder or a Hub name")
    path = hub.fetch(name, revision, weights) if from_hub else path
    if path.is_file():
        base = _open_gguf(name or path.stem, path)
    else:
        base = _open_folder(name, path) if weights else _open_config(name, _config_in(path))
    return dataclasses.replace(base, from_hub=from_hub)


def _open_gguf(name: str, path: Path) -> Base:
    from graftune.weights.gguf_io import read_model

    file = read_model(path)
    path = file.parts[0]
    with sensible("its configuration makes", path, "download the model again"):
        spec = _checked_spec(from_gguf(file.metadata, file.tensors, str(path)))
    tensors: dict[str, RowSource] = {}
    family = family_of(spec)
    layers, carried = len(spec.layers), {}
    for gguf_name, tensor in file.tensors.items():
        block = re.match(r"blk\.(\d+)\.", gguf_name)
        ours = family.our_name(gguf_name) or gguf_name  # _check_tensors refuses it by name
        predicts = block and layers <= int(block[1]) < layers + family.prediction_blocks(file.metadata)
        if predicts or family.is_unused(ours, spec):
            carried[gguf_name] = CarriedTensor(tensor.shape, tensor.dtype_name, tensor.blocks.reshape(-1))
            continue
        split = experts.from_gguf(gguf_name, tensor, spec) if spec.experts else None
        if split is not None:
            tensors.update(split)
            continue
        if family.is_gguf_only(gguf_name) or family.is_second_part(gguf_name):
            continue
        both = [file.tensors[stored] for stored in family.to_gguf(ours) if stored in file.tensors]
        source = rows_.Joined(tuple(both)) if len(both) > 1 else tensor
        tensors[ours] = rows_.from_file(source, "gguf", spec, ours)
    return Base(name, path, "gguf", spec, tok.from_gguf(file.metadata), tensors, file.parts, carried=carried)


def _open_folder(name: str, folder: Path) -> Base:
    described = _open_config(name, _config_in(folder))
    stored = safetensors_io.open_folder(folder)
    scheme = names.scheme_of(stored)
    family, layers = family_of(described.spec), len(described.spec.layers)
    predicting = family.prediction_layers(read_json(folder / "config.json", "download it again"))
    further = tuple(f"{scheme.prefix}layers.{layers + number}." for number in range(predicting))

    def is_outside(name: str) -> bool:
        """Whether a tensor is outside the text model. If the configuration is that of a text model alone, other tensors
        are not: `_check_tensors` refuses them by name."""
        if name.startswith((PREDICTION, *further)) or family.is_unused(names.from_hf(name), described.spec):
            return True
        return described.multimodal and scheme.ours(name) is None

    outside = {n: t for n, t in stored.items() if is_outside(n)}
    found = assembled({n: t for n, t in stored.items() if n not in outside}, folder)
    ours = family.from_folder
    tensors = {ours(names.from_hf(n)): t for n, t in found.items() if not n.endswith("rotary_emb.inv_freq")}
    tensors = {n: rows_.from_file(t, "folder", described.spec, n) for n, t in tensors.items()}
    if described.spec.experts:
        tensors = experts.from_folder(tensors, described.spec)
    carried = safetensors_io.carried(outside)
    return dataclasses.replace(
        described, path=folder, kind="safetensors", tensors=tensors, carried=carried, scheme=scheme
    )


def _config_in(folder: Path) -> Path:
    check_inside(folder / "config.json")
    return folder / "config.json"


def _open_config(name: str, config: Path) -> Base:
    """A configuration and the tokenizer beside it."""
    if not config.exists():
        raise GraftuneError("holds no config.json", where=str(config.parent), fix="give a Hugging Face model folder")
    values = read_json(config, "download the model again")
    with sensible("its configuration makes", config, "download the model again"):
        check_quantisation(values.get("quantization_config"), str(config))
        spec = _checked_spec(from_config(values, str(config)))
    tokenizer = tok.from_folder(config.parent)
    return Base(name, config, "config", spec, tokenizer, {}, multimodal=is_multimodal(values))
