"""A process of the page (dashboard/worker.py): `python -m graftune.cli.worker KIND KEY`.

`chat` opens a checkpoint of a run, and the base and the tuned model answer; `preview` opens a run's file in the token
cache and its tokenizer. Requests come as lines of JSON on stdin, answers go to stdout, one request at a time. Meanwhile
a thread reads stdin, so that `stop` and the end of the server take effect between two tokens.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import IO, Any

from graftune.cli.failures import sentence

Document = dict[str, Any]
LONGEST_SEARCH = 10.0  # seconds
Answer = Callable[[Document], Iterator[Document]]


class Requests:
    """The queue of requests, and the numbers of those that were stopped."""

    def __init__(self, lines: IO[str]):
        self._lines, self._waiting = lines, queue.Queue[Document | None]()
        self._stopped = 0
        self.over = False
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._lines:
            request = json.loads(line)
            if "stop" in request:
                self._stopped = max(self._stopped, request["stop"])
            else:
                self._waiting.put(request)
        self.over = True
        self._waiting.put(None)

    def __iter__(self) -> Iterator[Document]:
        return iter(self._waiting.get, None)

    def is_stopped(self, number: int) -> bool:
        return self.over or number <= self._stopped


def main(kind: str, key: str) -> int:
    os.nice(5)  # training has priority
    out, sys.stdout = sys.stdout, sys.stderr  # prints of libraries go to stderr
    opener = {"chat": open_chat, "preview": open_preview}[kind]
    serve(lambda: opener(json.loads(key)), Requests(sys.stdin), out)
    return 0


def serve(opener: Callable[[], Answer], requests: Requests, out: IO[str]) -> None:
    """Answer requests until there are no more. If the model cannot be opened, every answer says why."""
    answer: Answer | None = None
    for request in requests:
        number = request["number"]

        def say(document: Document, number: int = number) -> None:
            out.write(json.dumps({"number": number, **document}) + "\n")
            out.flush()

        try:
            answer = answer or opener()
            for document in answer(request):
                if requests.is_stopped(number):
                    break
                say(document)
        except Exception as error:
            message = sentence(error)
            if message is None:  # a bug of ours: print its traceback
                traceback.print_exception(error, file=sys.stderr)
                message = f"this failed inside graftune ({type(error).__name__}); see the messages of graftune watch"
            say({"error": message})
        say({"end": True})


def open_chat(key: Document) -> Answer:
    from graftune import api
    from graftune.infer.sample import Sampling
    from graftune.session import text
    from graftune.settings.config import Config

    run, settings = key["run"], {"device": key["device"]} if key["device"] != "auto" else {}
    target = run if key["checkpoint"] == "adapter" else f"{run}@{key['checkpoint']}"
    tuned = api.open(target, quiet=True, **settings)
    config = Config.of_run(run)
    base: Any = tuned
    if config.train.method == "full":  # its weights replace the base's
        base = api.open(config.base.base, quiet=True, **settings)
    elif config.train.method == "scratch":
        base = None

    def pieces(who: str, request: Document) -> Iterator[Document]:
        session = tuned if who == "tuned" else base
        if session is None:
            yield {"who": who, "done": True, "reason": "this run was trained from scratch and has no base"}
            return
        adapted = who == "tuned" or session is not tuned
        prompt, ends = text.encoded(session.parts, request["messages"])
        how = Sampling(request["max_new_tokens"], request["temperature"], stop_ids=ends)
        for _, piece, sample in text.stream(session.parts, [prompt], how, adapted=adapted, reads=True):
            if piece:
                yield {"who": who, "text": piece}
            if sample is not None:
                yield {"who": who, "done": True, "reason": sample.stopped}

    def answer(request: Document) -> Iterator[Document]:
        """A piece of each answer in turn, so that both are shown as they come."""
        going = [pieces(who, request) for who in ("base", "tuned")]
        while going:
            for one in list(going):
                found = next(one, None)
                if found is None:
                    going.remove(one)
                else:
                    yield found

    return answer


def open_preview(key: Document) -> Answer:
    from graftune.cli.data import tokenizer_of
    from graftune.data import cached
    from graftune.data.dataset import Dataset, split
    from graftune.data.encoded import Examples, side_of
    from graftune.data.token_text import Pieces
    from graftune.errors import GraftuneError
    from graftune.settings.config import Config
    from graftune.training.preview import shown_example

    config = Config.of_run(key["run"])
    store = cached.find(key["encoded"])
    if store is None:
        raise GraftuneError("its file is gone or damaged", fix="prepare the data again by starting a run")
    tokenizer, _ = tokenizer_of(config)
    pieces = Pieces(tokenizer)
    whole = Dataset(Examples(store), store.summary(), "", "", tokenizer)
    held = 0.0 if config.data.eval_data else config.data.val_split
    examples = split(whole, held, config.train.seed)[0].examples

    def matching(search: str) -> tuple[list[int], int]:
        """The examples that contain a text, and how many were searched within `LONGEST_SEARCH`."""
        found, until = [], time.monotonic() + LONGEST_SEARCH
        for index in range(len(examples)):
            if search in tokenizer.decode(examples[index].tokens).lower():
                found.append(index)
            if time.monotonic() > until:
                return found, index + 1
        return found, len(examples)

    def answer(request: Document) -> Iterator[Document]:
        start, size, search = request["page"] * request["size"], request["size"], request["search"].lower()
        count = len(examples)
        indices, seen = matching(search) if search else (range(count), count)
        wanted = indices[start : start + size]
        shown = [shown_example(index, examples[index], pieces, side_of(examples, index)) for index in wanted]
        yield {"total": len(indices), "examples": shown, "searched": seen, "of": count}

    return answer


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
