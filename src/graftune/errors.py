"""The one error a user sees: what is wrong, where, and how to fix it, in one sentence.

There is one class and no hierarchy: no caller needs to tell mistakes apart, and the command line turns each into one
line on stderr and exit code 2. Broken invariants of our own are plain asserts.

Names and values in a message often come from an untrusted file. They are escaped and cut here, where every message
passes, rather than where each is quoted: a tokenizer must not be able to clear the user's terminal or fill it with one
token's name. Keys and passwords, which a service's own error may quote, are removed here too: messages go into logs and
run folders, and users send those to others.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Sequence

_CONTROLS = {
    **{code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"},  # Unicode's control pictures
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
    # Directional overrides can make a line read other than it is.
    **dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x206A)), 0xFFFD),
    # So can line breaks that a terminal or a log viewer knows and we do not.
    **dict.fromkeys((0x2028, 0x2029), 0xFFFD),
    **dict.fromkeys(range(0xD800, 0xE000), 0xFFFD),  # half a character: no stream could encode it
}
LONGEST = 600  # characters of each part of a message
MOST_LINES = 60  # of a message with a list
_SECRET = ("TOKEN", "API_KEY", "PASSWORD", "SECRET", "SECRET_KEY", "ACCESS_KEY")  # how names of variables end
_SHORTEST = 8  # characters of a secret: a shorter one would be found in every other word
_LOGIN = re.compile(r"(?<=://)[^\s/]+(?=@)")
# Secrets in the query of an address. The rest of it stays: this reads all that is logged, and data has many addresses.
_QUERY = re.compile(r"([?&][\w-]*(?:token|key|secret|signature|sig|password)=)[^\s&'\"]+", re.IGNORECASE)


def printable(text: str) -> str:
    """`text` with its control characters made visible; newlines and tabs stay, and CR LF is a newline."""
    return text.replace("\r\n", "\n").translate(_CONTROLS)


def without_secrets(text: str) -> str:
    """`text` without the keys, tokens and passwords in this process's environment, and without those in addresses:
    logins, and what a query calls a token or key."""
    for name, value in _secrets():
        text = text.replace(value, f"[{name}]")
    return _QUERY.sub(r"\1[secret]", _LOGIN.sub("[login]", text)) if "://" in text else text


@functools.cache
def _secrets() -> list[tuple[str, str]]:
    """Names and values of secrets in the environment at the first call, the longest first: one may contain another."""
    found = [(n, v) for n, v in os.environ.items() if n.upper().endswith(_SECRET) and len(v) >= _SHORTEST]
    return sorted(found, key=lambda each: -len(each[1]))


def one_line(text: str, longest: int = LONGEST) -> str:
    """`text` made printable, on one line, and cut in the middle if it is longer than `longest` characters. Without
    secrets: most of what comes here is a message."""
    text = without_secrets(text)
    line = " ".join(printable(text[: 8 * longest] + (text[-longest:] if len(text) > 8 * longest else "")).split())
    if len(line) <= longest:
        return line
    head = longest * 2 // 3
    return f"{line[:head]} … {line[-(longest - head) :]}"


class GraftuneError(ValueError):
    """A mistake the user can fix. `where` is a file, line, field or row; `fix` says what to do. `lines`: one for each
    of several mistakes of the same kind, printed below."""

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None, lines: Sequence[str] = ()):
        self.what = one_line(what)
        self.where = None if where is None else one_line(where)
        self.fix = None if fix is None else one_line(fix)
        head = f"{self.where}: {self.what}" if where else self.what
        more = [f"and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
        self.lines = [*map(one_line, lines[:MOST_LINES]), *more]
        super().__init__("\n  ".join([f"{head}; {self.fix}" if fix else head, *self.lines]))
