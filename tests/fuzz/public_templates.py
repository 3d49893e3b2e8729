"""Runs real chat templates, a folder of Jinja files, through the judge: python -m tests.fuzz.public_templates FOLDER

What stands before the author's first text in a trained run is printed where it is neither blank nor part of what the
rendering has after the prompt, so that a person can look at it.
"""

from __future__ import annotations

import argparse
import collections
import random
import re
import sys
from pathlib import Path

from graftune.data.row_encoder import RowEncoder
from graftune.errors import GraftuneError
from graftune.settings.config import DataConfig
from tests.data.generated import conversations
from tests.data.template_judge import Verdict, judge_public, opened

CONTROL = re.compile(r"<\|[^<>\s'\"{}|]{1,40}\|?>|<[^<>\s'\"{}|/]{1,40}\|>|<\uff5c[^<>\uff5c\s]{1,40}\uff5c>|"
                     r"<(?:start_of_turn|end_of_turn|sop|s|/s|eot|bot)>|\[/?[A-Z_]{3,30}\]")  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--show", default="wrong,silent,crash")
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    counts, seen = collections.Counter[str](), set[tuple[str, str, str]]()
    for path in sorted(given.folder.glob("*.jinja*")):
        if given.only not in path.name:
            continue
        source = path.read_text()
        names = tuple(sorted(set(CONTROL.findall(source)) | {"<|eom|>"}))
        try:
            encoder = RowEncoder(opened(source, names), DataConfig(max_seq_len=1 << 16, append_eos=True), "data")
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
    print(dict(counts))
    return int(any(counts[kind] for kind in ("wrong", "silent", "crash")))


if __name__ == "__main__":
    sys.exit(main())
