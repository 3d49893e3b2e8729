"""Reinforcement learning: rewards with their failures, advantages, prompts, and runs that are stopped and resumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tools import reward_data

import graftune
from graftune.cli import main
from graftune.dashboard.runs import open_runs
from graftune.dashboard.views import details
from graftune.data.prompts import PromptRow, prompt_of, read_prompts
from graftune.data.row import Refusal
from graftune.data.sample.parcels import parcels_path, reward
from graftune.errors import GraftuneError
from graftune.infer import generate
from graftune.losses import CrossEntropy
from graftune.observe.events import read_events
from graftune.rl import RL
from graftune.rl.rewards import Rewards, advantages_of
from graftune.rl.rounds import example_of
from graftune.rl.run import PhaseTimes
from graftune.session.batches import BatchFeed
from graftune.session.parts import SessionParts
from graftune.settings.config import Config
from graftune.settings.sections import DataConfig, RlConfig
from tests.losses import sampled
from tests.training.runs import adapter_bytes

FUNCTIONS = """
import math, time

def length(completions, **columns):
    return [len(one) / 10 for one in completions]

async def wanted(prompts, completions, want):
    return [None if w is None else float(w in one) for one, w in zip(completions, want)]

def raises_for_b(prompts, completions, **columns):
    if "b" in prompts:
        raise ValueError("not b")
    return [1.0] * len(completions)

def nan_for_long(completions, **columns):
    return [math.nan if len(one) > 3 else 1 for one in completions]

def too_few(completions, **columns):
    return [1.0]

def forgets(completions, **columns):
    [1.0 for one in completions]

def none(completions, **columns):
    return [None for one in completions]

def hangs(completions, **columns):
    time.sleep(60)

def unnamed(prompts, /, completions):
    return []

def std(completions, **columns):
    return [1.0 for one in completions]

def spread(completions, **columns):
    return [sum(map(ord, one)) % 7 for one in completions]
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rewards") / "rewards.py"
    path.write_text(FUNCTIONS)
    return path


def rewarded(path: Path, *names: str, seconds: float = 30.0) -> Any:
    prompts = [PromptRow([], text, {"want": want}, 0) for text, want in (("a", "x"), ("b", None))]
    config = RlConfig(reward=tuple(f"{path}:{name}" for name in names), reward_seconds=seconds)
    with closing(Rewards(config)) as rewards:
        return rewards(prompts, [["x", "yyyyy"], ["zz", ""]], lambda: None)


def test_rewards_are_weighted_sums_of_those_that_apply(functions: Path) -> None:
    found = rewarded(functions, "length", "wanted=2")
    assert found.by_function == {"length": [0.1, 0.5, 0.2, 0.0], "wanted": [1.0, 0.0, None, None]}
    assert found.totals == pytest.approx([2.1, 0.5, 0.2, 0.0]) and not found.failed
    assert found.means == pytest.approx({"length": 0.2, "wanted": 0.5})


@pytest.mark.parametrize(
    ("name", "totals", "why"),
    [
        ("raises_for_b", [1.1, 1.5, None, None], "not b"),  # the other group keeps its rewards
        ("nan_for_long", [1.1, None, 1.2, 1.0], "not finite"),
        ("too_few", [None] * 4, "1 numbers for 2 completions"),
        ("forgets", [None] * 4, "it returned None, which is not a list of numbers"),
        ("hangs", [None] * 4, "longer than"),
    ],
)
def test_failures_are_counted(name: str, totals: list[float | None], why: str, functions: Path) -> None:
    found = rewarded(functions, "length", name, seconds=1.5 if name == "hangs" else 30.0)
    assert found.failed == {name: totals.count(None)} and why in found.errors[name]
    assert found.totals == pytest.approx(totals)


def test_why_answers_have_no_reward(functions: Path) -> None:
    assert rewarded(functions, "wanted").problems == {"None": "no reward function gave a number for 2 answers"}
    found = rewarded(functions, "wanted", "raises_for_b").problems  # the answers to b, for which wanted gives None
    assert list(found.values()) == [
        f"the reward raises_for_b failed for 2 answers: ValueError: not b (line 12 of {functions.name})"
    ]


