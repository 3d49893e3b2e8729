"""One rank of tests/dist/test_shard.py, and what it and the test have in common: `main` is called in every rank with
the folder that holds the models; each rank leaves its results there, by case."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from graftune.batch import Example
from graftune.dist.shard import shards_of
from graftune.dist.world import connect, join
from graftune.infer.sample import Sampling
from graftune.losses import Anchored
from graftune.model.bundles import Bundles, BundleStorage
from graftune.model.lora import build_arena, initialise
from graftune.ranks import from_environment
from graftune.runtime import resolve
from graftune.session import Session, open_session, text
from graftune.settings.config import Config
from graftune.settings.sections import LoraConfig
from graftune.step.evaluate import evaluate
from graftune.step.step import Step
from graftune.weights import names
from graftune.weights.base import open_base
from graftune.weights.load import build_decoder
from graftune.weights.placement import Placement
from tests.support import oracle, quantised, tiny
from tests.weights import tiny_gguf

LORA = LoraConfig(rank=4, alpha=8.0)
LAYERS, WIDTH, FFN, VOCAB = 26, 128, 128, 259
CASES = {  # model, base_dtype; products in fp32, which every CPU has units for
    "fp32": ("folder", "fp32"),
    "bf16": ("folder", "bf16"),
    "nf4": ("folder", "nf4"),
    "gguf": ("blocks.gguf", "keep"),
}
EXAMPLES = [Example([5, 60, 7, 8, 9, 10, 11], [0, 0, 1, 1, 1, 1, 1]), Example([15, 16, 17, 18], [0, 1, 1, 1])]


def kept_bytes(bundles: Bundles) -> int:
    return sum(kept.nbytes for bundle in bundles.bundles.values() for kept in bundle.kept)


def buffer_bytes(bundles: Bundles) -> int:
    return sum(buffer.flat.nbytes for buffer in {id(b): b for b in bundles.buffers.values()}.values())


def write_models(folder: Path) -> None:
    """One model twice: fp32 safetensors, and GGUF blocks of several kinds."""
    shape = quantised.spec(WIDTH, layers=LAYERS, vocab=VOCAB)
    tensors = quantised.dequantised(quantised.gguf_base("F32", shape, "F32")).tensors
    values = {names.TEXT.of(name): source.values().contiguous() for name, source in tensors.items()}
    (folder / "folder").mkdir()
    save_file(values, folder / "folder" / "model.safetensors")
    config = {
        **{"model_type": "llama", "hidden_size": WIDTH, "intermediate_size": FFN, "num_hidden_layers": LAYERS},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": WIDTH // 4, "vocab_size": VOCAB},
        **{"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 256, "tie_word_embeddings": False},
    }
    (folder / "folder" / "config.json").write_text(json.dumps(config))
    tiny.make_tokenizer().save(folder / "folder")
    _write_gguf(folder / "blocks.gguf", values)


def _write_gguf(path: Path, values: dict[str, torch.Tensor]) -> None:
    keys: dict[str, Any] = {
        **{"context_length": 256, "embedding_length": WIDTH, "block_count": LAYERS, "feed_forward_length": FFN},
        **{"attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": WIDTH // 4},
        **{"attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 10000.0},
    }
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in ({f"llama.{key}": value for key, value in keys.items()} | tiny_gguf.vocabulary()).items():
        tiny_gguf._add(writer, key, value)
    for name, value in values.items():
        array = np.ascontiguousarray(value.numpy())
        if array.ndim == 1:
            writer.add_tensor(tiny_gguf.gguf_name(name), array)
            continue
        q = gguf.GGMLQuantizationType
        kind = q.Q4_1 if "mlp" in name else q.F16 if "v_proj" in name else q.Q8_0
        writer.add_tensor(tiny_gguf.gguf_name(name), gguf.quants.quantize(array, kind), raw_dtype=kind)
    tiny_gguf.finish(writer)


def made(folder: Path, case: str, storage: BundleStorage | None) -> oracle.Ours:
    model, base_dtype = CASES[case]
    base, runtime = open_base(str(folder / model)), resolve("cpu", "fp32")
    arena = build_arena(base.spec, LORA, runtime.device, runtime.compute)
    decoder = build_decoder(base, arena, LORA, runtime, Placement(base_dtype, "test"), storage)
    initialise(arena, dataclasses.replace(LORA, init="gaussian"), seed=7)
    drawn = torch.Generator().manual_seed(8)
    for name in arena.slots:
        if name.endswith("lora_B.weight"):
            arena.view(name, arena.weights).normal_(0, 0.05, generator=drawn)
    arena.publish()
    return oracle.Ours(base, decoder, arena, LORA)


def results(ours: oracle.Ours, case: str) -> dict[str, torch.Tensor]:
    """Logits, then gradients under each policy (of one kind of weight; of the others under that which fetches most) and
    of a loss that reads the base first, then an evaluation: each finds the buffers as the one before left them."""
    found = {"logits": ours.logits([[1, 2, 3, 44], [4, 5]]).contiguous()}
    policies = (("none", None), ("selective", None), ("full", Anchored(0.3)))
    for recompute, loss in policies if case == "fp32" else policies[-1:]:
        ours.arena.grads.zero_()
        step = Step(ours.decoder, ours.arena, recompute=recompute, loss=loss)
        step.micro_step(oracle.pack(EXAMPLES))
        found[f"loss {recompute}"], found[f"gradients {recompute}"] = step.loss_sum.clone(), ours.arena.grads.clone()
    found["evaluated"] = torch.tensor(evaluate(ours.decoder, EXAMPLES, capacity=7).loss)
    found["logits after"] = ours.logits([[9, 8]], adapted=False).contiguous()
    return found


def settings(folder: Path, **more: Any) -> Config:
    values = {"base": str(folder / "folder"), "device": "cpu", "compute_dtype": "fp32", "base_dtype": "fp32"}
    return Config.of(values | {"threads": 1, "rank": 4} | more)


def said(session: Session) -> dict[str, Any]:
    """What a session finds of data, and says: an evaluation is divided among ranks, an answer is every rank's."""
    rows = [{"prompt": "ab", "response": "cdef"}, {"prompt": "x", "response": "yz"}]
    answer = text.sampled(session.parts, [[5, 6, 7], [8]], Sampling(max_new_tokens=4, temperature=0.0))
    return {"loss": session.evaluate(rows).loss, "answer": [one.tokens for one in answer]}


def main(place: str) -> int:
    folder = Path(place)
    ranks = from_environment()
    assert ranks is not None
    world = join(ranks, *connect(ranks))
    world.attach(torch.device("cpu"))
    facts = {}
    for case in CASES:
        ours = made(folder, case, shards_of(world, torch.device("cpu")))
        bundles = ours.decoder.bundles
        facts[case] = {"kept": kept_bytes(bundles), "buffers": buffer_bytes(bundles)}
        save_file(results(ours, case), folder / f"{case}-{ranks.rank}.safetensors")
    (folder / f"facts-{ranks.rank}.json").write_text(json.dumps(facts))
    session = open_session(settings(folder, shard_base="yes"), world=world)
    found = said(session) | {"held": session.parts.placement.describe()}
    (folder / f"session-{ranks.rank}.json").write_text(json.dumps(found))
    world.leave()
    return 0
