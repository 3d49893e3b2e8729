"""The session: its stages are whole and short enough, it goes on past what fails, leaves few files, and what it leaves
becomes the records that the README reads."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from benchmarks.session import Done
from benchmarks.stages import Command, Stage, timed

from benchmarks import cases, peers, session

ROOT = Path(__file__).resolve().parents[2]
ASKED = {
    "ours", "peers", "issue3-graph", "issue3-curves", "issue3-sweep", "issue4-kernels", "issue4-plan", "issue4-curves",
    "tests",
}  # fmt: skip


def cases_of(stages: list[str]) -> dict[str, set[str]]:
    """case -> who is timed in it"""
    found: dict[str, set[str]] = {}
    for stage in stages:
        for command in session.STAGES[stage].commands:
            for name, who in command.timed if command.result else ():
                found.setdefault(name, set()).add(who)
    return found


def test_every_stage_fits_a_call_and_every_command_exists():
    assert set(session.STAGES) >= ASKED
    for stage in session.STAGES.values():
        assert 0 < stage.seconds <= session.CALL_S, stage.name
        for command in stage.commands:
            first, second = command.words[:2]
            if first != "-m":
                assert (ROOT / first).is_file()
            elif second != "pytest":
                assert (ROOT / (second.replace(".", "/") + ".py")).is_file()
            for word in command.words:
                if word.startswith("tests/"):
                    assert (ROOT / word).is_file()


def test_each_goal_is_measured_by_a_stage_and_its_cases_name_real_participants():
    everything = cases_of(["ours", "large", "peers"])
    assert set(cases.GOALS) <= set(everything)
    for name, who in everything.items():
        assert who <= set(cases.participants(cases.parse(name), sorted(who))), name
        for key in cases.GOALS.get(name, {}):
            needed, _, other = key.partition("@")
            if key == "best_peer":
                assert {"peft", "liger", "unsloth"} <= who, name
            else:
                needed = "ours" if needed in ("peak_gib", "ms", "start_s") else needed
                assert needed in everything[other or name], (name, key)
    assert all(who <= {"ours", "floor"} for who in cases_of(["ours", "large"]).values())
    assert not any({"ours", "floor"} & who for who in cases_of(["peers"]).values())


def test_everyone_of_the_peers_has_an_estimate_of_its_memory():
    (command,) = session.STAGES["peers"].commands
    assert all(who in peers.GIB[case] for case, who in command.timed) and len(set(command.timed)) == 19
    assert command.least < command.seconds, "a second call does the rest"


def test_the_plans_slow_tests_are_left_to_the_benchmark():
    names = [command.name for command in session.STAGES["tests"].commands]
    assert "tests/gpu/test_plan.py" not in names and "tests/gpu/test_families.py" in names and len(names) > 20
    assert any("not within_three_percent" in c.words for c in session.STAGES["issue4-plan"].commands)


def test_the_list_has_every_stage_and_speaks_of_the_project_alone(capsys):
    assert session.main(["--list"]) == 0
    said = capsys.readouterr().out
    assert all(re.search(rf"^{name} +\d+ s", said, re.M) for name in session.STAGES)
    text = said + "".join((ROOT / "benchmarks" / name).read_text() for name in ("session.py", "stages.py"))
    assert not re.search(r"/(work|tmp|opt|root|dev)/|\$OUT", text)


def stages(*made: Stage) -> dict[str, Stage]:
    return {stage.name: stage for stage in made}


def plain(name: str, code: str, seconds: int = 5, result: str = "") -> Command:
    return Command(name, ("-c", code), seconds, result)


RECORD = """
import json, sys
goals = [{'what': 'a', 'rule': 'at most', 'bound': 1, 'is': 0.5, 'met': True}]
goals += [{'what': 'b', 'rule': 'at least', 'bound': 2, 'is': 1, 'met': False}]
open(sys.argv[2], 'w').write(json.dumps({'gpu': 'NVIDIA H9', 'part': {'goals': goals}}))
"""


def test_it_goes_on_past_failures_and_leaves_a_log_and_a_record_a_stage(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Command, "limit", property(lambda self: 2.0 if self.name == "endless" else 60.0))
    record = Command("record", ("-c", RECORD, "--json", "{json}"), 5, "thing")
    made = stages(
        Stage("one", "", (plain("bad", "raise ValueError('no such kernel')"), record)),
        Stage(
            "two", "", (plain("endless", "import time; print('begun', flush=True); time.sleep(60)"), plain("ok", ""))
        ),
        Stage("many", "", tuple(plain(f"p{i}", f"print('from {i}')") for i in range(4)), at_once=3),
    )
    out = tmp_path / "out"
    assert session.main(["one", "two", "many", "--out", str(out)], made) == 1
    said = capsys.readouterr().out
    assert sorted(p.name for p in out.iterdir()) == sorted(f"{s}.{e}" for s in made for e in ("log", "json"))
    one = json.loads((out / "one.json").read_text())["commands"]
    assert [c["exit"] for c in one] == [1, 0] and one[0]["said"] == "ValueError: no such kernel"
    assert [g["met"] for g in one[1]["goals"]] == [True, False] and one[1]["record"]["gpu"] == "NVIDIA H9"
    two = json.loads((out / "two.json").read_text())["commands"]
    assert two[0]["exit"] == session.STOPPED and two[0]["said"].endswith("last line: begun") and two[1]["exit"] == 0
    assert all(f"from {i}" in (out / "many.log").read_text() for i in range(4))
    table = said[said.index("stage  ") :]
    assert re.search(r"one +record +\d+ +0 +1 +1 +0", table) and "at least 2: NOT reached" in table
    kept = session.keep(out, tmp_path / "results")
    assert [path.name for path in kept] == ["thing-h9.json"] and json.loads(kept[0].read_text())["part"]["goals"]


def test_what_is_missing_or_too_late_is_said_and_not_run(tmp_path):
    late = stages(Stage("late", "", (plain("short", "", 1), plain("long", "print('ran')", 1000))))
    session.main(["late", "--out", str(tmp_path / "a"), "--total", "30"], late)
    found = json.loads((tmp_path / "a" / "late.json").read_text())["commands"]
    assert (
        found[0]["exit"] == 0
        and found[1]["exit"] is None
        and found[1]["said"].startswith("not run: takes about 1000 s")
    )
    needy = stages(Stage("needy", "", (Command("c", ("-c", "", "{data}"), 1),)))
    assert session.main(["needy", "--out", str(tmp_path / "b")], needy) == 1
    assert json.loads((tmp_path / "b" / "needy.json").read_text())["commands"][0]["said"].startswith(
        "not run: needs --data"
    )


@pytest.mark.parametrize("words", [["nothing"], ["one"], [], ["one", "--out", "x", *["one"] * 4]])
def test_mistakes_are_refused(words):
    with pytest.raises(SystemExit) as error:
        session.main(words, stages(Stage("one", "", (plain("p", ""),))))
    assert error.value.code == 2


def test_steps_of_one_session_are_timed_once(tmp_path):
    made = stages(
        Stage("first", "", (timed("tiny-1x32", "ours", 20, "--steps", "1"),)),
        Stage("second", "", (timed("tiny-1x32", "ours", 20, "--steps", "1"),)),
    )
    words = ["--out", str(tmp_path), "--device", "cpu", "--commit", "abc", "--run", "mine"]
    assert session.main(["first", *words], made) == 0
    assert session.main(["second", *words], made) == 0
    first, second = (json.loads((tmp_path / f"{s}.json").read_text())["commands"][0] for s in made)
    assert "measured in this run already" in (tmp_path / "second.log").read_text()
    own = [c["record"]["cases"]["tiny-1x32"] for c in (first, second)]
    assert own[0]["participants"]["ours"] == own[1]["participants"]["ours"] and own[0]["run"] == own[1]["run"]
    assert own[0]["commit"] == "abc" and own[0]["run"] == "mine"
    assert [g["what"] for g in second["goals"]] == ["host ms per step", "host syncs in the steps"]
    assert (tmp_path / "step.json").exists()
    kept = session.keep(tmp_path, tmp_path / "results")
    assert [p.name for p in kept] == ["step-cpu.json"] and "tiny-1x32" in json.loads(kept[0].read_text())["cases"]


def test_records_of_one_run_are_kept_together_and_all_say_where_they_are_from(tmp_path):
    def step(who: str, run: str) -> dict:
        return {"gpu": "NVIDIA H9", "cases": {"8b-1x512": {"run": run, "participants": {who: {"ms": 2.0}}}}}

    def stage(name: str, result: str, record: dict) -> None:
        command = {"result": result, "record": record}
        told = {"stage": name, "commit": "abc", "date": "today", "run": "1", "gpu": "NVIDIA H9", "commands": [command]}
        (tmp_path / f"{name}.json").write_text(json.dumps(told))

    stage("a", "step", step("ours", "1"))
    stage("b", "step", step("peft", "1"))
    stage("c", "plan", {"goals": []})
    stage("d", "graph", {"commit": "own", "date": "", "1b-4x512": {}})
    kept = {path.name: json.loads(path.read_text()) for path in session.keep(tmp_path, tmp_path / "results")}
    case = kept["step-h9.json"]["cases"]["8b-1x512"]
    assert set(case["participants"]) == {"ours", "peft"} and case["ratios"]["peft_over_ours"] == 1.0
    assert kept["plan-h9.json"] == {"goals": [], "commit": "abc", "date": "today", "run": "1"}
    assert kept["graph-h9.json"] == {"commit": "own", "date": "today", "run": "1", "1b-4x512": {}}
    stage("a", "step", step("liger", "2"))
    (tmp_path / "b.json").unlink()
    session.keep(tmp_path, tmp_path / "results")
    found = json.loads((tmp_path / "results" / "step-h9.json").read_text())["cases"]["8b-1x512"]
    assert list(found["participants"]) == ["liger"] and "best_peer_over_ours" not in found["ratios"]


def test_what_the_tests_said_is_kept(tmp_path):
    (tmp_path / "test_one.py").write_text("def test_good(): pass\n")
    words = ("-m", "pytest", "-p", "no:cacheprovider", str(tmp_path / "test_one.py"))
    made = stages(Stage("tests", "", (Command("one", words, 5),)))
    assert session.main(["tests", "--out", str(tmp_path / "out"), "--commit", "abc"], made) == 0
    [kept] = session.keep(tmp_path / "out", tmp_path / "results")
    record = json.loads(kept.read_text())
    file = record["files"]["one"]
    assert kept.name == "tests-cpu.json" and file["commit"] == "abc"
    assert file["exit"] == 0 and file["said"].startswith("1 passed")
    stopped = {"name": "one", "exit": session.STOPPED, "result": "", "record": None}
    told = {"stage": "tests", "commit": "def", "gpu": "", "commands": [stopped]}
    (tmp_path / "out" / "tests.json").write_text(json.dumps(told))
    session.keep(tmp_path / "out", tmp_path / "results")
    assert json.loads(kept.read_text())["files"] == {"one": file}, "what was stopped said nothing new"


def test_what_is_not_timed_is_listed_to_be_paused(tmp_path):
    pause = tmp_path / "pause"
    made = stages(Stage("one", "", (plain("p", "import os; print('group', os.getpgid(0))"),)))
    assert session.main(["one", "--out", str(tmp_path / "out"), "--pause-file", str(pause)], made) == 0
    assert f"group {pause.read_text().strip()}\n" in (tmp_path / "out" / "one.log").read_text()


def test_counts():
    done = Done("x", goals=[{"met": True}, {"met": None}, {"met": True}, {"met": False}])
    assert [done.counted(met) for met in (True, False, None)] == [2, 1, 1]
