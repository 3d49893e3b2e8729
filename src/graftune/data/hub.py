"""Data sets from the Hugging Face Hub, by name: OWNER/NAME, OWNER/NAME:SPLIT, OWNER/NAME/SUBSET:SPLIT or their page.

Only the files of the split that is read are fetched, as they lie in the repository; the `datasets` library would
convert all splits into a cache of its own first. The repository's README says which files make up a subset and a split
(`configs:`), or else the names of folders and files do. If a repository has no files that can be read here (a loading
script, archives), the Hub's own conversion to Parquet is used (revision refs/convert/parquet).
"""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from graftune.data.splits import Splits, files_of_split, is_data, listed, of_split, of_subset, split_of
from graftune.data.streams import FORMATS, format_of
from graftune.errors import GraftuneError
from graftune.io.hub import download, unreachable
from graftune.io.yaml_file import parse_yaml
from graftune.settings.sources import Source

CONVERTED = "refs/convert/parquet"
LONGEST_README, MOST_OF_README = 1 << 20, 50_000  # characters, and values in its header
_ADDRESS = re.compile(r"^(https?://(www\.)?(huggingface\.co|hf\.co)/|hf://)datasets/")
_NAME = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w.-]+)(/(?P<subset>[\w. -]+))?(:(?P<split>[\w.-]+))?")


def files_of(source: Source, note: Callable[[str], None]) -> list[tuple[Path, str]]:
    """The data set's files on this machine, each with the name that messages give it."""
    repo, subset, split = _named(source)
    where = f"{repo}/{subset}" if subset else repo
    folder = download(repo, source.revision, ("README.md", ".gitattributes"), "dataset")
    revision, names = folder.name, _listed(repo, folder)
    chosen = _chosen(_configs(folder), names, subset, split, where)
    if not chosen and not source.revision:
        try:
            folder = download(repo, CONVERTED, (".gitattributes",), "dataset")
        except GraftuneError:
            raise _nothing(where, names) from None
        revision, names = folder.name, _listed(repo, folder)
        configs = _converted_configs(names)
        chosen = _chosen(configs, names, subset, split, where) if configs else []
        note(f"{where}: read from the Hub's own conversion to Parquet")
    if not chosen:
        raise _nothing(where, names)
    download(repo, revision, (".gitattributes", *map(glob.escape, chosen)), "dataset")
    missing = next((name for name in chosen if not (folder / name).is_file()), None)
    if missing is not None:
        raise GraftuneError(
            f"{missing} is not in the cache, and the Hub could not be reached",
            where=where, fix="ask again with a network",
        )  # fmt: skip
    note(f"{where}: split {split or 'train'}, {listed(chosen)}")
    return [(folder / name, f"{repo}/{name}") for name in chosen]


def _named(source: Source) -> tuple[str, str, str]:
    """(OWNER/NAME, subset, split) that the source names; GraftuneError if it cannot be a data set on the Hub."""
    path = _ADDRESS.sub("", source.path).removesuffix("/")
    match = _NAME.fullmatch(path)
    if "://" in path:
        raise GraftuneError("is an address on the web", where=source.path, fix="download the file and give its path")
    if match is None or format_of(path) is not None or path.startswith((".", "/", "~")):
        fix = "check the path of the data" if "/" in path else "check the path, or name a Hub data set as OWNER/NAME"
        raise GraftuneError("no such file", where=source.path, fix=fix)
    for key, own in (("subset", source.subset), ("split", source.split)):
        if own and match[key] and own != match[key]:
            raise GraftuneError(
                f"its name says {key} {match[key]!r} and its {key} is {own!r}", where=source.path, fix="say it once"
            )
    return match["repo"], source.subset or match["subset"] or "", source.split or match["split"] or ""


def _listed(repo: str, folder: Path) -> list[str]:
    """The names of the repository's files; where the Hub does not answer, of those in the cache."""
    from huggingface_hub import HfApi

    try:
        return sorted(HfApi().list_repo_files(repo, revision=folder.name, repo_type="dataset"))
    except Exception as error:  # the HTTP client may raise anything, as in `download`
        cached = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if is_data(file.name))
        if not cached:
            raise unreachable(repo, error, "") from None
        return cached


