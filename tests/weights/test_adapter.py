"""Adapters out and in: PEFT over transformers reads our folder and gives our logits, and we read PEFT's.

Whole logits are compared, not files: a scale, a name or a norm that went astray on the way shows in them.
"""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from graftune.api import Session
from graftune.errors import GraftuneError
from graftune.model.decoder import PackedDocuments
from graftune.weights.adapter import CONFIG, TENSORS
from graftune.weights.uniform_rank import with_uniform_rank
from tests.exporting.judges import opened, shaken
from tests.support import tiny

DOCUMENT = [5, 90, 3, 200, 131, 7, 7, 64, 250, 17, 99, 2, 41]
NEW = ("<call>", "<result>")


def logits(run: Session, tokens: list[int], adapted: bool = True) -> torch.Tensor:
    decoder = run.parts.decoder
    state = decoder.begin(torch.arange(len(tokens)), PackedDocuments.of((len(tokens),)), adapted=adapted)
    with torch.no_grad():
        return decoder.logits(decoder.hidden(torch.tensor(tokens), state), adapted=adapted)


def peft_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.tensor([tokens])).logits[0]


def loaded_by_peft(base: Path, adapter: Path, vocabulary: int = 0) -> Any:
    import peft
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if vocabulary:
        model.resize_token_embeddings(vocabulary, mean_resizing=False)
    with warnings.catch_warnings():  # PEFT warns about a configuration with fields that it does not know
        warnings.filterwarnings("error", message="Unexpected keyword arguments")
        return peft.PeftModel.from_pretrained(model, str(adapter))


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    return got.shape == want.shape and bool((got - want).abs().max() < 1e-4)


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("variant", "settings"),
    [
        ("llama", {}),
        ("mistral-window", {"rslora": True}),
        ("qwen2", {"targets": ["qv"]}),
        ("qwen3", {"targets": ["k_proj", "down_proj"], "rslora": True}),
        ("qwen2", {"train_norms": True}),
        ("qwen3", {"train_norms": True, "targets": ["mlp"]}),
        ("llama", {"new_tokens": NEW}),
        ("llama-untied", {"new_tokens": NEW, "train_norms": True}),
        ("mistral", {"new_tokens": NEW, "targets": ["attention"]}),
        ("lfm2", {"train_norms": True}),
        ("lfm2", {"targets": ["in_proj", "q_proj", "w2"]}),
        ("qwen3_5", {"targets": ["in_proj_qkv", "in_proj_b", "out_proj", "q_proj"]}),
    ],
)
def test_peft_loads_ours(variant: str, settings: dict[str, Any], tiny_folder: Any, tmp_path: Path) -> None:
    base = tiny_folder(variant)
    run = shaken(opened(base, rank=3, alpha=7.0, **settings))
    folder = run.save(tmp_path / "adapter")
    new = len(settings.get("new_tokens", ()))
    tokens = DOCUMENT + [tiny.VOCAB + i for i in range(new)] + [9]
    got = logits(run, tokens)
    assert got.shape[1] == tiny.VOCAB + new
    assert (got[:, : tiny.VOCAB] - logits(run, tokens, adapted=False)[:, : tiny.VOCAB]).abs().max() > 0.1
    assert close(got, peft_logits(loaded_by_peft(base, folder, tiny.VOCAB + new if new else 0), tokens))
    again = opened(adapter=folder)  # finds its base by itself
    assert torch.equal(logits(again, tokens), got)


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("variant", "settings"),
    [
        ("llama", {"target_modules": "all-linear"}),
        ("mistral", {"target_modules": ["q_proj", "v_proj"], "use_rslora": True}),
        ("qwen2", {"target_modules": ["gate_proj", "down_proj", "k_proj"], "init_lora_weights": "gaussian"}),
        ("qwen3", {"target_modules": ["o_proj"], "modules_to_save": ["norm"]}),
        ("llama", {"target_modules": ["o_proj"], "modules_to_save": ["input_layernorm"]}),
        ("lfm2", {"target_modules": "all-linear"}),
        ("qwen3_5", {"target_modules": "all-linear"}),
        ("lfm2", {"target_modules": ["out_proj", "k_proj", "w3"], "modules_to_save": ["operator_norm"]}),
    ],
)
def test_we_load_pefts(variant: str, settings: dict[str, Any], tiny_folder: Any, tmp_path: Path) -> None:
    model = peft_adapter(variant, tmp_path, r=5, lora_alpha=8, lora_dropout=0.1, **settings)
    run = opened(tiny_folder(variant), tmp_path)
    assert close(logits(run, DOCUMENT), peft_logits(model, DOCUMENT))
    assert (logits(run, DOCUMENT) - logits(run, DOCUMENT, adapted=False)).abs().max() > 0.1


