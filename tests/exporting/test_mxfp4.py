"""gpt-oss with its experts in MXFP4 through every format: bytes are copied from a folder to a GGUF and back, unless an
adapter was merged into them; llama.cpp and transformers read the results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from graftune.api import Session
from graftune.exporting.write import export
from graftune.infer.sample import Sampling
from graftune.observe.console import Console
from graftune.weights.gguf_io import read_gguf
from tests.exporting import judges, models
from tests.support import moe
from tests.support.generate import generate

COARSE = 1e-2  # llama.cpp rounds what it multiplies by such blocks to 8 bits
SEED = 4  # of adapters under which no two experts and no two tokens are nearly as likely


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = moe.make_folder("gpt_oss-mxfp4", tmp_path_factory.mktemp("moe") / "gpt_oss")
    models.tokenizer().save(made)
    return made


def tuned(base: Path, out: Path, *targets: str) -> Session:
    run = judges.shaken(judges.opened(base, rank=3, alpha=6.0, targets=targets), SEED, by=0.05)
    run.save(str(out))
    return run


def packed(folder: Path) -> dict[str, torch.Tensor]:
    found = {n: t for n, t in load_file(folder / "model.safetensors").items() if n.endswith(("_blocks", "_scales"))}
    assert len(found) == 2 * 2 * 3
    return found


def check_close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert judges.gap(got, want) < COARSE
    assert torch.equal(got.argmax(1), want.argmax(1))


def test_bytes_travel_to_a_gguf_and_back(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "whole.gguf"
    done = export(str(folder), "gguf", kind="F32", out=str(path))
    kinds = {name: tensor.dtype_name for name, tensor in read_gguf(path).tensors.items()}
    assert {kind for name, kind in kinds.items() if name.endswith("_exps.weight")} == {"MXFP4"}
    assert {kind for name, kind in kinds.items() if not name.endswith("_exps.weight")} == {"F32"}
    assert done.facts["kinds"] == ["F32", "MXFP4"]
    back = export(str(path), "merged", out=str(tmp_path / "back"))
    assert back.facts["type"] == "F32+MXFP4"
    want, got = packed(folder), packed(tmp_path / "back")
    assert want.keys() == got.keys() and all(torch.equal(got[name], want[name]) for name in want)
    again = tmp_path / "again.gguf"
    export(str(tmp_path / "back"), "gguf", kind="Q8_0", out=str(again))
    first, second = (read_gguf(file).tensors for file in (path, again))
    assert all((first[name].blocks == second[name].blocks).all() for name, kind in kinds.items() if kind == "MXFP4")
    logits = judges.ours(judges.opened(folder))
    for other in (path, tmp_path / "back"):
        assert judges.gap(judges.ours(judges.opened(other)), logits) < 1e-5


def test_attention_adapters_leave_the_experts_bytes(folder: Path, tmp_path: Path) -> None:
    run = tuned(folder, tmp_path / "adapter", "attention")
    export(str(tmp_path / "adapter"), "merged", out=str(tmp_path / "merged"))
    want, got = packed(folder), packed(tmp_path / "merged")
    assert all(torch.equal(got[name], want[name]) for name in want)
    described = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert described["quantization_config"]["quant_method"] == "mxfp4"
    assert judges.gap(judges.in_transformers(tmp_path / "merged"), judges.ours(run)) < 1e-4
    assert judges.gap(judges.ours(judges.opened(tmp_path / "merged")), judges.ours(run)) < 1e-4


def test_llama_cpp_reads_it(folder: Path, tmp_path: Path) -> None:
    """The base, and an adapter on everything beside it: log-probabilities and 50 tokens."""
    run = tuned(folder, tmp_path / "adapter", "all_linear")
    plain, beside = tmp_path / "plain.gguf", tmp_path / "beside.gguf"
    export(str(folder), "gguf", kind="F32", out=str(plain))
    export(str(tmp_path / "adapter"), "gguf-lora", out=str(beside))
    want, before = judges.ours(run), judges.ours(run, adapted=False)
    assert judges.gap(want, before) > 0.1
    check_close(judges.LlamaCpp(plain).along(judges.DOCUMENT), before)
    with_adapter = judges.LlamaCpp(plain, [beside])
    found = with_adapter.along(judges.DOCUMENT)
    check_close(found, want)
    prompt = judges.DOCUMENT[:9]
    told = with_adapter.ask(prompt, n_predict=50, return_tokens=True, top_k=1)["tokens"]
    (said,) = generate(run.parts.decoder, [prompt], Sampling(max_new_tokens=50, temperature=0.0), ())
    assert len(told) == 50 and told == said


def test_merged_experts_say_what_four_bits_cost(folder: Path, tmp_path: Path) -> None:
    run = tuned(folder, tmp_path / "adapter", "all_linear")
    done = export(str(tmp_path / "adapter"), "merged", out=str(tmp_path / "merged"), kind="F32")
    assert done.facts["survives"] == pytest.approx(1.0, abs=1e-3)
    names = load_file(tmp_path / "merged" / "model.safetensors")
    assert not any(name.endswith("_blocks") for name in names)
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())
    want = judges.ours(run)
    assert judges.gap(judges.in_transformers(tmp_path / "merged"), want) < 1e-4
    gaps, noise = {}, {}
    for kind in ("Q8_0", "MXFP4"):
        path = tmp_path / f"{kind}.gguf"
        done = export(str(tmp_path / "adapter"), "gguf", kind=kind, out=str(path))
        noise[kind] = done.facts["noise_over_change"]
        gaps[kind] = judges.gap(judges.ours(judges.opened(path)), want)
        assert ("MXFP4" in done.facts["kinds"]) == (kind == "MXFP4")
    assert noise["MXFP4"] > 5 * noise["Q8_0"] and gaps["MXFP4"] > gaps["Q8_0"]


def test_four_bits_lose_small_changes(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A change of a few percent of the weights returns to where they were; the export warns."""
    run = judges.shaken(judges.opened(folder, rank=3, alpha=6.0, targets=("mlp",)), SEED, by=0.004)
    run.save(str(tmp_path / "adapter"))
    done = export(str(tmp_path / "adapter"), "gguf", kind="MXFP4", out=str(tmp_path / "x.gguf"), console=Console())
    assert 0.9 < done.facts["noise_over_change"] < 1.1
    assert "this may undo your fine-tuning" in capsys.readouterr().err
    same = export(str(folder), "gguf", kind="MXFP4", out=str(tmp_path / "base.gguf"))
    assert same.facts["kinds"] == ["F32", "MXFP4", "Q8_0"]
    biases = [t for name, t in read_gguf(tmp_path / "base.gguf").tensors.items() if name.endswith(".bias")]
    assert len(biases) == 3 * 8 and {tensor.dtype_name for tensor in biases} == {"F32"}
