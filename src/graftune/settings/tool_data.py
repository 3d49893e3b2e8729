"""Converts another tool's data settings into `data`, `eval_data` and `map`.

Each tool names its data in its own way: Axolotl as a list of sources with a type each, LLaMA-Factory by names that
dataset_info.json explains, TRL and Unsloth scripts as a data set on the Hub or the files of load_dataset. The format of
the rows is recognised here; only columns with names of their own go into a map.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from graftune.settings.recognise import DATA_ENDINGS, PACKED
from graftune.settings.tool_files import preference, read_object

if TYPE_CHECKING:
    from graftune.settings.converting import Conversion

_TRL = (
    *("dataset_name", "dataset_config", "dataset_config_name", "dataset_train_split", "dataset_test_split"),
    *("data_files", "datasets", "dataset_text_field"),
)
# The names that are converted here.
DATA_NAMES: dict[str, tuple[str, ...]] = {
    "axolotl": ("datasets", "test_datasets", "pretraining_dataset"),
    "llama-factory": ("dataset", "eval_dataset", "dataset_dir"),
    "trl": _TRL,
    "unsloth": _TRL,
}
MISSING_BASE, MISSING_DATA = "./YOUR_BASE", "./YOUR_DATA.jsonl"
_CHATS = ("messages", "conversations", "conversation")
_LOADERS = ("json", "csv", "parquet", "text", "pandas")  # load_dataset's names for kinds of files
# The columns of a source of Axolotl's or LLaMA-Factory's, and our names for them.
_FIELDS = {
    **{"field_messages": "messages", "field_instruction": "instruction", "field_input": "input"},
    **{"field_output": "output", "field_system": "system", "field_tools": "tools", "field": "text"},
}
_COLUMNS = {
    **{"prompt": "instruction", "query": "input", "response": "output", "messages": "messages"},
    **{"system": "system", "tools": "tools", "history": "history"},
}
_SOURCE_NAMES = {
    *("path", "name", "split", "data_files", "ds_type", "type", "revision", "text_column"),
    *("message_field_role", "message_field_content"),
}
_PROMPTS = "rows go through the model's chat template, not through the prompt text of that type"


def convert_data(result: Conversion) -> None:
    """Put `data`, `eval_data` and `map`. A placeholder stands where the file names no base or no data: an empty value
    would train the bundled model on the bundled sample."""
    {"axolotl": _axolotl, "llama-factory": _llama_factory}.get(result.file.tool, _trl)(result)
    for name, placeholder in (("base", MISSING_BASE), ("data", MISSING_DATA)):
        if name not in result.settings and not (name == "base" and "adapter" in result.settings):
            result.put(name, placeholder, "not in the file: write the path or the Hub name in its place")
            result.assumed.append(f"{name} is {placeholder}, {result.comments[name]}")


def _put_sources(result: Conversion, ours: str, sources: list[dict[str, Any]], name: str) -> None:
    if sources:
        plain = len(sources) == 1 and set(sources[0]) == {"path"}
        result.put(ours, sources[0]["path"] if plain else sources, name)


def _source(path: str, split: Any = "", subset: Any = "", renamed: dict[str, str] | None = None) -> dict[str, Any]:
    """An entry of `data`. `split`: kept only for a data set on the Hub, unless it is train, which is the default."""
    local = Path(path).expanduser().exists() or path.endswith((*DATA_ENDINGS, *PACKED))
    entry: dict[str, Any] = {"path": path}
    if isinstance(split, str) and split not in ("", "train") and not local:
        entry["split"] = split
    if isinstance(subset, str) and subset and not local:
        entry["subset"] = subset
    renamed = renamed or {}
    if any(ours != theirs and not (ours == "messages" and theirs in _CHATS) for ours, theirs in renamed.items()):
        entry["map"] = renamed
    return entry


def _unsliced(result: Conversion, name: str, split: Any) -> Any:
    """train[:10%] -> train."""
    if not isinstance(split, str) or "[" not in split:
        return split
    result.leave(name, f"a slice of a split ({split}) does not exist here; the whole split is taken")
    return split.split("[")[0]


def _paths(entry: dict[str, Any], name: str = "path") -> list[str]:
    """The files that load_dataset would read, or the data set's own name."""
    path, files = entry.get(name), entry.get("data_files")
    if isinstance(files, dict):
        files = files.get("train")
    files = [files] if isinstance(files, str) else files
    if isinstance(files, list) and files and (path in _LOADERS or path is None):
        return [str(file) for file in files]
    return [path] if isinstance(path, str) and path else []


# Axolotl


def _axolotl(result: Conversion) -> None:
    given = result.file.given
    for name, ours in (("datasets", "data"), ("pretraining_dataset", "data"), ("test_datasets", "eval_data")):
        entries = given.get(name) or []
        sources: list[dict[str, Any]] = []
        for place, entry in enumerate(entries if isinstance(entries, list) else [entries], 1):
            entry = {"path": entry} if isinstance(entry, str) else entry
            if isinstance(entry, dict):
                sources += _axolotl_source(result, entry, f"{name}[{place}]", text=name == "pretraining_dataset")
        _put_sources(result, ours, sources, name)


