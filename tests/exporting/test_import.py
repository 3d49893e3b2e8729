"""PEFT's adapters in all their kinds: loaded where they can be trained, merged where they can only be merged, refused
by name otherwise; and several adapters added up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from graftune.api import export
from graftune.errors import GraftuneError
from tests.exporting import models
from tests.exporting.judges import DOCUMENT, gap, in_transformers, opened, ours, shaken
from tests.support import tiny
from tests.training.runs import write_data

EXACT = 1e-4


def by_peft(base: Path, folder: Path, resize: int = 0, **settings: Any) -> torch.Tensor:
    """PEFT's own adapter with random values, saved by PEFT; returns its log-probabilities."""
    import peft
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if resize:
        model.resize_token_embeddings(resize, mean_resizing=False)
    config = peft.LoraConfig(**({"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 6} | settings))
    wrapped = peft.get_peft_model(model, config)
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        wrapped.save_pretrained(str(folder))
        return torch.log_softmax(wrapped.eval()(torch.tensor([DOCUMENT])).logits[0], -1)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.make_folder("qwen2", tmp_path_factory.mktemp("import") / "base")


@pytest.mark.parametrize(
    "settings",
    [
        {"rank_pattern": {"q_proj": 2, "v_proj": 2}, "alpha_pattern": {"[qv]_proj": 9}},
        {"rank_pattern": {r"layers\.\d+\.self_attn\.(q|v)_proj": 3}},
        {"alpha_pattern": {"self_attn.v_proj": 6}},  # the same as for all
        {"rank_pattern": {"up_proj": 7}},  # of what is not adapted
    ],
)
def test_patterns_that_say_the_same_of_all_are_taken(settings: dict[str, Any], base: Path, tmp_path: Path) -> None:
    want = by_peft(base, tmp_path / "a", target_modules=["q_proj", "v_proj"], **settings)
    assert gap(ours(opened(base, tmp_path / "a")), want) < EXACT


UNEVEN = {
    "ranks": {"rank_pattern": {"q_proj": 2}},
    "alphas": {"alpha_pattern": {"v_proj": 0, r"layers\.0\.self_attn\.q_proj": 2}},
    "both": {"rank_pattern": {"q_proj": 7}, "alpha_pattern": {"v_proj": 5}},
    "rslora": {"rank_pattern": {r"layers\.1\.self_attn\.q_proj": 9}, "use_rslora": True},
    "a layer's": {"alpha_pattern": {r"layers\.0\.self_attn\.[qv]_proj": 30}},
    "any": {"alpha_pattern": {r".*\.layers\.2\..*": 30}},
    "some layers": {"layers_to_transform": [0, 2]},
    "left out": {"exclude_modules": ["layers.1.self_attn.q_proj"]},
    "an expression": {"target_modules": r".*\.[02]\.self_attn\.(q_proj|v_proj)"},
    "by their place": {"target_modules": ["self_attn.q_proj", "mlp.down_proj"]},
    "all": {"target_modules": "all-linear"},
}


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", UNEVEN)
def test_modules_that_differ_get_one_rank(kind: str, base: Path, tmp_path: Path) -> None:
    """Loaded, merged and written again, by all of which PEFT's own log-probabilities come out; and trained on."""
    import peft
    import transformers

    want = by_peft(base, tmp_path / "a", **({"target_modules": ["q_proj", "v_proj"]} | UNEVEN[kind]))
    model = opened(base, tmp_path / "a")
    assert gap(ours(model), want) < EXACT
    arena = model.parts.arena
    before = {name: arena.view(name, arena.weights).clone() for name in arena.slots}
    more = ("gguf-lora", "apr") if kind in ("both", "rslora", "all") else ()
    for to in ("merged", "peft", *more):  # the adapter has one rank by now, whatever it came from
        out = tmp_path / ("x.gguf" if to == "gguf-lora" else "x.apr" if to == "apr" else to)
        path = export(str(tmp_path / "a"), to, base=str(base), out=str(out)).path
        again = opened(path) if to == "merged" else opened(base, path)
        assert gap(ours(again), want) < EXACT, to
    judge = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    judge = peft.PeftModel.from_pretrained(judge, str(tmp_path / "peft")).eval()
    with torch.no_grad():
        assert gap(torch.log_softmax(judge(torch.tensor([DOCUMENT])).logits[0], -1), want) < EXACT
    data = model.prepare(str(write_data(tmp_path / "data.jsonl", rows=4)))
    for step in range(2):
        for batch in model.batches(data, step):
            model.forward_backward(batch)
        model.optim_step(lr=1e-2)
    for name, old in before.items():
        new = arena.view(name, arena.weights)
        across = 0 if "lora_A" in name else 1  # the ranks that no module of PEFT's had
        empty = old.abs().amax(1 - across) == 0
        assert ((new.abs().amax(1 - across)[empty] == 0).all() and not torch.equal(new, old)) or empty.all(), name


@pytest.mark.parametrize("to", ["peft", "gguf-lora", "apr", "merged"])
def test_an_adapter_for_another_base_is_refused_by_every_format(to: str, base: Path, tmp_path: Path) -> None:
    folder = shaken(opened(base, rank=2)).save(tmp_path / "a")
    other = models.make_folder("gemma3", tmp_path / "other")
    with pytest.raises(GraftuneError):
        export(str(folder), to, base=str(other), out=str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.few(3)
@pytest.mark.parametrize("variant", ["qwen2", "llama-untied"])
@pytest.mark.parametrize("saved", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]])
def test_tables_trained_whole_are_merged_but_not_trained(saved: list[str], variant: str, tmp_path: Path) -> None:
    base = models.make_folder(variant, tmp_path / "base")
    want = by_peft(base, tmp_path / "a", target_modules=["q_proj"], modules_to_save=saved)
    with pytest.raises(GraftuneError, match=rf"modules_to_save with a trained {saved[0]}.*export it to merged"):
        opened(base, tmp_path / "a")
    merged = export(str(tmp_path / "a"), "merged", base=str(base), out=str(tmp_path / "m")).path
    assert gap(in_transformers(merged), want) < EXACT
    assert gap(ours(opened(merged)), want) < EXACT


def test_added_tokens_of_pefts_own(tmp_path: Path) -> None:
    base = models.make_folder("llama-untied", tmp_path / "base")
    size = tiny.VOCAB + 1
    want = by_peft(base, tmp_path / "a", size, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])
    with pytest.raises(GraftuneError, match="no tokenizer is beside it"):
        export(str(tmp_path / "a"), "merged", base=str(base), out=str(tmp_path / "m"))
    models.tokenizer().with_tokens(["<new>"]).save(tmp_path / "a")
    merged = export(str(tmp_path / "a"), "merged", base=str(base), out=str(tmp_path / "m")).path
    assert gap(in_transformers(merged), want) < EXACT
    assert opened(merged).tokenizer.encode("<new>") == [tiny.VOCAB]


def test_old_rows_that_were_trained_elsewhere_are_not_lost(base: Path, tmp_path: Path) -> None:
    """An adapter of ours with added tokens, trained on by PEFT: that trains every row of the table."""
    from safetensors.torch import load_file, save_file

    folder = shaken(opened(base, rank=2, new_tokens=("<z>",))).save(tmp_path / "a")
    opened(base, folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    name = "base_model.model.model.embed_tokens.weight"
    tensors[name][7] += 0.3
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(GraftuneError, match="a trained embed_tokens"):
        opened(base, folder)


@pytest.fixture
def two(base: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Adapters of different ranks, scales and targets."""
    first = shaken(opened(base, rank=4, alpha=10.0, targets=["qv", "mlp"]), seed=1).save(tmp_path / "one")
    second = shaken(opened(base, rank=3, alpha=5.0, rslora=True, targets=["attention"]), seed=2).save(tmp_path / "two")
    return first, second


def test_several_adapters_add_up(base: Path, two: tuple[Path, Path], tmp_path: Path) -> None:
    """PEFT's judge: both adapters merged into the weights, one after the other, each times its weight."""
    import peft
    import transformers

    first, second = two
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    for folder, weight in ((first, 0.5), (second, -0.75)):
        wrapped = peft.PeftModel.from_pretrained(model, str(folder))
        for module in wrapped.modules():
            if isinstance(getattr(module, "scaling", None), dict):
                module.scaling = {name: value * weight for name, value in module.scaling.items()}
        model = wrapped.merge_and_unload()
    with torch.no_grad():
        want = torch.log_softmax(model(torch.tensor([DOCUMENT])).logits[0], -1)
    target, add = f"{first}=0.5", [f"{second}=-0.75"]
    merged = export(target, "merged", add=add, out=str(tmp_path / "m")).path
    assert gap(in_transformers(merged), want) < EXACT
    assert gap(want, ours(opened(base, first))) > 0.1
    combined = export(target, "peft", add=add, out=str(tmp_path / "p"))
    assert combined.facts["rank"] == 7
    assert gap(in_transformers(base, adapter=combined.path), want) < EXACT
    lora = export(target, "gguf-lora", add=add, out=str(tmp_path / "l.gguf")).path
    apr = export(target, "apr", add=add, out=str(tmp_path / "l.apr")).path
    for back in (combined.path, lora, apr):
        assert gap(ours(opened(base, back)), want) < EXACT


def test_norms_add_up_in_a_merged_model_only(base: Path, two: tuple[Path, Path], tmp_path: Path) -> None:
    normed = shaken(opened(base, rank=2, train_norms=True), seed=4).save(tmp_path / "normed")
    twice = export(f"{normed}=0.25", "merged", add=[f"{normed}=0.75"], out=str(tmp_path / "m")).path
    assert gap(ours(opened(twice)), ours(opened(base, normed))) < EXACT
    with pytest.raises(GraftuneError, match=r"norm\.weight, which cannot be added up.*merged or gguf"):
        export(str(two[0]), "peft", add=[str(normed)], out=str(tmp_path / "p"))
    with pytest.raises(GraftuneError, match=r"norm\.weight, which an adapter in GGUF has no place for"):
        export(str(normed), "gguf-lora", out=str(tmp_path / "l.gguf"))
    assert not (tmp_path / "p").exists() and not list(tmp_path.glob("l.gguf*"))
