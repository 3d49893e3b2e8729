"""The session: its stages are whole and short enough, it goes on past what fails, leaves few files, and what it leaves
becomes the records that the README reads."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from benchmarks.session import Done
from benchmarks.stages import Command, Stage, timed

from benchmarks import cases, session

ROOT = Path(__file__).resolve().parents[2]
ASKED = {
    "issue3-step", "issue3-graph", "issue3-curves", "issue3-sweep", "issue4-kernels", "issue4-step", "issue4-fp8",
    "issue4-plan", "issue4-curves", "tests",
}  # fmt: skip


def cases_of(stages: list[str]) -> dict[str, set[str]]:
    """case -> who is timed in it"""
    found: dict[str, set[str]] = {}
    for stage in stages:
        for command in session.STAGES[stage].commands:
            words = list(command.words)
            if "--cases" in words and command.result:
                who = words[words.index("--who") + 1].split(",")
                found.setdefault(words[words.index("--cases") + 1], set()).update(who)
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


@pytest.mark.parametrize("issue", ["issue3", "issue4"])
def test_each_goal_is_measured_by_a_stage_and_its_cases_name_real_participants(issue):
    own = cases_of([name for name in session.STAGES if name.startswith(issue)])
    everything = cases_of(list(session.STAGES))
    for name, who in own.items():
        assert who <= set(cases.participants(cases.parse(name), sorted(who))), name
    for name in own:
        for key in cases.GOALS.get(name, {}):
            needed, _, other = key.partition("@")
            if needed in ("peak_gib", "ms", "start_s"):
                needed = "ours"
            within = [s for s in session.STAGES if name in cases_of([s])]
            if other:  # within one stage, so that one call has both
                assert any(needed in cases_of([s]).get(other, ()) for s in within), (name, key)
            else:
                assert needed in everything[name], (name, key)
    if issue == "issue4":
        assert set(cases.GOALS) <= set(everything)


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
    assert session.main(["first", "second", "--out", str(tmp_path), "--device", "cpu", "--commit", "abc"], made) == 0
    first, second = (json.loads((tmp_path / f"{s}.json").read_text())["commands"][0] for s in made)
    assert "measured in this run already" in (tmp_path / "second.log").read_text()
    own = [c["record"]["cases"]["tiny-1x32"] for c in (first, second)]
    assert own[0]["participants"]["ours"] == own[1]["participants"]["ours"] and own[0]["run"] == own[1]["run"]
    assert own[0]["commit"] == "abc" and [g["what"] for g in second["goals"]] == ["host ms a step"]
    assert (tmp_path / "step.json").exists()
    kept = session.keep(tmp_path, tmp_path / "results")
    assert [p.name for p in kept] == ["step-cpu.json"] and "tiny-1x32" in json.loads(kept[0].read_text())["cases"]


def test_counts():
    done = Done("x", goals=[{"met": True}, {"met": None}, {"met": True}, {"met": False}])
    assert [done.counted(met) for met in (True, False, None)] == [2, 1, 1]
