"""The page's process that answers, in this process: it needs no web server, which a machine with a GPU may not have."""

from __future__ import annotations

import io
import json
from typing import Any

from graftune.cli.worker import Requests, serve


def answers(opener: Any, *requests: dict[str, Any]) -> list[dict[str, Any]]:
    lines = "".join(json.dumps({"number": number, **request}) + "\n" for number, request in enumerate(requests, 1))
    out, waiting = io.StringIO(), Requests(io.StringIO(lines))
    waiting.is_stopped = lambda number: number in [n for n, r in enumerate(requests, 1) if r.get("stopped")]  # type: ignore[method-assign]
    serve(opener, waiting, out)
    return [json.loads(line) for line in out.getvalue().splitlines()]
