"""The data of a run with its mask, page by page: from the run folder, and from the token cache of this machine.

The folder has the first examples (training/preview.py). All of them are in the token cache, if the run was prepared on
this machine and the cache still has the file that the run's log names; a process of its own reads it, since it takes
the tokenizer. Each answer says where it comes from.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

from graftune.dashboard.reading import read_bytes, stamp
from graftune.dashboard.runs import Run
from graftune.dashboard.worker import Worker
from graftune.io import user_cache

Document = dict[str, Any]
PREVIEW = "preview.jsonl"
LARGEST = 5 << 20  # bytes of the file that are read; a run writes 4 MiB at most
MOST_ON_A_PAGE = 100


class Previews:
    def __init__(self, worker: Worker | None = None):
        self.worker = worker or Worker("preview")

    async def page(self, run: Run, page: int, size: int, search: str) -> Document | None:
        """A page of examples, of those that hold `search` if that is not empty; None if the run has no preview."""
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

    async def _cached(self, run: Run, key: str, page: int, size: int, search: str, lines: list[bytes]) -> Document:
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
    """Of the file's lines, each one example."""
    if search:
        found = (one for line in lines if (one := _example(line)) and search.lower() in _text(one).lower())
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


def _text(example: Document) -> str:
    return "".join(example["tokens"])


def _note(held: int, total: int | None, *, here: bool) -> str:
    if total is None or held >= total:
        return "All examples are in the run folder."
    rest = "the rest comes from the token cache" if here else "the token cache of this machine does not have the rest"
    return f"The run folder holds the first {held} of {total} examples; {rest}."


def _start(run: Run) -> Document:
    return run.glance.start


def _examples(run: Run) -> int | None:
    """How many examples the run trains on, if its log says so."""
    count = _start(run).get("examples")
    return count if type(count) is int and count >= 0 else None


def _cache_key(run: Run) -> str:
    """The run's entry in the token cache of this machine; empty if it has none."""
    key = _start(run).get("encoded")
    if not isinstance(key, str) or not re.fullmatch(r"[0-9a-f]{40}", key):
        return ""
    return key if stamp(user_cache.cache_folder() / "data" / f"{key}.tokens") != (0, 0, 0) else ""
