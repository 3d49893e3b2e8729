"""Makes benchmarks/results/fit.json: how much GPU memory fine-tuning takes, by model size and precision, as planned.

python tools/fit.py             plans every row again (a CPU minute or two; no GPU and no weights are needed)

Each row is a public model's shape with random weights, planned as `graftune plan` plans a run: a GPU that is not here,
rank 16 on all seven projections, one document of `LENGTH` tokens per micro-batch, all of them trained. A figure is
all that the card has to have: what the plan needs free, its margin included, and the CUDA context. tools/readme.py
makes tables of the record; a test plans its first row again. Typing the figures in from runs was rejected: they would
be of as many versions as there are rows.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.synthetic import random_base

from graftune.model.families import from_config
from graftune.plan.job import CONTEXT_BYTES, Job, any_data, runtime_for
from graftune.settings.config import Config

PATH = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "fit.json"
LENGTH = 2048
CARD = 1 << 40  # a GPU on which everything fits, so that nothing is refused
# (how the base is held, what the backward computes again)
WAYS = (("bf16", "none"), ("bf16", "full"), ("nf4", "none"), ("nf4", "full"), ("nf4", "offload"))
LLAMA = {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "vocab_size": 128256}
QWEN = {"model_type": "qwen3", "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "vocab_size": 151936, "head_dim": 128}
COLUMNS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
# Public shapes: the name, the family, COLUMNS, and whether the head is the embedding.
MODELS: dict[str, tuple[dict[str, Any], tuple[int, ...], bool]] = {
    "Qwen3 0.6B": (QWEN, (1024, 3072, 28, 16, 8), True),
    "Llama 3.2 1B": (LLAMA, (2048, 8192, 16, 32, 8), True),
    "Qwen3 4B": (QWEN, (2560, 9728, 36, 32, 8), True),
    "Llama 3.1 8B": (LLAMA, (4096, 14336, 32, 32, 8), False),
    "Qwen3 14B": (QWEN, (5120, 17408, 40, 40, 8), False),
    "Qwen3 32B": (QWEN, (5120, 25600, 64, 64, 8), False),
    "Llama 3.3 70B": (LLAMA, (8192, 28672, 80, 64, 8), False),
}


def row(name: str, ways: Sequence[tuple[str, str]] = WAYS) -> dict[str, int]:
    """Bytes by way."""
    family, sizes, tied = MODELS[name]
    values = family | dict(zip(COLUMNS, sizes, strict=True)) | {"tie_word_embeddings": tied}
    spec = from_config(values | {"max_position_embeddings": 32768}, name)
    return {f"{held} {policy}": planned(spec, held, policy) for held, policy in ways}


def planned(spec: Any, held: str, policy: str) -> int:
    config = Config.of(
        {"device": "cuda", "base_dtype": held, "compute_dtype": "bf16", "rank": 16, "max_seq_len": LENGTH}
    )
    runtime, card = runtime_for(config, CARD)
    base = random_base(spec, runtime.device)
    asked = (LENGTH,) * config.run.samples
    job = Job(config, base, runtime, LENGTH, any_data(LENGTH), card, CARD, asked=asked)
    return job.plan(policy, LENGTH).needed + CONTEXT_BYTES


def main() -> int:
    rows = {}
    for name in MODELS:
        rows[name] = row(name)
        print(name, {key: round(value / 2**30, 1) for key, value in rows[name].items()}, file=sys.stderr)
    PATH.write_text(json.dumps({"length": LENGTH, "rank": 16, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