def _configs(folder: Path) -> list[dict[str, Any]]:
    """The subsets that the README's header describes (`configs:`); empty if it has no readable header."""
    try:
        with (folder / "README.md").open(encoding="utf-8-sig") as file:
            text = file.read(LONGEST_README)
        header = re.match(r"---\s*\n(.*?)\n---", text, re.DOTALL)
        tree = parse_yaml(header[1], "README.md", most=MOST_OF_README) if header else {}
    except (OSError, ValueError):  # GraftuneError is one
        return []
    configs = tree.get("configs")
    return [c for c in configs if isinstance(c, dict) and c.get("data_files")] if isinstance(configs, list) else []


def _chosen(configs: list[dict[str, Any]], names: Sequence[str], subset: str, split: str, where: str) -> list[str]:
    """The files of the subset and split; none where the repository holds no data files."""
    data = [name for name in names if is_data(name)]
    if configs:
        config = _config(configs, subset, where)
        splits = _splits(config, data)
        if any(splits.values()):
            return files_of_split(splits, split, where)
    if subset:
        data = of_subset(data, subset, where)
    kind = next((kind for kind in (FORMATS[-1], *FORMATS) if any(format_of(name) == kind for name in data)), "")
    data = [name for name in data if format_of(name) == kind]
    return of_split(data, split, where) if data else []


def _config(configs: list[dict[str, Any]], subset: str, where: str) -> dict[str, Any]:
    by_name = {str(config.get("config_name", "default")): config for config in configs}
    if subset:
        if subset not in by_name:
            raise GraftuneError(f"has no subset {subset!r}", where=where, fix=f"it has {listed(list(by_name))}")
        return by_name[subset]
    marked = [name for name, config in by_name.items() if config.get("default") is True]
    for name in (*marked, "default"):
        if name in by_name:
            return by_name[name]
    if len(by_name) > 1:
        raise GraftuneError(
            f"has the subsets {listed(list(by_name))}",
            where=where,
            fix=f"name one with subset, or as {where}/{next(iter(by_name))}",
        )
    return configs[0]


def _splits(config: dict[str, Any], data: Sequence[str]) -> Splits:
    """Split -> files, by the patterns of the README: a text, a list of them, {split: pattern} or [{split, path}]."""
    given, splits = config["data_files"], Splits()
    folder = str(config.get("data_dir") or "").strip("./")
    if isinstance(given, dict):
        given = [{"split": split, "path": path} for split, path in given.items()]
    for entry in given if isinstance(given, list) else [given]:
        split, paths = (entry.get("split"), entry.get("path")) if isinstance(entry, dict) else (None, entry)
        for pattern in paths if isinstance(paths, list) else [paths]:
            full = f"{folder}/{pattern}" if folder else str(pattern)
            for name in (name for name in data if _pattern(full).fullmatch(name)):
                splits.setdefault(str(split) if split else split_of(name) or "train", []).append(name)
    return {split: sorted(set(names)) for split, names in splits.items()}


def _pattern(text: str) -> re.Pattern[str]:
    """`**/` is any folders, `*` anything within a name."""
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", text.removeprefix("./"))
    meanings = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.compile("".join(meanings.get(part, re.escape(part)) for part in parts))


def _converted_configs(names: Sequence[str]) -> list[dict[str, Any]]:
    """The subsets of the Hub's conversion in the form of a README's `configs:`. It has files SUBSET/SPLIT/0000.parquet,
    with partial-SPLIT where the conversion stopped after some gigabytes."""
    configs: dict[str, list[dict[str, str]]] = {}
    for folder in dict.fromkeys(str(Path(name).parent) for name in names if format_of(name) and name.count("/") == 2):
        subset, split = folder.split("/")
        configs.setdefault(subset, []).append({"split": split.removeprefix("partial-"), "path": f"{folder}/*"})
    return [{"config_name": subset, "data_files": configs[subset]} for subset in sorted(configs)]


def _nothing(where: str, names: Sequence[str]) -> GraftuneError:
    shown = listed([name for name in names if not name.startswith(".")]) or "no files"
    return GraftuneError(
        f"is a data set on the Hub without files that can be read here ({shown})",
        where=where,
        fix=f"data files are {', '.join(FORMATS)}",
    )
