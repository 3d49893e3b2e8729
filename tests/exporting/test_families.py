"""Every family as a GGUF that we write: llama.cpp says what we and transformers say, token for token, and the file
comes in again as a base whose gradients are autograd's and which goes out as the folder it came from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from graftune.api import export
from graftune.errors import GraftuneError
from graftune.infer.sample import Sampling
from graftune.model.families import FAMILIES as KNOWN
from graftune.model.families import family_of, from_gguf
from graftune.weights.base import open_base
from graftune.weights.gguf_io import read_gguf
from graftune.weights.model import hf_config, save_model
from tests.exporting import models
from tests.exporting.judges import LlamaCpp, gap, opened, ours
from tests.parity.test_full import examples, named, relative, transformers_logits
from tests.support import oracle, tiny
from tests.support.generate import generate
from tests.support.thorough import THOROUGH

IN_LLAMA_CPP = [variant for variant in tiny.FAMILIES if KNOWN[variant].in_llama_cpp]
FAMILIES = [*IN_LLAMA_CPP, "llama-untied", "phi3-far", "olmo3-yarn"]  # mixtures: tests/exporting/test_moe.py
# One of each structure; test_logits.py compares the logits of all.
SPOKEN = (
    FAMILIES
    if THOROUGH
    else ["llama-untied", "gemma3", "phi3-far", "lfm2", "qwen3_5", "granite_swa", "gemma4", "gemma4_unified"]
)
TOKENS = 50 if THOROUGH else 24
PROMPT = [200, 5, 5, 18, 77, 150, 31, 8, 8, 64, 12, 90]


@pytest.fixture(scope="module")
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Path]:
    """(variant, folder, GGUF)."""
    root = tmp_path_factory.mktemp("family")
    folder = models.make_folder(request.param, root / "model")
    if request.param in ("llama", "qwen2"):  # tied: a head that says its own input again and again shows little
        file = folder / "model.safetensors"
        tensors = load_file(file)
        tensors["model.norm.weight"][::2] *= -1
        save_file(tensors, file, {"format": "pt"})
    return request.param, folder, export(str(folder), "gguf", kind="F32", out=str(root / "m.gguf")).path


@pytest.mark.few(4)
@pytest.mark.parametrize("both", SPOKEN, indirect=True)
def test_greedy_text_of_llama_cpp_is_ours(both: tuple[str, Path, Path]) -> None:
    """Over its cache. Where the two best are closer than its noise (gemma's gelu comes from a table over
    fp16), either may be said, and the texts part there."""
    variant, folder, gguf = both
    engine, sampling = oracle.ours(gguf, random_b=False), Sampling(max_new_tokens=TOKENS)
    prompts = [[*PROMPT[:4], start] for start in range(30, 60 if THOROUGH else 42)]
    answers = generate(engine.decoder, prompts, sampling, ())
    # The liveliest text without the tokens that end one there.
    ends = {0, 2, engine.base.tokenizer.backend.token_to_id("</s>")}
    endless = [(p, a) for p, a in zip(prompts, answers, strict=True) if not ends & set(a)]
    prompt, want = max(endless, key=lambda one: len(set(one[1])))
    # Read from the folder, each token is the first choice after those before: the same text.
    assert want == oracle.ours(folder, random_b=False).logits([prompt + want])[len(prompt) - 1 : -1].argmax(-1).tolist()
    got = [int(t) for t in LlamaCpp(gguf).ask(prompt, n_predict=TOKENS, return_tokens=True)["tokens"]]
    same = next((i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b), TOKENS)
    if same < TOKENS:
        logits = engine.logits([prompt + want[:same]])[-1]
        close = float(logits[want[same]] - logits[got[same]])
        assert variant.startswith("gemma") and close < 0.02, (same, close, got, want)
    assert same > 5 and len(set(want)) > 6, (got, want)
    print(f"{variant}: {same} of {TOKENS} tokens equal, {len(set(want))} different ones")


def test_long_rope_is_llama_cpps(tmp_path: Path) -> None:
    """It takes the long factors for a context beyond the original, we for a document beyond it: both do here."""
    folder = models.make_folder("phi3-far", tmp_path / "model")
    gguf = export(str(folder), "gguf", kind="F32", out=str(tmp_path / "m.gguf")).path
    document = [5 + (i * 37) % 200 for i in range(300)]
    got = LlamaCpp(gguf, context=512).after(document)
    run = opened(gguf)
    assert gap(got, ours(run, document)[-1]) < 1e-4
    decoder = run.parts.decoder
    decoder.ropes = (decoder.ropes[0]._replace(limit=1000),)
    assert gap(got, ours(run, document)[-1]) > 1e-2, "the factors make a difference"


def test_a_ministral_that_llama_cpp_converted_is_read(tmp_path: Path) -> None:
    """Its converter writes yarn's mscale_all_dim and no attention factor."""
    folder = models.make_folder("ministral3", tmp_path / "model")
    file = read_gguf(export(str(folder), "gguf", kind="F32", out=str(tmp_path / "m.gguf")).path)
    theirs = dict(file.metadata) | {"mistral3.rope.scaling.yarn_log_multiplier": 1.0}
    del theirs["mistral3.rope.scaling.attn_factor"]
    (rope,), (wanted,) = from_gguf(theirs, file.tensors, "").ropes, open_base(str(folder)).spec.ropes
    assert rope.build().scaling == pytest.approx(1.0) == wanted.build().scaling
    assert (rope.temperature, rope.temperature_length) == (pytest.approx(0.3), 16)


