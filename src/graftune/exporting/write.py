"""Writes each export format to a path beside the target, reads it back and renames it into place.

Before that it checks that the place is free (or --force given), the type is known and the disk is large enough. A full
disk or Ctrl-C leaves nothing behind.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from graftune.errors import GraftuneError
from graftune.exporting.merge import Survival, combine, merge
from graftune.exporting.target import ExportSource, find, run_facts
from graftune.io.files import new_file, write_file
from graftune.model.families import family_of, with_text_values
from graftune.model.frozen import RowSource
from graftune.model.frozen.formats import READABLE, checkpoint_format, stored_format
from graftune.model.frozen.formats.mxfp4 import KIND as MXFP4
from graftune.model.frozen.interface import DTYPES, NAMES
from graftune.observe.console import Console
from graftune.observe.memory import human_bytes
from graftune.weights import experts
from graftune.weights.adapter import NAMINGS, is_adapter, write_adapter
from graftune.weights.adapter_fit import check_fits
from graftune.weights.apr import save_apr
from graftune.weights.base import Base, with_new_tokens
from graftune.weights.finite import naming_nonfinite
from graftune.weights.model import hf_config, is_model, write_model
from graftune.weights.safetensors_io import CarriedTensor
from graftune.weights.streamed import OutputTensor, Watcher

MEGABYTE = 10**6
FORMATS = ("peft", "merged", "gguf-lora", "gguf", "apr")
Writer = Callable[[ExportSource, Path, str, Console], "Exported"]
SUFFIX = {"gguf": ".gguf", "gguf-lora": ".gguf", "apr": ".apr"}


@dataclass
class Exported:
    """The result of an export."""

    path: Path  # the file or folder
    files: list[Path] = field(default_factory=list)  # all of them
    facts: dict[str, Any] = field(default_factory=dict)  # for programs
    notes: list[str] = field(default_factory=list)  # for the user


def export(
    target: str,
    to: str,
    *,
    kind: str = "",
    out: str = "",
    base: str = "",
    revision: str = "",
    any_base: bool = False,
    add: Sequence[str] = (),
    force: bool = False,
    adapter_names: str = NAMINGS[0],
    console: Console | None = None,
) -> Exported:
    """Write TARGET as `to`, one of FORMATS. `kind` is a type such as Q8_0 (for merged: BF16); `add` are further
    adapters, each PATH or PATH=WEIGHT, whose changes are added. `adapter_names`, one of NAMINGS, is for peft."""
    console = console or Console(quiet=True)
    if adapter_names not in NAMINGS:
        raise GraftuneError(f"adapter_names is {adapter_names!r}", fix=f"choose one of {', '.join(NAMINGS)}")
    if adapter_names != NAMINGS[0] and to != "peft":
        raise GraftuneError(f"adapter_names is {adapter_names} and the format is {to}", fix="leave it out, or use peft")
    if to not in FORMATS:
        raise GraftuneError(f"the format {to!r} is not known", fix=f"choose one of {', '.join(FORMATS)}")
    kind = _checked_kind(kind, to)
    source = find(target, base, revision, add, any_base)
    if to in ("gguf", "gguf-lora") and not family_of(source.base.spec).in_llama_cpp:
        raise GraftuneError(
            f"llama.cpp has no architecture for {source.base.spec.family} models", fix="export to merged or peft"
        )
    if to in ("peft", "gguf-lora", "apr"):
        if not source.adapters:
            what = f"{source.name} has no adapter, and {to} is of an adapter"
            raise GraftuneError(what, fix="export to merged or gguf")
        for adapter, _ in source.adapters:
            check_fits(adapter, source.base)
    place = _place(source, to, kind, out)
    _check_place(place, to, source, force)
    peft = partial(_peft, naming=adapter_names)
    writers: dict[str, Writer] = {"peft": peft, "merged": _merged, "gguf-lora": _gguf_lora, "gguf": _gguf, "apr": _apr}
    place.parent.mkdir(parents=True, exist_ok=True)
    with naming_nonfinite(source.base):  # only the adapter was checked when it was loaded
        done: Exported = writers[to](source, place, kind, console)
    written = {"merged": "safetensors", "gguf": "gguf"}.get(to)
    if written and (left := source.base.carried.keys() - source.base.carried_to(written).keys()):
        done.notes.append(f"{len(left)} tensors outside the text model are not in this export, such as {min(left)}")
    if note := source.base.tokenizer.refused_template:
        done.notes.append(note)
    done.facts = {"to": to, "path": str(place), "bytes": _size(place)} | done.facts
    return done


def _checked_kind(kind: str, to: str) -> str:
    from graftune.exporting import gguf_lora, gguf_mix

    choices: dict[str, Sequence[str]] = {
        "merged": ("F32", "F16", "BF16"),
        "gguf-lora": gguf_lora.TYPES,
        "gguf": tuple(gguf_mix.TYPES),
    }
    if not kind:
        return {"gguf": "Q8_0", "gguf-lora": "F32"}.get(to, "")
    found = kind.upper()
    if to not in choices:
        raise GraftuneError(f"the type is {kind} and {to} is always F32", fix="leave the type out")
    if found not in choices[to]:
        raise GraftuneError(f"the type {kind} is not known for {to}", fix=f"choose one of {', '.join(choices[to])}")
    return found


def _place(source: ExportSource, to: str, kind: str, out: str) -> Path:
    endings = {"peft": "-peft", "merged": "-merged", "gguf-lora": "-lora.gguf", "gguf": f"-{kind}.gguf", "apr": ".apr"}
    name = source.name + endings[to]
    if not out:
        return source.folder / name
    place = Path(out).expanduser()
    place = place.resolve() if place.is_symlink() else place  # or the link itself would be replaced
    suffix = SUFFIX.get(to)
    if suffix and place.suffix != suffix:  # a folder to put it in
        return place / name
    return place


def _check_place(place: Path, to: str, source: ExportSource, force: bool) -> None:
    here = place.resolve()
    sources = [source.base.path, *source.base.parts, *(a.folder for a, _ in source.adapters)]
    for used in (path.resolve() for path in sources):
        if used == here or here in used.parents or (used in here.parents and used.is_dir() and used != source.run):
            raise GraftuneError("is part of what is exported", where=str(place), fix="set out to another place")
    beside = place.with_suffix(".Modelfile")
    if to in ("gguf", "gguf-lora") and beside.exists() and not force:
        raise GraftuneError("exists already", where=str(beside), fix="use force, or set out to another place")
    if not (place.exists() or place.is_symlink()):
        return
    if not force:
        raise GraftuneError("exists already", where=str(place), fix="use force, or set out to another place")
    ours = place.is_file() if to in SUFFIX else is_adapter(place) if to == "peft" else is_model(place)
    if not ours and (place.is_file() or any(place.iterdir())):
        raise GraftuneError("is in use for something else", where=str(place), fix="set out to another place")


def _require_space(place: Path, need: int) -> None:
    free = shutil.disk_usage(place.parent).free
    if need > free:
        raise GraftuneError(
            f"the export takes {human_bytes(need)} and {human_bytes(free)} are free there",
            where=str(place),
            fix="free some, or set out to another place",
        )


def _size(place: Path) -> int:
    files = [place] if place.is_file() else [file for file in place.iterdir() if file.is_file()]
    return sum(file.stat().st_size for file in files)


# Adapters


def _peft(source: ExportSource, place: Path, kind: str, console: Console, naming: str) -> Exported:
    adapter = combine(source.adapters)
    facts = {"template": adapter.template, "append_eos": adapter.append_eos, "revision": adapter.revision}
    base = with_new_tokens(source.base, adapter.lora.new_tokens)
    write_adapter(place, adapter.tensors, adapter.lora, base, facts, naming)
    done = Exported(place, sorted(place.iterdir()), {"rank": adapter.lora.rank})
    if source.base.kind == "gguf":
        done.notes.append(
            "PEFT needs the base as a Hugging Face folder: graftune export "
            f"{source.base.name or source.base.path} --to merged writes one"
        )
    return done


def _gguf_lora(source: ExportSource, place: Path, kind: str, console: Console) -> Exported:
    from graftune.exporting.gguf_lora import write_lora_gguf

    adapter, base = combine(source.adapters), source.base
    with new_file(place) as aside:
        write_lora_gguf(aside, adapter, base, kind, source.name)
    done = Exported(place, [place], {"type": kind, "rank": adapter.lora.rank})
    if base.kind == "gguf":
        done.notes.append(f"llama.cpp: llama-cli -m {base.path} --lora {place}")
    else:
        done.notes.append(
            "llama.cpp needs a GGUF of the base beside it: graftune export "
            f"{base.name or base.path} --to gguf --type F16 writes one"
        )
    _add_modelfile(done, source, base, weights=base.path, adapter=place)
    return done


def _apr(source: ExportSource, place: Path, kind: str, console: Console) -> Exported:
    adapter = combine(source.adapters)
    if not adapter.base_name:
        adapter = replace(adapter, base_name=source.base.reference, base_sha256=source.base.sha256)
    save_apr(place, adapter, with_new_tokens(source.base, adapter.lora.new_tokens).spec, run_facts(source.run))
    return Exported(place, [place], {"rank": adapter.lora.rank})


# Whole models


def _merged(source: ExportSource, place: Path, kind: str, console: Console) -> Exported:
    whole = merge(source.base, source.adapters)
    tensors = {n: t for n, t in whole.tensors.items() if not (n == "lm_head.weight" and whole.spec.tied)}
    dtypes = {n: _dtype(n, source.base, kind) for n in tensors}
    in_mxfp4 = not kind and experts.is_mxfp4(tensors, whole.spec)
    copied = {n for n, t in tensors.items() if in_mxfp4 and t.dtype_name == MXFP4}
    need = {
        n: t.nbytes if n in copied else torch.Size(t.shape).numel() * dtypes[n].itemsize for n, t in tensors.items()
    }
    carried = whole.carried_to("safetensors")
    need |= {name: tensor.nbytes for name, tensor in carried.items()}
    _require_space(place, sum(need.values()))
    survival = Survival()
    config = with_text_values(hf_config(whole), {"vocab_size": whole.spec.vocab})
    with _watched(len(tensors) + len(carried), sum(need.values()), survival, bool(source.adapters), console) as watcher:
        write_model(place, tensors, dtypes, whole, config, in_mxfp4=in_mxfp4, watcher=watcher)
    if checkpoint_format(source.base.tensors) and (
        odd := [n for n, t in carried.items() if t.dtype_name not in READABLE]
    ):
        console.warn(
            f"{len(odd)} tensors outside the text model are quantised and were copied as they are, such as {odd[0]}:"
            " config.json no longer says how"
        )
    used = sorted({MXFP4 if n in copied else NAMES[d] for n, d in dtypes.items() if len(tensors[n].shape) > 1})
    done = Exported(place, sorted(place.iterdir()), {"type": "+".join(used)})
    _report_survival(done, source, survival, "+".join(used).lower(), console)
    return done


def _dtype(name: str, base: Base, asked: str) -> torch.dtype:
    """The dtype asked for, or that of the stored tensor (in a GGUF: of all matrices, if they agree); quantised tensors
    become bf16."""
    if asked:
        return DTYPES[asked]
    if base.kind == "gguf":
        matrices = [t for t in base.tensors.values() if len(t.shape) > 1]
        stored = {_merged_dtype(t) for t in matrices if t.dtype_name != MXFP4}  # MXFP4: exact in every float
        return stored.pop() if len(stored) == 1 else torch.bfloat16
    return _merged_dtype(base.tensors.get(name) or base.tensors["embed_tokens.weight"])


def _merged_dtype(source: RowSource) -> torch.dtype:
    form = stored_format(source)
    return torch.bfloat16 if form is None else form.merged_dtype


def _gguf(source: ExportSource, place: Path, kind: str, console: Console) -> Exported:
    from graftune.exporting.gguf_model import gguf_tensors, write_model_gguf

    whole = merge(source.base, source.adapters)
    form, _ = source.form(whole)
    tensors = gguf_tensors(whole, kind)
    need = sum(t.nbytes for t in tensors)
    _require_space(place, need)
    survival = Survival()
    end = form.end_id if form is not None and form.end_id != whole.tokenizer.eos_id else None
    with (
        _watched(len(tensors), need, survival, bool(source.adapters), console) as watcher,
        new_file(place) as aside,
    ):
        write_model_gguf(aside, whole, tensors, kind, source.name, end, watcher)
    kinds = sorted({t.kind for t in tensors if len(t.source.shape) > 1})
    done = Exported(place, [place], {"type": kind, "kinds": kinds})
    if kind in DTYPES:
        _report_survival(done, source, survival, kind.lower(), console)
    elif source.adapters:
        rounded = any(t.kind == MXFP4 and t.blocks is None for t in tensors)
        _report_noise(done, survival.ratio, "Q8_0" if kind == MXFP4 and not rounded else kind, console)
    spec = whole.spec
    window = max((shape.window for shape in spec.attention), default=0)
    if 0 < window < spec.max_positions and not family_of(spec).windows_in_llama_cpp:
        console.warn(f"llama.cpp does not know this model's window of {window} tokens: longer texts may differ")
    _add_modelfile(done, source, whole, weights=place)
    return done


@contextmanager
def _watched(count: int, total: int, survival: Survival, merging: bool, console: Console) -> Iterator[Watcher]:
    """Shows a bar over the bytes, labelled with the tensor that is written, and measures what survives of the change.
    Tensors differ in size by a thousand times, so that a bar over tensors would not show how much is left."""
    written, seen = 0, dict[str, int]()
    with console.progress(max(1, total // MEGABYTE), label="merging" if merging else "writing", unit="MB") as bar:

        def on_bytes(tensor: OutputTensor | None, nbytes: int) -> None:
            nonlocal written
            written += nbytes
            if tensor is None:
                bar.label = "reading back"
            else:
                doing = "quantising" if tensor.kind not in DTYPES else "merging" if merging else "writing"
                doing = "copying" if isinstance(tensor.source, CarriedTensor) else doing
                place = seen.setdefault(tensor.name, len(seen) + 1)
                bar.label = f"{doing} {tensor.name} ({place} of {count})"
            bar.update(bar.total if tensor is None else written * bar.total // max(1, total))

        yield Watcher(survival.on_piece, on_bytes)


def _report_noise(done: Exported, ratio: float, kind: str, console: Console) -> None:
    """Reports the rounding noise relative to the adapters' change. A change smaller than the type's steps survives only
    on average over many weights. Weights that were MXFP4 lie on its steps and are rounded back to them: at a ratio near
    1 nothing is left of the change."""
    done.facts["noise_over_change"] = ratio
    text = f"rounding to {kind} moves the adapted weights {ratio:.2g} times as far as your fine-tuning did"
    if ratio <= (0.5 if kind == MXFP4 else 1):
        done.notes.append(text)
    elif kind == "Q8_0":
        done.notes.append(f"{text}; the type F16 keeps more of it")
    else:
        console.warn(f"{text}: this may undo your fine-tuning; use the type Q8_0")


def _report_survival(done: Exported, source: ExportSource, survival: Survival, dtype: str, console: Console) -> None:
    if not source.adapters:
        return
    done.facts["survives"] = survival.share
    text = f"{100 * survival.share:.1f}% of the adapter's change survives {dtype}"
    if survival.share < 0.9:
        console.warn(f"{text}; the type F32 keeps all of it")
    else:
        done.notes.append(text)


def _add_modelfile(
    done: Exported, source: ExportSource, base: Base, weights: Path, adapter: Path | None = None
) -> None:
    from graftune.exporting.modelfile import modelfile, seen_from

    path = done.path.with_suffix(".Modelfile")
    named = None if adapter is None else seen_from(path.parent, adapter)
    form, why = source.form(base)
    text, notes = modelfile(seen_from(path.parent, weights), named, form, base.tokenizer, why)
    write_file(path, text)
    done.files.append(path)
    done.notes += [*notes, f"Ollama: ollama create {source.name.lower()} -f {path}"]
