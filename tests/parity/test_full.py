"""Every weight trains: gradients and updates against transformers' autograd and torch's AdamW, in fp32; runs that train
the whole model or start from nothing, what they save, and how they are taken up again."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from graftune import api
from graftune.batch import Example
from graftune.data.pack import pack
from graftune.errors import GraftuneError
from graftune.observe.console import Console
from graftune.observe.events import read_events
from graftune.runtime import resolve
from graftune.session import open_session
from graftune.settings.config import Config
from graftune.settings.sections import LoraConfig
from graftune.step.step import Step
from graftune.weights import checkpoint, names
from graftune.weights.base import open_base
from graftune.weights.model import hf_config, save_model
from tests.support import oracle, specs, tiny
from tests.support.pairwise import pairwise
from tests.weights import tiny_gguf

Folder = Callable[[str], Path]
HYPER = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1, "divisor": 1.0, "clip": 0.0}
# Every block: seven projections and two norms; with q's and k's norms two more, with biases three more, with norms
# around the halves two more, with fused projections three less.
PER_BLOCK = {
    "llama": 9,
    "llama-untied": 9,
    "mistral-window": 9,
    "qwen2": 12,
    "qwen3": 11,
    "gemma3": 13,
    "gemma2": 11,
    "gemma2-odd": 11,
    "phi3": 6,
    "phi3-long": 6,
    "granite": 9,
    "smollm3": 9,
    "olmo2": 11,
    "olmo3-yarn": 11,
    "gemma": 9,
    "granitemoehybrid": 8,
    "exaone4-window": 11,
    "hunyuan_v1_dense": 11,
    "granite_swa": 10,
    "glm4": 13,
    "ministral3": 9,
    "muse_glimmer": 12,
    "lfm3-short": 14,
}


def examples(*lengths: int, seed: int = 5) -> list[Example]:
    draw = torch.Generator().manual_seed(seed)
    documents = [torch.randint(3, tiny.VOCAB, (n,), generator=draw).tolist() for n in lengths]
    return [Example(d, [i >= len(d) // 3 and (i * 7 + len(d)) % 5 != 0 for i in range(len(d))]) for d in documents]


def named(model: Any) -> dict[str, torch.nn.Parameter]:
    """Their parameters by our names; a tied table is listed once."""
    found = dict(model.named_parameters())
    scheme = names.scheme_of(found)
    return {ours: p for n, p in found.items() if (ours := scheme.ours(n)) is not None}


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


def take(step: Step, micro_batches: list[list[Example]], **hyper: float) -> list[float]:
    packed = [pack(batch) for batch in micro_batches]
    step.set_hyper(HYPER | {"divisor": float(sum(b.response_tokens for b in packed))} | hyper)
    for batch in packed:
        step.micro_step(batch)
    return step.update_step()[:3].tolist()


@pytest.mark.parametrize("variant", PER_BLOCK)
def test_every_gradient_is_autograds(variant: str, tiny_folder: Folder) -> None:
    batch = examples(20, 1, 33, 5)
    ours = oracle.whole(tiny_folder(variant))
    loss, got = ours.gradients(batch)
    got, spec = oracle.as_stored(got, ours.base.spec), ours.base.spec
    starts = oracle.as_stored({name: ours.arena.view(name, ours.arena.weights) for name in got}, spec)
    model = tiny.hf_model(variant)
    total = oracle.loss_sum(model, [e for e in batch if len(e.tokens) > 1])
    total.backward()
    assert loss == pytest.approx(float(total.detach()), rel=1e-5)
    theirs = named(model)
    tied = model.config.tie_word_embeddings
    assert len(got) == PER_BLOCK[variant] * len(spec.layers) + (2 if tied else 3)
    assert set(got) == set(theirs)
    for name, parameter in theirs.items():
        assert parameter.grad is not None and parameter.grad.norm() > 1e-4, name
        assert relative(got[name], parameter.grad) < 1e-5, name
        assert torch.equal(starts[name], parameter.detach() + spec.norm_offset(name)), name


@pytest.mark.few(2)
@pytest.mark.parametrize("variant", ["llama", "qwen2", "qwen3", "gemma3-short", "granite", "olmo2"])
def test_five_steps_are_torchs_adamw(variant: str, tiny_folder: Folder) -> None:
    """Both sides make their own gradients, through weights that move. Norms and biases do not decay."""
    ours, model = oracle.whole(tiny_folder(variant)), tiny.hf_model(variant)
    before, theirs = ours.arena.weights.clone(), named(model)
    decayed = [p for p in theirs.values() if p.dim() > 1]
    kept = [p for p in theirs.values() if p.dim() == 1]
    assert sum(p.numel() for p in decayed) == ours.arena.decayed
    # A wide epsilon: where a gradient is rounding alone, lr * g / |g| would amplify it on both sides.
    settings = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-4}
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": kept, "weight_decay": 0.0}]
    judge = torch.optim.AdamW(groups, **settings)
    step = Step(ours.decoder, ours.arena)
    for number in range(5):
        batch = examples(24, 9, 17, seed=number)
        loss, norm, skipped = take(step, [batch[:1], batch[1:]], eps=1e-4, clip=1.0)
        judge.zero_grad()
        total = oracle.loss_sum(model, batch) / sum(e.response_tokens for e in batch)
        total.backward()
        want = torch.nn.utils.clip_grad_norm_(list(theirs.values()), 1.0)
        judge.step()
        assert not skipped and loss == pytest.approx(float(total.detach()), rel=1e-5)
        assert norm == pytest.approx(float(want), rel=1e-4) and norm > 1
    assert (ours.arena.weights - before).abs().max() > 2e-3
    for name, parameter in theirs.items():
        shift = ours.base.spec.norm_offset(name)
        assert relative(ours.arena.view(name, ours.arena.weights), parameter.detach() + shift) < 1e-5, name


@pairwise(
    (
        "variant",
        [
            "qwen2",
            "qwen3",
            "gemma3",
            "gemma2",
            "phi3-long",
            "granite",
            "smollm3",
            "olmo3",
            "lfm2",
            "qwen3_5",
            "glm4",
            "granitemoehybrid",
        ],
    ),
    ("method", ["lora", "full"]),
    ("policy", ["selective", "full"]),
)
def test_recomputing_changes_no_bit(variant: str, method: str, policy: str, tiny_folder: Folder) -> None:
    path, batch = tiny_folder(variant), pack(examples(20, 33, 5))
    ours = oracle.whole(path) if method == "full" else oracle.ours(path, LoraConfig(rank=4, train_norms=True))
    found = []
    for recompute in ("none", policy):
        ours.arena.grads.zero_()
        step = Step(ours.decoder, ours.arena, recompute=recompute)
        step.micro_step(batch)
        found.append((step.loss_sum.clone(), ours.arena.grads.clone()))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    assert found[0][1].abs().sum() > 1


def test_bf16_weight_gradients_are_close(tiny_folder: Folder) -> None:
    """The copy that products read is right before the first step, and the arena keeps fp32."""
    config = Config.of({"base": str(tiny_folder("qwen3")), "method": "full", "device": "cpu"})
    batch, found = pack(examples(40, 30)), []
    for compute in ("fp32", "bf16"):
        with pytest.warns() if compute == "bf16" and resolve("cpu").compute_name != "bf16" else nullcontext():
            engine = open_session(config.replace(compute_dtype=compute))
        step = Step(engine.parts.decoder, engine.parts.arena)
        step.micro_step(batch)
        found.append(
            (
                float(step.loss_sum),
                {n: engine.parts.arena.view(n, engine.parts.arena.grads) for n in engine.parts.arena.slots},
            )
        )
    (want_loss, want), (loss, got) = found
    assert loss == pytest.approx(want_loss, rel=0.02)
    for name, grad in got.items():
        assert torch.nn.functional.cosine_similarity(grad.flatten(), want[name].flatten(), 0) > 0.99, name


# What is saved


def transformers_logits(folder: Path, documents: list[list[int]]) -> torch.Tensor:
    model = tiny.load_hf(folder)
    with torch.no_grad():
        return torch.cat([model(torch.tensor([d])).logits[0] for d in documents])


FOLDERS = ["llama", "llama-untied", "llama-yarn", "qwen2", "qwen3", "mistral-window", "lfm2", "qwen3_5"]


@pytest.mark.few(4)
@pytest.mark.parametrize("variant", FOLDERS)
def test_transformers_loads_what_is_saved(
    variant: str, tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = oracle.whole(tiny_folder(variant))
    take(Step(ours.decoder, ours.arena), [examples(30, 20)], lr=1e-2)
    documents = [e.tokens for e in examples(37, 11)]
    config = hf_config(ours.base)
    with monkeypatch.context() as patch:
        patch.setattr("graftune.weights.model.SHARD_BYTES", 40_000)
        save_model(tmp_path / "wide", ours.arena, ours.base, config, torch.float32)
    shards = sorted(p.name for p in (tmp_path / "wide").glob("model*.safetensors"))
    assert len(shards) > 3 and shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
    want = ours.logits(documents)
    assert (transformers_logits(tmp_path / "wide", documents) - want).abs().max() < 1e-4
    save_model(tmp_path / "model", ours.arena, ours.base, config, torch.bfloat16)
    save_model(tmp_path / "model", ours.arena, ours.base, config, torch.bfloat16)  # over itself
    again = oracle.ours(tmp_path / "model", random_b=False)
    got = again.logits(documents)
    assert {t.dtype_name for t in again.base.tensors.values()} == {"BF16"}
    assert ("lm_head.weight" in again.base.tensors) == (not ours.base.spec.tied)
    assert (transformers_logits(tmp_path / "model", documents) - got).abs().max() < 1e-4
    assert relative(got, want) < 0.05 and again.base.spec == ours.base.spec
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "wide"]


@pytest.mark.parametrize("variant", ["llama-llama3", "llama-linear", "llama-yarn"])  # others: exporting/test_families
def test_a_gguf_trains_and_goes_out_as_a_folder(variant: str, tmp_path: Path) -> None:
    ours = oracle.whole(tiny_gguf.write(tmp_path / "tiny.gguf", variant))
    _, grads = ours.gradients(examples(20, 33))
    model = tiny.hf_model(variant)
    oracle.loss_sum(model, examples(20, 33)).backward()
    for name, parameter in named(model).items():
        assert parameter.grad is not None and relative(grads[name], parameter.grad) < 1e-4, name
    save_model(tmp_path / "model", ours.arena, ours.base, hf_config(ours.base), torch.float32)
    documents = [e.tokens for e in examples(90, 11)]
    assert (transformers_logits(tmp_path / "model", documents) - ours.logits(documents)).abs().max() < 1e-4
    again = oracle.ours(tmp_path / "model", random_b=False)
    assert (again.logits(documents) - ours.logits(documents)).abs().max() < 1e-5
    assert again.base.tokenizer.encode("a tale") == ours.base.tokenizer.encode("a tale")


def test_a_gguf_whose_rope_has_no_name_is_refused_before_it_trains(tmp_path: Path) -> None:
    base = open_base(str(tiny_gguf.write(tmp_path / "tiny.gguf", "llama-llama3")))
    (rope,) = base.spec.ropes
    divisors = tuple(one * by for one, by in zip(rope.scaling.divisors, (1.0, 1.3, 1.0, 1.1), strict=True))
    scaling = dataclasses.replace(rope.scaling, divisors=divisors)
    odd = dataclasses.replace(base, spec=specs.edited(base.spec, rope=dataclasses.replace(rope, scaling=scaling)))
    with pytest.raises(GraftuneError, match="rope frequencies have no name"):
        open_session(Config.of({"method": "full", "device": "cpu"}), base=odd)


# Whole runs

WORDS = {
    "the": "cat dog fox",
    "cat": "sat ran",
    "dog": "sat ran",
    "fox": "ran hid",
    "sat": "by",
    "ran": "by",
    "hid": "by",
}


def write_text(path: Path, rows: int = 240) -> Path:
    """Short sentences of a small grammar."""
    draw = random.Random(3)

    def sentence() -> str:
        words = ["the"]
        while words[-1] in WORDS and len(words) < 5:
            words.append(draw.choice(WORDS[words[-1]].split()))
        return " ".join(words)

    path.write_text("".join(json.dumps({"text": sentence()}) + "\n" for _ in range(rows)))
    return path


RUN = {"device": "cpu", "tokens_per_step": 512, "val_split": 0.1, "samples": 2, "sample_tokens": 4, "lr": 5e-3,
       "compute_dtype": "fp32", "save_every": 4, "keep_last": 9}  # fmt: skip


def train(**settings: Any) -> Any:
    return api.train(Config.of(RUN | settings), console=Console(quiet=True))


@pytest.fixture(scope="module")
def scratch_run(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Folder) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("scratch")
    shutil.copytree(tiny_folder("llama-shallow"), root / "shape", ignore=shutil.ignore_patterns("*.safetensors"))
    data = write_text(root / "text.jsonl")
    train(base=str(root / "shape"), data=str(data), method="scratch", epochs=8, save_every=0, out=str(root / "run"))
    yield root / "run"


@pytest.mark.thorough
def test_from_scratch_learns(scratch_run: Path) -> None:
    events = read_events(scratch_run / "metrics.jsonl")
    losses = [e["loss"] for e in events if e["event"] == "eval"]
    assert losses[0] == pytest.approx(math.log(tiny.VOCAB), rel=0.03), "random weights guess evenly"
    assert losses[-1] < 0.45 * losses[0], losses
    assert not (scratch_run / "adapter").exists() and (scratch_run / "model" / "model.safetensors").is_file()
    assert not any(e["event"] == "sample" and e["step"] == 0 for e in events)


def test_a_whole_run_opens_as_its_model(scratch_run: Path) -> None:
    run = api.open(str(scratch_run), device="cpu", compute_dtype="fp32")
    assert run.generate("the fox ", max_new_tokens=4)[0][0] in "rh", "a fox ran or hid"
    data = scratch_run.parent / "text.jsonl"
    assert run.evaluate(str(data)).loss < 2.5
    documents = [run.tokenizer.encode("the cat sat by"), run.tokenizer.encode("the dog")]
    ours = oracle.ours(scratch_run / "model", random_b=False)
    assert (transformers_logits(scratch_run / "model", documents) - ours.logits(documents)).abs().max() < 1e-4
    with pytest.raises(GraftuneError, match="trained the whole model"):
        api.open(str(scratch_run / "model"), adapter=str(scratch_run))


@pytest.mark.few(1)
@pytest.mark.parametrize("method", ["full", "scratch"])
def test_resumed_is_straight(method: str, tiny_folder: Folder, tmp_path: Path) -> None:
    data = write_text(tmp_path / "text.jsonl", 60)
    base = str(tiny_folder("qwen2"))
    train(base=base, data=str(data), method=method, max_steps=8, epochs=9, samples=0, out=str(tmp_path / "run"))
    run = tmp_path / "run"

    def state() -> tuple[bytes, bytes]:
        last = checkpoint.latest(run / "checkpoints")
        assert last is not None
        return (run / "model" / "model.safetensors").read_bytes(), (last / checkpoint.TENSORS).read_bytes()

    want = state()
    for path in (run / "checkpoints").iterdir():  # as a kill after step 4 leaves it
        if int(path.name.removeprefix("step-")) > 4:
            shutil.rmtree(path)
    shutil.rmtree(run / "model")
    api.train(Config(), console=Console(quiet=True), resume=str(run))
    assert state() == want
    shutil.rmtree(run / "checkpoints")
    shutil.rmtree(run / "model")
    api.train(Config(), console=Console(quiet=True), resume=str(run))
    assert state() == want


@pytest.mark.thorough
def test_the_base_is_asked_while_it_is_the_base(tiny_folder: Folder, tmp_path: Path) -> None:
    rows = [{"prompt": f"say {c}", "response": c * 3} for c in "abcdefgh" * 3]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    base, out = tiny_folder("llama"), tmp_path / "run"
    train(base=str(base), data=str(tmp_path / "data.jsonl"), method="full", max_steps=6, out=str(out))
    samples = {e["step"]: e["answers"] for e in read_events(out / "metrics.jsonl") if e["event"] == "sample"}
    first, last = samples[0], samples[6]
    assert first != last
    plain = tmp_path / "plain"
    train(base=str(base), data=str(tmp_path / "data.jsonl"), max_steps=1, out=str(plain))
    asked = next(e for e in read_events(plain / "metrics.jsonl") if e["event"] == "sample" and e["step"] == 0)
    assert asked["answers"] == first, "the base of an adapter's run gives the same answers"
    # With another number of samples the base's answers are not known any more, and its weights are gone.
    shutil.rmtree(out / "model")  # with it the run would be finished
    api.train(Config(), console=Console(quiet=True), resume=str(out), overrides={"samples": 1})
    again = [e for e in read_events(out / "metrics.jsonl") if e["event"] == "sample"]
    assert [e["step"] for e in again] == [0, 6, 6]
    # An adapter's run can ask it again, and does where the questions are others; else what it said is kept.
    for overrides, steps in (({}, [0, 1, 1]), ({"sample_tokens": 2}, [0, 1, 1, 0, 1])):
        shutil.rmtree(plain / "adapter")
        api.train(Config(), console=Console(quiet=True), resume=str(plain), overrides=overrides)
        again = [e for e in read_events(plain / "metrics.jsonl") if e["event"] == "sample"]
        assert [e["step"] for e in again] == steps


def test_from_scratch_asks_no_base(tiny_folder: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": f"say {c}", "response": c * 3} for c in "abcdefgh" * 3]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    settings = RUN | {"base": str(tiny_folder("llama")), "data": str(tmp_path / "data.jsonl"), "method": "scratch"}
    config = Config.of(settings | {"max_steps": 3, "out": str(tmp_path / "run")})
    api.train(config, console=Console())
    said = capsys.readouterr()
    assert "no base to ask" in said.err and "tuned" in said.out and "base" not in said.out.split("reference")[0]
    assert [e["step"] for e in read_events(tmp_path / "run" / "metrics.jsonl") if e["event"] == "sample"] == [3]


# Mistakes


@pytest.mark.parametrize(
    ("name", "value"), [("rank", 8), ("targets", "qv"), ("dropout", 0.1), ("new_tokens", "<a>"), ("train_norms", True)]
)
@pytest.mark.parametrize("method", ["full", "scratch"])
def test_adapter_settings_are_refused(method: str, name: str, value: Any, tiny_folder: Folder, tmp_path: Path) -> None:
    settings = {"base": str(tiny_folder("llama")), "method": method, name: value, "out": str(tmp_path / "run")}
    with pytest.raises(GraftuneError, match=f"{name} is set and method is {method}"):
        train(**settings)
    assert not (tmp_path / "run").exists()


def test_descriptions_of_models_that_cannot_start(tiny_folder: Folder, tmp_path: Path) -> None:
    shape = tmp_path / "shape"
    shutil.copytree(tiny_folder("llama"), shape, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((shape / "config.json").read_text())

    def refused(**changed: Any) -> str:
        (shape / "config.json").write_text(json.dumps({k: v for k, v in (config | changed).items() if v != "gone"}))
        with pytest.raises(GraftuneError) as error:
            open_session(Config.of({"base": str(shape), "method": "scratch", "device": "cpu"}))
        assert "\n" not in str(error.value)
        return str(error.value)

    for name in ("hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size", "num_attention_heads"):
        told = refused(**{name: "gone"})
        assert f"{name} is None" in told and str(shape / "config.json") in told
    assert "raise vocab_size" in refused(vocab_size=100)
    assert "architecture 'gpt2' is not known" in refused(model_type="gpt2")
    assert "training every weight takes" in refused(num_hidden_layers=1_000, hidden_size=32_768)
    assert "says 1000000000 layers" in refused(num_hidden_layers=10**9)
    (shape / "config.json").write_text(json.dumps(config))
    with pytest.raises(GraftuneError, match=r"holds no model\.safetensors"):
        open_base(str(shape))
    (shape / "tokenizer.json").unlink()
    assert "has no tokenizer.json" in refused()


def test_from_scratch_takes_a_config_file_a_folder_or_a_gguf(tiny_folder: Folder, tmp_path: Path) -> None:
    folder = tiny_folder("llama")
    gguf = tiny_gguf.write(tmp_path / "tiny.gguf", "llama")
    starts = []
    for base in (folder, folder / "config.json", gguf):
        opened = open_base(str(base), weights=False)
        assert not opened.tensors and re.fullmatch("[0-9a-f]{64}", opened.sha256)
        settings = {"base": str(base), "method": "scratch", "device": "cpu", "seed": 4}
        starts.append(open_session(Config.of(settings)).parts.arena.weights.clone())
    assert torch.equal(starts[0], starts[1]) and torch.equal(starts[0], starts[2])
    other = open_session(Config.of(settings | {"seed": 5})).parts.arena.weights
    assert not torch.equal(other, starts[0])
    before = open_base(str(folder), weights=False).sha256
    shutil.copytree(folder, tmp_path / "copy")
    assert open_base(str(tmp_path / "copy"), weights=False).sha256 == before != open_base(str(folder)).sha256
    (tmp_path / "copy" / "config.json").write_text((folder / "config.json").read_text() + "\n")
    assert open_base(str(tmp_path / "copy"), weights=False).sha256 != before
