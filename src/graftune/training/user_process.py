"""The process of a user's function (user_function.py): `python user_process.py SYS_PATH FILE FUNCTION SECONDS KIND`.

It imports the function, writes a first line of JSON (why that failed, or a list of the parameters without a default),
then reads calls as lines of JSON and answers each with a line: its numbers, or its error. A metric's numbers have
names; a reward's are a list, with null where the function returned None, and `bad` maps the positions of values that
are not finite numbers to the reasons. It runs by its path and imports nothing of graftune.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import math
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

GIVEN = ("prompt", "answer", "reference", "record")
MOST_NAMES, LONGEST = 16, 500  # numbers of one call, and characters of a name or an error


def load(path: str, name: str) -> Callable[..., Any]:
    sys.path.insert(0, os.path.dirname(path))  # for imports of files beside it
    spec = importlib.util.spec_from_file_location("graftune_user", path)
    if spec is None or spec.loader is None:
        raise ImportError("it is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise ImportError(f"it has no function {name}")
    return function


class WrongCount(ValueError):
    """A reward function returned more or fewer numbers than there are completions."""


def needed(function: Callable[..., Any]) -> list[str]:
    """The parameters without a default."""
    parameters = inspect.signature(function).parameters.values()
    wanted = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if positional := [p.name for p in wanted if p.kind is p.POSITIONAL_ONLY]:
        raise TypeError(f"its parameter {positional[0]} is positional-only, and arguments are passed by name")
    return [p.name for p in wanted]


def check_metric(function: Callable[..., Any]) -> None:
    """Refuse a function that needs something else than GIVEN."""
    for name in needed(function):
        if name not in GIVEN:
            raise TypeError(f"it takes {name}; a metric takes some of {', '.join(GIVEN)}, by these names")


def numbers(value: Any, name: str) -> dict[str, float]:
    if not isinstance(value, dict):
        return {name: _finite(value, "it returned")}
    if not value or len(value) > MOST_NAMES:
        raise TypeError(f"it returned a dict of {len(value)} entries, and 1 to {MOST_NAMES} are allowed")
    return {str(key)[:LONGEST]: _finite(inner, f"its dict has for {str(key)[:60]!r}") for key, inner in value.items()}


def rewards(value: Any, count: int) -> dict[str, Any]:
    found = value.tolist() if hasattr(value, "tolist") else value
    if not hasattr(found, "__iter__") or isinstance(found, str | bytes | dict):
        raise TypeError(f"it returned {repr(value)[:60]}, which is not a list of numbers")
    found = list(found)
    if len(found) != count:
        raise WrongCount(f"it returned {len(found)} numbers for {count} completions")
    made: list[float | None] = []
    bad: dict[int, str] = {}
    for place, one in enumerate(found):
        try:
            made.append(None if one is None else _finite(one, "it returned"))
        except (TypeError, ValueError) as error:
            made.append(None)
            bad[place] = str(error)
    return {"numbers": made, "bad": bad}


def called(function: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Call with those of the keywords that the function takes; an async function is run to its end."""
    parameters = inspect.signature(function).parameters.values()
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        given = {p.name: given[p.name] for p in parameters if p.name in given and p.kind is not p.POSITIONAL_ONLY}
    found = function(**given)
    return asyncio.run(_awaited(found)) if inspect.isawaitable(found) else found


async def _awaited(value: Any) -> Any:
    return await value


def _finite(value: Any, what: str) -> float:
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise TypeError(f"{what} {repr(value)[:60]}, which is not a number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{what} {number}, which is not finite")
    return number


def _error(error: BaseException, path: str) -> str:
    """The error in one line, with its line in the function's file."""
    frames = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    where = f" (line {frames[-1]} of {os.path.basename(path)})" if frames else ""
    kind = "" if isinstance(error, WrongCount) else f"{type(error).__name__}: "  # users do not know this class
    return " ".join(f"{kind}{error}".split())[:LONGEST] + where


def _main(path: str, name: str, seconds: float, kind: str) -> None:
    calls, out = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what the function prints goes to stderr

    def say(document: Any) -> None:
        out.write(json.dumps(document) + "\n")
        out.flush()

    try:
        function = load(path, name)
        if kind == "metric":
            check_metric(function)
        say(needed(function))
    except BaseException as error:
        return say(_error(error, path))
    for line in calls:
        given = json.loads(line)
        signal.alarm(math.ceil(seconds) + 5)  # ends a call that hangs if the run itself was killed
        try:
            if kind == "reward":
                say(rewards(called(function, given), len(given["completions"])))
            else:
                say({"numbers": numbers(called(function, given), name)})
        except BaseException as error:
            say({"error": _error(error, path), "wrong_count": isinstance(error, WrongCount)})
        signal.alarm(0)
    return None


if __name__ == "__main__":
    sys.path[:] = json.loads(sys.argv[1])
    _main(sys.argv[2], sys.argv[3], float(sys.argv[4]), sys.argv[5])
