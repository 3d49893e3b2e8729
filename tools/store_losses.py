"""Writes tests/stored_losses/*.json anew: the first hundred losses of five small runs.

OMP_NUM_THREADS=1 python tools/store_losses.py "why they move" [CASE ...]

The reason is stored beside the losses, with the commit, the machine and the versions they were computed with. Losses
that are still the same to the bit keep their old record: a reason is for what it changed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.support import stored  # noqa: E402 (found by the line above)

SHORTEST = 12  # characters of a reason


def main(words: list[str]) -> int:
    why, names = (words[0].strip(), words[1:] or list(stored.CASES)) if words else ("", [])
    unknown = [name for name in names if name not in stored.CASES]
    if len(why) < SHORTEST or why in stored.CASES or unknown:
        print(
            f'say why, as in: python tools/store_losses.py "AdamW adds eps inside the root" [{" ".join(stored.CASES)}]'
        )
        return 2
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    stored.FOLDER.mkdir(exist_ok=True)
    for name in names:
        path, found = stored.FOLDER / f"{name}.json", stored.CASES[name]()
        before = stored.record(name) if path.exists() else None
        if before is not None and before["losses"] == found:
            print(f"{name}: the same to the bit, left as it is")
            continue
        facts = {"why": why, "commit": git.stdout.strip(), "seed": stored.SEED, **stored.machine()}
        text = json.dumps(facts | {"losses": found}, indent=0)
        path.write_text(text + "\n")
        moved = "new" if before is None else f"moved by {stored.worst(found, before['losses'])[0]:.1e}"
        print(f"{name}: {moved}; {found[0]:.4f} -> {found[-1]:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
