"""Mixtures of experts in fp32 against transformers and PEFT, on tiny random models: logits, gradients, text, adapters
that travel, both layouts of a folder, and GGUF there and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import graftune
from graftune.api import train
from graftune.batch import Example
from graftune.data.pack import pack
from graftune.errors import GraftuneError
from graftune.infer.sample import Sampling
from graftune.model.lora import build_arena, targets_of
from graftune.model.spec import ModelSpec
from graftune.observe.console import Console
from graftune.settings.config import Config
from graftune.settings.sections import LoraConfig
from graftune.step.step import Step
from graftune.weights import experts, names, rows
from graftune.weights.adapter import _peft_config
from graftune.weights.names import TEXT
from tests.support import moe, oracle, tiny
from tests.support.generate import generate
from tests.training.runs import write_data

LORAS = [
    LoraConfig(rank=4, alpha=10.0, targets=("all_linear",)),
    LoraConfig(rank=3, alpha=1.0, targets=("mlp",), rslora=True),
    LoraConfig(rank=4, alpha=10.0, targets=("qv", "down_proj")),
    LoraConfig(rank=4, alpha=10.0, targets=("gate_proj", "up_proj"), train_norms=True),
    LoraConfig(rank=4, alpha=10.0, targets=("attention",)),
]
IDS = ["all", "mlp-rslora", "qv-down", "gate-up-norms", "attention"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory):
    made: dict[str, Path] = {}

    def get(variant: str) -> Path:
        if variant not in made:
            made[variant] = moe.make_folder(variant, tmp_path_factory.mktemp("moe") / variant)
        return made[variant]

    return get


def documents(*lengths: int) -> list[list[int]]:
    return [torch.randint(3, tiny.VOCAB, (n,)).tolist() for n in lengths]


def examples(*lengths: int) -> list[Example]:
    return [Example(d, [i >= len(d) // 3 and (i * 7) % 5 != 0 for i in range(len(d))]) for d in documents(*lengths)]


def their_logits(model: Any, docs: list[list[int]]) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model(torch.tensor([d])).logits[0] for d in docs])


def parameters_of(spec: ModelSpec, lora: LoraConfig) -> list[str]:
    return experts.target_parameters(spec, targets_of(spec, lora))


def peft_model(model: Any, ours: oracle.Ours) -> Any:
    """PEFT around a transformers model, with our adapter's values."""
    import peft

    lora, spec = ours.lora, ours.base.spec
    named = _peft_config(lora, ours.base, {"revision": ""}, [], TEXT)
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=named["target_modules"],
        target_parameters=named["target_parameters"],
        use_rslora=lora.rslora,
        modules_to_save=["input_layernorm", "post_attention_layernorm"] if lora.train_norms else None,
        task_type="CAUSAL_LM",
    )
    wrapped = peft.get_peft_model(model, config)
    own = dict(wrapped.named_parameters())
    with torch.no_grad():
        shifts = {oracle.peft_name(name): spec.norm_offset(name) for name in ours.arena.slots}
        for name, value in theirs_of(ours, ours.arena.weights).items():
            if name in own:
                own[name].copy_(value - shifts.get(name, 0.0))
    return wrapped