def test_one_reward_for_all_answers_is_no_reward_of_single_answers(functions: Path) -> None:
    """Held-out prompts have one answer each: repeated one by one, such a function would seem to work."""
    with closing(Rewards(RlConfig(reward=(f"{functions}:too_few",)))) as rewards:
        found = rewards([PromptRow([], "", {}, 0)] * 3, [["x"], ["y"], ["z"]], lambda: None)
    assert found.totals == [None] * 3 and "1 numbers for 3 completions" in found.errors["too_few"]


def test_a_function_that_needs_what_the_data_lacks_is_refused(functions: Path) -> None:
    with closing(Rewards(RlConfig(reward=tuple(f"{functions}:{name}" for name in ("length", "wanted"))))) as rewards:
        rewards.check()
        rewards.check_columns(["want", "other"])
        with pytest.raises(GraftuneError, match=r"wanted takes want, which the data does not have.*\(other\)"):
            rewards.check_columns(["other"])


def test_a_function_is_not_taken_for_a_figure(functions: Path) -> None:
    """reward_std is the standard deviation of all rewards."""
    assert list(rewarded(functions, "std", "length").means) == ["rewards.std", "length"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("x.txt", "file.py"),
        ("none.py", "no such file"),
        ("rewards.py:absent", "no function absent"),
        ("rewards.py:unnamed", "prompts is positional-only"),
        ("rewards.py:length=1.2.3", "file.py:function=WEIGHT"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused(text: str, why: str, functions: Path) -> None:
    with pytest.raises(GraftuneError, match=why):
        Rewards(RlConfig(reward=(f"{functions.parent}/{text}",))).check()


def test_advantages_are_trls() -> None:
    """Through the reward functions. TRL's advantage of an answer without a reward and of equal rewards is 0."""
    answers, weights = sampled.rewarded_answers(), sampled.WEIGHTS
    named = tuple(f"{sampled.FUNCTIONS}:{name}={by}" for name, by in weights.items())
    with closing(Rewards(RlConfig(reward=named))) as rewards:
        totals = iter(rewards([PromptRow([], "", {}, 0)] * len(answers), answers, lambda: None).totals)
    groups = [[next(totals) for _ in group] for group in answers]
    assert len(set(groups[0])) == 1 and None not in groups[1] and any(None in group for group in groups)
    for scale in sampled.SCALES:
        for group, want in zip(groups, sampled.stored()["advantages"][scale], strict=True):
            found = advantages_of(group, scale) or [None] * len(group)
            assert [one or 0.0 for one in found] == pytest.approx(want, rel=1e-5, abs=1e-6), scale
            assert all(one or other == 0 for one, other in zip(found, want, strict=True))


@pytest.mark.parametrize("scale", sampled.SCALES)
def test_groups_that_teach_nothing_have_no_advantages(scale: str) -> None:
    assert advantages_of([1.0, None, 3.0], "none") == [-1.0, None, 1.0]
    assert advantages_of([1.0, 1.0, None], scale) == [] == advantages_of([1.0, None], scale)


HI = [{"role": "user", "content": "Hi"}]
BRIEF = {"role": "system", "content": "Be brief."}
FROM = [{"from": "Human", "value": "Hi"}]


@pytest.mark.parametrize(
    ("row", "messages", "given"),
    [
        ({"question": "Hi", "answer": "4", "level": 1}, HI, "Hi"),
        ({"prompt": HI, "system": "Be brief."}, [BRIEF, *HI], HI),
        ({"messages": [*HI, {"role": "assistant", "content": "Hello"}], "system": "Be brief."}, [BRIEF, *HI], HI),
        *(
            ({"conversations": [*FROM, {"from": speaker, "value": "Hello"}]}, HI, FROM)
            for speaker in ("gpt", "GPT", "Assistant", " assistant ")  # as in other data
        ),
    ],
)
def test_prompts_of_rows(row: dict[str, Any], messages: list[Any], given: Any) -> None:
    found = prompt_of(row)
    assert found.messages == messages and found.given == given
    assert "answer" not in row or found.columns == {"answer": "4", "level": 1}


@pytest.mark.parametrize("row", [{"text": "no prompt"}, {"prompt": " "}, {"messages": []}])
def test_rows_without_a_prompt_are_refused(row: dict[str, Any]) -> None:
    with pytest.raises(Refusal):
        prompt_of(row)


def test_rows_without_a_prompt_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "Hi"}\n{"text": "no prompt"}\n{"prompt": "Ho"}\n{"text": "nor here"}\n')
    found = read_prompts(str(path), DataConfig())
    assert [prompt.place for prompt in found.prompts] == ["row 1", "row 3"]
    assert found.refused == {"missing key": ["row 2", "row 4"]}


def test_the_bundled_prompts_have_no_good_constant_answer() -> None:
    prompts = read_prompts(str(parcels_path()), DataConfig()).prompts
    answers = [prompt.columns["answer"] for prompt in prompts]
    assert reward_data.rendered() == parcels_path().read_bytes()
    assert len(prompts) == 400 and reward(answers, answers) == [1.0] * 400
    assert max(sum(reward([one] * 400, answers)) for one in set(answers)) < 0.1 * 400
    assert reward([[{"role": "assistant", "content": "It is Zoe."}], "Tom"], ["Zoe", "Tom"]) == [0.0, 1.0]


# Runs. Two updates a round: a stop after an odd step leaves a round half done.


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"word {n}"}) + "\n" for n in range(7)))
    return path


