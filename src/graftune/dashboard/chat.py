"""The chat box: the base and the tuned model answer the same conversation, side by side, in a separate process.

Training is not disturbed: the process loads the weights from the run folder, at a lower priority, and not onto a GPU
while a watched run is training, unless the user chose the device. It answers one request at a time.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from graftune.dashboard.reading import stamp
from graftune.dashboard.runs import Runs, WatchedRun
from graftune.dashboard.states import RUNNING
from graftune.dashboard.streams import message
from graftune.dashboard.views import checkpoints
from graftune.dashboard.worker import Document, Worker

MOST_MESSAGES, LONGEST_MESSAGE, MOST_TOKENS = 200, 100_000, 4096
ROLES = ("system", "user", "assistant")


class Chat:
    def __init__(self, runs: Runs, device: str = "auto", worker: Worker | None = None):
        self.runs, self.device = runs, device
        self.worker = worker or Worker("chat", must_end=self.occupies_needed_gpu)

    async def events(self, request: Request) -> AsyncIterator[str]:
        """The answer to a request, which is checked before anything is sent back."""
        asked = checked(await _body(request))
        await asyncio.to_thread(self.runs.refresh)
        run = await asyncio.to_thread(find_run, self.runs, asked["run"])
        if asked["checkpoint"] not in checkpoints(run.folder):
            raise HTTPException(404, "this run has no such checkpoint (any more); choose another one")
        if self.worker.busy.locked():
            raise HTTPException(429, "the model is answering another request; wait until it is done, or stop it")
        return self._answer(self._key(run, asked["checkpoint"]), asked)

    def occupies_needed_gpu(self, key: Document) -> bool:
        """Whether an idle model may be on the GPU that a watched run needs. On a device of the user's choice it
        stays."""
        self.runs.refresh()
        return self.device == "auto" and key["device"] == "auto" and self._training()

    def _training(self) -> bool:
        return any(run.state.state in RUNNING for run in self.runs.known())

    def _key(self, run: WatchedRun, checkpoint: str) -> Document:
        """Identifies the weights and their device. A result that was written again has another key, so it is loaded
        again."""
        device = self.device if self.device != "auto" or not self._training() else "cpu"
        written = [stamp(run.folder / name) for name in ("adapter/adapter_model.safetensors", "model/config.json")]
        return {"run": str(run.folder), "checkpoint": checkpoint, "device": device, "written": written}

    async def _answer(self, key: Document, asked: Document) -> AsyncIterator[str]:
        request = {name: asked[name] for name in ("messages", "temperature", "max_new_tokens")}
        yield ": asked\n\n"
        async with aclosing(self.worker.ask(key, request)) as answer:
            async for document in answer:
                yield message(document)


def find_run(runs: Runs, key: str) -> WatchedRun:
    run = runs.get(key)
    if run is None:
        raise HTTPException(404, "there is no such run in the watched folder")
    return run


async def _body(request: Request) -> Any:
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise HTTPException(415, "the request has to be JSON")
    try:
        return json.loads(await request.body())
    except ClientDisconnect:
        raise HTTPException(413, "the request is too large", {"connection": "close"}) from None
    except (ValueError, RecursionError):
        raise HTTPException(400, "the request is not valid JSON") from None


def checked(asked: Any) -> Document:
    """The fields of a request. Raises HTTPException with a sentence that says what is wrong."""
    if not isinstance(asked, dict):
        raise HTTPException(400, "the request has to be an object")
    messages = asked.get("messages")
    turns: list[Any] = messages if isinstance(messages, list) else []
    if not 0 < len(turns) <= MOST_MESSAGES or not all(isinstance(m, dict) and m.get("role") in ROLES for m in turns):
        raise HTTPException(400, f"messages has to be a list of up to {MOST_MESSAGES} turns with role and content")
    if not all(isinstance(m.get("content"), str) and len(m["content"]) <= LONGEST_MESSAGE for m in turns):
        raise HTTPException(400, f"the content of a turn has to be text of up to {LONGEST_MESSAGE} characters")
    for name in ("run", "checkpoint"):
        if not isinstance(asked.get(name), str):
            raise HTTPException(400, f"{name} has to be text")
    temperature, most = asked.get("temperature", 0.0), asked.get("max_new_tokens", 256)
    number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    if not number or not (math.isfinite(temperature) and 0 <= temperature <= 100):
        raise HTTPException(400, "temperature has to be a number from 0 to 100")
    if type(most) is not int or not 1 <= most <= MOST_TOKENS:
        raise HTTPException(400, f"max_new_tokens has to be a whole number from 1 to {MOST_TOKENS}")
    return {
        "run": asked["run"],
        "checkpoint": asked["checkpoint"],
        "messages": [{"role": m["role"], "content": m["content"]} for m in turns],
        "temperature": float(temperature),
        "max_new_tokens": most,
    }
