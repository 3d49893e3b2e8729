"""The formats that are fuzzed: how a damaged input is made, and which of the package's readers read it.

An input is a few files by name. A reader is called as the package calls it, in this process and without a model; where
a file is accepted, what was read is looked at, too (every tensor, every example), since a view of a damaged file may
fail only then.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import save

from graftune.cli.train import run_summary
from graftune.dashboard.log import Log, series
from graftune.dashboard.runs import WatchedRun
from graftune.data import cached, find, readers, source
from graftune.data.columns import refusal_of_all
from graftune.data.dataset import _Texts
from graftune.data.encoded import Examples
from graftune.data.row import Refusal, Row
from graftune.data.row_encoder import RowEncoder
from graftune.errors import GraftuneError, one_line
from graftune.exporting.target import run_facts
from graftune.observe import events, report
from graftune.settings.config import Config
from graftune.settings.sections import DataConfig
from graftune.settings.sources import Source
from graftune.tokenizer import ChatTemplate, examine, examine_process, from_folder
from graftune.training import launch, resume
from graftune.weights import checkpoint, safetensors_io
from graftune.weights.adapter import is_adapter, load_adapter
from graftune.weights.base import open_base
from graftune.weights.gguf_io import read_model
from tests.fuzz import binary, mutate, seeds, text
from tests.fuzz.judge import bad_message
from tests.support import oracle

Files = dict[str, bytes | None]  # by name below the input's folder; None: a folder
BINARY, TREE = 4.0, 40.0  # bytes of memory per byte of a file, beside those that are always allowed
SMALL = 1 << 16


@dataclass(frozen=True)
class Format:
    name: str
    factor: float
    share: int  # of all inputs, beside the others' shares
    make: Callable[[Random], Files]
    read: Callable[[Path], object]

    def made(self, draw: Random) -> Files:
        """An input. Where values were drawn that no file can be made of (a number that its field cannot hold), others
        are drawn; a hundred times in a row is a mistake of the maker's."""
        for _ in range(99):
            with contextlib.suppress(struct.error, ValueError, OverflowError):
                return self.make(draw)
        return self.make(draw)


def all_formats(place: Path) -> list[Format]:
    """`place`: an empty folder for the seeds."""
    model = seeds.write_model(place / "model")
    return [
        *_weights(place, model),
        *_adapters(place, model),
        *_folders(place, model),
        *_data(),
        *_programs(model),
    ]


EXAMINE = examine.faults_of


def examined_here(files: list[examine.Untrusted]) -> list[str]:
    """In the place of examine.faults_of: examines tokenizers in this process, fifty times as fast. A template may hang,
    so it is examined in a process as the package does it."""
    return [_fault(file) if file.kind == "tokenizer" else EXAMINE([file])[0] for file in files]


def _fault(file: examine.Untrusted) -> str:
    try:
        return examine_process.examine_tokenizer(file.text)
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        return str(error) or "a panic"


def write(folder: Path, files: Files) -> int:
    """Puts an input where the reader looks; returns its bytes. What an earlier one left is removed."""
    _clear(folder)
    for name, content in files.items():
        path = folder / name
        if content is None:
            path.mkdir(parents=True, exist_ok=True)
            continue
        if "/" in name:
            path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            os.write(handle, content)
        finally:
            os.close(handle)
    return sum(len(content or b"") for content in files.values())


def _clear(folder: Path) -> None:
    for entry in list(os.scandir(folder)):
        if entry.is_dir(follow_symlinks=False):
            _clear(Path(entry.path))
            os.rmdir(entry.path)
        else:
            os.unlink(entry.path)


# Weights.


