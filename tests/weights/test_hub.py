"""A Hub name as the base, against a Hub of our own on loopback: found, unknown, of an unknown revision, unreachable,
broken off in the middle and taken up again, and found in the cache when there is no Hub at all. Of a repository only
what is read is fetched; one of GGUF files gives the one that is named.

The server speaks the few addresses that huggingface_hub's snapshot_download asks for. The client reads its settings
when it is imported, so each test's questions go to a process of their own: a fork of one that has imported everything
else, which is what takes seconds.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import gguf
import pytest
from safetensors.torch import load_file, save_file

from graftune.weights.base import open_base
from tests.training.runs import ROOT, write_data
from tests.weights import tiny_gguf

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def files_of(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


class Hub(http.server.BaseHTTPRequestHandler):
    """Serves `folder` as the model me/tiny at one commit, and `ggufs` as me/files."""

    folder: Path
    ggufs: Path
    patience = 10**9  # bytes of weights it sends before it hangs up
    asked: ClassVar[list[tuple[str, str, str]]]  # (method, path, range) of each question
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/patience/"):  # between two questions: marks the place, too
            type(self).patience = int(path.rpartition("/")[2])
            self.asked.append(("MARK", "", ""))
            return self._send(b"")
        if path == "/stop":  # the server stops listening
            self._send(b"")
            return threading.Thread(target=self._stop).start()
        path = path.replace("/me/mini", "/me/tiny")  # the same model twice
        self.asked.append((self.command, path, self.headers.get("Range", "")))
        if path.startswith("/api/models/me/broken"):
            self.close_connection = True  # hangs up without a word
            return
        if asked := re.fullmatch(r"/api/models/me/(tiny|files)(.*)", path):
            folder = self.folder if asked[1] == "tiny" else self.ggufs
            if asked[2] == f"/tree/{COMMIT}":  # what newer clients ask instead of `siblings`
                return self._send(json.dumps(self._tree(folder)).encode())
            if asked[2].removeprefix("/revision/") in ("", "main", COMMIT):
                return self._send(json.dumps(self._described(folder)).encode())
            return self._refuse("RevisionNotFound")
        if asked := re.fullmatch(r"/me/(tiny|files)/resolve/[^/]+/(.+)", path):
            file = (self.folder if asked[1] == "tiny" else self.ggufs) / asked[2]
            if file.is_file():
                return self._send(file.read_bytes())
            return self._refuse("EntryNotFound")
        self._refuse("RepoNotFound")

    def _stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def _described(self, folder: Path) -> dict[str, object]:
        names = [{"rfilename": str(f.relative_to(folder))} for f in files_of(folder)]
        return {"_id": "1", "id": "me/tiny", "modelId": "me/tiny", "sha": COMMIT, "siblings": names, "private": False,
                "tags": [], "downloads": 0, "likes": 0}  # fmt: skip

    def _tree(self, folder: Path) -> list[dict[str, object]]:
        held = [(str(f.relative_to(folder)), f.read_bytes()) for f in files_of(folder)]
        return [
            {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for name, data in held
        ]

    def _send(self, body: bytes) -> None:
        etag, start = hashlib.sha1(body).hexdigest(), 0
        if wanted := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            start = int(wanted[1])
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(body) - start))
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command != "GET":
            return
        sent = body[start:] if len(body) < 50_000 else body[start : start + self.patience]
        self.wfile.write(sent)
        if start + len(sent) < len(body):
            self.close_connection = True

    def _refuse(self, code: str) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(handler: type[Hub]) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture
def handler(tiny_folder) -> type[Hub]:
    return type("Tiny", (Hub,), {"folder": tiny_folder("llama"), "asked": []})


@pytest.fixture
def endpoint(handler: type[Hub]) -> Iterator[str]:
    with serving(handler) as address:
        yield address


ASK = """
import contextlib, io, json, os, sys, time, urllib.request
import huggingface_hub.constants
from graftune.cli import main
out = open(request["out"], "w")
huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE = 10_000  # what is kept of a file that breaks off is whole pieces
wait = time.sleep
time.sleep = lambda seconds: wait(seconds / 100)  # between two tries
for line in request["questions"]:
    if line[0] == "patience":
        urllib.request.urlopen(os.environ["HF_ENDPOINT"] + "/patience/" + line[1]).read()
        continue
    if line[0] == "stop":
        with contextlib.suppress(OSError):
            while True:
                urllib.request.urlopen(os.environ["HF_ENDPOINT"] + "/stop").read()
        continue
    if line[0] == "offline":
        huggingface_hub.constants.HF_HUB_OFFLINE = line[1] == "1"
        continue
    said, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(err):
        code = main(line)
    print(json.dumps([code, said.getvalue(), err.getvalue()]), file=out, flush=True)
