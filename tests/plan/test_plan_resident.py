"""Planned against what processes take of a CPU's memory, and what of it lies in the base's file."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from graftune.observe.events import read_events
from graftune.plan import job, rehearse
from graftune.settings.config import Config
from graftune.training import prepare
from graftune.weights.base import open_base
from tests.plan.test_plan import QUIET, setup
from tests.support import tiny
from tests.support.thorough import THOROUGH
from tests.weights.test_placement import NF4, written


def trained(base: Path, folder: Path, kind: str, tokens: int, samples: int = 0) -> dict[str, Any]:
    """One step in a process of its own; the event that compares. Prompts that are answered are long. Of small steps
    there are few rows: every pass over one dequantises the whole base."""
    data = folder / "data.jsonl"
    words = "the cat sat on a mat and looked at some birds while rain fell over hills "
    asks = words[:60] if not samples else words * (tokens // 20)
    rows = [{"prompt": asks, "response": words[: 20 + 10 * (i % 3)]} for i in range(14 if tokens > 128 else 3)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = [
        "train", str(base), str(data), "--device", "cpu", "--base-dtype", kind, "--max-steps", "1", "--no-score",
        "--samples", str(samples), "--sample-tokens", "1", "--recompute", "full" if samples else "auto",
        "--tokens-per-step", str(tokens), "--val-split", "0.1", "--out", str(folder / "run"),
    ]  # fmt: skip
    done = subprocess.run([sys.executable, "-m", "graftune", *line], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "memory: planned" in done.stderr
    (memory,) = [e for e in read_events(folder / "run" / "metrics.jsonl") if e["event"] == "memory"]
    return memory


def repeat_layer(folder: Path, layers: int) -> None:
    """A model of one layer becomes one of so many, all alike: to quantise each would take longer than to train them."""
    tensors = load_file(folder / "model.safetensors")
    first = {name: value for name, value in tensors.items() if ".layers.0." in name}
    for layer in range(1, layers):
        tensors |= {name.replace(".layers.0.", f".layers.{layer}."): value.clone() for name, value in first.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "kind", "tokens", "samples"),
    [
        # In a quick run the models of medium size stand for the real one.
        *([("real", "fp32", 256, 0), ("real", "keep", 128, 1), ("tiny", "nf4", 512, 0)] if THOROUGH else []),
        ("prequantised", "keep", 128, 1),
    ],
)
def test_resident_memory_within_a_tenth(
    model: str, kind: str, tokens: int, samples: int, smollm2: Path, tiny_folder, tmp_path: Path, monkeypatch
) -> None:
    if model == "prequantised":  # of a size that shows beside the process: 30 MiB, which stay in the map
        wide = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 1}
        wide |= {"num_attention_heads": 16, "num_key_value_heads": 4}
        monkeypatch.setitem(tiny.VARIANT_OPTIONS, "llama", wide)
        base = written(tiny.make_folder("llama", tmp_path / "plain"), tmp_path / "base", NF4)
        repeat_layer(base, 5)
    else:
        base = smollm2 if model == "real" else tiny_folder("llama")
    memory = trained(base, tmp_path, kind, tokens, samples)
    off = memory["planned"] / memory["measured"] - 1
    print(f"{model}, {kind}, {tokens} tokens: {memory['planned']} planned, {memory['measured']} measured, {off:+.1%}")
    assert abs(off) < 0.10, memory


MEDIUM = """
import json
from dataclasses import replace
import torch
from graftune.settings.sections import LoraConfig
from graftune.data.pack import Capacities
from tests.support import specs
from graftune.observe.memory import forget_peak, peak_resident_bytes, resident_bytes
from graftune.runtime import Runtime
from graftune.plan import Setup, libraries, rehearse
from graftune.plan.job import HEAP_SHARE
from tests.support.real_rehearsal import rehearse_real
from graftune.settings.config import Config
from graftune.weights.placement import Placement
from benchmarks.synthetic import random_base

cpu = torch.device("cpu")
def spec(**more):
    values = dict(layers=6, width=512, ffn=1536, heads=8, kv_heads=4, head_width=64, vocab=8000)
    return specs.made(norm_eps=1e-5, rope_theta=1e4, max_positions=1024, tied=False, **values | more)
copies = libraries.copies_operand(torch.float32)
setup = Setup(random_base(spec(), cpu), LoraConfig(), Runtime(cpu, torch.float32, ""), Placement("fp32", ""),
              Capacities(1024, 1, 1024, 1024), Config().replace(recompute="none"), copies=copies)
# The first step reads in the code of torch's products, which is the process's and no plan's.
rehearse_real(replace(setup, base=random_base(spec(layers=1, width=64, ffn=64, vocab=256), cpu)))
found = rehearse(setup)
planned = found.peak + int(HEAP_SHARE * found.temporary) + resident_bytes()
forget_peak()
rehearse_real(setup)
print(json.dumps([planned, peak_resident_bytes()]))
"""


@pytest.mark.thorough
def test_resident_memory_of_a_model_of_medium_size() -> None:
    done = subprocess.run([sys.executable, "-c", MEDIUM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    planned, measured = json.loads(done.stdout)
    print(f"medium: {planned} planned, {measured} measured, {planned / measured - 1:+.1%}")
    assert abs(planned / measured - 1) < 0.10


def test_what_lies_in_the_map_takes_nothing(tiny_folder, tmp_path: Path) -> None:
    """Of safetensors; a GGUF's rows are made, and so are a folder's in another dtype."""
    folder = tiny_folder("llama")
    prequantised = written(folder, tmp_path / "nf4", NF4)
    loaded = {
        (path.name, kind): sum(
            rehearse(dataclasses.replace(setup(kind=kind), base=open_base(str(path)))).phases["load"].values()
        )
        for path, kind in ((folder, "keep"), (folder, "fp32"), (prequantised, "keep"))
    }
    kept, resident, nf4_kept = loaded.values()
    assert kept == nf4_kept, "adapters alone"
    assert resident - kept >= sum(source.nbytes for source in open_base(str(folder)).tensors.values()) * 0.9


def test_pages_of_an_embedding_that_are_read(tiny_folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data.jsonl").write_text(json.dumps({"prompt": "the cat", "response": "sat"}) + "\n")
    data = {"data": str(tmp_path / "data.jsonl"), "val_split": 0.0, "device": "cpu", "compute_dtype": "fp32"}
    monkeypatch.setattr(job, "FAULT_BYTES", 256)  # a row of this small model
    found = {}
    for variant, kind in (("llama", "keep"), ("llama-untied", "keep"), ("llama-untied", "fp32")):
        config = Config.of(data | {"base": str(tiny_folder(variant)), "base_dtype": kind})
        made = prepare.job_of(config, QUIET)
        every = sum(source.nbytes for source in made.base.tensors.values())
        table = made.base.tensors["embed_tokens.weight"].nbytes
        found[variant, kind] = made.plan("none", 64).rest[job.FILES] - every + table, made.tokens * 256, table
    tied, untied, resident = found.values()
    assert tied[0] == tied[2] and resident[0] == resident[2], "all of it is read"
    assert untied[0] == untied[1] < untied[2]
