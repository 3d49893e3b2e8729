"""Training over quantised bases on the CPU, against the same base dequantised to fp32 (whose steps
test_transformers.py compares with PEFT) and against PEFT over bitsandbytes' own model; and checkpoints that
bitsandbytes wrote, read without it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from graftune import api
from graftune.batch import Example
from graftune.data.dataset import prepare
from graftune.data.pack import pack
from graftune.data.sample import sample_for
from graftune.kernels import launch
from graftune.model.frozen import Dense, Mapped, Unpacked
from graftune.runtime import resolve
from graftune.settings.sections import DataConfig, LoraConfig
from graftune.step.step import Step
from graftune.weights.base import Base, open_base
from graftune.weights.placement import choose_placement
from tests.parity.test_transformers import examples
from tests.support import oracle, quantised, tiny
from tests.support.thorough import THOROUGH

HYPER = {"lr": 2e-3, "beta1": 0.9, "beta2": 0.99, "eps": 1e-3, "weight_decay": 0.01, "clip": 1.0}
LORA = LoraConfig(rank=4, alpha=8.0)
STEPS = 9  # the last has the data of the first
LAYERS = 30 if THOROUGH else 4  # of the real model, which has 30


def data(number: int) -> list[Example]:
    """A step's two examples."""
    torch.manual_seed(number % 4)
    return examples(24, 17)


def trained(
    side: oracle.Ours, steps: int, dropout: float = 0.0, batches: Callable[[int], list[Example]] = data
) -> list[float]:
    """Losses of so many steps."""
    step = Step(side.decoder, side.arena, dropout=dropout)
    losses = []
    for number in range(steps):
        packed = pack(batches(number))
        step.set_dropout_seed(number)
        step.micro_step(packed)
        step.set_hyper(HYPER | {"divisor": float(packed.response_tokens)})
        losses.append(float(step.update_step()[0]))
    return losses


def same(ours: oracle.Ours, want: oracle.Ours, steps: int, dropout: float = 0.0) -> None:
    want.arena.weights.copy_(ours.arena.weights)
    want.arena.publish()
    got, wanted = trained(ours, steps, dropout), trained(want, steps, dropout)
    assert got == pytest.approx(wanted, rel=1e-5), "losses"
    assert got[-1] < got[0]
    for name in ours.arena.slots:
        a, b = (side.arena.view(name, side.arena.weights) for side in (ours, want))
        assert (a - b).norm() < 1e-4 * b.norm(), name


@pytest.fixture(params=[Mapped, Unpacked], ids=["by pieces", "by the scratch"])
def way(request, monkeypatch) -> type:
    """How products reach the weights: as on a CPU, or as on a GPU (its layout by the references, not the kernels)."""
    monkeypatch.setattr(launch, "augments", lambda device: request.param is Unpacked)
    return request.param


@pytest.mark.few(1)
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_nf4_trains_as_its_dequantised_values_do(dropout, way, tiny_folder):
    base = open_base(str(tiny_folder("qwen2")))
    ours = quantised.placed(base, LORA, "nf4")
    assert isinstance(ours.decoder.blocks[0].mixer.qkv.frozen, way) and isinstance(ours.decoder.embedding, Dense)
    assert ours.decoder.blocks[0].mixer.qkv.frozen.kind == "nf4"
    same(ours, quantised.placed(quantised.through_nf4(base), LORA, "fp32"), STEPS, dropout)
    plain = quantised.placed(base, LORA, "fp32")
    assert trained(plain, 1)[0] != pytest.approx(trained(quantised.placed(base, LORA, "nf4"), 1)[0], rel=1e-3)


@pytest.mark.few(3)
@pytest.mark.parametrize(("kind", "table"), [("Q4_1", "Q8_0"), ("Q8_0", "F16"), ("Q4_K", "Q6_K"), ("IQ4_XS", "Q5_K")])
def test_gguf_blocks_train_as_their_dequantised_values_do(kind, table, way):
    shape = quantised.spec(256 if kind in ("Q4_K", "IQ4_XS") else 64, tied=kind == "Q8_0")
    base = quantised.gguf_base(kind, shape, table)
    ours = quantised.placed(base, LORA, "keep")
    assert isinstance(ours.decoder.blocks[0].mixer.o.frozen, way)
    assert ours.decoder.blocks[0].mixer.o.frozen.kind == kind
    assert ours.decoder.head.frozen.kind == (table if table != "F16" or way is Mapped else "fp16")
    same(ours, quantised.placed(quantised.dequantised(base), LORA, "fp32"), STEPS)