def _weights(place: Path, model: Path) -> Iterator[Format]:
    small, whole = seeds.small_gguf(), seeds.gguf_model()
    yield Format("gguf", BINARY, 12, lambda draw: {"m.gguf": binary.some_gguf(draw, small)}, _read_gguf)
    yield Format(
        "gguf model", BINARY, 4, lambda draw: {"m.gguf": binary.some_gguf(draw, whole)}, lambda f: _opened(f / "m.gguf")
    )
    parts = [seeds.split_safetensors(save(found)) for found in (seeds.tensors(), seeds.fp8_tensors())]
    small_parts = [
        seeds.split_safetensors(save({"a": torch.ones(3, 4), "b": torch.ones(2).bfloat16(), "c": torch.ones(())})),
        parts[1],
    ]

    def tensors(draw: Random) -> Files:
        made = binary.some_safetensors(draw, *draw.choice(small_parts))
        if draw.random() < 0.7:
            return {"model.safetensors": made}
        index = mutate.some_json(draw, {"metadata": {}, "weight_map": {"a": "s1.safetensors", "b": "s2.safetensors"}})
        return {safetensors_io.INDEX: index, "s1.safetensors": made, "s2.safetensors": made}

    yield Format("safetensors", BINARY, 10, tensors, _read_safetensors)
    yield Format("model folder", TREE, 6, lambda draw: _model_folder(draw, model, parts), lambda f: _opened(f))


def _read_gguf(folder: Path) -> None:
    file = read_model(folder / "m.gguf")
    if file.parts[0].stat().st_size < SMALL:
        for tensor in file.tensors.values():
            tensor.values()


def _read_safetensors(folder: Path) -> None:
    from graftune.model.frozen.formats import assembled

    (folder / "config.json").write_text("{}")
    tensors = safetensors_io.open_folder(folder)
    for tensor in tensors.values():
        if tensor.nbytes < SMALL:
            tensor.values()
    for weight in assembled(tensors, folder).values():
        if weight.nbytes < SMALL:
            weight.values()


def _opened(path: Path) -> None:
    base = open_base(str(path))
    for tensor in base.tensors.values():
        tensor.read(0, 1)
    _encoded(base.tokenizer)
    for base_dtype in ("keep", "fp32"):
        oracle.place(base, seeds.LORA, base_dtype)


