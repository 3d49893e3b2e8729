"""The training data of a run with its mask, page by page, from the run folder and from this machine's token cache.

The folder contains the first examples (training/preview.py). The token cache contains all of them, if the run was
prepared on this machine and the cache still has the file that the run's log names. A separate process reads it, since
that needs the tokenizer. Each answer says where it comes from.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

from graftune.dashboard.reading import is_file, read_bytes
from graftune.dashboard.runs import WatchedRun
from graftune.dashboard.worker import Worker
from graftune.io import user_cache

Document = dict[str, Any]
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
        lines = [] if content is None else content.split(b"\n")[:-1]
        total, key = _examples(run), _cache_key(run)
        if (total is not None and len(lines) < total) or (content is None and key):
            behind = search or (page + 1) * size > len(lines)
            if behind and key:
                return await self._cached(run, key, page, size, search, lines)
            if key:
                return _page(lines, page, size, search, total=total, note=_note(len(lines), total, here=True))
        if content is None:
            return None
        return await asyncio.to_thread(_page, lines, page, size, search, note=_note(len(lines), total, here=False))

    async def _cached(
        self, run: WatchedRun, key: str, page: int, size: int, search: str, lines: list[bytes]
    ) -> Document:
        opened = {"run": str(run.folder), "encoded": key}
        answers = self.worker.ask(opened, {"page": page, "size": size, "search": search})
        found = [document async for document in answers]
        if not found or "error" in found[-1]:
            why = found[-1]["error"] if found else "the process that reads it has ended"
            note = f"The token cache cannot be shown: {why}. {_note(len(lines), _examples(run), here=False)}"
            return await asyncio.to_thread(_page, lines, page, size, search, note=note)
        answer = found[0]
        note = "All examples come from the token cache on this machine."
        if answer["searched"] < answer["of"]:
            note = f"Only the first {answer['searched']} of {answer['of']} examples were searched: it took too long."
        return {
            "total": answer["total"], "page": page, "source": "cache", "note": note, "examples": answer["examples"],
        }  # fmt: skip


def _page(
    lines: list[bytes], page: int, size: int, search: str, *, total: int | None = None, note: str = ""
) -> Document:
    """From the lines of preview.jsonl, one example each."""
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
    """An example, if the line is one."""
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
