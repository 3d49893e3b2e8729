"""Text-and-vision checkpoints: only the text model is read, and exports carry everything else over byte for byte."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from graftune.api import export
from graftune.errors import GraftuneError
from graftune.model.lora import build_arena, start_from_scratch
from graftune.observe.console import Console
from graftune.settings.sections import LoraConfig
from graftune.weights import names
from graftune.weights.adapter import load_adapter
from graftune.weights.base import open_base
from graftune.weights.describe import base_facts
from graftune.weights.gguf_io import read_gguf
from graftune.weights.model import hf_config, save_model
from graftune.weights.safetensors_io import CarriedTensor, weight_files
from tests.exporting import models
from tests.exporting.judges import opened
from tests.parity.test_full import transformers_logits
from tests.support import oracle, tiny
from tests.weights import tiny_gguf

VISION = list(tiny.VISION)
PROCESSOR = '{"image_size": 8,   "patch_size": 4}\n'


def make_folder(variant: str, folder: Path, shard: str = "1GB") -> Path:
    """With an image processor, a block that predicts further tokens, and a scalar of another type."""
    models.make_folder(variant, folder)
    model = tiny.hf_model(variant)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    model.save_pretrained(folder, max_shard_size=shard)
    (folder / "preprocessor_config.json").write_text(PROCESSOR)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"image_token": "z"}))
    files = weight_files(folder)
    more = {"mtp.fc.weight": torch.randn(3, 5).to(torch.bfloat16), "mtp.count": torch.tensor(7)}
    if len(files) > 1:
        save_file(more, folder / "model-mtp.safetensors", {"format": "pt"})
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        index["weight_map"] |= dict.fromkeys(more, "model-mtp.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        save_file({**stored_tensors(folder), **more}, folder / "model.safetensors", {"format": "pt"})
    return folder


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in weight_files(folder) for name, t in load_file(folder / file).items()}


def stored_bytes(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """(type, shape, bytes) of every tensor, by the files' own headers."""
    found = {}
    for file in weight_files(folder):
        data = (folder / file).read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:start])
        for name, entry in header.items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                found[name] = (entry["dtype"], tuple(entry["shape"]), data[start + first : start + last])
    return found


def is_text(name: str) -> bool:
    return "language_model" in name or "lm_head" in name


def trained(folder: Path, out: Path, **settings: Any) -> Path:
    """An adapter that changes what the model says."""
    run = opened(folder, rank=2, **settings)
    arena = run.parts.arena
    arena.weights.add_(torch.randn(len(arena.weights), generator=torch.Generator().manual_seed(1)), alpha=0.2)
    arena.publish()
    return run.save(out)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("variant", "shard"), [*((variant, "1GB") for variant in VISION), ("qwen3_vl", "20KB"), ("gemma3-vision", "20KB")]
)
def test_a_merged_folder_has_every_tensor_of_its_base(variant: str, shard: str, tmp_path: Path) -> None:
    folder = make_folder(variant, tmp_path / "model", shard)
    assert (len(weight_files(folder)) > 3) == (shard == "20KB")
    adapter = trained(folder, tmp_path / "adapter", targets="qv")
    merged = export(str(adapter), "merged", out=str(tmp_path / "merged")).path
    want, got = stored_bytes(folder), stored_bytes(merged)
    assert set(want) == set(got) and {"mtp.fc.weight", "mtp.count"} < set(want)
    assert any(is_text(name) for name in want) and any("vision" in n or "visual" in n for n in want)
    for name, stored in want.items():
        changed = is_text(name) and name.endswith(("q_proj.weight", "v_proj.weight"))
        assert (got[name] == stored) != changed, name
        assert got[name][:2] == stored[:2], name
    assert (merged / "preprocessor_config.json").read_text() == PROCESSOR
    assert json.loads((merged / "tokenizer_config.json").read_text())["image_token"] == "z"
    before, after = (json.loads((f / "config.json").read_text()) for f in (folder, merged))
    assert after["architectures"] == before["architectures"] and after["model_type"] == before["model_type"]
    assert after["vision_config"] == before["vision_config"]
    assert "vocab_size" not in after and after["text_config"] == before["text_config"]
    documents = [[5, 80, 7, 99, 130], [40, 41]]
    changed_logits = oracle.ours(merged, random_b=False).logits(documents)
    assert (transformers_logits(merged, documents) - changed_logits).abs().max() < 1e-4
    assert (oracle.ours(folder, random_b=False).logits(documents) - changed_logits).abs().max() > 1e-2


