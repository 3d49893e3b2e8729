"""A mixture of experts through every format: merged folders, GGUF that llama.cpp runs, adapters beside it, and back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from graftune.api import Session
from graftune.errors import GraftuneError
from graftune.exporting.write import export
from graftune.infer.sample import Sampling
from graftune.weights.rows import Joined
from tests.exporting import judges, models
from tests.support import moe
from tests.support.generate import generate

VARIANTS = tuple(moe.FAMILIES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    made: dict[str, Path] = {}

    def get(variant: str) -> Path:
        if variant not in made:
            made[variant] = moe.make_folder(variant, tmp_path_factory.mktemp("moe") / variant)
            models.tokenizer().save(made[variant])
        return made[variant]

    return get


def tuned(base: Path, out: Path) -> tuple[Session, Path]:
    """A run with an adapter on everything, and where it is saved."""
    run = judges.shaken(judges.opened(base, rank=3, alpha=6.0, targets=("all_linear",)), by=0.05)
    run.save(str(out))
    return run, out


@pytest.mark.few(2)
@pytest.mark.parametrize("variant", VARIANTS)
def test_merged_folder(variant, folder, tmp_path):
    run, adapter = tuned(folder(variant), tmp_path / "adapter")
    done = export(str(adapter), "merged", kind="F32", out=str(tmp_path / "merged"))
    assert done.facts["survives"] == pytest.approx(1.0, abs=1e-3)
    want = judges.ours(run)
    assert judges.gap(judges.in_transformers(tmp_path / "merged"), want) < 1e-4
    assert judges.gap(judges.ours(judges.opened(tmp_path / "merged")), want) < 1e-4


@pytest.mark.few(1)
@pytest.mark.parametrize("variant", VARIANTS)
def test_gguf(variant, folder, tmp_path):
    """The base and the merged model as files; an adapter beside the first; all of it in again."""
    run, adapter = tuned(folder(variant), tmp_path / "adapter")
    whole, plain, beside = (tmp_path / f"{name}.gguf" for name in ("whole", "plain", "beside"))
    export(str(adapter), "gguf", kind="F32", out=str(whole))
    export(str(folder(variant)), "gguf", kind="F32", out=str(plain))
    export(str(adapter), "gguf-lora", out=str(beside))
    want, before = judges.ours(run), judges.ours(run, adapted=False)
    # A delta net's state adds up roundings; llama.cpp reads gelu from a table over fp16.
    close = 1e-3 if "linear_attn.A_log" in str(list(run.base.tensors)) else 1e-2 if variant == "gemma4" else 1e-4
    assert judges.gap(want, before) > 0.1
    assert judges.gap(judges.LlamaCpp(whole).along(judges.DOCUMENT), want) < close
    assert judges.gap(judges.LlamaCpp(plain).along(judges.DOCUMENT), before) < close
    assert judges.gap(judges.LlamaCpp(plain, [beside]).along(judges.DOCUMENT), want) < close
    assert judges.gap(judges.ours(judges.opened(whole)), want) < 1e-4
    assert judges.gap(judges.ours(judges.opened(plain, beside, any_base=True)), want) < 1e-4
    prompts = [judges.DOCUMENT[:count] for count in range(4, 12)]
    answers = generate(run.parts.decoder, prompts, Sampling(max_new_tokens=50, temperature=0.0), ())
    prompt, said = next((p, a) for p, a in zip(prompts, answers, strict=True) if not {0, 2} & set(a))
    told = judges.LlamaCpp(plain, [beside]).ask(prompt, n_predict=50, return_tokens=True, top_k=1)["tokens"]
    assert len(told) == 50 and told == said
    back = export(str(whole), "merged", kind="F32", out=str(tmp_path / "back"))
    assert judges.gap(judges.in_transformers(back.path), want) < 1e-4


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K_M"])
def test_quantised_gguf(kind, folder, tmp_path):
    """llama.cpp computes in 8 bits over such blocks; we, over the same file, in fp32."""
    path = tmp_path / "small.gguf"
    export(str(folder("qwen3_moe-wide")), "gguf", kind=kind, out=str(path))
    run = judges.opened(path, base_dtype="keep")
    kinds = {name.split(".")[-2]: t.dtype_name for name, t in run.base.tensors.items() if ".mlp." in name}
    assert kinds["gate"] == "F32" and kinds["gate_proj"] == kind.removesuffix("_M")
    theirs, ours = judges.LlamaCpp(path).along(judges.DOCUMENT), judges.ours(run)
    assert float((theirs - ours).abs().mean()) < 0.05


def test_a_projection_in_two_tensors_of_a_gguf(folder, tmp_path):
    """Qwen3-Next's q, k, v and z are one projection, and two tensors of blocks in a file."""
    path = tmp_path / "small.gguf"
    export(str(folder("qwen3_next-small")), "gguf", kind="Q8_0", out=str(path))
    run = judges.opened(path, base_dtype="keep")
    joined = run.base.tensors["layers.0.linear_attn.in_proj_qkvz.weight"]
    assert isinstance(joined, Joined) and [part.dtype_name for part in joined.parts] == ["Q8_0", "Q8_0"]
    assert run.parts.decoder.blocks[0].mixer.into.frozen.kind == "Q8_0"
    theirs, ours = judges.LlamaCpp(path).along(judges.DOCUMENT), judges.ours(run)
    assert float((theirs - ours).abs().mean()) < 0.05


def test_weights_that_do_not_sum_to_one_have_no_gguf(folder, tmp_path):
    with pytest.raises(GraftuneError, match="sum to one"):
        export(str(folder("qwen3_moe-unnormalised")), "gguf", out=str(tmp_path / "x.gguf"))


def test_apr_has_no_place_for_experts(folder, tmp_path):
    _, adapter = tuned(folder("qwen3_moe"), tmp_path / "adapter")
    with pytest.raises(GraftuneError, match="no place for adapters on experts"):
        export(str(adapter), "apr", out=str(tmp_path / "x.apr"))
    assert not (tmp_path / "x.apr").exists()


@pytest.mark.parametrize("key", ["rank_pattern", "alpha_pattern", "exclude_modules", "layers_to_transform"])
def test_what_differs_beside_experts_is_refused_by_name(key, folder, tmp_path):
    _, adapter = tuned(folder("qwen3_moe"), tmp_path / "adapter")
    path = adapter / "adapter_config.json"
    value = {"q_proj": 2} if key.endswith("pattern") else [1]
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(GraftuneError, match=f"the adapter uses {key} beside adapters on experts"):
        judges.opened(folder("qwen3_moe"), adapter)


def test_two_adapters_on_experts_merge(folder, tmp_path):
    one, first = tuned(folder("qwen3_moe"), tmp_path / "one")
    with pytest.raises(GraftuneError, match="cannot be made one"):
        export(str(first), "peft", add=(f"{first}=0.5",), out=str(tmp_path / "both"))
    export(str(first), "merged", kind="F32", add=(f"{first}=-1",), out=str(tmp_path / "none"))
    got = judges.ours(judges.opened(tmp_path / "none"))
    assert judges.gap(got, judges.ours(one, adapted=False)) < 1e-4
    assert torch.isfinite(got).all()
