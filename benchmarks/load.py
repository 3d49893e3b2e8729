"""How fast a base becomes resident, beside how fast this machine reads a file that lies in its page cache.

    python benchmarks/load.py [--json FILE] [--gib 2] [--repeats 5]

A Llama-shaped folder of that size in bf16 shards is written to a temporary folder and read once, so that no disk is
timed. `read` is a plain read of all its shards into memory that this process has and has touched, the page cache's
bandwidth; `fresh` the same into memory it has yet to be given, which any loading has to pay for too. `load` is
opening the folder, the tokenizer included, and placing every weight in the dtype of the file; `share` is load over
read, and has to exceed 0.6. `mapped` is the bundled GGUF opened and left in its file, ready to train, and has to take
less than 2 s. They alternate; medians of the repeats are compared. Some rows of what was loaded are compared with the
file's: a loader that skips work would show. Exit code 1 where one of the two is missed.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from safetensors.torch import save_file
from tests.tiny import make_tokenizer

from benchmarks import report
from graftune.config import LoraConfig
from graftune.model.decoder import Decoder
from graftune.model.lora import build_arena
from graftune.runtime import resolve
from graftune.weights.base import default_base, open_base
from graftune.weights.load import build_decoder
from graftune.weights.placement import Placement

SHARE, MAPPED_S = 0.6, 2.0
CONFIG = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
}


def make_folder(folder: Path, gib: float) -> int:
    """Shards, a layer or more each, until there are so many bytes. Returns how many there are."""
    width, ffn, kv = 2048, 8192, 512
    shapes = {
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (kv, width),
        "self_attn.v_proj": (kv, width),
        "self_attn.o_proj": (width, width),
        "mlp.gate_proj": (ffn, width),
        "mlp.up_proj": (ffn, width),
        "mlp.down_proj": (width, ffn),
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
    }
    a_layer = 2 * sum(torch.Size(shape).numel() for shape in shapes.values())
    layers = max(1, round(gib * 2**30 / a_layer))
    where: dict[str, str] = {}
    for number in range(0, layers, 4):
        tensors = {
            f"model.layers.{i}.{name}.weight": torch.randn(shape).mul_(0.02).bfloat16()
            for i in range(number, min(number + 4, layers))
            for name, shape in shapes.items()
        }
        if number == 0:
            tensors["model.embed_tokens.weight"] = torch.randn(32000, width).mul_(0.02).bfloat16()
            tensors["model.norm.weight"] = torch.ones(width).bfloat16()
        file = f"model-{number:05}.safetensors"
        save_file(tensors, folder / file, {"format": "pt"})
        where |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))
    make_tokenizer().save(folder)
    return sum(file.stat().st_size for file in shards(folder))


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def read(folder: Path, buffer: torch.Tensor) -> None:
    at, view = 0, memoryview(buffer.numpy())
    for file in shards(folder):
        with file.open("rb", buffering=0) as handle:
            while taken := handle.readinto(view[at : at + (8 << 20)]):
                at += taken


def load(path: str, base_dtype: str) -> Decoder:
    base, runtime, lora = open_base(path), resolve("cpu"), LoraConfig(rank=8)
    arena = build_arena(base.spec, lora, runtime.device, runtime.compute)
    return build_decoder(base, arena, lora, runtime, Placement(base_dtype, "measured"))


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    kept = work()
    took = time.perf_counter() - start
    del kept
    return took


def checked(folder: Path) -> None:
    """The last projection and the embedding are the file's."""
    decoder, tensors = load(str(folder), "bf16"), open_base(str(folder)).tensors
    last = len(decoder.blocks) - 1
    down = decoder.blocks[last].down.frozen
    for loaded, name in ((down, f"layers.{last}.mlp.down_proj.weight"), (decoder.embedding, "embed_tokens.weight")):
        ids = torch.arange(0, loaded.out_features, 97)
        assert torch.equal(loaded.rows(ids).float(), tensors[name].gather(ids).float()), name


def measure(gib: float, repeats: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        size = make_folder(folder, gib)
        buffer = torch.zeros(size, dtype=torch.uint8)
        read(folder, buffer)
        checked(folder)
        gguf = str(default_base())
        times: dict[str, list[float]] = {"read": [], "fresh": [], "load": [], "mapped": []}
        for _ in range(repeats):
            times["read"].append(seconds(lambda: read(folder, buffer)))
            times["fresh"].append(seconds(lambda: read(folder, torch.empty(size, dtype=torch.uint8))))
            times["load"].append(seconds(lambda: load(str(folder), "bf16")))
            times["mapped"].append(seconds(lambda: load(gguf, "keep")))
    took = {name: statistics.median(values) for name, values in times.items()}
    rates = {f"{name}_gb_s": round(size / took[name] / 1e9, 2) for name in ("read", "fresh", "load")}
    share = round(took["read"] / took["load"], 3)
    return {
        "bytes": size,
        **rates,
        "share": share,
        "share_of_fresh": round(took["fresh"] / took["load"], 3),
        "mapped_s": round(took["mapped"], 3),
        "met": share > SHARE and took["mapped"] < MAPPED_S,
        "goals": [
            report.goal("resident / page cache", "at least", SHARE, share),
            report.goal("mapped, seconds", "at most", MAPPED_S, round(took["mapped"], 3)),
        ],
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "commit": report.commit(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    found = measure(options.gib, options.repeats)
    print(
        f"{found['bytes'] / 2**30:.2f} GiB of shards: page cache {found['read_gb_s']} GB/s "
        f"({found['fresh_gb_s']} into fresh memory), resident at {found['load_gb_s']} GB/s, "
        f"{found['share']:.0%} of it (above {SHARE:.0%} is wanted); mapped GGUF ready in {found['mapped_s']} s"
    )
    if options.json:
        text = json.dumps(found, indent=2) + "\n"
        print(text, end="") if options.json == "-" else Path(options.json).write_text(text)
    return 0 if found["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
