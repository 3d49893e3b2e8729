"""Runs real chat templates, a folder of Jinja files, through the judge: python -m tests.fuzz.public_templates FOLDER

What stands before the author's first text in a trained run is printed where it is neither blank nor part of what the
rendering has after the prompt, so that a person can look at it. A template NAME.jinja with a NAME_training.jinja beside
it, as TRL ships them, is also compared with the generation marks of that one (training_marks.py).
"""

from __future__ import annotations

import argparse
import collections
import random
import sys
from pathlib import Path

from graftune.data.row_encoder import RowEncoder
from graftune.errors import GraftuneError
from graftune.settings.sections import DataConfig
from tests.data.generated import conversations
from tests.data.template_judge import Verdict, judge_public, opened
from tests.data.training_marks import CONTROL, compare, encoder_of
from tests.data.training_marks import conversations as marked_conversations


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--show", default="wrong,silent,crash")
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    counts, seen = collections.Counter[str](), set[tuple[str, str, str]]()
    for path in sorted(given.folder.glob("*.jinja*")):
        if given.only not in path.name or path.stem.endswith("_training"):
            continue
        training = path.with_name(f"{path.stem}_training.jinja")
        source = path.read_text()
        names = tuple(sorted(set(CONTROL.findall(source)) | {"<|eom|>"}))
        try:
            config = DataConfig(max_seq_len=1 << 16, append_eos=True, train_reasoning="all")
            encoder = RowEncoder(opened(source, names), config, "data")
            encoder._open()
        except GraftuneError as error:
            counts["template refused"] += 1
            print(f"-- {path.name}: {error}")
            continue
        for name, messages, tools in conversations(random.Random(path.name), "think"):
            verdict: Verdict = judge_public(encoder, source, messages, tools)
            counts[verdict.kind] += 1
            key = (path.name, verdict.kind, verdict.key)
            if verdict.kind in given.show.split(",") and key not in seen:
                seen.add(key)
                print(f"== {path.name}, {name}: {verdict.kind}\n  {verdict.detail}")
        if training.is_file():
            counts.update(compared_with_marks(path.name, source, training.read_text()))
    print(dict(counts))
    return int(any(counts[kind] for kind in ("wrong", "silent", "crash")))


def compared_with_marks(name: str, source: str, training: str) -> collections.Counter[str]:
    """Prints, for conversations whose trained tokens no policy derives from the marks, what differs."""
    counts, encoder = collections.Counter[str](), encoder_of(source, {})
    for title, messages, tools in marked_conversations():
        try:
            found = compare(encoder, training, messages, tools, {})
        except Exception as error:  # the template does not take the conversation
            counts["marks: not rendered"] += 1
            print(f"-- {name}, {title}: {error!r}"[:200])
            continue
        counts["marks: other tokens" if found.fault else "marks: equal"] += 1
        if found.fault:
            print(f"** {name}, {title}: {found.fault}")
    return counts


if __name__ == "__main__":
    sys.exit(main())
