"""metrics.jsonl: the events of a run, one JSON object per line, appended and never rewritten.

The file must be readable after a `kill -9`: every line is one write, an unfinished last line is skipped when reading
and cut off when a resumed run opens the file, and NaN and infinity, which JSON lacks, become null. If the disk is full,
the part of a line that was written is removed. A database or a binary log would be faster, but `tail -f`, `jq` and the
dashboard can read this file.

Events, each with `event` and `time` (unix seconds):
  run_start, resume {step}, extend {step, steps, steps_before (of the whole run)},
  step {step, loss, grad_norm, lr, tokens, tok_s, skipped; micro_batches, tflops (the model's, over the last steps), on
  CUDA floor_share (where the floor was measured) and host_idle},
  profile {step, step_ms, plain_ms, owned, bottleneck; of profile_every},
  routing {step, layers: [{layer, entropy, tokens (of each expert)}]; of a mixture, after steps 1, 50, 100 and so on},
  memory {step, planned, measured (bytes), owners; after the first step},
  phase {phase: what the run does from here on},
  eval {step, epoch, loss, perplexity, response_tokens; the first before step 1; metrics (means by name: the metric's,
  then the loss's own figures), with a metric metric_records, and where calls failed metric_failed and metric_error},
  warning,
  sample {step (0: of the base), answers, prompts, references, shown (how many of them people see; the rest is for the
  score)},
  answers {step (the first of the round), best, worst: lists of {prompt, answer, reward}; of reinforcement learning,
  whose steps also have the figures of docs/rl.md},
  (step and eval also have the loss's own figures, as cross_entropy and drift of the anchored loss; steps of a mixture
  router_entropy, busiest_expert and idle_experts)
  run_end {step, stopped, host_ms (median host time of a step), captures, on CUDA peak_device_memory, ...}.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import date
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

from graftune.errors import GraftuneError, without_secrets
from graftune.io.files import open_own, open_plain
from graftune.io.json_file import DEEPEST, is_deep, no_collections

Event = dict[str, Any]
BEGINNINGS = ("run_start", "resume")
MOST_LEVELS, CUT = 30, "[cut]"  # lists and objects inside each other that are written, and what replaces the others
LARGEST, LONGEST = 4 << 30, 64 << 20  # bytes of a log (ten million steps have fewer), and of one line
# Fields of a step that are no curve of it; every other number is one, whichever loss or reward reports it.
NOT_CURVES = ("event", "time", "step", "epoch", "tokens", "response_tokens", "micro_batches", "tflops", "host_idle")
MOST_CURVES = 64
_NUMBERS = ("loss", "lr", "grad_norm", "tok_s")  # fields of steps and evaluations that readers compute with


class EventLog:
    """Appends events to `path`, creating it if need be. One writer at a time; any number of readers."""

    def __init__(self, path: str | Path, listener: Callable[[Event], None] | None = None):
        """`listener` is called with each event once it is written."""
        self.path, self._listener = Path(path), listener
        nowhere = self.path == Path(os.devnull)  # of a rank that writes no log
        handle = os.open(self.path, os.O_WRONLY) if nowhere else open_own(self.path, os.O_APPEND)
        self._file = FileIO(handle, "wb" if nowhere else "rb+")  # held for the whole run; close() ends it
        if not nowhere:
            try:
                _cut_torn_line(self._file, self.path)
            except BaseException:
                self._file.close()
                raise

    def emit(self, event: str, **fields: Any) -> None:
        """Write one line. NaN and infinity become null; secrets, which a tracker's message or the command line may
        contain, are removed."""
        written = plain({"event": event, "time": round(time.time(), 3), **fields}, without_secrets)
        self._append(json.dumps(written, allow_nan=False).encode("ascii") + b"\n")
        if self._listener is not None:
            self._listener(written)

    def _append(self, line: bytes) -> None:
        end = self._file.seek(0, os.SEEK_END)
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(end)
            raise OSError(error.errno, error.strerror, str(self.path)) from None

    def sync(self) -> None:
        """Flush the file to the disk, so that it survives a power failure."""
        if self.path != Path(os.devnull):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def read_events(path: str | Path) -> list[Event]:
    """All events of a file. An unfinished last line is left out; any other bad line is an error."""
    events: list[Event] = []
    with no_collections(), open_plain(path) as file:
        if os.fstat(file.fileno()).st_size > LARGEST:
            raise GraftuneError(f"is larger than {LARGEST >> 30} GiB", where=str(path), fix="restore the file")
        odd = 0  # the first line that is not an event: a crash may leave a line of zeros at the end
        for number, line in enumerate(iter(lambda: file.readline(LONGEST + 1), b""), 1):
            if (odd and line.endswith(b"\n")) or len(line) > LONGEST:
                where = f"{path}, line {odd or number}"
                raise GraftuneError("is not an event", where=where, fix="remove the line, or restore the file")
            event = parsed(line)
            if event is None:
                odd = odd or number
            else:
                events.append(event)
    return events


def latest(events: list[Event], kind: str) -> list[Event]:
    """Events of one kind, the last of each step, in order of steps, without those that a resume took back.

    A run killed at step 60 and resumed from the checkpoint of step 50 writes 51 to 60 again; if it is stopped at 55,
    its first 56 to 60 do not count. A new run_start discards everything before it.
    """
    found = standing([e for e in events if e["event"] in (kind, *BEGINNINGS)])
    by_step = {step: e for e in found if e["event"] == kind and (step := step_of(e)) is not None}
    return [_with_numbers(by_step[step]) for step in sorted(by_step)]


def _with_numbers(event: Event) -> Event:
    """The event with null for every field that should be a number and is not, as in a log that someone has edited."""
    odd = [name for name in _NUMBERS if event.get(name) is not None and number(event[name]) is None]
    return {**event, **dict.fromkeys(odd)} if odd else event


def whole(value: object) -> int | None:
    """A whole number that JavaScript can represent, not negative; otherwise None."""
    return value if type(value) is int and 0 <= value < 1 << 53 else None


def step_of(event: Event) -> int | None:
    return whole(event.get("step"))


def number(value: object) -> float | None:
    """The value as a float; None for other types, NaN, infinity and numbers beyond a float's range."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        return None
    return float(value)