def _model_folder(draw: Random, model: Path, parts: list[Any]) -> Files:
    kind = draw.randrange(4)
    config, weights = json.dumps(seeds.CONFIG).encode(), (model / "model.safetensors").read_bytes()
    if kind < 3:
        config = mutate.some_json(draw, draw.choice(seeds.CONFIGS))
    if kind == 3 or draw.random() < 0.1:
        weights = binary.some_safetensors(draw, *draw.choice(parts))
    files: Files = {"config.json": config, "model.safetensors": weights}
    return files | {name: (model / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")}


# Adapters.


def _adapters(place: Path, model: Path) -> Iterator[Format]:
    folder = seeds.write_adapter(place / "adapter", model)
    config = json.loads((folder / "adapter_config.json").read_text())
    header, data = seeds.split_safetensors((folder / "adapter_model.safetensors").read_bytes())
    patterns = config | {
        "rank_pattern": {"layers.0.q_proj": 2}, "alpha_pattern": {".*v_proj": 4}, "layers_to_transform": [0],
        "target_modules": ".*(q|v)_proj", "layers_pattern": "layers", "exclude_modules": ["k_proj"],
        "modules_to_save": ["norm"],
    }  # fmt: skip
    experts = config | {
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        "target_modules": ["q_proj"],
    }

    def adapter(draw: Random) -> Files:
        told = (
            mutate.some_json(draw, draw.choice((config, config, patterns, experts)))
            if draw.random() < 0.7
            else mutate.dumped(config)
        )
        made = binary.some_safetensors(draw, header, data) if draw.random() < 0.4 else _joined(header, data)
        return {"adapter_config.json": told, "adapter_model.safetensors": made}

    yield Format("adapter", TREE, 8, adapter, lambda f: _loaded(f))
    apr = binary.apr(seeds.apr_bytes(folder, model, place / "a.apr"))
    yield Format("apr", BINARY, 8, lambda draw: {"a.apr": binary.some_apr(draw, apr)}, lambda f: _loaded(f / "a.apr"))
    small = seeds.gguf_adapter()
    yield Format(
        "gguf adapter",
        BINARY,
        4,
        lambda draw: {"a.gguf": binary.some_gguf(draw, small)},
        lambda f: _loaded(f / "a.gguf"),
    )


def _joined(header: Any, data: bytes) -> bytes:
    told = json.dumps(header).encode()
    return len(told).to_bytes(8, "little") + told + data


def _loaded(path: Path) -> None:
    is_adapter(path)
    load_adapter(path)


# Folders of runs, tokenizers, the cache.


def _folders(place: Path, model: Path) -> Iterator[Format]:
    saved = seeds.write_checkpoint(place / "run", model)
    state, (header, data) = (
        json.loads((saved / "state.json").read_text()),
        seeds.split_safetensors((saved / "state.safetensors").read_bytes()),
    )
    arena = seeds.opened(model)[1]

    def checkpoints(draw: Random) -> Files:
        tree = mutate.some_tree(draw, state) if draw.random() < 0.8 else state
        tensors = binary.some_safetensors(draw, header, data) if draw.random() < 0.3 else _joined(header, data)
        told = mutate.dumped(_signed(state, tensors) if draw.random() < 0.5 else tree)
        others = ("step-\u00b2", "step-3.old", "step-03", "step-3.part", "step-" + "9" * 20, "step--1")
        name = "step-3" if draw.random() < 0.4 else draw.choice(others)
        return {
            f"checkpoints/{name}/state.json": told,
            f"checkpoints/{name}/state.safetensors": tensors,
            "checkpoints/step-1": None,
        }

    def load(folder: Path) -> None:
        for path in checkpoint.steps(folder / "checkpoints").values():
            checkpoint.check_whole(path, None, (9, 9))
            checkpoint.load(path, arena)
        newest = checkpoint.newest_whole(folder / "checkpoints", {}, (9, 9), _silent)
        if newest is not None:
            checkpoint.weights_of(newest)

    yield Format("checkpoint", TREE, 8, checkpoints, load)
    yield Format("run folder", TREE, 10, _run_folder, _read_run)
    yield Format("tokenizer", TREE, 8, _tokenizer, lambda f: _encoded(from_folder(f)))
    whole = seeds.cache_bytes()
    yield Format("token cache", BINARY, 8, lambda draw: {"data/k.tokens": binary.some_cache(draw, whole)}, _read_cache)


def _silent(said: str) -> None:
    assert not bad_message(one_line(said)), said


def _signed(state: Any, tensors: bytes) -> Any:
    """With checksums that are right."""
    whole = state | {"tensors": hashlib.sha256(hashlib.sha256(tensors).digest()).hexdigest()}
    return whole | {"sha256": checkpoint._checksum(whole)}


def _run_folder(draw: Random) -> Files:
    lines = [mutate.dumped(event) for event in seeds.EVENTS]
    for _ in range(draw.choice((1, 1, 2, 4))):
        at, kind = draw.randrange(len(lines) + 1), draw.randrange(6)
        if kind < 3 and at < len(lines):
            lines[at] = mutate.some_json(draw, draw.choice(seeds.EVENTS))
        elif kind == 3:
            lines.insert(at, draw.choice(lines))
        elif kind == 4:
            lines.insert(at, mutate.some_json(draw, draw.choice(seeds.EVENTS)))
        else:
            lines.insert(at, mutate.some_bytes(draw, draw.choice(lines)))
    log = b"\n".join(lines) + draw.choice((b"\n", b"\n", b"", b'\n{"event": "st', b"\n\0\0\0\n"))
    lock = {"pid": 1, "began": "5", "machine": "elsewhere", "since": 3.5}
    settings = text.some_yaml(draw) if draw.random() < 0.1 else b"base: x\nrank: 4\n"  # which takes most of the time
    files: Files = {"metrics.jsonl": log, "config.yaml": settings, "adapter": None}
    return files | {".lock": mutate.some_json(draw, lock), "plan.json": mutate.some_json(draw, {"owners": {"base": 5}})}


def _read_run(folder: Path) -> None:
    run = WatchedRun("r", folder)
    run.refresh()
    json.dumps(run.document([]), allow_nan=False)
    log = Log(run.log_path)
    log.advance()
    json.dumps(series(log, [], 100, None, None), allow_nan=False)
    refused = None
    small = (folder / "metrics.jsonl").stat().st_size < SMALL  # each look parses the whole log once more
    for look in (_finished, _shown, _appended) if small else (_finished, _appended):
        try:
            look(folder)
        except GraftuneError as error:
            refused = error
    if refused is not None:
        raise refused


def _finished(folder: Path) -> None:
    read = events.read_events(folder / "metrics.jsonl")
    for kind in ("step", "eval"):
        events.latest(read, kind)
    end = resume.finished(folder, Config(), Config())
    if end is not None:
        assert not bad_message(one_line(run_summary(launch.result_of(folder, end)))), end
    Config.of_run(folder)


def _shown(folder: Path) -> None:
    read = events.read_events(folder / "metrics.jsonl")
    assert len(events.steps(read)) + len(events.evals(read)) <= len(read)
    json.dumps(events.plain(report.document(folder)), allow_nan=False)
    json.dumps(run_facts(folder), allow_nan=False)


def _appended(folder: Path) -> None:
    with events.EventLog(folder / "metrics.jsonl") as log:
        log.emit("resume", step=1)


def _tokenizer(draw: Random) -> Files:
    tree = seeds.tokenizer_json()
    for part, others in seeds.PARTS.items():
        if draw.random() < 0.25:
            tree[part] = draw.choice(others)
    files: Files = {"tokenizer.json": mutate.dumped(tree)}
    if draw.random() < 0.75:
        part = draw.choice(list(tree))  # the vocabulary has most of the values: each part alone
        tree[part] = mutate.some_tree(draw, tree[part])
        files["tokenizer.json"] = mutate.dumped(tree)
    elif draw.random() < 0.3:
        files["tokenizer.json"] = mutate.some_bytes(draw, mutate.dumped(tree))
    for name, beside in seeds.TOKENIZER_FILES.items():
        if draw.random() < 0.3:
            files[name] = mutate.some_json(draw, beside) if draw.random() < 0.7 else json.dumps(beside).encode()
    if draw.random() < 0.1:
        files["chat_template.jinja"] = text.some_template(draw).encode("utf-8", "surrogatepass")
    return files


def _encoded(tokenizer: Any) -> None:
    for words in ("Hello ab 12 \u00e9\u4e2d!", "a" * 40):
        ids, _ = tokenizer.encode_with_offsets(words)
        tokenizer.encode(words, special=False, add_special=True)
        tokenizer.decode(ids)
    for _, offsets in tokenizer.encode_batch(["ab <|im_end|> c", "", "\U0001f469\u200d"]):
        offsets.whole()
    assert len(tokenizer.fingerprint) == 64 and tokenizer.highest_id < 1 << 31


def _read_cache(folder: Path) -> None:
    os.environ["GRAFTUNE_CACHE"] = str(folder)
    store = cached.find("k")
    if store is None:
        raise GraftuneError("is made again", fix="wait")
    examples = Examples(store)
    list(examples)
    for name in ("prompt", "reference", "messages"):
        list(_Texts(examples, name))
    list(store.details())
    store.summary()


# Data.


def _data() -> Iterator[Format]:
    def jsonl(draw: Random) -> Files:
        lines = [mutate.some_json(draw, draw.choice(seeds.ROWS)) for _ in range(draw.choice((1, 2, 4)))]
        return {"d.jsonl": text.encoded(draw, b"\n".join(lines) + b"\n")}

    def rows_of_json(draw: Random) -> Files:
        tree: Any = list(seeds.ROWS)
        tree = draw.choice((tree, {"data": tree}, {"data": tree, "train": tree}, tree[:1]))
        return {"d.json": text.encoded(draw, mutate.some_json(draw, tree))}

    yield Format("jsonl", TREE, 8, jsonl, lambda f: _rows(f / "d.jsonl"))
    yield Format("json", TREE, 4, rows_of_json, lambda f: _rows(f / "d.json"))
    yield Format("csv", TREE, 6, lambda draw: {"d.csv": text.some_csv(draw)}, lambda f: _rows(f / "d.csv"))
    files = seeds.parquet_files()
    if files:
        yield Format(
            "parquet", TREE, 6, lambda draw: {"d.parquet": _some_parquet(draw, files)}, lambda f: _rows(f / "d.parquet")
        )
    yield Format("yaml", TREE, 6, lambda draw: {"c.yaml": text.some_yaml(draw)}, lambda f: Config.load(f / "c.yaml"))


def _some_parquet(draw: Random, files: list[bytes]) -> bytes:
    """Mostly in the footer, which describes the rest, and in the first page's header."""
    whole = draw.choice(files)
    size = int.from_bytes(whole[-8:-4], "little")
    start, kind = len(whole) - 8 - size, draw.randrange(6)
    if kind == 0:
        return mutate.some_bytes(draw, whole)
    if kind == 1:
        return whole[:4] + mutate.some_bytes(draw, whole[4:64], 1) + whole[64:]
    footer = bytearray(whole[start:-8])
    for _ in range(draw.choice((1, 1, 2, 4))):
        footer[draw.randrange(len(footer))] = draw.choice((0, 1, 2, 0x15, 0x7F, 0x80, 0xFE, 0xFF, draw.randrange(256)))
    told = len(footer) if draw.random() < 0.95 else draw.choice((0, 2**31, 2**32 - 1, len(footer) * 2))
    return whole[:start] + bytes(footer) + told.to_bytes(4, "little") + b"PAR1"


def _rows(path: Path) -> None:
    notes: set[str] = set()
    for row in source.rows(find.files_of(Source(str(path)), notes.add), note=notes.add, refused=refusal_of_all):
        if isinstance(row.value, Refusal):
            notes.add(row.value.text)
    for said in notes:
        fault = bad_message(one_line(said))
        assert not fault, f"{fault}: {said!r}"


# Records and templates, which are programs over one another.


def _programs(model: Path) -> Iterator[Format]:
    base = seeds.opened(model)[0]
    encoder = RowEncoder(base.tokenizer, DataConfig(max_seq_len=64), "d.jsonl")
    messages = [
        [turn | {"content": "text"} for turn in seeds.ROWS[3]["messages"]],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
    ]

    def record(folder: Path) -> None:
        content = (folder / "row.json").read_bytes()
        value = readers.parsed(content)
        pending = encoder._rendered(Row(1, value, key=1))
        if pending.refusal is not None:
            raise GraftuneError(pending.refusal.text)
        encoder._chunk([pending], _Now(base.tokenizer.encode_batch(pending.texts)))

    def template(folder: Path) -> None:
        content = (folder / "t.jinja").read_bytes().decode("utf-8", "surrogatepass")
        examine.check(examine.Untrusted("template", content, "t"))
        made = ChatTemplate(content, bos_token="<s>", eos_token="</s>", name="t")
        for conversation in messages:
            made.render(conversation, tools=seeds.ROWS[3]["tools"], add_generation_prompt=True)

    yield Format("record", TREE, 7, lambda draw: {"row.json": mutate.some_json(draw, draw.choice(seeds.ROWS))}, record)
    yield Format(
        "template",
        TREE,
        6,
        lambda draw: {"t.jinja": text.some_template(draw).encode("utf-8", "surrogatepass")},
        template,
    )


class _Now:
    """A result that is there already, in the place of a thread's."""

    def __init__(self, value: Any):
        self.value = value

    def result(self) -> Any:
        return self.value
