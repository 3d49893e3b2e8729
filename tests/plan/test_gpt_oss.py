"""The plans of gpt-oss's real sizes, its experts kept in MXFP4: no weight is read and no GPU is needed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from benchmarks.random_bases import RandomBlocks

from graftune.model.families import from_config
from graftune.plan import Plan, cards
from graftune.plan.job import Job, any_data, runtime_for
from graftune.settings.config import Config
from graftune.weights.synthetic import random_base

LENGTH = 2048
SIZES = {"20b": (24, 32), "120b": (36, 128)}  # layers and experts


def planned(size: str, **settings: Any) -> Plan:
    """One document of LENGTH tokens in a micro-batch, all trained, blocks recomputed, adapters on attention."""
    layers, experts = SIZES[size]
    values = {
        "model_type": "gpt_oss", "vocab_size": 201_088, "hidden_size": 2880, "intermediate_size": 2880, "head_dim": 64,
        "num_hidden_layers": layers, "num_attention_heads": 64, "num_key_value_heads": 8, "num_local_experts": experts,
        "num_experts_per_tok": 4, "sliding_window": 128, "max_position_embeddings": 131_072,
    }  # fmt: skip
    config = Config.of({"device": "cuda", "rank": 16, "max_seq_len": LENGTH, "targets": "attention"} | settings)
    runtime, card = runtime_for(config, 0, cards.find("H200"))
    base = random_base(from_config(values, "a test"), runtime.device)
    blocks = {n: RandomBlocks("MXFP4", t.shape, t.device) for n, t in base.tensors.items() if _is_expert(n)}
    base = dataclasses.replace(base, tensors=base.tensors | blocks)
    job = Job(config, base, runtime, LENGTH, any_data(LENGTH), card)
    assert job.placement.base_dtype == "keep"
    return job.plan("full", LENGTH)


def _is_expert(name: str) -> bool:
    return ".experts." in name and name.endswith("_proj.weight")


@pytest.mark.parametrize(("size", "gigabytes"), [("20b", 15.8), ("120b", 71.0)])
def test_peak(size: str, gigabytes: float) -> None:
    plan = planned(size)
    assert 0.9 * gigabytes < plan.expected / 1e9 <= gigabytes and plan.fits


def test_peak_with_the_embedding_on_the_host() -> None:
    resident, hosted = planned("20b"), planned("20b", embedding_on="host")
    table = 201_088 * 2880 * 2
    assert hosted.expected / 1e9 <= 14.5 and hosted.settings["embedding_on"] == "host"
    assert abs(resident.expected - hosted.expected - table) < 1 << 20
    assert hosted.bytes.host == resident.bytes.host + table
