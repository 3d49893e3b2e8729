"""What an adapter carries with it, what a run that starts from one takes from it, and what is refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

import graftune
from graftune.api import TrainResult, export, train
from graftune.errors import GraftuneError
from graftune.model.families import from_config, from_gguf
from graftune.observe.console import Console
from graftune.session import check_method, parts
from graftune.settings.config import Config
from graftune.weights.adapter import load_adapter
from tests.support import tiny

QUIET = Console(quiet=True)
PLAIN_TURNS = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"


@pytest.fixture
def data(tmp_path: Path) -> str:
    rows = [{"prompt": f"Say {i}", "response": f"It is {i}."} for i in range(10)]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def run(folder: Path, data: str, out: Path, **more: object) -> TrainResult:
    settings = {"base": str(folder), "data": data, "out": str(out), "rank": 2, "max_steps": 1, "sample_tokens": 4}
    return train(Config.of(settings | {"compute_dtype": "fp32", "tokens_per_step": 200} | more), console=QUIET)


@pytest.fixture
def no_template(tiny_folder, tmp_path: Path) -> Path:
    folder = tmp_path / "no-template"
    folder.mkdir()
    for file in tiny_folder("llama").iterdir():
        if "template" not in file.name:
            (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_a_run_without_a_template_can_be_talked_to(no_template, data, tmp_path):
    result = run(no_template, data, tmp_path / "run")
    for target in (result.folder, result.folder / "adapter"):
        opened = graftune.open(str(target))
        assert isinstance(opened.chat([{"role": "user", "content": "Say 3"}], max_new_tokens=3), str)


def test_template_file_and_append_eos_travel(tiny_folder, data, tmp_path, monkeypatch):
    file = tmp_path / "own.jinja"
    file.write_text(PLAIN_TURNS)
    result = run(tiny_folder("llama"), data, tmp_path / "run", template=str(file), append_eos=True)
    file.unlink()
    monkeypatch.chdir("/")
    for target in (result.folder, result.folder / "adapter"):
        opened = graftune.open(str(target))
        assert opened.tokenizer.template.render([{"role": "user", "content": "x"}]) == "user: x\n"
        assert opened.config.data.append_eos


def test_continuing_takes_the_adapters_settings_and_refuses_others(tiny_folder, data, tmp_path):
    first = run(tiny_folder("llama"), data, tmp_path / "first", targets=("qv",))
    # A run folder will do, and its base is found.
    second = run(Path(""), data, tmp_path / "second", adapter=str(first.folder), base="", rank=16)
    stored = json.loads((second.folder / "adapter" / "adapter_config.json").read_text())
    assert stored["r"] == 2 and stored["target_modules"] == ["q_proj", "v_proj"]
    assert Config.load(second.folder / "config.yaml").lora.rank == 2
    with pytest.raises(GraftuneError, match="rank is 4 and the adapter's is 2"):
        run(tiny_folder("llama"), data, tmp_path / "third", adapter=str(first.folder), rank=4)


def test_the_resolved_alpha_is_what_is_stored_everywhere(tiny_folder, data, tmp_path):
    """Unset means twice the rank, in every file a run leaves; whoever continues takes the adapter's, set or not."""
    first = run(tiny_folder("llama"), data, tmp_path / "first", rank=8, targets=("qv",))
    assert Config.load(first.folder / "config.yaml").lora.alpha == 16
    assert json.loads((first.folder / "adapter" / "adapter_config.json").read_text())["lora_alpha"] == 16
    for to, name in (("gguf-lora", "a.gguf"), ("apr", "a.apr")):
        path = export(str(first.folder), to, out=str(tmp_path / name)).path
        assert load_adapter(path).lora.alpha == 16
    other = graftune.open(str(tiny_folder("llama")), rank=8, alpha=32)
    assert (other.parts.lora.alpha, other.config.lora.alpha) == (32, 32)
    other.save(tmp_path / "other")
    again = graftune.open(str(tiny_folder("llama")), adapter=str(tmp_path / "other"), rank=8)  # asks for no alpha
    assert (again.parts.lora.alpha, again.config.lora.alpha) == (32, 32)
    with pytest.raises(GraftuneError, match=r"alpha is 16\.0 and the adapter's is 32\.0"):
        graftune.open(str(tiny_folder("llama")), adapter=str(tmp_path / "other"), alpha=16)


