"""`graftune export` as a user meets it: whole runs, one sentence for every mistake, nothing half written."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from graftune.api import export, train
from graftune.cli import main
from graftune.errors import GraftuneError
from graftune.exporting import gguf_file, gguf_mix, gguf_model, write
from graftune.io import files
from graftune.model.part import AttentionShape
from graftune.observe.console import Console
from graftune.settings.config import Config
from graftune.weights import streamed
from graftune.weights.base import open_base
from graftune.weights.gguf_io import read_gguf
from tests.exporting import models
from tests.exporting.judges import gap, in_transformers, opened, ours

Capture = pytest.CaptureFixture[str]


def trained(base: Path, out: Path, **settings: Any) -> Path:
    data = out.with_suffix(".jsonl")
    rows = [{"prompt": f"Say {i}", "response": f"It is {i}."} for i in range(10)]
    data.write_text("\n".join(map(json.dumps, rows)))
    values: dict[str, Any] = {"base": str(base), "data": str(data), "out": str(out), "max_steps": 2, "samples": 0}
    values |= {"compute_dtype": "fp32", "tokens_per_step": 200, "lr": 0.01, "score": False} | settings
    return train(Config.of(values), console=Console(quiet=True)).folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    return trained(models.make_folder("llama", folder / "base"), folder / "mine", rank=4)


@pytest.mark.parametrize("weight", ["-0.5", "5e-1"])
def test_weights_on_the_command_line(run: Path, tmp_path: Path, weight: str) -> None:
    assert main(["export", f"{run}={weight}", "--to", "peft", "--out", str(tmp_path / "a")]) == 0
    assert (tmp_path / "a" / "adapter_config.json").is_file()


def test_a_base_may_be_named_by_its_address_on_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[str] = []

    def exporting(target: str, *_: object, **__: object) -> write.Exported:
        asked.append(target)
        return write.Exported(tmp_path, facts={"bytes": 1})

    monkeypatch.setattr("graftune.api.export", exporting)
    assert main(["export", "https://huggingface.co/owner/name/tree/main", "--to", "gguf"]) == 0
    assert asked == ["owner/name"]


def test_a_run_goes_out_in_every_format(run: Path, capsys: Capture) -> None:
    want = ours(opened(run))
    for line in (["peft"], ["merged"], ["gguf-lora"], ["gguf", "--type", "f16"], ["apr"]):
        assert main(["export", str(run), "--to", *line, "--json"]) == 0
        done = json.loads(capsys.readouterr().out)
        assert Path(done["path"]).parent == run / "export" and done["bytes"] > 0
        assert all(Path(file).exists() for file in done["files"])
    names = {path.name for path in (run / "export").iterdir()}
    assert names == {
        "mine-peft", "mine-merged", "mine-lora.gguf", "mine-lora.Modelfile", "mine-F16.gguf", "mine-F16.Modelfile",
        "mine.apr",
    }  # fmt: skip
    text = (run / "export" / "mine-lora.Modelfile").read_text()
    assert f"FROM {run.parent / 'base'}\nADAPTER ./mine-lora.gguf\n" in text and 'stop "<|im_end|>"' in text
    assert "FROM ./mine-F16.gguf\n" in (run / "export" / "mine-F16.Modelfile").read_text()
    for line in (["mine-merged"], ["mine-F16.gguf"], ["mine-lora.gguf"], ["mine.apr"]):
        path = str(run / "export" / line[0])
        assert main(["chat", path, "--prompt", "hi", "--max-new-tokens", "3", "--json"]) == 0, path
        assert gap(ours(opened(path)), want) < 0.05
    capsys.readouterr()
    assert main(["export", str(run), "--to", "merged"]) == 2
    assert "exists already; use force" in capsys.readouterr().err
    assert main(["export", str(run), "--to", "merged", "--force"]) == 0
    out, err = capsys.readouterr()
    assert "mine-merged (" in out and "100.0% of the adapter's change survives f32" in err


def test_a_run_that_trained_everything_is_the_model_itself(tmp_path: Path) -> None:
    base = models.make_folder("qwen3", tmp_path / "base")
    folder = trained(base, tmp_path / "full", method="full")
    want = ours(opened(folder))
    merged = export(str(folder), "merged").path
    whole = export(str(folder), "gguf", kind="F32").path
    assert gap(in_transformers(merged), want) < 1e-4 and gap(ours(opened(whole)), want) < 1e-4
    for to in ("peft", "gguf-lora", "apr"):
        with pytest.raises(GraftuneError, match="full has no adapter"):
            export(str(folder), to)
    with pytest.raises(GraftuneError, match="trained the whole model"):
        export(str(folder), "merged", base=str(base))


def test_shards_dtype_and_survival(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small change hardly survives bf16, and that is said; in fp32 all of it does."""
    import transformers

    from graftune.weights import model

    base = tmp_path / "half"
    transformers.AutoModelForCausalLM.from_pretrained(run.parent / "base", dtype=torch.bfloat16).save_pretrained(base)
    models.tokenizer().save(base)
    monkeypatch.setattr(model, "SHARD_BYTES", 20_000)
    shares = []
    for size in (0.05, 3e-5):
        opening = opened(base, rank=4)
        arena = opening.parts.arena
        for name in arena.slots:
            if "lora_B" in name:
                arena.view(name, arena.weights).normal_(0, size)
        arena.publish()
        adapter = opening.save(tmp_path / f"a{size}")
        done = export(str(adapter), "merged", out=str(tmp_path / f"m{size}"))
        shares.append(done.facts["survives"])
        index = json.loads((done.path / "model.safetensors.index.json").read_text())
        assert len(set(index["weight_map"].values())) > 3
        for file in set(index["weight_map"].values()):
            with safe_open(done.path / file, "pt") as shard:
                assert {shard.get_slice(n).get_dtype() for n in shard.keys()} == {"BF16"}  # noqa: SIM118
        assert json.loads((done.path / "config.json").read_text())["dtype"] == "bfloat16"
        if size > 0.01:
            assert (in_transformers(done.path) - ours(opening)).std() < 0.1
    assert shares[0] > 0.99 and shares[1] < 0.9
    exact = export(str(tmp_path / "a3e-05"), "merged", kind="F32", out=str(tmp_path / "exact"))
    assert exact.facts["survives"] > 0.9999


