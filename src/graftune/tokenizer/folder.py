"""A tokenizer from a Hugging Face folder.

Purpose: read what model repositories ship, and what `Tokenizer.save` writes. Method: tokenizer.json holds the whole
algorithm and is handed to the `tokenizers` library as it is; the small JSON files beside it say which tokens are
BOS, EOS and padding, and where the chat template is. Every file is checked on the way in, so that a broken one is
named in a sentence. Rejected: rebuilding from vocab.json/merges.txt or tokenizer.model, where the algorithm's details
live in Python classes of other projects; such folders are refused with the command that converts them.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from graftune.errors import GraftuneError
from graftune.io.files import check_inside, open_plain
from graftune.io.json_file import NotJson, read_object
from graftune.tokenizer import examine
from graftune.tokenizer.core import Tokenizer, check_text, find_stop_ids, guarded
from graftune.tokenizer.template import base_template

LONGEST = 128 << 20  # characters of a tokenizer.json: four times those of the largest vocabularies


def from_folder(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder (tokenizer.json and the files beside it)."""
    folder = Path(folder)
    path, text = folder / "tokenizer.json", _tokenizer_text(folder)
    config = _json_object(folder / "tokenizer_config.json")
    source, name = _template_source(folder, config)
    files = [examine.Untrusted("tokenizer", text, str(path))]
    if source is not None:
        files.append(examine.Untrusted("template", source, name))
    faults = examine.errors_of(*files)
    if "tokenizer" in faults:
        raise faults["tokenizer"]
    with guarded("be loaded", str(path), "fetch it again from the model's repository"):
        backend = tokenizers.Tokenizer.from_str(text)
        # Some repositories ship the padding and truncation of their last training run inside the file.
        backend.no_padding()
        backend.no_truncation()
    specials = _json_object(folder / "special_tokens_map.json")
    generation = _json_object(folder / "generation_config.json")
    _add_missing(backend, config.get("added_tokens_decoder"), folder / "tokenizer_config.json")

    ends = _ids(generation.get("eos_token_id"), backend, folder / "generation_config.json")
    bos = _token_id(backend, config, specials, "bos_token", folder)
    eos = _token_id(backend, config, specials, "eos_token", folder)
    if eos is None and ends:
        eos = ends[0]
    add_bos, add_eos = _around(backend, config, bos, eos, folder)
    saved = config.get("stop_token_ids")
    stops = find_stop_ids(backend, [eos, *ends])
    if saved is not None:  # written by Tokenizer.save: the exact set, so that a saved tokenizer restores itself
        stops = tuple(sorted(_ids(saved, backend, folder / "tokenizer_config.json")))
    template, fault = None, None
    if source is not None:
        template, fault = base_template(
            source,
            faults.get("template"),
            bos_token="" if bos is None else backend.id_to_token(bos) or "",
            eos_token="" if eos is None else backend.id_to_token(eos) or "",
            name=name,
        )
    return Tokenizer(
        backend=backend,
        bos_id=bos,
        eos_id=eos,
        pad_id=_token_id(backend, config, specials, "pad_token", folder),
        add_bos=add_bos,
        add_eos=add_eos,
        template=template,
        template_fault=fault,
        stop_ids=stops,
    )


def _tokenizer_text(folder: Path) -> str:
    path = folder / "tokenizer.json"
    if not _is_there(path):
        if not folder.is_dir():
            raise GraftuneError("there is no such folder", where=str(folder))
        others = [name for name in ("tokenizer.model", "vocab.json", "tekken.json") if (folder / name).exists()]
        raise GraftuneError(
            f"the folder has no tokenizer.json{', only ' + others[0] if others else ''}",
            where=str(folder),
            fix="write one with transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
            if others
            else "copy tokenizer.json and tokenizer_config.json from the model's repository",
        )
    return _text(path)


def _add_missing(backend: tokenizers.Tokenizer, listed: object, path: Path) -> None:
    """Tokens that tokenizer_config.json lists but tokenizer.json lacks, at the ids it gives them."""
    if listed is None:
        return
    if not isinstance(listed, Mapping) or not all(
        isinstance(entry, Mapping)
        and isinstance(entry.get("content"), str)
        and entry["content"]
        and isinstance(id, str)
        and re.fullmatch("[0-9]{1,9}", id)
        for id, entry in listed.items()
    ):
        raise GraftuneError("added_tokens_decoder is not a table of tokens by id", where=str(path))
    for id, entry in sorted(((int(id), entry) for id, entry in listed.items()), key=lambda item: item[0]):
        content = entry["content"]
        check_text(content, "a token of added_tokens_decoder")
        if backend.token_to_id(content) is None:
            flags = {key: bool(entry[key]) for key in ("lstrip", "rstrip", "single_word", "normalized") if key in entry}
            token = tokenizers.AddedToken(content, special=bool(entry.get("special", False)), **flags)
            (backend.add_special_tokens if token.special else backend.add_tokens)([token])
        if backend.token_to_id(content) != id:
            raise GraftuneError(
                f"the token '{content}' has id {id} here but {backend.token_to_id(content)} in tokenizer.json",
                where=str(path),
                fix="fetch both files again from one version of the model's repository",
            )


