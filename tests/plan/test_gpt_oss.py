"""The plans of gpt-oss's real sizes, its experts kept in MXFP4: no weight is read and no GPU is needed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from benchmarks.cases import SHAPES
from benchmarks.random_bases import with_mxfp4_experts
from benchmarks.synthetic import random_base

from graftune.model.families import from_config
from graftune.plan import Plan, cards
from graftune.plan.job import Job, any_data, runtime_for
from graftune.settings.config import Config

LENGTH = 2048
SIZES = {"20b": (24, 32), "120b": (36, 128)}  # layers and experts


def planned(size: str, **settings: Any) -> Plan:
    """One document of LENGTH tokens in a micro-batch, all trained, blocks recomputed, adapters on attention."""
    layers, experts = SIZES[size]
    shape = dataclasses.replace(SHAPES["20b"], layers=layers, experts=experts)
    config = Config.of({"device": "cuda", "rank": 16, "max_seq_len": LENGTH, "targets": "attention"} | settings)
    runtime, card = runtime_for(config, 0, cards.find("H200"))
    base = with_mxfp4_experts(random_base(from_config(shape.settings, "a test"), runtime.device))
    job = Job(config, base, runtime, LENGTH, any_data(LENGTH), card)
    assert job.placement.base_dtype == "keep"
    return job.plan("full", LENGTH)


@pytest.mark.few(1)
@pytest.mark.parametrize(("size", "gigabytes"), [("20b", 15.8), ("120b", 71.0)])
@pytest.mark.thorough
def test_peak(size: str, gigabytes: float) -> None:
    plan = planned(size)
    assert 0.9 * gigabytes < plan.expected / 1e9 <= gigabytes and plan.fits


def test_peak_with_the_embedding_on_the_host() -> None:
    resident, hosted = planned("20b"), planned("20b", embedding_on="host")
    table = 201_088 * 2880 * 2
    assert hosted.expected / 1e9 <= 14.5 and hosted.settings["embedding_on"] == "host"
    assert abs(resident.expected - hosted.expected - table) < 1 << 20
    assert hosted.bytes.host == resident.bytes.host + table
