"""A Hub name as the base, against a Hub of our own on loopback: found, unknown, of an unknown revision, unreachable.

The server speaks the few addresses that huggingface_hub's snapshot_download asks for. The client reads its settings
when it is imported, so it runs in a process of its own, one for all questions.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.train.runs import ROOT, write_data

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(http.server.BaseHTTPRequestHandler):
    """Serves `folder` as the model me/tiny at one commit."""

    folder: Path
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/me/broken"):
            self.close_connection = True  # hangs up without a word
            return
        if path.startswith("/api/models/me/tiny"):
            if path == f"/api/models/me/tiny/tree/{COMMIT}":  # what newer clients ask instead of `siblings`
                return self._send(json.dumps(self._tree()).encode())
            revision = path.removeprefix("/api/models/me/tiny").removeprefix("/revision/")
            if revision in ("", "main", COMMIT):
                return self._send(json.dumps(self._described()).encode())
            return self._refuse("RevisionNotFound")
        if path.startswith("/me/tiny/resolve/"):
            file = self.folder / path.split("/", 5)[5]
            if file.is_file():
                return self._send(file.read_bytes())
            return self._refuse("EntryNotFound")
        self._refuse("RepoNotFound")

    def _described(self) -> dict[str, object]:
        names = [{"rfilename": f.name} for f in sorted(self.folder.iterdir())]
        return {"_id": "1", "id": "me/tiny", "modelId": "me/tiny", "sha": COMMIT, "siblings": names, "private": False,
                "tags": [], "downloads": 0, "likes": 0}  # fmt: skip

    def _tree(self) -> list[dict[str, object]]:
        return [
            {"type": "file", "path": f.name, "size": f.stat().st_size, "oid": hashlib.sha1(f.read_bytes()).hexdigest()}
            for f in sorted(self.folder.iterdir())
        ]

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def _refuse(self, code: str) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def endpoint(tiny_folder) -> Iterator[str]:
    handler = type("Tiny", (Hub,), {"folder": tiny_folder("llama")})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


ASK = """
import contextlib, io, json, sys
from graftune.cli import main
for line in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(line)
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""


def test_a_hub_name(endpoint: str, tmp_path: Path) -> None:
    data = str(write_data(tmp_path / "d.jsonl"))
    ask = ["data", data, "--json", "--show", "0", "--base"]
    questions = [
        [*ask, "me/tiny"],
        [*ask, "me/tiny", "--revision", COMMIT],
        [*ask, "me/nobody"],
        [*ask, "me/tiny", "--revision", "nonesuch"],
        [*ask, "me/broken"],
        [*ask, "not a name"],
        ["train", "me/tiny", data, "--out", str(tmp_path / "run"), "--max-steps", "1", "--samples", "0", "--quiet"],
    ]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING", "http", "HTTP", "ALL_", "all_"))}
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hf"), "PYTHONPATH": str(ROOT / "src")}
    settings |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", ASK]
    done = subprocess.run(command, input=json.dumps(questions), capture_output=True, text=True, env=kept | settings)
    assert done.returncode == 0, done.stderr
    found, at_commit, nobody, nonesuch, broken, no_name, trained = map(json.loads, done.stdout.splitlines())
    for code, out, _ in (found, at_commit):
        assert code == 0 and json.loads(out)["examples"] == 16, done.stdout
    for code, out, err in (nobody, nonesuch, broken, no_name):
        assert code == 2 and out == "" and err.startswith("graftune: ") and err.count("\n") == 1, err
    assert "me/nobody: is neither a file or folder here nor a model on the Hub" in nobody[2]
    assert "me/tiny: has no revision 'nonesuch' on the Hub" in nonesuch[2]
    assert "me/broken" in broken[2] and "the Hub could not be reached" in broken[2]
    assert "not a name: no such file or folder" in no_name[2]
    assert trained[0] == 0, trained
    config = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "me/tiny"


def test_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The tests themselves run with the Hub switched off: a name that is not cached is one sentence."""
    from graftune.cli import main

    if os.environ.get("HF_HUB_OFFLINE") != "1":
        pytest.skip("HF_HUB_OFFLINE is not 1 here: the Hub may be reachable")
    assert main(["train", "nobody/knows-this-model", "--out", str(tmp_path / "run")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("graftune: nobody/knows-this-model: ") and err.count("\n") == 1
    assert not (tmp_path / "run").exists()
