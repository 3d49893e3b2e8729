"""How weights are held: what `auto` chooses and says, what is refused, and what lies where."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from gguf.constants import GGMLQuantizationType
from safetensors.torch import load_file, save_file

from graftune.errors import GraftuneError
from graftune.kernels import launch, nf4
from graftune.model.frozen import Dense, Mapped, Unpacked
from graftune.model.frozen.formats.floats import FloatRows
from graftune.model.frozen.formats.gguf import GgufRows
from graftune.model.frozen.formats.nf4 import Nf4Rows
from graftune.model.part import FileOrder
from graftune.runtime import resolve
from graftune.settings.sections import LoraConfig
from graftune.weights import placement
from graftune.weights.base import Base, open_base
from graftune.weights.gguf_io import GgufTensor
from graftune.weights.placement import choose_placement
from graftune.weights.rows import Reordered, RowRange
from tests.support import quantised, tiny

LORA = LoraConfig(rank=4, alpha=8.0)
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
CPU = torch.device("cpu")


@pytest.fixture
def as_on_a_gpu(monkeypatch) -> None:
    monkeypatch.setattr(launch, "augments", lambda device: True)


def written(plain: Path, folder: Path, told: dict, leave: str = "none") -> Path:
    """A checkpoint as bitsandbytes would write it, made by our own quantiser."""
    shutil.copytree(plain, folder)
    tensors = {}
    for name, value in load_file(folder / "model.safetensors").items():
        quantise = "_proj." in name and name.endswith("weight") and leave not in name
        tensors |= quantised.nf4_checkpoint(nf4.quantise(value), name) if quantise else {name: value}
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": told}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def refusal(folder: Path) -> str:
    with pytest.raises(GraftuneError) as caught:
        open_base(str(folder))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "gpu", "fits", "chosen", "said"),
    [
        ("safetensors", True, True, "fp32", "resident: "),
        ("gguf", True, True, "fp32", "resident: "),
        ("gguf", True, False, "keep", "the file's own blocks: fp32 would take "),
        ("safetensors", True, False, "nf4", "quantised: fp32 would take "),
        ("gguf", False, False, "keep", "left in the file"),
        ("safetensors", False, False, "keep", "left in the file"),
        ("nf4", False, True, "nf4", "as the checkpoint has it"),
        ("nf4", True, False, "nf4", "as the checkpoint has it"),
    ],
)
def test_auto(kind, gpu, fits, chosen, said, tiny_folder, tmp_path, monkeypatch):
    if kind == "gguf":
        base = quantised.gguf_base("Q4_0", quantised.spec())
    else:
        folder = tiny_folder("llama")
        base = open_base(str(written(folder, tmp_path / "nf4", NF4) if kind == "nf4" else folder))
    monkeypatch.setattr(launch, "augments", lambda device: gpu)
    monkeypatch.setattr(placement, "free_bytes", lambda device: base.spec.parameters * (8 if fits else 6))
    found = choose_placement(base, "auto", resolve("cpu", "fp32"))
    assert (found.base_dtype, found.why[: len(said)]) == (chosen, said)
    assert choose_placement(base, "nf4", resolve("cpu", "fp32")).why == "as set"
    if kind != "nf4":  # what is free is what the caller says
        free = base.spec.parameters * (6 if fits else 8)
        assert (choose_placement(base, "auto", resolve("cpu", "fp32"), free).base_dtype == "fp32") != fits


def test_blocks_that_no_kernel_knows_are_refused(as_on_a_gpu):
    base = quantised.gguf_base("Q4_0", quantised.spec())
    strange = dataclasses.replace(base.tensors["lm_head.weight"], dtype_name="TQ1_0")
    base = dataclasses.replace(base, tensors=dict(base.tensors) | {"lm_head.weight": strange})
    with pytest.raises(GraftuneError, match=r"lm_head.weight is TQ1_0.*set base_dtype to nf4 or bf16"):
        choose_placement(base, "keep", resolve("cpu", "fp32"))
    found = choose_placement(base, "auto", resolve("cpu", "fp32"), base.spec.parameters * 4)
    assert found.base_dtype == "nf4" and "no GPU kernel knows the file's TQ1_0" in found.why
    assert choose_placement(base, "fp32", resolve("cpu", "fp32")).base_dtype == "fp32"


@pytest.mark.parametrize("rows", [0, 250])
def test_a_files_blocks_are_uploaded_byte_by_byte(rows, as_on_a_gpu):
    base = quantised.gguf_base("Q5_1", quantised.spec(), "Q4_0", "F16")
    key = "layers.0.self_attn.k_proj.weight"
    file = GgufTensor(GGMLQuantizationType.Q5_1, (32, 64), base.tensors[key].blocks.numpy())
    turned = Reordered(file, FileOrder(0, torch.arange(31, -1, -1)))  # rows in another order, as Llama's are
    base = dataclasses.replace(base, tensors=dict(base.tensors) | {key: turned})
    if rows:  # tokens were added: rows that only pad the table are left off
        tensors = dict(base.tensors) | {"lm_head.weight": RowRange(base.tensors["lm_head.weight"], rows)}
        tensors["embed_tokens.weight"] = RowRange(base.tensors["embed_tokens.weight"], rows)
        base = dataclasses.replace(base, tensors=tensors, spec=base.spec.with_vocab(rows))
    decoder = quantised.placed(base, LORA, "keep").decoder
    qk, v = decoder.blocks[0].mixer.qkv.frozen.members
    wanted = [base.tensors["layers.0.self_attn.q_proj.weight"].blocks, torch.from_numpy(file.blocks[::-1].copy())]
    assert isinstance(qk, GgufRows) and torch.equal(qk.blocks, torch.cat(wanted))
    assert isinstance(v, FloatRows) and v.tensor.dtype == torch.float16
    head = decoder.head.frozen
    assert isinstance(head, Unpacked) and head.nbytes == (rows or 600) * 64 // 32 * 18
    ids = torch.tensor([0, 249, 7, 7])
    assert torch.equal(head.rows(ids), base.tensors["lm_head.weight"].gather(ids))


@pytest.mark.parametrize("gpu", [True, False])
def test_floats_of_another_dtype(gpu, tiny_folder, monkeypatch):
    """On a GPU they are cast into the scratch, where adapters lie beside them; of the compute dtype they are dense."""
    monkeypatch.setattr(launch, "augments", lambda device: gpu)
    base = open_base(str(tiny_folder("llama")))
    kinds = {}
    for asked in ("fp32", "bf16", "keep"):
        weight = quantised.placed(base, LORA, asked).decoder.blocks[0].feed_forward.gate_up.frozen
        kinds[asked] = (type(weight), weight.kind)
    if gpu:
        assert kinds == {"fp32": (Dense, "fp32"), "bf16": (Unpacked, "bf16"), "keep": (Dense, "fp32")}
    else:
        assert kinds == {"fp32": (Dense, "fp32"), "bf16": (Dense, "bf16"), "keep": (Mapped, "F32")}


@pytest.mark.parametrize("gpu", [True, False])
def test_what_a_checkpoint_left_unquantised_stays_so(gpu, tiny_folder, tmp_path, monkeypatch):
    folder = written(tiny_folder("llama"), tmp_path / "some", NF4, leave="v_proj")
    monkeypatch.setattr(launch, "augments", lambda device: gpu)
    base = open_base(str(folder))
    ours = quantised.placed(base, LORA, "nf4")
    weight = ours.decoder.blocks[0].mixer.qkv.frozen
    assert weight.kind == ("nf4+fp32" if gpu else "nf4+F32")
    members = weight.members
    assert isinstance(members[0], Nf4Rows) and not isinstance(members[2], Nf4Rows)
    tokens = torch.randint(3, tiny.VOCAB, (20,)).tolist()
    want = quantised.placed(quantised.dequantised(base), LORA, "fp32").logits([tokens], adapted=False)
    assert (ours.logits([tokens], adapted=False) - want).abs().max() < 1e-5


def test_other_quantised_checkpoints_are_refused_by_name(tiny_folder, tmp_path):
    plain = tiny_folder("llama")
    fp4 = NF4 | {"bnb_4bit_quant_type": "fp4"}
    int8 = {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}
    for number, (told, said) in enumerate(
        [(fp4, "(fp4)"), (int8, "(llm_int8)"), ({"quant_method": "gptq"}, "(gptq)"), ({"bits": 4}, "not named")]
    ):
        assert said in refusal(written(plain, tmp_path / str(number), told))


def test_tensors_that_the_configuration_did_not_tell_of(tiny_folder, tmp_path):
    """By their keys alone."""
    name, state = "model.layers.1.mlp.up_proj.weight", ".quant_state.bitsandbytes__"
    folder = written(tiny_folder("llama"), tmp_path / "base", NF4)
    good = load_file(folder / "model.safetensors")

    def refused(said: str, **changed: torch.Tensor | None) -> None:
        values = {n: t for n, t in (good | changed).items() if t is not None}
        save_file(values, folder / "model.safetensors", {"format": "pt"})
        assert said in refusal(folder)

    refused("fp4", **{name + state + "nf4": None, name + state + "fp4": good[name + state + "nf4"]})
    whole = {n: None for n in good if n.startswith(name)}
    int8 = {name: torch.zeros(72, 48, dtype=torch.int8), "model.layers.1.mlp.up_proj.SCB": torch.ones(72)}
    refused("up_proj.weight is int8 (llm_int8)", **(whole | int8))
    refused("is U8", **(whole | {name: torch.zeros(1728, 1, dtype=torch.uint8)}))
    refused("up_proj.weight is missing", **whole)
    refused(
        "tensor layers.1.mlp.up_proj.weight is [48, 72]",
        **quantised.nf4_checkpoint(nf4.quantise(torch.ones(48, 72)), name),
    )


def test_parts_of_a_checkpoint_that_are_missing(tiny_folder, tmp_path):
    folder = written(tiny_folder("llama"), tmp_path / "base", NF4)
    values = load_file(folder / "model.safetensors")
    del values["model.layers.0.self_attn.q_proj.weight.absmax"]
    save_file(values, folder / "model.safetensors", {"format": "pt"})
    base: Base = open_base(str(folder))  # its description is whole
    with pytest.raises(GraftuneError, match=r"q_proj.weight.absmax is missing"):
        quantised.placed(base, LORA, "nf4")
