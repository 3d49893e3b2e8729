"""Describes a base for `graftune doctor BASE`, and says whether it can be trained. For a base that does not open, it
describes the headers and gives the reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from graftune.data.template import chat_format
from graftune.errors import GraftuneError
from graftune.model.part import AttentionShape
from graftune.observe.memory import human_bytes
from graftune.settings.sections import DataConfig
from graftune.tokenizer import Tokenizer
from graftune.weights.adapter import is_adapter, load_adapter
from graftune.weights.base import Base, open_base
from graftune.weights.gguf_io import read_gguf
from graftune.weights.opening import read_json
from graftune.weights.safetensors_io import open_folder

Facts = dict[str, Any]


def describe(name: str, revision: str = "") -> tuple[Facts, Base | None, GraftuneError | None]:
    """(facts about a base or adapter, the base if it opens, why it cannot be trained if so)."""
    path = Path(name or ".").expanduser()
    adapter = next((place for place in (path, path / "adapter") if name and is_adapter(place)), None)  # of a run
    try:
        if adapter is not None:
            return _of_adapter(name, adapter)
        base = open_base(name, revision)
    except GraftuneError as error:
        headers = {} if adapter else _from_headers(path)
        return {"adapter" if adapter else "base": name, **headers} if name else {}, None, error
    return base_facts(base), base, None


def _from_headers(path: Path) -> Facts:
    """Architecture and types of the weights, as far as they can be read."""
    found: Facts = {}
    try:
        if path.is_file():
            found["bytes"] = path.stat().st_size
            file = read_gguf(path)
            found |= {key: file.metadata.get(f"general.{key}") for key in ("name", "architecture", "type")}
            found["part"] = _part(file.metadata)
            found["weights"] = _weights((t.dtype_name, t.nbytes) for t in file.tensors.values())
        elif path.is_dir():
            config = read_json(path / "config.json", "copy it again") if (path / "config.json").is_file() else {}
            quantised = config.get("quantization_config")
            method = quantised.get("quant_method") if isinstance(quantised, dict) else None
            found |= {"architecture": config.get("model_type"), "quantised by": method}
            found["weights"] = _weights((t.dtype_name, t.nbytes) for t in open_folder(path).values())
    except (GraftuneError, OSError):
        pass  # `describe` returns the error that opening the base raised
    return {key: value if type(value) is int else str(value) for key, value in found.items() if value}


def _part(metadata: Mapping[str, Any]) -> str:
    count = metadata.get("split.count")
    return f"{metadata.get('split.no')} of {count}" if count else ""


def _of_adapter(name: str, place: Path) -> tuple[Facts, None, GraftuneError]:
    adapter = load_adapter(place)
    lora, base = adapter.lora, adapter.base_name or "a base it does not name"
    facts = {"adapter": name, "of": base, "rank": lora.rank, "alpha": lora.alpha, "targets": ", ".join(lora.targets)}
    fix = "ask the doctor about its base; chat, eval and export take it, and train with --adapter goes on from it"
    return facts, None, GraftuneError(f"is not a base but an adapter, of {base}", where=name, fix=fix)


def base_facts(base: Base) -> Facts:
    spec, tokenizer = base.spec, base.tokenizer
    files = base.files
    experts, chosen = spec.expert_counts
    shapes = [layer.mixer.attention for layer in spec.layers]
    windows = [shape.window for shape in shapes if shape is not None and shape.window]
    window = f", of which {len(windows)} see {max(windows)} tokens back" if windows else ""
    heads = next((shape for shape in shapes if shape is not None), AttentionShape(0, 0, 0))
    return {
        "base": base.name,
        "kind": base.kind,
        "path": str(base.path),
        "files": len(files),
        "bytes": sum(file.stat().st_size for file in files),
        "architecture": spec.family,
        "parameters": spec.parameters,
        "layers": f"{len(spec.layers)}{window}",
        "heads": f"{heads.heads} of {heads.head_width}, {heads.kv_heads} for keys and values",
        "width": spec.width,
        **({"experts": f"{chosen} of {experts} for each token"} if experts else {}),
        "context": spec.max_positions,
        "weights": _weights((t.dtype_name, t.nbytes) for t in base.tensors.values()),
        **({"not loaded": _outside(base)} if base.carried else {}),
        "head": "tied to the embedding" if spec.tied else "of its own",
        "vocabulary": f"{tokenizer.vocab_size} tokens for {spec.vocab} rows",
        "template": _template(tokenizer),
    }


def _outside(base: Base) -> str:
    size = human_bytes(sum(tensor.nbytes for tensor in base.carried.values()))
    return f"{len(base.carried)} tensors outside the text model ({size}), which exports carry over"


def _template(tokenizer: Tokenizer) -> str:
    """Whether the chat template can be used. It is probed to find out."""
    if tokenizer.template is None and tokenizer.template_fault is None:
        return "none: give --template, or train on plain text"
    fault = tokenizer.template_fault
    try:
        if fault is None:
            chat_format(tokenizer, DataConfig())
    except GraftuneError as error:
        fault = error
    return (
        "yes" if fault is None else f"cannot be used ({fault.what}): give another with --template, or --template none"
    )


def _weights(stored: Iterable[tuple[str, int]]) -> str:
    """The bytes of each type, the most first."""
    total: Counter[str] = Counter()
    for kind, size in stored:
        total[kind] += size
    return ", ".join(f"{kind} {human_bytes(size)}" for kind, size in total.most_common())