def test_settings_of_adapters_are_a_mistake_where_none_are_trained():
    check_method(Config.of({"method": "full"}))
    with pytest.raises(GraftuneError, match="alpha is set and method is full"):
        check_method(Config.of({"method": "full", "alpha": 16.0}))


def test_examples_beyond_the_context_are_refused_before_anything_is_made(tiny_folder, tmp_path):
    path = tmp_path / "long.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": "p" * 300, "response": "r"}) for _ in range(4)))
    with pytest.raises(GraftuneError, match="set max_seq_len to 256"):
        run(tiny_folder("llama"), str(path), tmp_path / "run", max_seq_len=512)
    assert not (tmp_path / "run").exists()


def test_a_nan_is_never_the_best(tiny_folder, data, tmp_path, monkeypatch):
    losses = iter([5.0, math.nan, 3.0, 4.0])
    real = parts.evaluate

    def poisoned(*args, **kwargs):
        result = real(*args, **kwargs)
        return type(result)(next(losses), 1.0, result.response_tokens, result.examples)

    monkeypatch.setattr(parts, "evaluate", poisoned)
    result = run(tiny_folder("llama"), data, tmp_path / "run", max_steps=3, eval_every=1, tokens_per_step=60)
    assert result.best_eval == 3.0 and result.summary["best_step"] == 2


def test_saving_never_deletes_what_is_not_an_adapter(tiny_folder, tmp_path):
    opened = graftune.open(str(tiny_folder("llama")), rank=2)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious.txt").write_text("mine")
    with pytest.raises(GraftuneError, match="new folder"):
        opened.save(tmp_path / "mine")
    assert (tmp_path / "mine" / "precious.txt").read_text() == "mine"
    opened.save(tmp_path / "adapter")
    opened.save(tmp_path / "adapter")


def test_base_answers_do_not_see_trained_rows(tiny_folder):
    opened = graftune.open(str(tiny_folder("llama-untied")), rank=2, new_tokens=("<z>",), compute_dtype="fp32")
    text = "ab<z>c"
    before = opened.generate(text, max_new_tokens=5, adapted=False)
    tuned = opened.generate(text, max_new_tokens=5)
    arena = opened.parts.arena
    for name in ("embed_tokens.rows", "lm_head.rows"):
        arena.view(name, arena.weights).fill_(9.0)
    arena.publish()
    assert opened.generate(text, max_new_tokens=5, adapted=False) == before
    assert opened.generate(text, max_new_tokens=5) != tuned


def test_rope_variants_that_are_not_known_are_refused():
    config = tiny.hf_config("llama").to_dict()
    with pytest.raises(GraftuneError, match="part of each head"):
        from_config(config | {"partial_rotary_factor": 0.5}, "config.json")

    class Shape:
        shape = (10, 8)

    metadata = {
        "general.architecture": "llama",
        "llama.embedding_length": 8,
        "llama.attention.head_count": 1,
        "llama.block_count": 1,
        "llama.feed_forward_length": 8,
    }
    tensors = {"token_embd.weight": Shape()}
    with pytest.raises(GraftuneError, match="part of each head"):
        from_gguf(metadata | {"llama.rope.dimension_count": 4}, tensors, "x.gguf")
    yarn = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0, "llama.rope.scaling.attn_factor": 1.0}
    plain = from_gguf(metadata | yarn, tensors, "x.gguf").ropes[0].build().scaling
    assert plain == pytest.approx(1 + 0.1 * math.log(4.0))  # attn_factor multiplies, as in llama.cpp
    fast = yarn | {"llama.rope.scaling.yarn_beta_fast": 8.0}
    assert from_gguf(metadata | fast, tensors, "x.gguf").ropes[0].scaling.beta_fast == 8.0
