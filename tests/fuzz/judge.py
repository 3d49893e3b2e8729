"""What may come of a damaged file: an answer, or GraftuneError with one printable sentence; little time, little memory.

Time is the process's own (the machine may be busy). Memory is the growth of the resident set's highest mark, which the
kernel sets back before each input where it can; whoever runs this also limits the address space, so that what is asked
for but never touched is noticed, too.
"""

from __future__ import annotations

import os
import re
import resource
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from graftune.errors import GraftuneError

SECONDS = 1.0  # of CPU time
BYTES = 64 << 20
LONGEST = 2000  # characters of a message: three parts of 600, and what joins them
PAGE = os.sysconf("SC_PAGESIZE")
# Control characters, line breaks of any kind, halves of characters, and what turns the direction of a line.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_CLEAR, _STATM = "/proc/self/clear_refs", "/proc/self/statm"


@dataclass
class Verdict:
    accepted: bool
    seconds: float
    grown: int  # bytes
    fault: str = ""  # what is wrong; empty: nothing
    detail: str = ""


def resident() -> int:
    with open(_STATM, "rb") as file:
        return int(file.read().split()[1]) * PAGE


def forget_peak() -> bool:
    """Sets the mark back to what is resident now; False where the kernel does not let us."""
    try:
        with open(_CLEAR, "wb") as file:
            file.write(b"5")
        return True
    except OSError:
        return False


def peak() -> int:
    with open("/proc/self/status", "rb") as file:
        for line in file:
            if line.startswith(b"VmHWM"):
                return int(line.split()[1]) << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def bad_message(text: str) -> str:
    """What is wrong with a message; empty if it may be printed."""
    if not text.strip():
        return "an empty message"
    if len(text) > LONGEST:
        return f"a message of {len(text)} characters"
    found = _UNPRINTABLE.search(text.replace("\n  ", ""))  # a list of unknown keys has a line for each
    if found is not None:
        return f"U+{ord(found[0]):04X} in a message"
    return ""


def judged(read: Callable[[], object], size: int, factor: float) -> Verdict:
    """One input of `size` bytes, read once; a second time if it took too long or too much, since the first may have
    paid for something else."""
    verdict = _once(read, size, factor)
    if verdict.fault in ("slow", "memory"):
        verdict = _once(read, size, factor)
    return verdict


def _once(read: Callable[[], object], size: int, factor: float) -> Verdict:
    before = resident() if forget_peak() else peak()
    began, accepted, fault, detail = time.process_time(), False, "", ""
    try:
        read()
        accepted = True
    except GraftuneError as error:
        fault = bad_message(str(error))
        detail = repr(str(error)[:500]) if fault else ""
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # panics of compiled libraries are no Exception
        fault, detail = f"{type(error).__name__}: {str(error)[:200]}", traceback.format_exc()[-3000:]
    seconds, grown = time.process_time() - began, max(0, peak() - before)
    if not fault and seconds > SECONDS:
        fault, detail = "slow", f"{seconds:.2f} s"
    if not fault and grown > BYTES + factor * size:
        fault, detail = "memory", f"{grown >> 20} MiB for {size} bytes"
    return Verdict(accepted, seconds, grown, fault, detail)