@pytest.mark.thorough
def test_windows_of_exaone4_are_llama_cpps(tmp_path: Path) -> None:
    """llama.cpp has them in models of 64 layers, where every fourth layer has no rope."""
    folder = models.make_folder("exaone4-deep", tmp_path / "model")
    gguf = export(str(folder), "gguf", kind="F32", out=str(tmp_path / "m.gguf")).path
    document = [5 + (i * 37) % 200 for i in range(40)]
    assert gap(LlamaCpp(gguf).after(document), ours(opened(folder), document)[-1]) < 1e-3
    mixers = [layer.mixer for layer in open_base(str(gguf)).spec.layers]
    assert [mixer.attention.window for mixer in mixers[:5]] == [6, 6, 6, 0, 6]
    assert [mixer.ropes[0].enabled for mixer in mixers[:5]] == [True, True, True, False, True]


@pytest.mark.parametrize("both", FAMILIES, indirect=True)
def test_a_gguf_trains_and_goes_out_as_a_folder(both: tuple[str, Path, Path], tmp_path: Path) -> None:
    variant, folder, gguf = both
    side, folders = oracle.whole(gguf), family_of(open_base(str(folder)).spec)
    loss, grads = side.gradients(examples(20, 33))
    grads = oracle.as_stored(grads, side.base.spec)
    model = tiny.load_hf(folder)
    total = oracle.loss_sum(model, examples(20, 33))
    total.backward()
    assert loss == pytest.approx(float(total.detach()), rel=1e-5)
    for name, parameter in named(model).items():
        parts = [family_of(side.base.spec).our_name(part) for part in folders.to_gguf(name)]
        got = torch.cat([grads[part] for part in parts if part])  # a GGUF may hold a tensor of the folder as two
        assert parameter.grad is not None and relative(got, parameter.grad) < 1e-4, name
    save_model(tmp_path / "model", side.arena, side.base, hf_config(side.base), torch.float32)
    documents = [e.tokens for e in examples(90, 11)]
    if variant != "muse_glimmer":  # transformers has no class for its text model alone
        assert (transformers_logits(tmp_path / "model", documents) - side.logits(documents)).abs().max() < 2e-4
    again = oracle.ours(tmp_path / "model", random_b=False)
    assert (again.logits(documents) - side.logits(documents)).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("variant", "what"),
    [
        ("gemma2-odd", "caps the scores"),
        ("smollm3-window", r"layers\.0\..*rope\.0 is 0\.0"),
        ("gemma3-short", r"layers\.1\..*rope\.1 is"),
        ("exaone4-window", r"layers\.0\..*window is 6 \(it reads back as 0\)"),
    ],
)
def test_what_a_gguf_cannot_say_is_refused(variant: str, what: str, tmp_path: Path) -> None:
    folder = models.make_folder(variant, tmp_path / "model")
    with pytest.raises(GraftuneError, match=what):
        export(str(folder), "gguf", kind="F32", out=str(tmp_path / "m.gguf"))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_family_that_llama_cpp_does_not_know_is_refused(tmp_path: Path) -> None:
    folder = models.make_folder("lfm3", tmp_path / "model")
    with pytest.raises(
        GraftuneError, match=r"llama\.cpp has no architecture for lfm3 models; export to merged or peft"
    ):
        export(str(folder), "gguf", kind="F32", out=str(tmp_path / "m.gguf"))


def test_phi3s_adapter_names_pefts_modules(tmp_path: Path) -> None:
    folder = models.make_folder("phi3", tmp_path / "model")
    config = json.loads((opened(folder, rank=2).save(tmp_path / "a") / "adapter_config.json").read_text())
    assert config["target_modules"] == ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
    again: Any = opened(folder, tmp_path / "a")
    assert "layers.0.self_attn.qkv_proj.lora_A.weight" in again.parts.arena.slots