"""

# Forks a child for each request: it takes over that environment, imports the client and asks.
FORK = f"""
import json, os, sys, traceback
import torch, torch.fx.experimental.symbolic_shapes, graftune.api, graftune.cli.app
assert "huggingface_hub" not in sys.modules
for line in sys.stdin:
    request, pid = json.loads(line), os.fork()
    if pid == 0:
        code = 1
        try:
            os.environ.clear()
            os.environ.update(request["environment"])
            exec({ASK!r}, {{"request": request}})
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


def environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING", "http", "HTTP", "ALL_", "all_"))}
    return kept | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}


server: subprocess.Popen[str]  # the one that forks, while this module's tests run


@pytest.fixture(scope="module", autouse=True)
def _server() -> Iterator[None]:
    global server
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", FORK], env=environment(), **pipes) as server:
        yield


def asking(endpoint: str, cache: Path, questions: list[list[str]]) -> list[tuple[int, str, str]]:
    """Each question's exit code, stdout and stderr, of one process that knows that Hub and that cache only."""
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache)}
    settings |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    out = cache.with_name("answers")
    request = {"questions": questions, "environment": environment() | settings, "out": str(out)}
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    assert server.stdout.readline() == "0\n"
    return [(code, said, err) for code, said, err in map(json.loads, out.read_text().splitlines())]


def fetched(handler: type[Hub]) -> list[dict[str, list[str]]]:
    """From mark to mark: the files whose bytes were asked for, each with the ranges that were."""
    found: list[dict[str, list[str]]] = []
    for method, path, wanted in handler.asked:
        if method == "MARK":
            found.append({})
        elif method == "GET" and (file := re.fullmatch(r"/me/\w+/resolve/[^/]+/(.+)", path)):
            found[-1].setdefault(file[1], []).append(wanted)
    return found


def test_broken_off_taken_up_and_offline(handler: type[Hub], tmp_path: Path) -> None:
    """A Hub that hangs up in the weights again and again is asked for the rest each time. One that gives nothing more
    ends the command; whole files stay, and the next command fetches what is missing. Without a Hub the cache does."""
    data = str(write_data(tmp_path / "d.jsonl"))

    def ask(name: str) -> list[str]:
        return ["eval", name, data, "--json", "--device", "cpu"]

    whole, cache = (handler.folder / "model.safetensors").read_bytes(), tmp_path / "hf"
    assert 180_000 < len(whole) < 270_000
    patience = [["patience", str(n)] for n in (90_000, 0, 10**9, 10**9)]
    names = ["me/tiny", "me/mini", "me/mini", "me/mini"]
    questions = [line for before, name in zip(patience, names, strict=True) for line in (before, ask(name))]
    gone = [ask("me/mini"), ask("me/other")]
    questions += [["stop"], ["offline", "1"], *gone, ["offline", "0"], *gone]
    with serving(handler) as address:
        patient, impatient, again, cached, *later = asking(address, cache, questions)
    hung_up, refused, missing, nothing = fetched(handler)
    assert patient[0] == 0 and json.loads(patient[1])["examples"] == 16, patient
    assert hung_up["model.safetensors"] == ["", "bytes=90000-", "bytes=180000-"]
    shown = [line for line in patient[2].splitlines() if line.endswith("downloaded")]
    assert shown and all(line.startswith("me/tiny: ") for line in shown) and "\r" not in patient[2]
    code, out, err = impatient
    assert code == 2 and json.loads(out)["error"]["where"] == "me/mini" and err.count("graftune: ") == 1
    assert "me/mini" in err.splitlines()[-1] and "are kept" in err.splitlines()[-1]
    assert "config.json" in refused and missing == {"model.safetensors": [""]} and nothing == {}
    assert again[0] == cached[0] == 0 and "downloaded" not in cached[2]
    files = [file.read_bytes() for file in cache.rglob("*.safetensors")]
    assert files == [whole, whole], "no half file under the name of a whole one"
    for found, other in (later[:2], later[2:]):  # the server has stopped
        assert found[0] == 0 and json.loads(found[1])["examples"] == 16, found
        assert other[0] == 2 and "me/other" in other[2] and other[2].count("\n") == 1


