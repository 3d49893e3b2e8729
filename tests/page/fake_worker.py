"""Answers the chat box as graftune.cli.worker does, without a model: two pieces a side, the second one only when a file
called `go` lies in the run folder. What it says shows what it was asked."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path


def main() -> None:
    key = json.loads(sys.argv[2])
    for line in sys.stdin:
        request = json.loads(line)
        if "messages" not in request:
            continue  # an answer is to be stopped
        number, messages = request["number"], request["messages"]

        def say(number: int = number, **document: object) -> None:
            print(json.dumps({"number": number, **document}), flush=True)

        for who in ("base", "tuned"):
            say(who=who, text=f"{who} of {key['checkpoint']} ")
        while not (Path(key["run"]) / "go").exists():
            time.sleep(0.02)
        for who in ("base", "tuned"):
            roles = "".join(message["role"][0] for message in messages)
            say(who=who, text=f"was asked {roles} <b>{messages[-1]['content']}</b>")
            say(who=who, done=True, reason="end")
        say(end=True)


if __name__ == "__main__":
    main()