def standing(events: list[Event]) -> list[Event]:
    """All events except those that a resume discarded, and the run_end before it."""
    kept: list[Event] = []
    for event in events:
        if event["event"] == "run_start":
            kept = []
        elif event["event"] == "resume" and (step := step_of(event)) is not None:
            kept = [e for e in kept if e["event"] != "run_end" and (step_of(e) or 0) <= step]
        kept.append(event)
    return kept


def sample_rows(events: list[Event]) -> list[dict[str, Any]]:
    """Answers to the run's prompts, one row per prompt and step. Those of step 0 are the base's. Answers
    that were generated for the score alone are left out."""
    prompts: list[Any] = []
    references: list[Any] = []
    base: list[Any] = []
    by_step: dict[int, list[Any]] = {}
    for event in events:
        step, shown, answers = step_of(event), event.get("shown"), event.get("answers")
        if event["event"] != "sample" or step is None or not isinstance(answers, list):
            continue
        answers = answers[:shown] if type(shown) is int and shown >= 0 else answers
        if isinstance(event.get("prompts"), list):
            prompts = event["prompts"]
            references = event["references"] if isinstance(event.get("references"), list) else []
        if step == 0:
            base = answers
        else:
            by_step[step] = answers
    rows = by_step or ({0: base} if base else {})
    return [
        {
            "step": step,
            "prompt": _at(prompts, i),
            "base": _at(base, i),
            "tuned": str(answer) if step else None,
            "reference": _at(references, i),
        }
        for step in sorted(rows)
        for i, answer in enumerate(rows[step])
    ]


def _at(texts: list[Any], place: int) -> str | None:
    return str(texts[place]) if place < len(texts) else None


def resume_marks(events: list[Event]) -> list[dict[str, Any]]:
    """The steps at which the run was resumed or got another length, each with a label."""
    found: dict[int, list[str]] = {}
    for event in events:
        step, total, before = step_of(event), whole(event.get("steps")), whole(event.get("steps_before"))
        if step is None or event["event"] not in ("resume", "extend"):
            continue
        label = "resumed"
        if event["event"] == "extend":
            label = f"{'shortened' if total and before and total < before else 'extended'} to {total}"
        found.setdefault(step, []).append(label)
    return [{"step": step, "label": ", ".join(dict.fromkeys(found[step]))} for step in sorted(found)]


def worked_seconds(events: list[Event]) -> float | None:
    """Seconds from each start to the last event before the next one; the time before a resume does not count."""
    worked, began, last = 0.0, None, 0.0
    for event in events:
        time = number(event.get("time"))
        if time is None:
            continue
        if event["event"] in BEGINNINGS:
            worked = 0.0 if began is None or event["event"] == "run_start" else worked + max(0.0, last - began)
            began = time
        last = time
    return None if began is None else worked + max(0.0, last - began)


def steps(events: list[Event]) -> list[Event]:
    return latest(events, "step")


def evals(events: list[Event]) -> list[Event]:
    return latest(events, "eval")


def parsed(line: bytes) -> Event | None:
    """The event on a line, or None."""
    if b"{" not in line:
        return None
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return None
    return None if line.count(b"[") + line.count(b"{") > DEEPEST and is_deep(event) else event


def _cut_torn_line(file: FileIO, path: Path) -> None:
    """Make the file end with a whole line: cut off what is not an event, or add a missing newline."""
    size = file.seek(0, os.SEEK_END)
    start = file.seek(max(0, size - 2 * LONGEST))
    *lines, torn = file.read(size - start).split(b"\n")
    if not lines and start:
        raise GraftuneError("does not end in an event", where=str(path), fix="restore the file")
    if parsed(torn) is not None:
        file.write(b"\n")
        return
    end = size - len(torn)
    if lines and parsed(lines[-1]) is None:  # a crash may leave zeros
        end -= len(lines[-1]) + 1
    file.truncate(end)


def plain(value: Any, text: Callable[[str], str] = str, depth: int = 0) -> Any:
    """`value` as JSON types that every browser reads, each text through `text`. Scalars of numpy and torch are read
    with `.item()`. NaN, infinity and whole numbers of more than 64 bits become null, and deep nesting is cut. Raises
    TypeError for other values that JSON lacks."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str | Path | date | bytes | set):  # the last three: values of a YAML file
        return text(str(value))
    if isinstance(value, int):
        return int(value) if value.bit_length() <= 64 else None
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, dict | list | tuple) and depth >= MOST_LEVELS:
        return CUT
    if isinstance(value, dict):
        return {str(key): plain(inner, text, depth + 1) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner, text, depth + 1) for inner in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain({f.name: getattr(value, f.name) for f in dataclasses.fields(value)}, text, depth)
    if hasattr(value, "item"):
        return plain(value.item(), text, depth)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def to_json(document: Any) -> str:
    """One line of strict JSON, in ASCII, so that no terminal's or pipe's encoding can break it."""
    return json.dumps(plain(document), allow_nan=False)
