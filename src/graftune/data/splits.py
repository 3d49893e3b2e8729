"""Finds the split of a data file by its name: one rule for folders and for data sets on the Hub.

Folders follow the convention of the Hub: files named by a split (train.jsonl, test-00000-of-00002.parquet, valid/x.csv)
belong to it, and training takes `train`. So a folder with a test set beside the training set is not trained on its test
set.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from graftune.data.streams import format_of
from graftune.errors import GraftuneError

SPLITS = {
    "train": "train", "training": "train", "validation": "validation", "valid": "validation", "val": "validation",
    "dev": "validation", "test": "test", "testing": "test", "eval": "test", "evaluation": "test",
}  # fmt: skip
UNNAMED = "(files without a split's name)"
Splits = dict[str, list[str]]
MOST_NAMED = 20  # of a list in a sentence
# Files that describe a data set and hold none of its rows.
_ABOUT = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "package.json", "config.json"}


def is_data(name: str) -> bool:
    return format_of(name) is not None and Path(name).name.lower() not in _ABOUT


def of_split(names: Sequence[str], split: str, where: str) -> list[str]:
    """The files of a split, train where none is asked for. Files without a split's name are all one split, train."""
    splits: Splits = {}
    for name in names:
        splits.setdefault(split_of(name) or UNNAMED, []).append(name)
    if split and split not in splits:
        splits[split] = [name for name in splits.get(UNNAMED, []) if has_words(name, split)]
    return files_of_split({name: found for name, found in splits.items() if found}, split, where)


def files_of_split(splits: Splits, split: str, where: str) -> list[str]:
    """The files of a split. Without one: train, or the only one there is unless it is for testing."""
    wanted = split or "train"
    for key in (wanted, SPLITS.get(wanted, wanted)):
        if key in splits:
            return splits[key]
    if wanted == "train" and len(splits) == 1:
        ((only, names),) = splits.items()
        if only == UNNAMED or (not split and only not in ("test", "validation")):
            return names
    example = next(iter(splits))
    raise GraftuneError(
        f"has no split {wanted!r}; it has {listed(sorted(splits))}",
        where=where,
        fix=f"name one of them with split, or on the Hub as {where}:{example}",
    )


def of_subset(names: Sequence[str], subset: str, where: str) -> list[str]:
    """The files in a folder named by the subset, or with its words in their names."""
    found = [n for n in names if subset in Path(n).parts[:-1] or has_words(Path(n).name.split(".")[0], subset)]
    if names and not found:
        folders = sorted({Path(name).parts[0] for name in names if "/" in name})
        raise GraftuneError(
            f"has no subset {subset!r}",
            where=where,
            fix=f"its folders are {listed(folders)}" if folders else "leave out the subset",
        )
    return found


def has_words(name: str, words: str) -> bool:
    """Whether a file's name has these words as whole words."""
    return re.search(rf"(^|[\W_]){re.escape(words)}([\W_]|$)", name) is not None


def split_of(name: str) -> str | None:
    """train for train.jsonl, data/train-00000-of-00004.parquet, train/x.csv and my_train.jsonl; None for others."""
    path = Path(name)
    stem = path.name.split(".")[0].lower()
    for text in (stem, *(part.lower() for part in reversed(path.parts[:-1]))):
        for word in re.split(r"[^a-z]+", text):
            if word in SPLITS:
                return SPLITS[word]
    return None


def listed(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