def theirs_trained(model: Any, steps: int, batches: Callable[[int], list[Example]] = data) -> list[float]:
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        weights,
        lr=HYPER["lr"],
        betas=(HYPER["beta1"], HYPER["beta2"]),
        eps=HYPER["eps"],
        weight_decay=HYPER["weight_decay"],
    )
    losses = []
    for number in range(steps):
        batch = batches(number)
        loss = oracle.loss_sum(model, batch) / sum(e.response_tokens for e in batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, HYPER["clip"])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


# Checkpoints of bitsandbytes


@pytest.fixture(scope="module")
def by_bitsandbytes() -> Iterator[Callable[[Path], Any]]:
    """A folder -> its model as transformers quantises it with bitsandbytes on this CPU."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: its checkpoints are not made here")
    import torch._dynamo
    import transformers

    compiles = torch._dynamo.config.disable
    torch._dynamo.config.disable = True  # it would compile its fallback for every shape anew
    how = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    settings = {"dtype": torch.float32, "device_map": "cpu", "attn_implementation": "eager"}
    yield lambda folder: transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=how, **settings)
    torch._dynamo.config.disable = compiles


@pytest.fixture
def portable(by_bitsandbytes) -> Iterator[None]:
    """Rows of 48 values, as the tiny model's, get wrong scales from bitsandbytes' AVX512 kernel (test_bitsandbytes.py):
    its layers dequantise by its portable code instead. The real model's rows are whole blocks and go by the kernel."""
    with oracle.portable_bitsandbytes():
        yield


@pytest.fixture(scope="module")
def bnb(by_bitsandbytes, tmp_path_factory) -> dict[str, Any]:
    """A tiny model quantised by bitsandbytes: the model and its folder."""
    folder = tmp_path_factory.mktemp("bnb")
    tiny.hf_model("llama-untied").save_pretrained(folder / "plain")
    model = by_bitsandbytes(folder / "plain")
    model.save_pretrained(folder / "nf4", max_shard_size="30KB")
    for name in ("plain", "nf4"):
        tiny.make_tokenizer().save(folder / name)
    # Training, though nothing drops out: in eval a CPU with AVX512-BF16 has bitsandbytes round the first layer to bf16.
    return {"model": model.train(), "nf4": folder / "nf4", "plain": folder / "plain"}


def test_a_checkpoint_gives_the_logits_of_its_dequantised_values(bnb, portable, way):
    base = open_base(str(bnb["nf4"]))
    assert len(list(bnb["nf4"].glob("*.safetensors"))) > 1 and base.describe()["stored_as"] == ["F32", "nf4"]
    assert choose_placement(base, "auto", resolve("cpu", "fp32")).base_dtype == "nf4"
    tokens = torch.randint(3, tiny.VOCAB, (40,)).tolist()
    got = {kind: quantised.placed(base, LORA, kind).logits([tokens], adapted=False) for kind in ("nf4", "keep", "fp32")}
    # What lies in the checkpoint is what our own quantiser makes of the model it came from.
    again = quantised.placed(quantised.through_nf4(open_base(str(bnb["plain"]))), LORA, "fp32")
    want = again.logits([tokens], adapted=False)
    assert all((logits - want).abs().max() < 1e-5 for logits in got.values())
    with torch.no_grad():
        theirs = bnb["model"](torch.tensor([tokens])).logits[0]
    assert (got["nf4"] - theirs).abs().max() < 1e-4
    plain = quantised.placed(open_base(str(bnb["plain"])), LORA, "fp32").logits([tokens], adapted=False)
    assert (got["nf4"] - plain).abs().max() > 0.05


def test_nothing_but_the_checkpoints_bytes_stays(bnb):
    base = open_base(str(bnb["nf4"]))
    weights = [p.frozen for b in quantised.placed(base, LORA, "nf4").decoder.blocks for p in b.projections]
    values = sum(w.out_features * w.in_features for w in weights)
    own = 1024 + 4  # of each member: the map of its scales, and their offset
    assert sum(w.nbytes for w in weights) < values * 0.52 + 7 * 3 * own + 7 * 3 * 64


@pytest.fixture
def real(by_bitsandbytes, shallow_smollm2: Path, tmp_path: Path) -> Iterator[tuple[Base, Any]]:
    """SmolLM2's first layers quantised by bitsandbytes: the folder it wrote, as we open it, and its own model."""
    source = open_base(str(shallow_smollm2))
    plain = oracle.smollm2_in_transformers(source)
    assert len(plain.model.layers) == LAYERS
    plain.save_pretrained(tmp_path / "plain")
    model = by_bitsandbytes(tmp_path / "plain")
    model.save_pretrained(tmp_path / "nf4")
    source.tokenizer.save(tmp_path / "nf4")
    yield open_base(str(tmp_path / "nf4")), model
    shutil.rmtree(tmp_path)  # hundreds of megabytes, which pytest would keep for three sessions


