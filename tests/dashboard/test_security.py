"""Who may ask, and that nothing outside of the watched folder can be asked for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from graftune.cli import main
from graftune.dashboard import runs as runs_module
from graftune.dashboard import security
from graftune.dashboard.runs import open_runs
from graftune.dashboard.security import TOKEN
from graftune.dashboard.serving import Page, token_for
from graftune.errors import GraftuneError
from tests.dashboard.folders import client, start, step, write_run

SECRET = "correct-horse-battery"


def status(page: Any, path: str = "/api/runs", method: str = "GET", **headers: str) -> int:
    answer = page.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    if answer.status_code >= 400:
        assert list(answer.json()) == ["error"] and SECRET not in answer.text
    return int(answer.status_code)


FROM_ANOTHER = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate", "sec_fetch_dest": "document"}
ASKED: list[tuple[int, dict[str, str]]] = [
    (200, {}),
    # Through a tunnel the port is another one.
    *((200, {"host": name}) for name in ("localhost", "127.0.0.1:9999", "[::1]:8472", "127.9.9.9")),
    *((403, {"host": name}) for name in ("evil.example", "localhost.evil.example", "10.0.0.7", "", "[::1", "0.0.0.0")),
    (200, {"origin": "http://localhost:8472"}),
    (403, {"origin": "http://localhost:3000"}),
    (403, {"origin": "http://evil.example"}),
    (403, {"origin": "null"}),
    (403, {"origin": "https://localhost:8472.evil.example"}),
    (200, {"sec_fetch_site": "same-origin"}),
    (403, {"sec_fetch_site": "cross-site"}),
    (403, {"sec_fetch_site": "same-site"}),
    (200, {"path": "/", **FROM_ANOTHER}),
    (403, {"path": "/api/runs", **FROM_ANOTHER}),
    (405, {"method": "DELETE"}),
    (405, {"path": "/api/chat"}),
    (413, {"content_length": "99999999"}),
    (413, {"content_length": "9" * 400}),
]


def test_other_pages_and_other_names_are_refused(tmp_path: Path) -> None:
    page = client(tmp_path)
    assert [(status(page, **asked), asked) for _, asked in ASKED] == ASKED


def test_no_script_of_others(tmp_path: Path) -> None:
    page = client(tmp_path)
    for path, name in (*((path, "localhost") for path in ("/", "/api/runs", "/nothing")), ("/", "evil.example")):
        headers = page.get(path, headers={"host": name}).headers
        policy = headers["content-security-policy"]
        assert "default-src 'self'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"
    assert page.get("/api/runs").headers["cache-control"] == "no-store"
    html = page.get("/").text
    assert "<style" not in html and " onclick" not in html and "<script>" not in html


def test_outside_of_loopback_there_is_a_token(tmp_path: Path) -> None:
    page = client(tmp_path, host="10.0.0.7", token=SECRET, name="10.0.0.7:8472")
    for path in ("/", "/api/runs", "/static/index.html", "/api/runs/x/events"):
        assert status(page, path) == 401
    assert status(page, authorization=f"Bearer {SECRET}") == 200
    for wrong in (f"{SECRET}x", SECRET[:-1], SECRET.upper(), f"{SECRET[:-1]}é"):
        assert status(page, authorization=f"Bearer {wrong}".encode("latin-1")) == 401, wrong  # type: ignore[arg-type]
    assert status(page, cookie="graftune_token=no") == 401
    assert status(page, f"/api/runs?token={SECRET}") == 401, "only the page itself takes it from the address"
    stale = {"cookie": "graftune_token=of-the-server-before"}
    answer = page.get(f"/?token={SECRET}", headers=stale, follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    assert answer.headers["set-cookie"] == f"graftune_token={SECRET}; HttpOnly; Path=/; SameSite=strict"
    assert status(page) == 200, "the cookie is enough from here on"
    assert status(page, host="evil.example") == 403


def test_the_token_is_shown_to_the_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN, raising=False)
    assert token_for("127.0.0.1", False, False) == ""
    one, other = (token_for("0.0.0.0", False, True) for _ in range(2))
    assert len(one) >= 24 and one != other and token_for("localhost", True, True)
    with pytest.raises(GraftuneError, match=r"cannot be shown.*set GRAFTUNE_WATCH_TOKEN"):
        token_for("0.0.0.0", False, False)
    monkeypatch.setenv(TOKEN, "short")
    with pytest.raises(GraftuneError, match="too short"):
        token_for("0.0.0.0", False, True)
    monkeypatch.setenv(TOKEN, SECRET)
    assert token_for("0.0.0.0", False, False) == SECRET
    with pytest.raises(ValueError):
        client(tmp_path, host="0.0.0.0").get("/")


def test_a_taken_port_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = Page(open_runs(str(tmp_path)), host="127.0.0.1", port=0)
    assert page.address == f"http://127.0.0.1:{page.port}/"
    assert main(["watch", str(tmp_path), "--port", str(page.port)]) == 2
    assert capsys.readouterr().err.endswith(f"port {page.port} is taken; give another one with --port, or 0 for any\n")
    assert main(["watch", str(tmp_path / "none")]) == main(["watch", str(tmp_path), "--port", "70000"]) == 2
    page._socket.close()


def test_no_path_leads_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs_module, "FRESH", 0.0)
    outside = write_run(tmp_path / "outside", start(1), step(1))
    (outside / "profile.json").write_text('{"secret": 1}')
    root = tmp_path / "root"
    inside = write_run(root / "r", start(1), step(1))
    (root / "link").symlink_to(outside)
    (inside / "profile.json").symlink_to(outside / "profile.json")
    (inside / "preview.jsonl").symlink_to(outside / "metrics.jsonl")
    (inside / "adapter").symlink_to(outside)
    (inside / "report.html").write_text("<script>")
    (inside / "checkpoints").mkdir()
    (inside / "checkpoints" / "step-1").symlink_to(outside)
    page = client(root)
    assert [run["id"] for run in page.get("/api/runs").json()["runs"]] == ["r"]
    for key in ("..%2Foutside", "r%2F..%2F..%2Foutside", "link", "%2Fetc", "..", "r%00", "%2E%2E%2Foutside", "",
        "%252e%252e%252foutside", "..%5Coutside", "r%2F..%5C..%5Coutside", "r/../../outside", "%c0%ae%c0%ae%2Foutside",
        "r/report.html", "r%2Freport.html"):  # fmt: skip
        assert status(page, f"/api/runs/{key}/profile") == 404, key
    assert status(page, "/api/runs/r/profile") == status(page, "/api/runs/r/preview") == 404
    assert page.get("/api/runs/r").json()["checkpoints"] == []
    assert page.get("/static/page.js").text.startswith("(function") and status(page, "/static/main.js") == 404
    assert (
        status(page, "/report.html") == status(page, "/static/report.js") == status(page, "/static/report.html") == 404
    )
    for path in ("/static/../server.py", "/static/%2e%2e/server.py", "/static/..%2fserver.py", "/static//etc/passwd"):
        assert status(page, path) == 404, path
    os.rename(inside, root / "moved")
    inside.symlink_to(outside)  # a run that was found becomes a link
    assert status(page, "/api/runs/r") == 404


def test_limits(tmp_path: Path) -> None:
    page = client(tmp_path)
    large = {"content": b"x" * (security.LARGEST_BODY + 1), "headers": {"content-type": "application/json"}}
    assert page.post("/api/chat", **large).status_code == 413
    parts = (b"x" * 65536 for _ in range(20))  # without a length
    assert page.post("/api/chat", content=parts, headers=large["headers"]).status_code in (400, 413)
    write_run(tmp_path / "r", start(1), step(1))
    for number in ("9" * 16, "9" * 5000, "-1", "1e3", "²"):
        assert status(page, f"/api/runs/r/series?points={number}") == 400, number[:20]
