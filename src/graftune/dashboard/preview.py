"""The training data of a run with its mask, page by page, from the run folder and from this machine's token cache.

The folder contains the first examples (training/preview.py). The token cache contains all of them, if the run was
prepared on this machine and the cache still has the file that the run's log names. A separate process reads it, since
that needs the tokenizer. Each answer says where it comes from.
"""

from __future__ import annotations

import asyncio
import json
import re

from graftune.dashboard.reading import is_file, read_bytes
from graftune.dashboard.runs import WatchedRun
from graftune.dashboard.worker import Document, Worker
from graftune.io import user_cache

PREVIEW = "preview.jsonl"
LARGEST = 5 << 20  # bytes of the file; a run writes 4 MiB at most
MOST_ON_A_PAGE = 100


class Previews:
    def __init__(self, worker: Worker | None = None):
        self.worker = worker or Worker("preview")

    async def page(self, run: WatchedRun, page: int, size: int, search: str) -> Document | None:
        """A page of the examples that contain `search`, or of all if it is empty; None if the run has no preview."""
        size = max(1, min(size, MOST_ON_A_PAGE))
        content = await asyncio.to_thread(read_bytes, run.folder / PREVIEW, LARGEST)
        key, total = _cache_key(run), _examples(run)
        if content is None and not key:
            return None
        lines = [] if content is None else content.split(b"\n")[:-1]
        complete = content is not None and (total is None or len(lines) >= total)
        failed = ""
        if key and not complete and (search or (page + 1) * size > len(lines)):
            opened = {"run": str(run.folder), "encoded": key}
            answers = self.worker.ask(opened, {"page": page, "size": size, "search": search})
            answer = [document async for document in answers][-1]
            if "error" not in answer:
                return {"page": page, "source": "cache", "note": _searched(answer), **answer}
            failed, key = f"The token cache cannot be shown: {answer['error']}. ", ""
        note = failed + _note(len(lines), total, here=bool(key))
        count = total if key and not complete else None
        return await asyncio.to_thread(_page, lines, page, size, search, total=count, note=note)


def _searched(answer: Document) -> str:
    if answer["searched"] < answer["of"]:
        return f"Only the first {answer['searched']} of {answer['of']} examples were searched: it took too long."
    return "All examples come from the token cache on this machine."


def _page(
    lines: list[bytes], page: int, size: int, search: str, *, total: int | None = None, note: str = ""
) -> Document:
    """A page of examples from the lines of preview.jsonl, one example each."""
    if search:
        found = (one for line in lines if (one := _example(line)) and search.lower() in "".join(one["tokens"]).lower())
        shown, count = [], 0
        for count, one in enumerate(found, 1):
            if page * size < count <= (page + 1) * size:
                shown.append(one)
    else:
        shown = [one for line in lines[page * size : (page + 1) * size] if (one := _example(line))]
        count = len(lines) if total is None else total
    return {"total": count, "page": page, "source": PREVIEW, "note": note, "examples": shown}


def _example(line: bytes) -> Document | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    tokens, trained = found.get("tokens"), found.get("trained")
    if not isinstance(tokens, list) or not isinstance(trained, list) or len(tokens) != len(trained):
        return None
    return found if all(isinstance(token, str) for token in tokens) else None


def _note(held: int, total: int | None, *, here: bool) -> str:
    if total is None or held >= total:
        return "All examples are in the run folder."
    rest = "the rest comes from the token cache" if here else "the token cache of this machine does not have the rest"
    return f"The run folder holds the first {held} of {total} examples; {rest}."


def _examples(run: WatchedRun) -> int | None:
    """The number of training examples, if the log has it."""
    count = run.summary.start.get("examples")
    return count if type(count) is int and count >= 0 else None


def _cache_key(run: WatchedRun) -> str:
    """The run's entry in the token cache of this machine; empty if it has none."""
    key = run.summary.start.get("encoded")
    if not isinstance(key, str) or not re.fullmatch(r"[0-9a-f]{40}", key):
        return ""
    return key if is_file(user_cache.cache_folder() / "data" / f"{key}.tokens") else ""