def _token_id(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], specials: Mapping[str, Any], key: str, folder: Path
) -> int | None:
    value, path = config.get(key), folder / "tokenizer_config.json"
    if value is None:
        value, path = specials.get(key), folder / "special_tokens_map.json"
    if isinstance(value, Mapping):
        value = value.get("content")
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        raise GraftuneError(f"{key} is {type(value).__name__}, not text", where=str(path))
    check_text(value, key)
    id = backend.token_to_id(value)
    # A padding token without an id would need a new embedding row, and packed batches never read it.
    if id is None and key != "pad_token":
        raise GraftuneError(
            f"{key} '{value}' is not in the vocabulary",
            where=str(path),
            fix="name a token that tokenizer.json contains",
        )
    return id


def _ids(value: object, backend: tokenizers.Tokenizer, path: Path) -> list[int]:
    """A token id or a list of them; ids past the vocabulary are refused."""
    ids: list[Any] = value if isinstance(value, list) else [] if value is None else [value]
    for id in ids:
        if not isinstance(id, int) or isinstance(id, bool) or not 0 <= id < 2**32 or backend.id_to_token(id) is None:
            raise GraftuneError(
                f"the end token id {id!r} is not in the vocabulary", where=str(path), fix="correct or remove it"
            )
    return ids


def _around(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], bos: int | None, eos: int | None, folder: Path
) -> tuple[bool, bool]:
    """Whether the model expects BOS and EOS: stated in tokenizer_config.json, else seen in what tokenizer.json does."""
    stated = {key: config[key] for key in ("add_bos_token", "add_eos_token") if config.get(key) is not None}
    for key, value in stated.items():
        if not isinstance(value, bool):
            raise GraftuneError(
                f"{key} is {type(value).__name__}, not true or false", where=str(folder / "tokenizer_config.json")
            )
    if stated:
        add_bos, add_eos = stated.get("add_bos_token", False), stated.get("add_eos_token", False)
    else:
        with guarded("encode a letter", str(folder)):
            ids = backend.encode("a").ids
        add_bos, add_eos = bool(ids) and ids[0] == bos, bool(ids) and ids[-1] == eos
    return add_bos and bos is not None, add_eos and eos is not None


def _template_source(folder: Path, config: Mapping[str, Any]) -> tuple[str | None, str]:
    """(the template's text, where it was found). chat_template.jinja takes precedence over an entry in a JSON file."""
    path = folder / "chat_template.jinja"
    if _is_there(path):
        return _text(path), str(path)
    for name in ("chat_template.json", "tokenizer_config.json"):
        path = folder / name
        entry = (config if name == "tokenizer_config.json" else _json_object(path)).get("chat_template")
        if entry is None:
            continue
        if isinstance(entry, str):
            return entry, str(path)
        return _default_of(entry, path), str(path)
    return None, ""


def _default_of(entry: object, path: Path) -> str:
    """The template named 'default' of several, given as a table or as a list of {name, template}."""
    named: dict[str, object] = {}
    if isinstance(entry, Mapping):
        named = dict(entry)
    elif isinstance(entry, list) and all(isinstance(one, Mapping) and "name" in one for one in entry):
        named = {str(one["name"]): one.get("template") for one in entry}
    chosen = named.get("default") if len(named) != 1 else next(iter(named.values()))
    if not isinstance(chosen, str):
        raise GraftuneError(
            f"chat_template has no template named 'default' (found: {', '.join(named) or 'nothing readable'})",
            where=str(path),
            fix="write the one to use into chat_template.jinja",
        )
    return chosen


def _is_there(path: Path) -> bool:
    """Whether the file exists. A device, or a link out of the folder, is refused rather than treated as absent: a
    tokenizer without its settings or its template would be a different one."""
    if not os.path.lexists(path):
        return False
    check_inside(path)
    return True


def _json_object(path: Path) -> dict[str, Any]:
    if not _is_there(path):
        return {}
    try:
        return read_object(path)
    except NotJson as error:
        raise GraftuneError(str(error), where=str(path), fix="fetch it again from the model's repository") from None
    except OSError as error:
        raise GraftuneError(f"the file cannot be read: {error.strerror}", where=str(path)) from error


def _text(path: Path) -> str:
    try:
        # newline="": the line ends of a template are part of it.
        with open_plain(path) as raw, io.TextIOWrapper(raw, encoding="utf-8", newline="") as file:
            text = file.read(LONGEST + 1)
    except UnicodeDecodeError as error:
        raise GraftuneError("the file is not UTF-8 text", where=str(path)) from error
    except OSError as error:
        raise GraftuneError(f"the file cannot be read: {error.strerror}", where=str(path)) from error
    if len(text) > LONGEST:
        raise GraftuneError("the file is too large", where=str(path))
    return text
