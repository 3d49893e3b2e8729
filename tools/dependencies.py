"""What a user installs with graftune, and under which licences, as the installed packages say themselves.

    python tools/dependencies.py

prints a table; the exit code is 1 where a licence is not among those that allow everything a user may want to do, as
tests/test_dependencies.py asks. It looks at the packages that `pip install graftune` brings, and at those that they
bring, on this machine. Known vulnerabilities are another matter: they are looked up on the network (`pip-audit` does),
and this tool looks up nothing.
"""

from __future__ import annotations

import importlib.metadata as metadata
import re
import sys

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# Licences that let everybody use, change and pass on, also in a product. The MPL asks only that changes to its own
# files be passed on; we do not change them.
ACCEPTED = re.compile(
    r"MIT|BSD|0BSD|Apache|ISC|PSF|Python Software Foundation|CNRI-Python|HPND|Zlib|BSL-1.0|CC0-1.0|LLVM-exception"
    r"|MPL-2.0|Mozilla Public License 2.0",
    re.IGNORECASE,
)
REFUSED = re.compile(r"\b(A|L)?GPL|General Public|SSPL|proprietary|non-?commercial", re.IGNORECASE)


def brought(name: str = "graftune") -> dict[str, set[str]]:
    """Every package that `name` needs, with those that ask for it."""
    found: dict[str, set[str]] = {}
    waiting = [name]
    while waiting:
        asking = waiting.pop()
        for line in metadata.requires(asking) or []:
            wanted = Requirement(line)
            if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
                continue
            package = canonicalize_name(wanted.name)
            if package not in found:
                waiting.append(package)
            found.setdefault(package, set()).add(asking)
    return found


def licence(package: str) -> str:
    """The licence as an expression, as a classifier, or as the first line of its text."""
    said = metadata.metadata(package)
    classes = [line.rpartition(" :: ")[2] for line in said.get_all("Classifier") or [] if line.startswith("License")]
    text = (said.get("License") or "").strip().partition("\n")[0][:60]
    return said.get("License-Expression") or ", ".join(classes) or text or "says nothing"


def is_accepted(words: str) -> bool:
    return bool(ACCEPTED.search(words)) and not REFUSED.search(words)


def table() -> list[str]:
    lines = ["| package | version here | licence | asked for by |", "|---|---|---|---|"]
    for package, asking in sorted(brought().items()):
        words = licence(package)
        words = words if len(words) < 120 else words[:117] + "..."
        lines.append(f"| {package} | {metadata.version(package)} | {words} | {', '.join(sorted(asking))} |")
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
    sys.exit(int(not all(is_accepted(licence(package)) for package in brought())))
