"""Every format gives our own log-probabilities in the program it is for, and again when it comes back in.

fp32 files are held to fp32's noise: a row in the wrong order, a scale or a transposed matrix would show at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from graftune.api import export
from graftune.errors import GraftuneError
from graftune.kernels import swiglu
from tests.exporting import models
from tests.exporting.judges import DOCUMENT, LlamaCpp, gap, in_transformers, opened, ours, shaken
from tests.support import tiny
from tests.support.thorough import THOROUGH
from tests.weights import tiny_gguf

EXACT = 1e-4  # of log-probabilities over fp32 files: 3e-5 measured at worst
VARIANTS = (
    *("llama", "mistral", "qwen2", "qwen3", "llama-llama3", "llama-yarn", "llama-untied"),
    *("gemma3", "gemma3-linear", "gemma2", "phi3", "phi3-far", "granite", "smollm3", "olmo2", "olmo3"),
    *("lfm2", "qwen3_5", "gemma", "granitemoehybrid", "exaone4", "glm4", "ernie4_5"),
    *("granite_swa", "hunyuan_v1_dense", "ministral3", "muse_glimmer", "gemma4", "gemma4_unified"),
)


# Their projections have the names and the layout of another family's: so have the files of their adapters.
ALIKE = (
    "mistral",
    "qwen3",
    "gemma2",
    "granite",
    "smollm3",
    "olmo2",
    "olmo3",
    "gemma",
    "exaone4",
    "granite_swa",
    "ministral3",
    "hunyuan_v1_dense",
)


def gelu_from_ggmls_table(gate: torch.Tensor, kind: str) -> torch.Tensor:
    """ggml looks gelu up in a table over fp16 between -10 and 10, on a CPU."""
    assert kind == "gelu"
    inside = torch.nn.functional.gelu(gate.half().float(), approximate="tanh").half().float()
    return torch.where(gate >= 10, gate, torch.where(gate <= -10, torch.zeros_like(gate), inside))


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_way_out_and_in_again(variant: str, tuned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tuned(variant)
    assert gap(ours(opened(made.base)), made.want) > 0.3, "an adapter that changes nothing proves nothing"

    def out(to: str, target: Path = made.adapter, name: str = "", **more: Any) -> Path:
        return export(str(target), to, out=str(tmp_path / (name or to)), **more).path

    merged = out("merged")
    whole = out("gguf", name="whole.gguf", kind="F32")
    there = made.want  # what llama.cpp should say
    if variant.startswith("gemma"):
        with monkeypatch.context() as patched:
            patched.setattr(swiglu.reference, "_act", gelu_from_ggmls_table)
            there = ours(opened(made.base, made.adapter))
        assert 1e-4 < gap(there, made.want) < 0.03
    gaps = {
        "transformers over merged": gap(in_transformers(merged), made.want),
        "llama.cpp over merged": gap(LlamaCpp(whole).along(DOCUMENT), there),
        "merged in": gap(ours(opened(merged)), made.want),
        "gguf in": gap(ours(opened(whole)), made.want),
    }
    # One that has another rope or a head of its own than its family has the same adapters.
    if "-" not in variant and (THOROUGH or variant not in ALIKE):
        peft = out("peft")
        lora = out("gguf-lora", name="lora.gguf")
        base = out("gguf", made.base, "base.gguf", kind="F32")
        gaps |= {
            "PEFT": gap(in_transformers(made.base, adapter=peft), made.want),
            "llama.cpp with the adapter": gap(LlamaCpp(base, [lora]).along(DOCUMENT), there),
            "peft in": gap(ours(opened(made.base, peft)), made.want),
            "apr in": gap(ours(opened(made.base, out("apr", name="a.apr"))), made.want),
            "gguf-lora in, over the GGUF": gap(ours(opened(base, lora, any_base=True)), made.want),
        }
        if variant == "granitemoehybrid":  # gate and up are one projection there, and may have two A's in a GGUF
            with pytest.raises(GraftuneError, match="granitemoehybrid has no gate_proj"):
                opened(adapter=lora)
        else:  # finds its base by itself
            gaps["gguf-lora in, over the folder"] = gap(ours(opened(adapter=lora)), made.want)
    print({name: f"{value:.1e}" for name, value in gaps.items()})
    # In seven layers, values on the border between two entries of ggml's table come out on either side of it.
    # llama.cpp divides a delta net's q and k by their length, or by the model's epsilon if that is larger; transformers
    # by the root of the squared length plus 1e-6.
    loose = {"gemma3": 0.02, "gemma4": 0.01, "qwen3_5": 0.002}.get(variant.partition("-")[0], EXACT)
    assert all(value < (loose if name.startswith("llama.cpp") else EXACT) for name, value in gaps.items()), gaps


def test_a_gguf_base_is_tuned_and_served_as_the_file_it_is(tmp_path: Path) -> None:
    """The adapter goes onto the original file, and the merged file keeps its keys."""
    base = tiny_gguf.write(tmp_path / "base.gguf", "llama", metadata={"general.license": "mine", "x.odd": -3.5})
    run = shaken(opened(base, rank=4, alpha=10.0))
    adapter = run.save(tmp_path / "adapter")
    want = ours(run)
    lora = export(str(adapter), "gguf-lora", out=str(tmp_path / "l.gguf")).path
    whole = export(str(adapter), "gguf", kind="F32", out=str(tmp_path / "w.gguf")).path
    merged = export(str(adapter), "merged", kind="F32", out=str(tmp_path / "m")).path
    assert gap(LlamaCpp(base, [lora]).along(DOCUMENT), want) < EXACT
    assert gap(LlamaCpp(whole).along(DOCUMENT), want) < EXACT
    assert gap(in_transformers(merged), want) < EXACT
    from graftune.weights.gguf_io import read_gguf

    before, after = read_gguf(base).metadata, read_gguf(whole).metadata
    changed = {"general.file_type", "general.quantization_version"}
    assert {k: v for k, v in after.items() if k not in changed} == {k: v for k, v in before.items() if k not in changed}


def test_trained_norms_and_added_tokens_are_merged(tmp_path: Path) -> None:
    for variant in ("llama", "llama-untied", "qwen3"):
        base = models.make_folder(variant, tmp_path / variant)
        new = ("<call>", "<result>")
        run = shaken(opened(base, rank=3, alpha=7.0, train_norms=True, new_tokens=new))
        adapter = run.save(tmp_path / f"{variant}-adapter")
        tokens = [*DOCUMENT, tiny.VOCAB, 9, tiny.VOCAB + 1]
        want = ours(run, tokens)
        assert want.shape[1] == tiny.VOCAB + 2
        merged = export(str(adapter), "merged", out=str(tmp_path / f"{variant}-m")).path
        whole = export(str(adapter), "gguf", kind="F32", out=str(tmp_path / f"{variant}.gguf")).path
        assert gap(in_transformers(merged, tokens), want) < EXACT
        assert gap(LlamaCpp(whole).along(tokens, tiny.VOCAB + 2), want) < EXACT
        for back in (opened(merged), opened(whole)):
            assert gap(ours(back, tokens), want) < EXACT
            assert back.tokenizer.encode("a<call>b") == run.tokenizer.encode("a<call>b")
        apr = export(str(adapter), "apr", out=str(tmp_path / f"{variant}.apr")).path
        assert gap(ours(opened(base, apr), tokens), want) < EXACT


def test_a_gguf_base_with_added_tokens(tmp_path: Path) -> None:
    base = tiny_gguf.write(tmp_path / "base.gguf", "qwen2")
    run = shaken(opened(base, rank=3, new_tokens=("<call>",)))
    adapter = run.save(tmp_path / "adapter")
    tokens = [*DOCUMENT, tiny.VOCAB, 9]
    whole = export(str(adapter), "gguf", kind="F32", out=str(tmp_path / "w.gguf")).path
    assert gap(LlamaCpp(whole).along(tokens, tiny.VOCAB + 1), ours(run, tokens)) < EXACT
    assert opened(whole).tokenizer.encode("<call>") == [tiny.VOCAB]


def test_rank_stabilised_adapters_keep_their_scale(tmp_path: Path) -> None:
    base = models.make_folder("qwen2", tmp_path / "base")
    run = shaken(opened(base, rank=4, alpha=3.0, rslora=True, targets=["qv"]))
    adapter = run.save(tmp_path / "adapter")
    gguf = export(str(base), "gguf", kind="F32", out=str(tmp_path / "b.gguf")).path
    lora = export(str(adapter), "gguf-lora", out=str(tmp_path / "l.gguf")).path
    merged = export(str(adapter), "merged", out=str(tmp_path / "m")).path
    assert gap(LlamaCpp(gguf, [lora]).along(DOCUMENT), ours(run)) < EXACT
    assert gap(in_transformers(merged), ours(run)) < EXACT
    assert gap(ours(opened(gguf, lora, any_base=True)), ours(run)) < EXACT


# What llama.cpp's 8-bit activations leave between it and us over the same file, and what the type itself costs.
COARSE = {
    "F16": (0.02, 0.03), "BF16": (0.1, 0.15), "Q8_0": (0.3, 0.4), "Q6_K": (0.4, 1.0), "Q4_K_M": (0.4, 4.0),
    "Q4_0": (0.4, 5.0), "Q5_K_M": (0.4, 2.0), "IQ4_XS": (0.4, 5.0), "Q3_K_M": (0.6, 9.0),
}  # fmt: skip


# Blocks of 256 values do not fit rows of 192: each of these then takes another type there.
LARGE_BLOCKS = ("Q6_K", "Q4_K_M", "Q5_K_M", "IQ4_XS", "Q3_K_M")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], tuple[Path, torch.Tensor]]:
    @cache
    def of(width: int) -> tuple[Path, torch.Tensor]:
        folder = tmp_path_factory.mktemp("wide")
        base = models.make_wide(folder / "base", layers=3, width=width)
        run = shaken(opened(base, rank=4, alpha=8.0), by=0.03)
        return run.save(folder / "adapter"), ours(run)

    return of


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("width", "kind"), [*((256, kind) for kind in COARSE), *((192, kind) for kind in LARGE_BLOCKS)]
)
def test_quantised_types_run_in_llama_cpp(width: int, kind: str, wide: Any, tmp_path: Path) -> None:
    adapter, want = wide(width)
    done = export(str(adapter), "gguf", kind=kind, out=str(tmp_path / "x.gguf"))
    theirs, back = LlamaCpp(done.path).along(DOCUMENT), ours(opened(done.path))
    same, cost = gap(theirs, back), gap(back, want)
    print(f"{kind} {done.facts['kinds']}: llama.cpp against us {same:.1e}, the type's own cost {cost:.1e}")
    assert same < COARSE[kind][0] and cost < COARSE[kind][1]
