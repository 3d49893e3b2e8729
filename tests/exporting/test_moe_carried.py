"""Mixtures inside text-and-vision checkpoints, and layers behind the last one that predict further tokens: what is not
the text model is carried into exports byte for byte."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from graftune.errors import GraftuneError
from graftune.exporting.write import export
from graftune.weights.base import open_base
from tests.exporting import judges, models
from tests.support import moe, tiny


def test_a_mixture_in_a_text_and_vision_checkpoint(tmp_path: Path) -> None:
    text = moe.hf_config("qwen3_5_moe").to_dict()
    vision = copy.deepcopy(tiny.VISION["qwen3_5-vision"][1])
    config = transformers.Qwen3_5MoeConfig(text_config=text, tie_word_embeddings=False, **vision)
    torch.manual_seed(3)
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").float().eval()
    model.save_pretrained(tmp_path / "base")
    models.tokenizer().save(tmp_path / "base")
    run = judges.shaken(judges.opened(tmp_path / "base", rank=3, alpha=6.0, targets=("all_linear",)), by=0.05)
    with torch.no_grad():
        logits = model(torch.tensor([judges.DOCUMENT])).logits[0]
    before = torch.log_softmax(logits, -1)
    assert judges.gap(judges.ours(run, adapted=False), before) < 1e-4
    run.save(str(tmp_path / "adapter"))
    export(str(tmp_path / "adapter"), "merged", kind="F32", out=str(tmp_path / "merged"))
    merged = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    with torch.no_grad():
        after = torch.log_softmax(merged(torch.tensor([judges.DOCUMENT])).logits[0], -1)
    assert judges.gap(after, judges.ours(run)) < 1e-4 and judges.gap(after, before) > 1e-2
    stored, written = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "merged"))
    outside = [name for name in stored if ".visual." in name]
    assert outside and all(torch.equal(stored[name], written[name]) for name in outside)


def test_layers_that_predict_further_tokens_are_carried(tmp_path: Path) -> None:
    """GLM's folders have them behind the last layer; without the setting that counts them they are refused by name."""
    base = moe.make_folder("glm4_moe", tmp_path / "base")
    models.tokenizer().save(base)
    want = judges.ours(judges.opened(base))
    tensors = load_file(base / "model.safetensors")
    names = ("model.layers.3.eh_proj.weight", "model.layers.3.mlp.experts.0.up_proj.weight")
    more = {name: torch.randn(4, 6) for name in names}
    save_file(tensors | more, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(GraftuneError, match=r"layers\.3\."):
        open_base(str(base))
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    run = judges.shaken(judges.opened(base, rank=2), by=0.05)
    assert set(open_base(str(base)).carried) == set(more)
    assert judges.gap(judges.ours(run, adapted=False), want) < 1e-6
    run.save(str(tmp_path / "adapter"))
    done = export(str(tmp_path / "adapter"), "merged", kind="F32", out=str(tmp_path / "merged"))
    written = load_file(Path(done.path) / "model.safetensors")
    assert all(torch.equal(written[name], value) for name, value in more.items())
    export(str(tmp_path / "adapter"), "gguf", kind="F32", out=str(tmp_path / "m.gguf"))
    assert judges.gap(judges.LlamaCpp(tmp_path / "m.gguf").along(judges.DOCUMENT), judges.ours(run)) < 1e-4