@pytest.mark.parametrize("variant", VISION)
def test_a_model_that_trained_whole_carries_them_too(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(variant, tmp_path / "model")
    side = oracle.whole(folder)
    side.arena.weights.mul_(1.01)
    monkeypatch.setattr("graftune.weights.model.SHARD_BYTES", 20_000)
    save_model(tmp_path / "out", side.arena, side.base, hf_config(side.base), torch.float32)
    want, got = stored_bytes(folder), stored_bytes(tmp_path / "out")
    assert set(want) == set(got) and len(weight_files(tmp_path / "out")) > 3
    assert all((want[name] == got[name]) != is_text(name) for name in want)


def test_tensors_outside_the_text_model_are_never_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folder("gemma3-vision", tmp_path / "model")
    want = oracle.ours(folder, random_b=False).logits([[5, 80, 7]])
    tensors = stored_tensors(folder)
    damage = {n: 0 if t.dtype == torch.int64 else torch.nan for n, t in tensors.items()}
    broken = {n: t if is_text(n) else torch.full_like(t, damage[n]) for n, t in tensors.items()}
    save_file(broken, folder / "model.safetensors", {"format": "pt"})
    monkeypatch.setattr(CarriedTensor, "pieces", lambda self: pytest.fail("a carried tensor is read"))
    base = open_base(str(folder))
    assert set(base.carried) == {name for name in tensors if not is_text(name)}
    assert base_facts(base)["not loaded"].startswith(f"{len(base.carried)} tensors outside the text model (")
    assert all(isinstance(t.data, np.memmap) for t in base.carried.values()), "a view of the file"
    assert torch.equal(oracle.ours(folder, random_b=False).logits([[5, 80, 7]]), want)
    assert not any("vision" in name or "mtp" in name for name in oracle.whole(folder).arena.slots)
    monkeypatch.undo()
    merged = export(str(folder), "merged", out=str(tmp_path / "merged")).path
    assert stored_bytes(merged) == stored_bytes(folder), "NaN too, to the bit"


def test_a_text_folder_with_a_stray_tensor_is_refused(tmp_path: Path) -> None:
    folder = models.make_folder("llama", tmp_path / "model")
    tensors = stored_tensors(folder) | {"model.visual.x": torch.ones(2)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(GraftuneError, match=r"holds visual\.x, which llama models do not have"):
        open_base(str(folder))
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3"}))
    with pytest.raises(GraftuneError, match="has no text_config"):
        open_base(str(folder))


def test_blocks_that_predict_further_tokens_are_no_layers(tmp_path: Path) -> None:
    """They are carried from GGUF to GGUF, in their own types, and a folder has no place for them."""
    width = tiny.config("qwen3")["hidden_size"]
    more = {
        "blk.3.nextn.eh_proj.weight": np.random.default_rng(1).standard_normal((width, 2 * width)).astype(np.float16),
        "blk.3.attn_norm.weight": np.ones(width, np.float32),
    }
    file = tiny_gguf.write(
        tmp_path / "m.gguf",
        "qwen3",
        metadata={"qwen3.block_count": 4, "qwen3.nextn_predict_layers": 1},
        **{name.replace(".", "__"): value for name, value in more.items()},
    )
    plain = tiny_gguf.write(tmp_path / "plain.gguf", "qwen3")
    base = open_base(str(file))
    assert base.spec == open_base(str(plain)).spec and set(base.carried) == set(more)
    assert torch.equal(*(oracle.ours(f, random_b=False).logits([[5, 80, 7]]) for f in (file, plain)))
    out = export(str(trained(file, tmp_path / "adapter")), "gguf", kind="F32", out=str(tmp_path / "out.gguf")).path
    before, after = read_gguf(file), read_gguf(out)
    assert set(before.tensors) == set(after.tensors)
    for name in more:
        assert after.tensors[name].kind == before.tensors[name].kind, name
        assert after.tensors[name].blocks.tobytes() == before.tensors[name].blocks.tobytes(), name
    assert after.metadata["qwen3.block_count"] == 4 and after.metadata["qwen3.nextn_predict_layers"] == 1
    done = export(str(file), "merged", out=str(tmp_path / "merged"))
    assert len(open_base(str(done.path)).spec.layers) == 3
    assert "2 tensors outside the text model are not in this export" in " ".join(done.notes)


def text_class(variant: str) -> Any:
    """The text model alone, in transformers' class for it, with the weights of the text-and-vision model; None if
    transformers has no such class."""
    import transformers

    whole = tiny.hf_model(variant)
    config = whole.config.get_text_config()
    if config.model_type == "qwen3_vl_text":  # it has no class of its own and computes what Qwen 3 does
        options = {**config.to_dict(), "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
        config = transformers.Qwen3Config(**options)
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    state = {names.TEXT.of(o): t for n, t in whole.state_dict().items() if (o := names.MULTIMODAL.ours(n))}
    missing = model.load_state_dict(state, strict=False)
    assert not missing.unexpected_keys and set(missing.missing_keys) <= {"lm_head.weight"}
    return model.float().eval()


def with_peft(model: Any, adapter: Path) -> Any:
    """The model with the adapter, which PEFT loads without a missing or unexpected key."""
    import peft

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(missing|unexpected).*")
        wrapped = peft.PeftModel.from_pretrained(model, adapter)
    found = peft.set_peft_model_state_dict(wrapped, peft.load_peft_weights(str(adapter)))
    missing = [n for n in found.missing_keys if "lora_" in n or "modules_to_save" in n]
    assert not missing and not found.unexpected_keys
    trained = [n for n, _ in wrapped.named_parameters() if "lora_" in n or "modules_to_save" in n]
    assert not any("vision" in n or "visual" in n for n in trained), "adapters on the text model alone"
    return wrapped.eval()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("variant", "settings"),
    [*((variant, {}) for variant in VISION), ("gemma3-vision", {"targets": "qv", "train_norms": True})],
)
def test_peft_loads_adapters_into_both_classes(variant: str, settings: Any, tmp_path: Path) -> None:
    folder, documents = make_folder(variant, tmp_path / "model"), [[5, 80, 7, 99, 130], [40, 41]]
    own = trained(folder, tmp_path / "adapter", **settings)
    paths = {"checkpoint": own}
    for naming in ("text", "multimodal"):
        paths[naming] = export(str(own), "peft", out=str(tmp_path / naming), adapter_names=naming).path
    keys = {naming: set(load_file(path / "adapter_model.safetensors")) for naming, path in paths.items()}
    assert keys["checkpoint"] == keys["multimodal"] and not keys["text"] & keys["multimodal"]
    assert all(n.startswith("base_model.model.model.language_model.") for n in keys["multimodal"])
    read = {naming: load_adapter(path) for naming, path in paths.items()}
    for adapter in read.values():  # either is read to the bit
        assert adapter.lora == read["checkpoint"].lora and not adapter.partial
        assert set(adapter.tensors) == set(read["checkpoint"].tensors)
        assert all(torch.equal(t, read["checkpoint"].tensors[n]) for n, t in adapter.tensors.items())
    run = opened(folder, paths["text"])
    want = oracle.Ours(run.base, run.parts.decoder, run.parts.arena, run.config.lora).logits(documents)
    models_ = {"text": text_class(variant), "multimodal": tiny.hf_model(variant)}
    for naming, model in models_.items():
        if model is None:
            continue
        with torch.no_grad():
            before = torch.cat([model(torch.tensor([d])).logits[0] for d in documents])
            wrapped = with_peft(model, paths[naming])
            got = torch.cat([wrapped(torch.tensor([d])).logits[0] for d in documents])
        assert (got - want).abs().max() < 1e-4 and (before - want).abs().max() > 1e-2, naming
        other = paths["text" if naming == "multimodal" else "multimodal"]
        with pytest.raises(ValueError, match="not found in the base model"):  # and not: without effect
            type(wrapped).from_pretrained(wrapped.unload(), other)
    with pytest.raises(GraftuneError, match="adapter_names is text and the format is merged"):
        export(str(own), "merged", adapter_names="text")


def test_adapters_of_older_versions_are_read(tmp_path: Path) -> None:
    """Their classes had the text model as language_model.model."""
    folder = make_folder("gemma3-vision", tmp_path / "model")
    own = trained(folder, tmp_path / "adapter")
    want, file = load_adapter(own), own / "adapter_model.safetensors"
    old = {
        n.replace("model.model.language_model.", "model.language_model.model."): t for n, t in load_file(file).items()
    }
    save_file(old, file, {"format": "pt"})
    (own / "graftune.json").unlink()
    settings = json.loads((own / "adapter_config.json").read_text())
    settings["target_modules"] = r".*language_model.*\.(self_attn|mlp)\.\w+_proj"
    (own / "adapter_config.json").write_text(json.dumps(settings))
    got = load_adapter(own)
    assert set(got.tensors) == set(want.tensors) and all(
        torch.equal(t, got.tensors[n]) for n, t in want.tensors.items()
    )
    assert set(got.tensors) == set(opened(folder, own, any_base=True).parts.arena.slots)


def test_added_tokens_travel_with_both(tmp_path: Path) -> None:
    folder, documents = make_folder("gemma3-vision", tmp_path / "model"), [[5, 80, 7, tiny.VOCAB, 130, tiny.VOCAB + 1]]
    own = trained(folder, tmp_path / "adapter", new_tokens="<a>,<b>", targets="qv")
    run = opened(folder, own)
    want = oracle.Ours(run.base, run.parts.decoder, run.parts.arena, run.config.lora).logits(documents)
    model = tiny.hf_model("gemma3-vision")
    model.resize_token_embeddings(tiny.VOCAB + 2, mean_resizing=False)
    with torch.no_grad():
        got = with_peft(model, own)(torch.tensor(documents)).logits[0]
    assert (got - want).abs().max() < 1e-4
    merged = export(str(own), "merged", out=str(tmp_path / "merged")).path
    config = json.loads((merged / "config.json").read_text())
    assert config["text_config"]["vocab_size"] == tiny.VOCAB + 2 and "vocab_size" not in config
    assert (transformers_logits(merged, documents) - want).abs().max() < 1e-4


def test_quantised_tensors_outside_the_text_model_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What describes them is no longer in the configuration, which says how the text model was quantised."""
    folder = make_folder("qwen3_vl", tmp_path / "model")
    export(str(folder), "merged", out=str(tmp_path / "plain"), console=Console())
    assert "quantised" not in capsys.readouterr().err
    monkeypatch.setattr("graftune.exporting.write.checkpoint_format", lambda tensors: "fp8")
    export(str(folder), "merged", out=str(tmp_path / "merged"), console=Console())
    assert "1 tensors outside the text model are quantised" in capsys.readouterr().err


def test_a_text_model_from_nothing_has_no_vision_tower(tmp_path: Path) -> None:
    """Its folder describes the text model alone."""
    folder = make_folder("gemma3-vision", tmp_path / "model")
    base = open_base(str(folder), weights=False)
    arena = build_arena(base.spec, LoraConfig(), torch.device("cpu"), torch.float32, full=True)
    start_from_scratch(arena, base.spec, 3)
    save_model(tmp_path / "out", arena, base, hf_config(base), torch.float32)
    back = open_base(str(tmp_path / "out"))
    assert back.spec == base.spec and not back.multimodal and not back.carried
    assert not (tmp_path / "out" / "preprocessor_config.json").exists()
    documents = [[5, 80, 7]]
    ours = oracle.ours(tmp_path / "out", random_b=False).logits(documents)
    assert (transformers_logits(tmp_path / "out", documents) - ours).abs().max() < 1e-4