def test_llama_cpps_mix() -> None:
    """Of 32 layers half get more bits, as its table of types says; odd widths fall back as there."""
    more = [layer for layer in range(32) if gguf_mix.more_bits(layer, 32)]
    assert more == [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]

    def kind(name: str, width: int, mix: str = "Q4_K_M", layers: int = 32, heads: int = 16, **facts: Any) -> str:
        shape = {"layers": range(layers), "attention": (AttentionShape(heads, 8, 64),)}
        spec: Any = SimpleNamespace(**({"tied": False, "experts": 0, "family": "qwen3"} | shape | facts))
        return gguf_mix.tensor_kind(name, (64, width), mix, spec)

    for name, width, more, want in (
        ("blk.3.attn_v", 256, {}, "Q6_K"),
        ("blk.4.attn_v", 256, {}, "Q4_K"),
        ("blk.6.attn_v", 256, {}, "Q6_K"),
        ("blk.3.ffn_down", 288, {}, "Q8_0"),
        ("blk.4.ffn_down", 288, {}, "Q5_0"),
        ("blk.0.attn_q", 256, {}, "Q4_K"),
        ("blk.0.attn_q", 48, {}, "F16"),
        ("output", 256, {}, "Q6_K"),
        ("token_embd", 256, {}, "Q4_K"),
        ("token_embd", 256, {"tied": True}, "Q6_K"),
        ("output", 256, {"mix": "Q8_0"}, "Q8_0"),
        ("output", 256, {"mix": "Q4_0"}, "Q6_K"),
        ("output", 256, {"mix": "F16"}, "F16"),
        ("blk.9.attn_v", 256, {"mix": "IQ4_XS", "heads": 32}, "Q5_K"),
        ("blk.4.attn_v", 256, {"layers": 80, "family": "llama"}, "Q6_K"),
        ("blk.12.attn_v", 256, {"mix": "Q3_K_M", "layers": 80, "family": "llama"}, "Q5_K"),
        ("blk.4.attn_qkv", 256, {"mix": "Q3_K_M", "family": "phi3"}, "Q4_K"),
        ("blk.4.ffn_down_exps", 256, {"mix": "Q3_K_M", "experts": 8}, "Q4_K"),
    ):
        assert kind(f"{name}.weight", width, **more) == want, name
    assert gguf_mix.tensor_kind("output_norm.weight", (64,), "Q4_0", None) == "F32"  # type: ignore[arg-type]
    # Of each mix: attn_q, attn_k, attn_output, and attn_v and ffn_down of layers 1, 2 and 12 of 32.
    mixes = {
        "Q5_K_M": "Q5_K Q5_K Q5_K  Q6_K Q6_K Q6_K  Q6_K Q6_K Q6_K",
        "Q3_K_M": "Q3_K Q3_K Q4_K  Q5_K Q4_K Q4_K  Q5_K Q4_K Q4_K",
        "IQ4_XS": "IQ4_XS IQ4_XS IQ4_XS  IQ4_XS IQ4_XS IQ4_XS  Q5_K Q5_K IQ4_XS",
    }
    for mix, wanted in mixes.items():
        parts = [
            "0.attn_q",
            "0.attn_k",
            "0.attn_output",
            *(f"{i}.{p}" for p in ("attn_v", "ffn_down") for i in (1, 2, 12)),
        ]
        assert [kind(f"blk.{part}.weight", 256, mix) for part in parts] == wanted.split()
        assert kind("blk.0.attn_q.weight", 288, mix) == {"Q5": "Q5_1", "Q3": "Q4_0", "IQ": "IQ4_NL"}[mix[:2]]
    eight = [kind(f"blk.4.attn_{part}.weight", 256, experts=8) for part in ("q", "k", "v", "output")]
    assert eight == ["Q4_K", "Q8_0", "Q8_0", "Q5_K"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["{run}", "--to", "onnx"], "for --to. Choose from:"),
        (["{run}"], "--to requires an argument"),
        (
            ["{run}", "--to", "gguf", "--type", "Q3_K"],
            "the type Q3_K is not known for gguf; choose one of F32, F16, BF16, Q8_0, Q6_K, Q5_K_M",
        ),
        (["{run}", "--to", "merged", "--type", "Q8_0"], "the type Q8_0 is not known for merged; choose one of F32"),
        (["{run}", "--to", "peft", "--type", "F16"], "the type is F16 and peft is always F32; leave the type out"),
        (["{base}", "--to", "gguf-lora"], "base has no adapter, and gguf-lora is of an adapter"),
        (["{base}", "--to", "merged", "--add", "{run}"], "base: is not an adapter or run folder"),
        (["{run}", "--to", "merged", "--add", "{run}=much"], "the weight 'much' of"),
        (["{run}", "--to", "merged", "--add", "nowhere"], "nowhere: does not exist"),
        (["no/such/thing", "--to", "merged"], "no/such/thing"),
        (["{run}", "--to", "merged", "--out", "{base}", "--force"], "is part of what is exported"),
        (["{run}", "--to", "merged", "--out", "{run}", "--force"], "is part of what is exported"),
        (["{run}", "--to", "merged", "--out", "{precious}", "--force"], "is in use for something else"),
        (["{run}", "--to", "gguf", "--base", "{precious}"], "holds no config.json"),
    ],
)
def test_mistakes_are_one_sentence(line: list[str], said: str, run: Path, tmp_path: Path, capsys: Capture) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "letter.txt").write_text("mine")
    places = {"run": str(run), "base": str(run.parent / "base"), "precious": str(precious)}
    before = sorted(run.parent.rglob("*"))
    assert main(["export", *(word.format(**places) for word in line)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and said in err and err.count("\n") == 1, err
    assert sorted(run.parent.rglob("*")) == before and (precious / "letter.txt").read_text() == "mine"


@pytest.mark.parametrize("to", write.FORMATS)
@pytest.mark.parametrize("code", [errno.ENOSPC, None])
def test_a_full_disk_or_ctrl_c_leaves_nothing(
    to: str, code: int | None, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt if code is None else OSError(code, "full", "x")

    monkeypatch.setattr(files, "flush", fails)
    with pytest.raises(KeyboardInterrupt if code is None else (OSError, GraftuneError)):
        export(str(run), to, out=str(tmp_path / f"x{write.SUFFIX.get(to, '')}"))
    assert not list(tmp_path.iterdir())


def test_a_disk_too_small_is_seen_before(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 1000

    monkeypatch.setattr(write.shutil, "disk_usage", lambda path: Usage)
    for to in ("merged", "gguf"):
        with pytest.raises(GraftuneError, match=r"takes .* and 1000 B are free"):
            export(str(run), to, kind="F32", out=str(tmp_path / ("x.gguf" if to == "gguf" else "x")))
    assert not list(tmp_path.iterdir())


def test_what_is_written_wrong_is_found(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte lost on the way to the disk."""
    real = streamed.write_tensor

    def lossy(file: Any, *given: Any) -> int:
        check = real(file, *given)
        file.seek(-1, 1)
        file.write(b"\x7f")
        return check

    monkeypatch.setattr(streamed, "write_tensor", lossy)
    monkeypatch.setattr(gguf_file, "write_tensor", lossy)
    for to, out in (("gguf", "x.gguf"), ("merged", "x")):
        with pytest.raises(GraftuneError, match=r"reading back .* with other bytes"):
            export(str(run), to, kind="F32", out=str(tmp_path / out))
    assert not list(tmp_path.iterdir())


def test_gguf_of_a_base_keeps_its_chat_template_and_stops(run: Path, tmp_path: Path) -> None:
    path = export(str(run), "gguf", kind="BF16", out=str(tmp_path)).path
    assert path == tmp_path / "mine-BF16.gguf"
    metadata = read_gguf(path).metadata
    tokenizer = opened(run).tokenizer
    assert metadata["tokenizer.chat_template"] == tokenizer.template.source
    assert metadata["general.architecture"] == "llama" and metadata["general.name"] == "mine"
    back = opened(path).tokenizer
    assert set(tokenizer.stop_ids) <= set(back.stop_ids) and back.eos_id == tokenizer.eos_id


@pytest.mark.parametrize("to", ["merged", "gguf"])
def test_a_base_that_is_not_finite_is_named(to: str, run: Path, tmp_path: Path) -> None:
    """And not the training, which had no part in it."""
    base = Path(shutil.copytree(Config.of_run(run).base.base, tmp_path / "base"))
    tensors = load_file(base / "model.safetensors")
    name = next(name for name in tensors if name.endswith("layers.0.mlp.down_proj.weight"))
    tensors[name].view(-1)[-1] = float("nan")
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(GraftuneError, match=r"base: tensor layers.0.mlp.down_proj.weight holds numbers"):
        export(base, to, out=tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize("to", ["merged", "gguf"])
def test_a_template_that_leaves_the_sandbox_is_not_carried_on(to: str, tmp_path: Path, capsys: Capture) -> None:
    base = models.make_folder("llama", tmp_path / "base")
    path = base / "chat_template.jinja"
    path.write_text(path.read_text() + "{{ ''.__class__.__base__.__subclasses__() }}")
    assert main(["export", str(base), "--to", to, "--out", str(tmp_path / "out")]) == 2
    assert "the template reaches for Python's own objects" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_training_says_so_before_it_begins(tmp_path: Path) -> None:
    """Even where the template is not used: it would be saved with the adapter."""
    base = models.make_folder("llama", tmp_path / "base")
    path = base / "chat_template.jinja"
    path.write_text(path.read_text() + "{% if messages | length > 99 %}{{ ''.__class__ }}{% endif %}")
    with pytest.raises(GraftuneError, match=r"names __class__\), so it is not carried on"):
        trained(base, tmp_path / "mine", template="none")


def test_named_templates_of_a_gguf_are_not_carried_on(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base was not checked when it was opened."""
    made = export(str(run), "gguf", kind="BF16", out=str(tmp_path / "a.gguf")).path
    found = gguf_model.header_bytes(made)
    named = {"tokenizer.chat_template.tool_use": gguf_file.encoded("{{ ''.__class__ }}")}
    monkeypatch.setattr(gguf_model, "header_bytes", lambda path: found | named)
    kept = gguf_model.model_keys(open_base(str(made)), "x", 0, None)
    assert kept["tokenizer.chat_template"] == found["tokenizer.chat_template"] and not named.keys() & kept.keys()
