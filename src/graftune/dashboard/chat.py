"""The chat box: base and tuned model answer the same conversation, side by side, in a process of their own.

The training is never touched: the process loads the weights from the run folder, at a lower priority, and not onto a
GPU while a watched run is training there unless it is told to. One answer is given at a time.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from graftune.dashboard.reading import stamp
from graftune.dashboard.runs import Run, Runs
from graftune.dashboard.states import RUNNING
from graftune.dashboard.streams import BEAT, Closing, message
from graftune.dashboard.views import checkpoints
from graftune.dashboard.worker import Worker

Document = dict[str, Any]
MOST_MESSAGES, LONGEST_MESSAGE, MOST_TOKENS = 200, 100_000, 4096
ROLES = ("system", "user", "assistant")


class Chat:
    def __init__(self, runs: Runs, closing: Closing, device: str = "auto", worker: Worker | None = None):
        self.runs, self.closing, self.device = runs, closing, device
        self.worker = worker or Worker("chat", leaves=self.in_the_way)

    async def events(self, request: Request) -> AsyncIterator[str]:
        """The answer to a request, which is checked before anything is sent."""
        asked = checked(await _body(request))
        run = await asyncio.to_thread(self._found, asked["run"])
        if asked["checkpoint"] not in checkpoints(run.folder):
            raise HTTPException(404, "this run has no such checkpoint (any more); choose another one")
        if self.worker.busy.locked():
            raise HTTPException(429, "another answer is being given; wait until it is done, or stop it")
        return self._answer(self._key(run, asked["checkpoint"]), asked)

    def _found(self, key: str) -> Run:
        try:
            self.runs.refresh()
            return self.runs.get(key)
        except KeyError:
            raise HTTPException(404, "there is no such run in the watched folder") from None

    def in_the_way(self, key: Document) -> bool:
        """Whether an idle model may lie on the GPU that a watched run wants. One on a device of the user's choice
        stays."""
        self.runs.refresh()
        return self.device == "auto" and key["device"] == "auto" and self._training()

    def _training(self) -> bool:
        return any(run.state.state in RUNNING for run in self.runs.known())

    def _key(self, run: Run, checkpoint: str) -> Document:
        """What has to be loaded. A result that is written anew is loaded anew."""
        device = self.device if self.device != "auto" or not self._training() else "cpu"
        written = [stamp(run.folder / name) for name in ("adapter/adapter_model.safetensors", "model/config.json")]
        return {"run": str(run.folder), "checkpoint": checkpoint, "device": device, "written": written}

    async def _answer(self, key: Document, asked: Document) -> AsyncIterator[str]:
        request = {name: asked[name] for name in ("messages", "temperature", "max_new_tokens")}
        answer = self.worker.ask(key, request)
        # A generator cannot be waited for with a limit, or it would be cancelled: a task reads it.
        queue: asyncio.Queue[Document | None] = asyncio.Queue()

        async def read() -> None:
            try:
                async for document in answer:
                    queue.put_nowait(document)
            finally:
                queue.put_nowait(None)
                await answer.aclose()  # type: ignore[attr-defined]

        reading = asyncio.create_task(read())
        try:
            yield ": asked\n\n"
            while not self.closing.set:
                try:
                    document = await asyncio.wait_for(queue.get(), BEAT)
                except TimeoutError:
                    yield ": still here\n\n"
                    continue
                if document is None:
                    return
                yield message({name: value for name, value in document.items() if name != "gone"})
        finally:
            reading.cancel()


async def _body(request: Request) -> Any:
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise HTTPException(415, "the request has to be JSON")
    try:
        return json.loads(await request.body())
    except ClientDisconnect:
        raise HTTPException(413, "the request is too large") from None
    except (ValueError, RecursionError):
        raise HTTPException(400, "the request is not valid JSON") from None


def checked(asked: Any) -> Document:
    """The fields of a request; HTTPException with a sentence for whatever is wrong with them."""
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