def peft_adapter(variant: str, folder: Path, **settings: Any) -> Any:
    """PEFT's own adapter with random values, saved by PEFT."""
    import peft

    config = peft.LoraConfig(task_type="CAUSAL_LM", **settings)
    model = peft.get_peft_model(tiny.hf_model(variant), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(str(folder))
    return model


def test_training_goes_on_from_an_adapter(tiny_folder: Any, tmp_path: Path) -> None:
    base, data = tiny_folder("llama"), tmp_path / "data.jsonl"
    rows = [{"prompt": f"say {w}", "response": w.upper()} for w in ("yes", "no", "stop", "go")]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def train(run: Session, steps: int) -> Session:
        for step in range(steps):
            for batch in run.batches(run.prepare(str(data)), step):
                run.forward_backward(batch)
            run.optim_step(lr=5e-3)
        return run

    first = train(opened(base, rank=4, alpha=9.0, targets=["qv"], train_norms=True), 3)
    before = first.evaluate(str(data)).loss
    folder = first.save(tmp_path / "first")
    second = opened(base, folder)
    # The first session has planned its micro-batches for the data, so the second may sum in another order.
    assert second.evaluate(str(data)).loss == pytest.approx(before, rel=1e-6)
    assert second.parts.lora.rank == 4 and second.parts.lora.targets == ("q_proj", "v_proj")
    saved = train(second, 3).save(tmp_path / "second")
    assert second.evaluate(str(data)).loss < before - 0.01
    assert close(logits(second, DOCUMENT), peft_logits(loaded_by_peft(base, saved), DOCUMENT))
    assert logits(second, DOCUMENT, adapted=False).equal(logits(opened(base), DOCUMENT, adapted=False))


@pytest.fixture(scope="module")
def good(tiny_folder: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shaken(opened(tiny_folder("llama"), rank=4)).save(tmp_path_factory.mktemp("good") / "adapter")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"lora_bias": True}, "adapter biases"),
        ({"bias": "lora_only"}, "trained biases"),
        ({"peft_type": "IA3"}, "'IA3'"),
        ({"target_modules": 3}, "target modules 3"),
        ({"modules_to_save": ["score"]}, "'score'"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4"),
        ({"alora_invocation_tokens": [5]}, "activated"),
        ({"r": None}, "has no r"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(
    changes: dict[str, Any], named: str, good: Path, tiny_folder: Any, tmp_path: Path
) -> None:
    folder = shutil.copytree(good, tmp_path / "changed")
    values = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(values | changes))
    with pytest.raises(GraftuneError, match=named) as error:
        opened(tiny_folder("llama"), folder)
    assert str(error.value).count(CONFIG) == 1 and "make no sense" not in str(error.value)


def test_pefts_own_dora_is_refused(tiny_folder: Any, tmp_path: Path) -> None:
    peft_adapter("llama", tmp_path, r=4, target_modules=["q_proj"], use_dora=True)
    with pytest.raises(GraftuneError, match="DoRA"):
        opened(tiny_folder("llama"), tmp_path)


def test_an_adapter_of_another_base_is_refused(good: Path, tiny_folder: Any) -> None:
    with pytest.raises(GraftuneError, match="trained on another base"):
        opened(tiny_folder("qwen3"), good)
    with pytest.raises(GraftuneError, match=r"is \[48, 4\], not \[96, 4\].*another base"):
        opened(tiny_folder("qwen3"), good, any_base=True)


def test_tensors_missing_or_left_over_are_refused(good: Path, tiny_folder: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(good, tmp_path / "changed")
    tensors = load_file(folder / TENSORS)
    name = next(iter(sorted(tensors)))
    save_file({n: t for n, t in tensors.items() if n != name}, folder / TENSORS)
    with pytest.raises(GraftuneError, match=r"down_proj\.lora_A\.weight is missing"):
        opened(tiny_folder("llama"), folder)
    save_file(tensors | {name.replace("layers.0.", "layers.9."): tensors[name].clone()}, folder / TENSORS)
    with pytest.raises(GraftuneError, match=r"1 tensors .*layers\.9\."):
        opened(tiny_folder("llama"), folder)


@pytest.mark.parametrize("keep", [0, 5, 400, -1])
def test_a_file_cut_short_is_refused(keep: int, good: Path, tiny_folder: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(good, tmp_path / "cut")
    (folder / TENSORS).write_bytes((folder / TENSORS).read_bytes()[:keep])
    with pytest.raises(GraftuneError, match=f"{TENSORS}.*cut short"):
        opened(tiny_folder("llama"), folder)
    (folder / TENSORS).unlink()
    with pytest.raises(GraftuneError, match=f"holds no {TENSORS}"):
        opened(tiny_folder("llama"), folder)


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", '{"peft_type": "LORA", "r": 4', "\xff\xfe"])
def test_broken_json_is_refused(text: str, good: Path, tiny_folder: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(good, tmp_path / "broken")
    (folder / CONFIG).write_bytes(text.encode("latin-1"))
    with pytest.raises(GraftuneError, match=f"{CONFIG}.*not valid JSON"):
        opened(tiny_folder("llama"), folder)


def test_a_folder_without_an_adapter_is_refused(tiny_folder: Any, tmp_path: Path) -> None:
    with pytest.raises(GraftuneError, match="not an adapter or run folder"):
        opened(tiny_folder("llama"), tmp_path)


def test_the_refusal_of_an_unknown_module_names_it_in_full() -> None:
    tensors = {"layers.3.self_attn.gate.lora_A.weight": torch.zeros(4, 8)}
    with pytest.raises(GraftuneError, match=r"adapters on layers\.3\.self_attn\.gate"):
        with_uniform_rank(tensors, {"r": 4, "lora_alpha": 8}, GraftuneError, "here")
