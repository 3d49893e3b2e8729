"""Coverage-guided damage where atheris is installed: `python -m tests.soak.soak_atheris gguf -runs=20000`.

The bytes that atheris makes are the file itself, so this suits formats of one file. What may come of them is judged as
in soak_fuzz.py; a failure is raised, and atheris keeps the input. It is no dependency of the tests.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path


def main() -> None:
    import atheris

    with atheris.instrument_imports(include=["graftune"]):
        from graftune.tokenizer import examine
        from tests.fuzz import formats
        from tests.fuzz.judge import judged
    examine.faults_of = formats.examined_here
    place = Path(tempfile.mkdtemp(prefix="atheris-"))
    one = {known.name: known for known in formats.all_formats(place / "seeds")}[sys.argv.pop(1)]
    (place / "input").mkdir()
    ((name, _),) = one.made(random.Random(0)).items()
    for number in range(50):  # to begin with
        (place / "corpus").mkdir(exist_ok=True)
        (place / "corpus" / str(number)).write_bytes(one.made(random.Random(number))[name] or b"")

    def look(content: bytes) -> None:
        size = formats.write(place / "input", {name: content})
        verdict = judged(lambda: one.read(place / "input"), size, one.factor)
        assert not verdict.fault, f"{verdict.fault}\n{verdict.detail}"

    atheris.Setup([*sys.argv, str(place / "corpus")], look)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
