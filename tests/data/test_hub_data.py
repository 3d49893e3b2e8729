"""Data sets by their name on the Hub, against a Hub of our own on loopback: which files a split and a subset are, what
is said where there is none, where access is gated or the Hub does not answer, and the cache without a network.

The client reads its settings when it is imported, so it runs in a process of its own, one for all questions (without
torch, which reading rows does not need).
"""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import unquote

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "f" * 40  # of refs/convert/parquet
README = """---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: [main/test-*]
- config_name: extra
  data_files: extra/**/*.jsonl
---
# A data set
"""


def row(text: str) -> str:
    return json.dumps({"text": text}) + "\n"


FILES: dict[str, dict[str, str]] = {
    "plain": {"train.jsonl": row("plain train"), "test.jsonl": row("plain test"), "dataset_infos.json": "{}"},
    "subsets": {
        "README.md": README,
        "main/train-00000.jsonl": row("main one"),
        "main/train-00001.jsonl": row("main two"),
        "main/test-00000.jsonl": row("main test"),
        "extra/deep/x.jsonl": row("extra"),
    },
    "named": {
        "README.md": "---\nconfigs:\n- data_files:\n    train_sft: a.jsonl\n    test_sft: b.jsonl\n---\n",
        "a.jsonl": row("a"),
        "b.jsonl": row("b"),
    },
    "formats": {"data/train.csv": "text\ncsv\n", "data/train.jsonl": row("jsonl"), "notes.txt": "x"},
    "script": {"script.py": "print()", "data.zip": "PK"},
    "images": {"picture.png": "x"},
    "gated": {"train.jsonl": row("secret")},
    "broken_readme": {"README.md": "---\nconfigs: [\n---\n", "train.jsonl": row("still read")},
}
CONVERTED = {"script": {"default/train/0000.jsonl": row("converted"), "default/test/0000.jsonl": row("not this")}}


class Hub(http.server.BaseHTTPRequestHandler):
    """Speaks the few addresses that huggingface_hub asks for."""

    protocol_version = "HTTP/1.1"
    asked: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(self.path.partition("?")[0])
        if path == "/stop":
            self._send(200, b"")
            return threading.Thread(target=self._stop).start()
        if found := re.fullmatch(r"/api/datasets/me/(\w+)(/revision/(?P<revision>.+)|/tree/(?P<tree>\w+))?", path):
            files = self._files(found[1], found["revision"] or found["tree"] or "main")
            if files is None:
                known = found[1] in FILES
                return self._send(404 if known else 401, b"", "RevisionNotFound" if known else "RepoNotFound")
            if found["tree"]:
                return self._send(200, json.dumps([self._entry(*pair) for pair in files.items()]).encode())
            return self._send(200, json.dumps(self._described(found[1], found["revision"] or "", files)).encode())
        if found := re.fullmatch(r"/datasets/me/(\w+)/resolve/(.+?)/(.+)", path):
            self.asked.append(f"{found[1]}/{found[3]}")
            files = self._files(found[1], found[2]) or {}
            if found[1] == "gated":
                return self._send(403, b"", "GatedRepo")
            if found[3] not in files:
                return self._send(404, b"", "EntryNotFound")
            return self._send(200, files[found[3]].encode(), commit=OTHER if found[2] == OTHER else COMMIT)
        self._send(404, b"", "RepoNotFound")

    @staticmethod
    def _files(name: str, revision: str) -> dict[str, str] | None:
        if revision in (OTHER, "refs/convert/parquet"):
            return CONVERTED.get(name)
        return {".gitattributes": "x", **FILES[name]} if name in FILES and revision in ("main", COMMIT) else None

    @staticmethod
    def _entry(name: str, text: str) -> dict[str, object]:
        return {"type": "file", "path": name, "size": len(text), "oid": hashlib.sha1(text.encode()).hexdigest()}

    @staticmethod
    def _described(name: str, revision: str, files: dict[str, str]) -> dict[str, object]:
        sha = OTHER if revision in (OTHER, "refs/convert/parquet") else COMMIT
        return {"_id": "1", "id": f"me/{name}", "sha": sha, "siblings": [{"rfilename": n} for n in files],
                "private": False, "tags": [], "downloads": 0, "likes": 0}  # fmt: skip

    def _stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def _send(self, code: int, body: bytes, error: str = "", commit: str = COMMIT) -> None:
        self.send_response(code)
        headers = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(body).hexdigest()}"'}
        if error:
            headers |= {"X-Error-Code": error, "X-Error-Message": error}
        for key, value in {**headers, "Content-Length": str(len(body)), "Connection": "close"}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