def theirs_of(ours: oracle.Ours, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    """Values or gradients of our arena by PEFT's names and in its layout."""
    tensors = {name: ours.arena.view(name, buffer) for name in ours.arena.slots}
    tensors = {name: rows.adapter_to_file(value, "folder", ours.base.spec, name) for name, value in tensors.items()}
    stored = experts.adapters_to_peft(tensors)
    return {oracle.peft_name(name): value for name, value in stored.items()}


@pytest.mark.parametrize(
    ("variant", "base_dtype"),
    [*((variant, "fp32") for variant in moe.VARIANTS), *((v, "keep") for v in (*moe.OLDER, "gpt_oss-mxfp4"))],
)
def test_logits_equal_transformers(variant, base_dtype, folder):
    docs = documents(37, 1, 90, 2, 11)
    ours = oracle.ours(folder(variant), random_b=False, base_dtype=base_dtype)
    want = their_logits(moe.hf_model(variant), docs)
    assert want.std() > 0.3, "a model whose logits are all alike proves nothing"
    assert (ours.logits(docs) - want).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("variant", "lora"),
    [
        *(pytest.param(v, lora, id=f"{v}-{id}") for v in moe.OLDER for lora, id in zip(LORAS, IDS, strict=True)),
        *(pytest.param(variant, LORAS[0], id=f"{variant}-all") for variant in moe.NEWER),
        pytest.param("qwen3_5_moe", LORAS[3], id="qwen3_5_moe-gate-up-norms"),
        pytest.param("glm4_moe", LORAS[2], id="glm4_moe-qv-down"),
        pytest.param("gpt_oss-mxfp4", LORAS[0], id="gpt_oss-mxfp4-all"),
    ],
)
def test_every_lora_gradient_equals_pefts(variant, lora, folder):
    batch = examples(20, 33, 5)
    ours = oracle.ours(folder(variant), lora, base_dtype="keep" if variant == "gpt_oss-mxfp4" else "fp32")
    loss, _ = ours.gradients(batch)
    model = peft_model(moe.hf_model(variant), ours).train()
    total = oracle.loss_sum(model, batch)
    total.backward()
    assert loss == pytest.approx(float(total.detach()), rel=1e-5)
    theirs = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    got = theirs_of(ours, ours.arena.grads)
    assert theirs.keys() <= got.keys()
    for name, want in theirs.items():
        assert want.norm() > 1e-4, name
        assert (got[name] - want).norm() / want.norm() < 1e-5, name
    adapted = {name for name in got if ".lora_" in name}
    assert adapted <= theirs.keys() and len(adapted) >= 2 * 2 * len(parameters_of(ours.base.spec, lora))


@pytest.mark.parametrize(
    ("variant", "recompute"),
    [("qwen3_moe", "selective"), ("qwen3_moe", "full"), ("qwen3_next", "selective"), ("glm4_moe", "full")],
)
def test_recomputing_changes_nothing(variant, recompute, folder):
    batch, ours = examples(20, 33, 5), oracle.ours(folder(variant), LORAS[0])
    loss, want = ours.gradients(batch)
    ours.arena.grads.zero_()
    step = Step(ours.decoder, ours.arena, recompute=recompute)
    step.micro_step(pack(batch))
    assert float(step.loss_sum) == loss
    for name, grad in want.items():
        assert torch.equal(ours.arena.view(name, ours.arena.grads), grad), name


@pytest.mark.few(2)
@pytest.mark.parametrize("variant", [*moe.OLDER, "qwen3_next", "glm4_moe"])
def test_greedy_text_equals_transformers(variant, folder):
    """Fifty tokens with the cache, an adapter on everything, and no near-ties. Transformers reads the whole text at
    once: if each token is its first choice after those before, the text is what it would have written."""
    ours = oracle.ours(folder(variant), LORAS[0])
    model = peft_model(moe.hf_model(variant), ours).eval()
    prompts = documents(9, 4, 17)
    written = generate(ours.decoder, prompts, Sampling(max_new_tokens=50, temperature=0.0), ())
    for prompt, got in zip(prompts, written, strict=True):
        top = their_logits(model, [prompt + got])[len(prompt) - 1 : -1].topk(2)
        assert len(got) == 50 and (top.values[:, 0] - top.values[:, 1]).min() > 1e-4, "a near-tie proves nothing"
        assert got == top.indices[:, 0].tolist()