@pytest.fixture(scope="module")
def settings(tiny_folder: Callable[[str], Path], prompts: Path, functions: Path) -> dict[str, Any]:
    how: dict[str, Any] = {"device": "cpu", "threads": 1, "rank": 4, "lr": 0.02, "temperature": 20.0, "epochs": 1}
    how |= {"prompts_per_round": 3, "group": 3, "answer_tokens": 4, "updates_per_round": 2, "schedule": "constant"}
    how |= {"save_every": 1, "eval_every": 2, "patience": 0, "samples": 1, "base": str(tiny_folder("llama"))}
    return how | {"data": str(prompts), "reward": (f"{functions}:spread",)}


@pytest.fixture(scope="module")
def straight(settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    made, real = [], generate.Sampler.__init__

    def init(self: Any, *args: Any) -> None:
        made.append(self)
        real(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate.Sampler, "__init__", init)
        folder = graftune.train(**settings, out=str(tmp_path_factory.mktemp("rl") / "straight")).folder
    kept = [one for one in made if one.cache.tables and not next(iter(one.cache.tables.values())).is_meta]
    assert len(kept) == 1 and kept[0].shape.places == 9, "one cache for the rounds and evaluations of a run"
    return folder


def test_a_run_reports_its_rewards(straight: Path) -> None:
    events = read_events(straight / "metrics.jsonl")
    steps, evals = ([e for e in events if e["event"] == kind] for kind in ("step", "eval"))
    assert [e["step"] for e in steps] == [1, 2, 3, 4] and [e["step"] for e in evals] == [0, 2, 4]
    assert all(0 <= e["metrics"]["reward"] <= 6 for e in evals)
    assert all(e["difference"] < 1e-5 and e["ratio"] == pytest.approx(1, abs=1e-5) for e in steps[::2])
    assert all(e["difference"] > 1e-5 for e in steps[1::2])  # by the second update the weights have changed
    for name in ("reward_std", "answer_tokens", "truncated", "clipped", "sample_tok_s"):
        assert all(name in e for e in steps), name
    assert all("sample_s" in e and "reward_s" in e and "skipped_groups" in e for e in steps[::2])
    shown = next(e for e in events if e["event"] == "answers")
    assert shown["best"][0]["reward"] >= shown["worst"][0]["reward"] and shown["best"][0]["prompt"].startswith("word")
    runs = open_runs(str(straight))
    (run,) = runs.all()
    with runs.log(run) as log:
        assert details(run, log, [])["answers"]["best"], "the page shows them"
    end = events[-1]
    assert end["metric"]["name"] == "reward" and end["best_step"] in (2, 4)
    assert end["metric"]["best"] == max(e["metrics"]["reward"] for e in evals[1:])
    assert (straight / "adapter" / "adapter_model.safetensors").is_file()
    plan = json.loads((straight / "plan.json").read_text())
    assert plan["settings"]["samples_at_once"] == 9 and plan["owners"]["cache of generation"] > 0
    assert Config.of_run(straight).rl.samples_at_once == 9


def test_eval_of_a_run_is_the_cross_entropy(straight: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"prompt": "word 1", "response": "two " * 20}) + "\n")
    capsys.readouterr()
    assert main(["eval", str(straight), str(data), "--device", "cpu", "--base-too", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    whole = {"max_seq_len": 512}  # the run's own length would cut the response
    with graftune.open(straight, loss=CrossEntropy(), device="cpu", quiet=True, **whole) as session:
        want = session.evaluate(str(data))
    assert found["loss"] == pytest.approx(want.loss, rel=1e-5) and found["base"]["loss"] != found["loss"]


def test_stopped_within_a_round_and_resumed_is_straight(
    settings: dict[str, Any], straight: Path, tmp_path: Path
) -> None:
    stop_after(3, settings, tmp_path / "run")
    graftune.train(resume=tmp_path / "run")
    assert adapter_bytes(tmp_path / "run") == adapter_bytes(straight)


def test_a_resume_has_the_shapes_of_the_straight_run(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they are fixed, as on a GPU: in another shape, sums may be rounded differently. The long prompt is in the
    first round, so that a resumed run by itself would choose a smaller shape."""
    shapes: list[Any] = []
    real = BatchFeed._own_shape
    monkeypatch.setattr(SessionParts, "fixed_shapes", property(lambda self: True))
    monkeypatch.setattr(BatchFeed, "_own_shape", lambda *given: shapes.append(real(*given)) or shapes[-1])
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"word {n} " * (40 if n == 3 else 1)}) + "\n" for n in range(6)))
    few = settings | {"data": str(data), "val_split": 0.0, "samples": 0, "updates_per_round": 1}
    few |= {"tokens_per_micro_batch": 4096}  # at most: the answers decide
    graftune.train(**few, out=str(tmp_path / "straight"))
    straight, shapes[:] = list(shapes), []
    stop_after(1, few, tmp_path / "run")
    graftune.train(resume=tmp_path / "run")
    assert shapes == straight and len(straight) == 2
    assert straight[0] == straight[1] and straight[0].capacity == 512
    assert adapter_bytes(tmp_path / "run") == adapter_bytes(tmp_path / "straight")


def test_held_out_prompts_that_are_not_evaluated_may_be_the_longest(settings: dict[str, Any], tmp_path: Path) -> None:
    """A resume reads the data with the stored max_seq_len: were it too small for them, the data would be another."""
    held_out = tmp_path / "held_out.jsonl"
    rows = [{"prompt": f"word {n} " * (1 if n else 9)} for n in range(8)]
    held_out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    few = settings | {"eval_data": str(held_out), "eval_examples": 1, "updates_per_round": 1, "samples": 0}
    stop_after(1, few, tmp_path / "run")
    graftune.train(resume=tmp_path / "run")


def stop_after(step: int, settings: dict[str, Any], out: Path) -> None:
    def stop(event: dict[str, Any]) -> str | None:
        return "stop" if event["event"] == "step" and event["step"] == step else None

    result = graftune.train(**settings, out=str(out), callbacks=[stop])
    assert (result.stopped, result.steps) == ("interrupted", step)


def test_a_row_that_lacks_a_column_has_none_there(settings: dict[str, Any], functions: Path, tmp_path: Path) -> None:
    data = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"word {n}", "prompts": "x"} | ({"want": "a"} if n == 3 else {}) for n in range(6)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    few = settings | {"data": str(data), "val_split": 0.0, "samples": 0, "updates_per_round": 1}
    few |= {"reward": (f"{functions}:spread", f"{functions}:wanted")}
    folder = graftune.train(**few, out=str(tmp_path / "run")).folder
    steps = [event for event in read_events(folder / "metrics.jsonl") if event["event"] == "step"]
    assert len(steps) == 2 and not any(step.get("reward_failed") for step in steps)


def test_an_edited_reward_is_warned_about_on_resume(
    settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own.py"
    own.write_text(FUNCTIONS)
    few = settings | {"reward": (f"{own}:spread",), "updates_per_round": 1, "eval_every": 0}
    run, said = str(tmp_path / "run"), f"the file of {own}:spread was edited"
    graftune.train(**few, out=run, callbacks=[lambda event: "stop" if event["event"] == "step" else None])
    capsys.readouterr()
    graftune.train(resume=run, callbacks=[lambda event: "stop" if event["event"] == "step" else None])
    assert said not in capsys.readouterr().err
    own.write_text(FUNCTIONS + "# another\n")
    graftune.train(resume=run)
    assert said in capsys.readouterr().err


def test_a_run_without_a_reward_says_so(
    settings: dict[str, Any], functions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = settings | {"reward": (f"{functions}:none",), "max_steps": 1, "updates_per_round": 1, "train_on": "last"}
    folder = graftune.train(**few, out=str(tmp_path / "run")).folder
    said, events = capsys.readouterr().err, read_events(folder / "metrics.jsonl")
    assert "step 1: no reward function gave a number for 9 answers; answers without a reward are not trained" in said
    assert "warning: settings that a run with rewards does not use: train_on" in said
    assert "held-out prompts at step 0: no reward function gave a number for" in said
    assert "because no group had two different rewards" in said
    (step,) = (e for e in events if e["event"] == "step")
    assert step["skipped_groups"] == 0 and step["reward_failed"] == 9, "no rewards are not equal rewards"


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"loss": "dpo"}, "does not train on rewards"),
        ({"reward": ":wanted"}, "the reward wanted takes want, which the data does not have"),
        ({"answer_tokens": 128, "max_seq_len": 64}, "128 and max_seq_len is 64, which leaves no token for a prompt"),
    ],
)
def test_settings_that_do_not_fit_rewards_are_refused(
    other: dict[str, Any], why: str, settings: dict[str, Any], functions: Path, tmp_path: Path
) -> None:
    if "reward" in other:
        other = {"reward": (str(functions) + other["reward"],)}
    with pytest.raises(GraftuneError, match=why):
        graftune.train(**settings | other, out=str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_the_time_of_a_step_that_was_done_again_counts_once() -> None:
    """Killed after step 3, resumed after step 1, and resumed again: step 2 was done twice."""
    first, again = ([{"event": "step", "step": step, "train_s": step + late} for step in (1, 2, 3)] for late in (0, 10))
    events = [{"event": "run_start"}, *first, {"event": "resume", "step": 1}, *again[1:]]
    times = PhaseTimes()
    times.resumed(SimpleNamespace(progress=SimpleNamespace(step=2)), events)  # type: ignore[arg-type]
    assert times.sums["train_s"] == 1 + 12


def test_several_ranks_are_refused() -> None:
    """A round is sampled and rewarded by one process; the command line refuses others for `graftune rl` alone."""
    ranks: Any = SimpleNamespace(size=2, leads=True)
    with pytest.raises(GraftuneError, match="one process, and a launcher has started 2; start it without torchrun"):
        RL.prepare(Config.of({"reward": ("own.py",)}), Any, Any, Any, ranks)


def test_an_example_holds_its_end_token() -> None:
    from graftune.infer.generate import Token
    from graftune.session import Sample

    ended = Sample("a", [5], [-1.0], "stop", [-2.0], Token(9, -0.1, -0.2))
    assert example_of([1, 2], ended, 0.5) == {
        "tokens": [1, 2, 5, 9], "mask": [0, 0, 1, 1], "logprobs": [0.0, 0.0, -2.0, -0.2], "advantages": 0.5,
    }  # fmt: skip
    cut = Sample("a", [5], [-1.0], "length", [-2.0])
    assert example_of([1], cut, 0.5)["tokens"] == [1, 5]