def test_data_needs_no_weights(handler: type[Hub], tmp_path: Path) -> None:
    ask = ["data", str(write_data(tmp_path / "d.jsonl")), "--json", "--show", "0", "--base", "me/tiny"]
    with serving(handler) as address:
        [(code, out, err)] = asking(address, tmp_path / "hf", marked([ask]))
    assert code == 0 and json.loads(out)["examples"] == 16, err
    [files] = fetched(handler)
    assert "tokenizer.json" in files and "model.safetensors" not in files


def marked(questions: list[list[str]]) -> list[list[str]]:
    """With a mark before each."""
    return [line for question in questions for line in (["patience", str(10**9)], question)]


def test_only_what_is_read_is_fetched(tiny_folder: Any, tmp_path: Path) -> None:
    """Weights that lie there a second time under another name stay there, whether there is an index or not; and the
    base is the same whether they lie beside the others or not."""
    whole = tmp_path / "whole"
    shutil.copytree(tiny_folder("llama"), whole)
    for name in ("consolidated.safetensors", "original/model.safetensors", "pytorch_model.bin", "model.gguf"):
        (whole / name).parent.mkdir(exist_ok=True)
        shutil.copy(whole / "model.safetensors", whole / name)
    parted = tmp_path / "parted"
    shutil.copytree(whole, parted)
    tensors = load_file(parted / "model.safetensors")
    shards = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(tensors)}
    for file in sorted(set(shards.values())):
        save_file({n: t for n, t in tensors.items() if shards[n] == file}, parted / file, {"format": "pt"})
    (parted / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    handler: Any = type("Folders", (Hub,), {"folder": whole, "ggufs": parted, "asked": []})
    with serving(handler) as address:
        questions = marked([["doctor", name, "--json"] for name in ("me/tiny", "me/files")])
        answers = asking(address, tmp_path / "hf", questions)
    own = ({"model.safetensors"}, {"part-0.safetensors", "part-1.safetensors"})
    for folder, files, (code, out, err), got in zip((whole, parted), own, answers, fetched(handler), strict=True):
        assert code == 0 and json.loads(out)["files"] == len(files), (out, err)
        assert {name for name in got if not name.endswith((".json", ".jinja"))} == files
        alone = tmp_path / f"alone-{folder.name}"
        shutil.copytree(folder, alone, ignore=shutil.ignore_patterns("consolidated*", "original"))
        assert open_base(str(alone)).sha256 == open_base(str(folder)).sha256


@pytest.fixture(scope="module")
def ggufs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two types of one model, one of them twice, once in parts; and what lies beside models."""
    folder = tmp_path_factory.mktemp("ggufs")
    (folder / ".gitattributes").write_text("*.gguf filter=lfs\n")
    (folder / "README.md").write_text("A model.\n")
    tiny_gguf.write(folder / "tiny-Q8_0.gguf")
    tiny_gguf.write(folder / "tiny-F32.gguf", metadata={"general.name": "other"})
    (folder / "mmproj-tiny-F32.gguf").write_bytes(b"not a model")
    real = gguf.GGUFWriter
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_gguf.gguf, "GGUFWriter", lambda path, arch: real(path, arch, split_max_tensors=9))
        (folder / "split").mkdir()
        tiny_gguf.write(folder / "split" / "tiny-Q8_0-L.gguf")
    return folder


def test_repositories_of_gguf_files(ggufs: Path, tiny_folder: Any, tmp_path: Path) -> None:
    data = str(write_data(tmp_path / "d.jsonl"))
    parts = [f"split/tiny-Q8_0-L-0000{n}-of-00004.gguf" for n in (1, 2, 3, 4)]
    wanted = {
        "me/files:f32": ["tiny-F32.gguf"],
        "me/files/tiny-Q8_0.gguf": ["tiny-Q8_0.gguf"],
        "me/files:Q8_0-L": parts,
        f"me/files/{parts[2]}": parts,
    }
    refused = {
        "me/files": "holds 3 GGUF models: " + ", ".join((parts[0], "tiny-F32.gguf", "tiny-Q8_0.gguf")),
        "me/files:Q8_0": "holds 2 GGUF models: ",
        "me/files:Q8": "holds no GGUF file of the type Q8 (but ",
        "me/files/none.gguf": "holds no none.gguf",
        "me/tiny:Q8_0": "holds no GGUF file of the type Q8_0 (but none at all)",
    }
    questions = [["doctor", name, "--json"] for name in (*wanted, *refused)]
    train = ["train", "me/files:F32", data, "--max-steps", "1", "--samples", "0", "--quiet", "--device", "cpu"]
    questions.append([*train, "--out", str(tmp_path / "run")])
    questions.append(["chat", str(tmp_path / "run"), "--prompt", "hi", "--max-new-tokens", "2", "--device", "cpu"])
    later = [["stop"], ["offline", "1"], *questions[:4]]
    made: Any = type("Files", (Hub,), {"ggufs": ggufs, "folder": tiny_folder("llama"), "asked": []})
    with serving(made) as address:
        *answers, trained, chatted, a, b, c, d = asking(address, tmp_path / "hf", [*marked(questions), *later])
    got = fetched(made)
    for (name, files), (code, out, err), asked in zip(wanted.items(), answers, got, strict=False):
        assert code == 0 and json.loads(out)["trainable"] and json.loads(out)["kind"] == "gguf", (name, out, err)
        assert json.loads(out)["files"] == len(files)
        fresh = set(files) if name != f"me/files/{parts[2]}" else set()  # those are here by then
        assert {file for file in asked if file.endswith(".gguf")} == fresh
    for (name, said), (code, out, err) in zip(refused.items(), answers[len(wanted) :], strict=True):
        told = json.loads(out) if out else {"why_not": err}
        assert code == 2 and said in told["why_not"] and told["why_not"].count("\n") < 2, (name, out, err)
    assert trained[0] == 0 and chatted[0] == 0, (trained, chatted)
    config = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "me/files:F32"
    assert [code for code, *_ in (a, b, c, d)] == [0, 0, 0, 0], "in the cache, by type too"


def test_a_hub_name(endpoint: str, tmp_path: Path) -> None:
    data = str(write_data(tmp_path / "d.jsonl"))
    ask = ["data", data, "--json", "--show", "0", "--base"]
    questions = [
        [*ask, "me/tiny"],
        [*ask, "me/tiny", "--revision", COMMIT],
        [*ask, "me/unknown"],
        [*ask, "me/tiny", "--revision", "nonesuch"],
        [*ask, "me/broken"],
        [*ask, "not a name"],
        ["train", "me/tiny", data, "--out", str(tmp_path / "run"), "--max-steps", "1", "--samples", "0", "--quiet"],
    ]
    answers = asking(endpoint, tmp_path / "hf", questions)
    found, at_commit, unknown, nonesuch, broken, no_name, trained = answers
    for code, out, _ in (found, at_commit):
        assert code == 0 and json.loads(out)["examples"] == 16, answers
    for code, out, err in (unknown, nonesuch, broken, no_name):
        assert code == 2 and err.startswith("graftune: ") and err.count("\n") == 1, err
        assert list(json.loads(out)) == ["error"]
    assert "me/unknown: is neither a file or folder here nor a model on the Hub" in unknown[2]
    assert "me/tiny: has no revision 'nonesuch' on the Hub" in nonesuch[2]
    assert "me/broken" in broken[2] and "the Hub could not be reached" in broken[2]
    assert "not a name: no such file or folder" in no_name[2]
    assert trained[0] == 0, trained
    config = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "me/tiny"