ASK = """
import contextlib, json, os, sys, time, urllib.request
import huggingface_hub.constants
from graftune.data.source import rows, sources
from graftune.errors import GraftuneError
wait = time.sleep
time.sleep = lambda seconds: wait(seconds / 100)  # between two tries
for value in json.load(sys.stdin):
    if value == "stop":
        with contextlib.suppress(OSError):
            while True:
                urllib.request.urlopen(os.environ["HF_ENDPOINT"] + "/stop").read()
        continue
    if value == "offline":
        huggingface_hub.constants.HF_HUB_OFFLINE = True
        continue
    notes = []
    try:
        data = value if isinstance(value, str) else tuple(value)
        found = [row.value["text"] for row in rows(sources(data, notes.append))]
    except GraftuneError as error:
        found = str(error)
    print(json.dumps([found, notes]))
print(json.dumps("torch" in sys.modules))
"""


def asking(cache: Path, questions: list[Any]) -> list[Any]:
    Hub.asked.clear()
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING", "http", "HTTP", "ALL_", "all_"))}
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        source = str(Path(__file__).parents[2] / "src")
        settings = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_address[1]}", "HF_HOME": str(cache)}
        settings |= {"PYTHONPATH": source, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        command = [sys.executable, "-c", ASK]
        text = json.dumps(questions)
        done = subprocess.run(command, input=text, capture_output=True, text=True, env=kept | settings)
        server.shutdown()
    assert done.returncode == 0, done.stderr
    *answers, torch = map(json.loads, done.stdout.splitlines())
    assert not torch, "reading rows needs no torch"
    return answers


GOOD: dict[str, Any] = {
    "me/plain": ["plain train"],
    "me/plain:test": ["plain test"],
    "https://huggingface.co/datasets/me/plain": ["plain train"],
    "me/subsets/main": ["main one", "main two"],
    "me/subsets/main:test": ["main test"],
    "me/subsets/extra": ["extra"],
    "me/named:test_sft": ["b"],
    "me/formats": ["jsonl"],
    "me/script": ["converted"],
    "me/broken_readme": ["still read"],
}
BAD = {
    "me/nobody": "me/nobody: is neither a file or folder here nor a data set on the Hub; check the name or log in",
    "me/plain:dev": "has no split 'dev'; it has test, train",
    "me/named": "has no split 'train'; it has test_sft, train_sft; name one of them with split, or on the Hub as",
    "me/subsets": "me/subsets: has the subsets main, extra; name one with subset, or as me/subsets/main",
    "me/subsets/none": "has no subset 'none'; it has main, extra",
    "me/formats/none": "has no subset 'none'; its folders are data",
    "me/images": "without files that can be read here (picture.png)",
    "me/gated": "gated access on the Hub; accept its terms",
    "data/typo.jsonl": "data/typo.jsonl: no such file; check the path of the data",
    "typo": "no such file; check the path, or name a Hub data set as OWNER/NAME",
    "https://example.org/x.jsonl": "is an address on the web; download the file",
}


def test_names_splits_and_subsets(tmp_path: Path) -> None:
    mixture = [{"path": "me/subsets", "subset": "main", "split": "test", "weight": 2}, {"path": "me/plain"}]
    pinned = [{"path": "me/plain", "revision": "nonesuch"}]
    asked = [*GOOD, *BAD, mixture, pinned, "stop", "me/plain", "me/other", "offline", "me/plain", "me/other"]
    answers = asking(tmp_path / "hf", asked)
    good, bad, rest = answers[: len(GOOD)], answers[len(GOOD) : len(GOOD) + len(BAD)], answers[len(GOOD) + len(BAD) :]
    assert {name: found for name, (found, _) in zip(GOOD, good, strict=True)} == GOOD
    assert good[0][1] == ["me/plain: split train, train.jsonl"]
    assert good[8][1][0] == "me/script: read from the Hub's own conversion to Parquet"
    for (name, said), (found, _) in zip(BAD.items(), bad, strict=True):
        assert isinstance(found, str) and said in found and "\n" not in found, (name, found)
    mixed, unpinned, cached, gone, offline, gone_offline = (found for found, _ in rest)
    assert mixed == ["main test", "plain train"]
    assert "has no revision 'nonesuch' on the Hub" in unpinned
    assert cached == offline == ["plain train"], "what was fetched once needs no network"
    assert "me/other: is not a file or folder here" in gone and "could not be reached" in gone
    assert "HF_HUB_OFFLINE keeps it from being downloaded" in gone_offline
    fetched = set(Hub.asked)
    assert "formats/data/train.csv" not in fetched and "subsets/extra/deep/x.jsonl" in fetched
    assert not any("zip" in name or "dataset_infos" in name for name in fetched)


def test_offline_here(tmp_path: Path) -> None:
    """The tests themselves run with the Hub switched off: a name that is not cached is one sentence."""
    from graftune.data.source import sources
    from graftune.errors import GraftuneError

    if os.environ.get("HF_HUB_OFFLINE") != "1":
        pytest.skip("HF_HUB_OFFLINE is not 1 here: the Hub may be reachable")
    with pytest.raises(GraftuneError, match="nobody/knows-this-data: is not a file or folder here"):
        sources("nobody/knows-this-data")
