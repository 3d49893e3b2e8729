"""Downloads models from the Hugging Face Hub into its cache, and finds them there again without a network.

Only the files that are read are downloaded: the description of the model, then the files that its index names (some
repositories hold the same weights again in another layout). GGUF files are named as in llama.cpp: OWNER/NAME:Q4_K_M by
type, OWNER/NAME/FILE.gguf by file, and OWNER/NAME where the repository has only one.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Sequence
from pathlib import Path

from graftune.errors import GraftuneError
from graftune.io.hub import download, unreachable
from graftune.weights import safetensors_io

# The files beside the weights. Every repository has the last one: a pattern that matches nothing is reported.
DESCRIPTION = ("*.json", "*.jinja", "tokenizer.model", ".gitattributes")
MOST_NAMED = 20  # files in a sentence
_NAME = re.compile(r"(?P<repo>[\w.-]+(/[\w.-]+)?)")
_GGUF = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(:(?P<kind>[\w.-]+)|/(?P<file>.+\.gguf))")


def is_name(name: str) -> bool:
    """Whether the name has the form of a model's name on the Hub."""
    if name.startswith((".", "/", "~")) or ".." in name.split("/"):
        return False
    if _NAME.fullmatch(name):
        return not name.endswith(".gguf")
    return _GGUF.fullmatch(name) is not None


def fetch(name: str, revision: str, weights: bool) -> Path:
    """A folder with a model's files, or its GGUF file (the first part of a split one, with the others beside it).
    Without `weights`, only the description is needed."""
    match = _GGUF.fullmatch(name)
    if match is not None and match["file"]:
        return _gguf(name, match["repo"], revision, match["file"])
    repo = match["repo"] if match is not None else name
    folder = download(repo, revision, DESCRIPTION)
    revision = folder.name  # the commit, so that all files are of the same one
    if match is None:
        if not weights and (folder / "config.json").is_file():
            return folder
        files = safetensors_io.weight_files(folder)
        download(repo, revision, (*DESCRIPTION, *map(glob.escape, files)))
        if (folder / files[0]).is_file():
            return folder
    held = _models(_listed(repo, folder))
    wanted = held if match is None else [file for file in held if _is_of(file, match["kind"])]
    if len(wanted) == 1:
        return _gguf(name, repo, revision, wanted[0])
    if match is None and not held:
        return folder  # opening it says what is missing
    few = sorted(wanted or held)
    shown = ", ".join(few[:MOST_NAMED]) + (f" and {len(few) - MOST_NAMED} more" if len(few) > MOST_NAMED else "")
    if not wanted:
        what = f"holds no GGUF file of the type {match['kind'] if match else ''} (but {shown or 'none at all'})"
    else:
        what = f"holds {len(wanted)} GGUF models: {shown}"
    example = f", such as {repo}/{few[0]}" if few else ""
    raise GraftuneError(what, where=name, fix=f"name one of them by its type, OWNER/NAME:Q4_K_M, or its file{example}")


def _gguf(name: str, repo: str, revision: str, file: str) -> Path:
    """Downloads the file, with the other parts of a split one."""
    from graftune.weights.gguf_io import part_names

    within, _, last = file.rpartition("/")
    files = [f"{within}/{part}" if within else part for part in part_names(last)]
    folder = download(repo, revision, (".gitattributes", *map(glob.escape, files)))
    missing = next((part for part in files if not (folder / part).is_file()), None)
    if missing is not None:
        raise GraftuneError(f"holds no {missing}", where=repo, fix=f"check the name of the file in {name}")
    return folder / files[0]


def _listed(repo: str, folder: Path) -> list[str]:
    """The names of the repository's files, or of those in the cache if the Hub does not answer."""
    from huggingface_hub import HfApi

    try:
        return list(HfApi().list_repo_files(repo, revision=folder.name))
    except Exception as error:  # as in `download`
        cached = [str(file.relative_to(folder)) for file in folder.rglob("*.gguf")]
        if not cached:
            raise unreachable(repo, error, "") from None
        return cached


def _models(files: Sequence[str]) -> list[str]:
    """The GGUF models among the files, a split one by its first part, without image projectors and importance
    matrices."""
    from graftune.weights.gguf_io import part_names

    names = [(file, file.rpartition("/")[2]) for file in files if file.endswith(".gguf")]
    aside = ("mmproj", "imatrix")
    return [file for file, last in names if last == part_names(last)[0] and not last.lower().startswith(aside)]


def _is_of(file: str, kind: str) -> bool:
    """Whether the file has this type: Q4_K matches model-Q4_K.gguf and Q4_K/model.gguf, not model-Q4_K_M.gguf."""
    return re.search(rf"(?<![a-z0-9]){re.escape(kind)}(?![a-z0-9_])", file, re.IGNORECASE) is not None