@pytest.mark.thorough
def test_adapters_of_a_real_model_move_as_pefts_over_bitsandbytes(real):
    """What a user trains, at size: layers of SmolLM2 over NF4, three steps on the bundled sample's first three rows.

    The test compares how far each tensor moved: two long vectors that started alike look alike even if both are wrong.
    Both sides are fp32, whose rounding shows here (test_smollm2.py): bitsandbytes dequantises to nothing wider."""
    import bitsandbytes

    base, model = real
    ours = quantised.placed(base, LORA, "nf4")
    model = oracle.peft_model(model, ours).train()  # as in the bnb fixture
    assert {p.frozen.kind for block in ours.decoder.blocks for p in block.projections} == {"nf4"}
    assert sum(isinstance(module, bitsandbytes.nn.Linear4bit) for module in model.modules()) == LAYERS * 7
    rows = prepare(str(sample_for("answers")), base.tokenizer, DataConfig()).examples

    def batches(number: int) -> list[Example]:
        return rows[number : number + 1]

    before, theirs = ours.arena.weights.clone(), dict(model.named_parameters())
    losses, wanted = trained(ours, 3, batches=batches), theirs_trained(model, 3, batches)
    assert len(ours.arena.slots) == sum(p.requires_grad for p in theirs.values()) == LAYERS * 7 * 2
    apart, turned, least = 0.0, 0.0, 1.0
    for name in ours.arena.slots:
        start = ours.arena.view(name, before)
        got = (ours.arena.view(name, ours.arena.weights).double() - start).flatten()
        want = (theirs[oracle.peft_name(name)].detach().double() - start).flatten()
        least = min(least, float(want.norm() / start.norm()))
        apart = max(apart, float((got - want).norm() / want.norm()))
        turned = max(turned, 1 - float(torch.cosine_similarity(got, want, 0)))
    off = max(abs(a / b - 1) for a, b in zip(losses, wanted, strict=True))
    print(f"losses off by {off:.1e}; moves apart by {apart:.1e}, 1 - cosine {turned:.1e}, the least is {least:.1e}")
    assert wanted[-1] < 0.8 * wanted[0] and least > 1e-4, "steps that move nothing prove nothing"
    # Measured on one thread and on two: 2.7e-5, 6.4e-4, 2.0e-7. A scale of alpha / rank off by 0.1% exceeds all three.
    assert off < 1e-4 and apart < 2e-3 and turned < 2e-6, (off, apart, turned)


def test_the_api_opens_it_and_its_adapter(bnb, tmp_path: Path):
    folder = tmp_path / "base"
    shutil.copytree(bnb["nf4"], folder)
    run = api.open(str(folder), device="cpu", compute_dtype="fp32", lr=1e-2)
    assert run.parts.placement.base_dtype == "nf4"
    packed = pack(examples(20, 30))
    losses = []
    for _ in range(4):
        run.forward_backward(packed)
        losses.append(run.optim_step().loss)
    assert losses[-1] < losses[0]
    run.save(tmp_path / "adapter")
    again = api.open(str(tmp_path / "adapter"), device="cpu", compute_dtype="fp32")
    again.forward_backward(packed)
    assert again.optim_step().loss < losses[0]


def test_quantising_holds_a_few_rows_at_a_time(tiny_folder, monkeypatch):
    """Of no tensor more than a piece is ever read, and of what was read nothing stays."""
    from graftune.model.frozen import pieces

    monkeypatch.setattr("graftune.model.frozen.mapped.MAPPED_ROWS_BYTES", 4 * 48 * 5)
    base: Base = open_base(str(tiny_folder("llama")))
    longest, real = [], type(base.tensors["embed_tokens.weight"]).read

    def read(self: Any, start: int, stop: int) -> torch.Tensor:
        longest.append((stop - start) * self.shape[1])
        return real(self, start, stop)

    monkeypatch.setattr(type(base.tensors["embed_tokens.weight"]), "read", read)
    ours = quantised.placed(base, LORA, "nf4")
    assert max(longest) <= 5 * 48 and pieces(11, 48) == [(0, 5), (5, 10), (10, 11)]
    for block in ours.decoder.blocks:
        for projection in block.projections:
            for source in projection.frozen.members:
                assert not any(t.is_floating_point() and t.numel() > 300 for t in source.nf4.tensors.values())