def _axolotl_source(result: Conversion, entry: dict[str, Any], shown: str, text: bool) -> list[dict[str, Any]]:
    kind, renamed = entry.get("type"), dict[str, str]()
    fields = {**entry, **kind} if isinstance(kind, dict) else entry
    for name, value in fields.items():
        if name in _FIELDS and isinstance(value, str):
            renamed[_FIELDS[name]] = value
        elif name == "message_property_mappings" and isinstance(value, dict):
            _check_keys(result, f"{shown}.{name}", value.get("role"), value.get("content"))
        elif name not in _SOURCE_NAMES:
            result.leave(f"{shown}.{name}", _PROMPTS if name in ("format", "no_input_format") else "")
    _check_keys(result, shown, entry.get("message_field_role"), entry.get("message_field_content"))
    if isinstance(entry.get("text_column"), str) and text:
        renamed["text"] = entry["text_column"]
    if isinstance(kind, str) and kind.split(".")[0] not in ("chat_template", "sharegpt", "completion", "pretrain"):
        result.leave(f"{shown}.type", f"{kind}: the format is recognised by the columns, and {_PROMPTS}")
    split = _unsliced(result, f"{shown}.split", entry.get("split"))
    found = [_source(path, split, entry.get("name"), renamed) for path in _paths(entry)]
    if isinstance(entry.get("revision"), str):
        found = [{**source, "revision": entry["revision"]} for source in found]
    if not found:
        result.leave(shown, "it names no path")
    return found


def _check_keys(result: Conversion, shown: str, role: Any, content: Any) -> None:
    """Turns are read as role/content and as from/value; other keys have to be renamed in the rows."""
    for key, known in ((role, ("role", "from")), (content, ("content", "value"))):
        if key is not None and key not in known:
            result.leave(shown, f"turns are read as role/content or from/value: rename {key!r} in the rows")


# LLaMA-Factory


def _llama_factory(result: Conversion) -> None:
    given = result.file.given
    folder = given.get("dataset_dir")
    folders = [Path(folder)] if isinstance(folder, str) else [Path("data")]
    folders += [Path(result.file.path).parent / one for one in folders if not one.is_absolute()]
    found = next((one for one in folders if (one / "dataset_info.json").is_file()), folders[0])
    listing = found / "dataset_info.json"
    known = read_object(str(listing)) if listing.is_file() else {}
    for name, ours in (("dataset", "data"), ("eval_dataset", "eval_data")):
        value = given.get(name) or []
        names = value if isinstance(value, list) else [part.strip() for part in str(value).split(",")]
        sources = [_listed(result, str(one), known.get(str(one)), found, name) for one in names]
        _put_sources(result, ours, sources, f"{name}, by {listing}" if known else name)


def _listed(result: Conversion, name: str, info: Any, folder: Path, key: str) -> dict[str, Any]:
    """An entry of `data` for one data set, by its entry in dataset_info.json."""
    if not isinstance(info, dict):
        if "/" not in name and not Path(name).exists():
            reason = f"{name} is not in {folder / 'dataset_info.json'}: write its file or Hub name in its place"
            result.assumed.append(f"{key}: {reason}")
        return _source(name)
    columns, tags = ({**value} if isinstance(value := info.get(key), dict) else {} for key in ("columns", "tags"))
    if info.get("ranking") or "kto_tag" in columns:
        raise preference(f"the data set {name}", result.file.path)
    _check_keys(result, f"{name}.tags", tags.get("role_tag"), tags.get("content_tag"))
    for other in ("num_samples", "script_url", "cloud_file_name", "ms_hub_url", "om_hub_url", "folder"):
        if info.get(other):
            result.leave(f"{name}.{other}")
    renamed = {_COLUMNS[theirs]: str(column) for theirs, column in columns.items() if theirs in _COLUMNS and column}
    for theirs in columns:
        if theirs not in _COLUMNS:
            result.leave(f"{name}.columns.{theirs}", "images, audio and video are not trained here")
    path = str(info.get("hf_hub_url") or folder / str(info.get("file_name") or name))
    return _source(path, info.get("split"), info.get("subset"), renamed)


# TRL and Unsloth


def _trl(result: Conversion) -> None:
    given = result.file.given
    subset = given.get("dataset_config") or given.get("dataset_config_name")
    split = _unsliced(result, "dataset_train_split", given.get("dataset_train_split"))
    column, renamed = given.get("dataset_text_field"), dict[str, str]()
    if isinstance(column, str) and ("map" in result.file.calls or given.get("formatting_func")):
        result.leave("dataset_text_field", "the script makes that column itself; the columns of the file are read")
    elif isinstance(column, str) and column != "text":
        renamed["text"] = column
    named = [_source(path, split, subset, renamed) for path in _paths(given, "dataset_name")]
    mixture, mixed = given.get("datasets"), list[dict[str, Any]]()
    for place, entry in enumerate(mixture if isinstance(mixture, list) else [], 1):
        if isinstance(entry, dict):
            mixed += [_source(path, entry.get("split"), entry.get("name")) for path in _paths(entry)]
            for name in [name for name in entry if name not in ("path", "name", "split", "data_files")]:
                result.leave(f"datasets[{place}].{name}")
    if named and mixed:
        result.leave("dataset_name", "datasets overrides it there")
    _put_sources(result, "data", mixed or named, "datasets" if mixed else "dataset_name")
    evaluates = given.get("eval_strategy") not in (None, "no", False)
    test = given.get("dataset_test_split", None if result.file.calls else "test")  # a script chooses its own
    if isinstance(test, str) and named and not mixed and evaluates and _source(named[0]["path"], test).get("split"):
        _put_sources(result, "eval_data", [{**named[0], "split": test}], "dataset_test_split")
    elif "dataset_test_split" in given:
        result.leave("dataset_test_split", "nothing is evaluated there, or the data has no splits")