@pytest.mark.parametrize("variant", ["qwen3_moe", "mixtral"])
def test_stacked_folder_reads_like_the_hubs(variant, folder, tmp_path):
    """What transformers holds in memory, [E, 2F, D] and [E, D, F], as some checkpoints store it."""
    source = folder(variant)
    stored = load_file(source / "model.safetensors")
    kept = {name: value for name, value in stored.items() if ".experts." not in name}
    assert len(kept) < len(stored) - 3 * moe.EXPERTS
    whole = {name: value for name, value in moe.hf_model(variant).state_dict().items() if ".experts." in name}
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file({**kept, **{name: value.contiguous() for name, value in whole.items()}}, tmp_path / "model.safetensors")
    docs = documents(30, 7)
    one, two = (oracle.ours(path, LORAS[0]) for path in (source, tmp_path))
    two.arena.weights.copy_(one.arena.weights)
    two.arena.publish()
    assert torch.equal(one.logits(docs), two.logits(docs))


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("variant", "targets"),
    [
        ("qwen3_moe", ("all_linear",)),
        ("qwen3_moe", ("mlp",)),
        ("qwen3_moe", ("qv", "down_proj")),
        *((variant, ("all_linear",)) for variant in moe.NEWER if variant != "qwen3_5_moe"),
        ("qwen3_next", ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj")),
        ("qwen3_5_moe", ("attention", "mlp.shared_expert.down_proj")),
    ],
)
def test_trained_adapter_loads_in_peft(variant, targets, folder, tmp_path):
    """A few steps of training; the run's adapter gives PEFT our logits, and comes back in bit for bit."""
    import peft

    base, out = folder(variant), tmp_path / "run"
    settings = {
        "base": str(base), "data": str(write_data(tmp_path / "data.jsonl")), "out": str(out), "targets": targets,
        "rank": 4, "alpha": 10.0, "lr": 0.02, "max_steps": 2, "tokens_per_step": 128, "tokens_per_micro_batch": 64,
        "compute_dtype": "fp32", "device": "cpu", "samples": 0,
    }  # fmt: skip
    train(Config.of(settings), console=Console(quiet=True))
    run = graftune.open(str(base), adapter=str(out / "adapter"), device="cpu", compute_dtype="fp32")
    engine = run
    ours = oracle.Ours(engine.base, engine.parts.decoder, engine.parts.arena, engine.parts.lora)
    docs = documents(30, 7)
    got = ours.logits(docs)
    assert (got - ours.logits(docs, adapted=False)).abs().max() > 1e-2, "nothing was learnt"
    wrapped = peft.PeftModel.from_pretrained(moe.hf_model(variant), str(out / "adapter")).eval()
    assert (got - their_logits(wrapped, docs)).abs().max() < 1e-4
    wrapped.save_pretrained(tmp_path / "again")
    mine, back = (load_file(path / "adapter_model.safetensors") for path in (out / "adapter", tmp_path / "again"))
    assert mine.keys() == back.keys() and all(torch.equal(mine[n], back[n]) for n in mine)
    config = json.loads((tmp_path / "again" / "adapter_config.json").read_text())
    assert set(config["target_parameters"] or []) >= set(parameters_of(engine.base.spec, engine.parts.lora))
    again = graftune.open(str(base), adapter=str(tmp_path / "again"), device="cpu", compute_dtype="fp32")
    assert torch.equal(again.parts.arena.weights, engine.parts.arena.weights)


@pytest.mark.parametrize(
    ("lora", "told"),
    [
        (LoraConfig(targets=("gate_proj",)), "gate and up as one"),
        (LoraConfig(targets=("mlp",), dropout=0.1), "no dropout"),
    ],
)
def test_refused_by_name(lora, told, folder):
    spec = oracle.open_base(str(folder("qwen3_moe"))).spec
    with pytest.raises(GraftuneError, match=told):
        build_arena(spec, lora, torch.device("cpu"), torch.float32)


def test_full_training_is_refused(folder):
    spec = oracle.open_base(str(folder("qwen3_moe"))).spec
    with pytest.raises(GraftuneError, match="every weight of a mixture"):
        build_arena(spec, LoraConfig(), torch.device("cpu"), torch.float32, full=True)


def test_a_missing_expert_is_named(folder, tmp_path):
    source = folder("qwen3_moe")
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    stored = load_file(source / "model.safetensors")
    lost = "model.layers.1.mlp.experts.4.up_proj.weight"
    save_file({n: t for n, t in stored.items() if n != lost}, tmp_path / "model.safetensors")
    with pytest.raises(GraftuneError, match=names.from_hf(lost)):
        oracle.open_base(str(tmp_path))
