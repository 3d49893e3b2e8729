"""What a run switches on it switches off again, and nothing that others switched on."""

from __future__ import annotations

import os

import pytest
import torch

from graftune import runtime
from graftune.runtime import resolve, set_up


@pytest.fixture(autouse=True)
def _as_before():
    before = torch.are_deterministic_algorithms_enabled()
    yield
    resolve("cpu")
    torch.use_deterministic_algorithms(before)


def test_deterministic_mode_ends_with_its_run():
    for _ in range(2):
        assert resolve("cpu", deterministic=True).deterministic and torch.are_deterministic_algorithms_enabled()
        resolve("cpu", deterministic=True)
        assert not resolve("cpu").deterministic and not torch.are_deterministic_algorithms_enabled()


def test_others_mode_stays():
    torch.use_deterministic_algorithms(True)
    resolve("cpu", deterministic=True)
    resolve("cpu")
    assert torch.are_deterministic_algorithms_enabled()


def test_what_a_run_on_cuda_changes_of_the_process_is_said_once(monkeypatch):
    made = []
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(runtime, "_set_allocator", lambda: made.append("allocator") or True)
    monkeypatch.setattr(runtime, "_segments_grow", False)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        said = set_up(torch.device("cuda"))
        assert len(said) == 3 and os.environ["CUBLAS_WORKSPACE_CONFIG"] == runtime.WORKSPACE
        assert torch.get_float32_matmul_precision() == "highest" and made == ["allocator"]
        assert set_up(torch.device("cuda")) == set_up(torch.device("cpu")) == [] and made == ["allocator"]
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("capability", "compute", "why"),
    [
        ((9, 0), torch.bfloat16, "bf16 units found"),
        ((8, 0), torch.bfloat16, "bf16 units found"),
        ((7, 5), torch.float16, "dynamic loss scale"),
        ((7, 0), torch.float16, "dynamic loss scale"),
        ((6, 1), torch.float32, "no bf16 units"),
    ],
)
def test_auto_takes_the_units_that_a_card_has(capability, compute, why, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    found = resolve("cuda")
    assert found.compute == compute and why in found.why
    assert resolve("cuda", "fp32").compute == torch.float32


def test_a_cpu_without_bf16_units_stays_in_fp32(monkeypatch):
    monkeypatch.setattr(runtime, "has_fast_bf16", lambda device: False)
    assert resolve("cpu").compute == torch.float32


@pytest.mark.parametrize(
    ("release", "environment", "hip", "expected"),
    [
        ("6.8.0-generic", {}, None, True),
        ("5.15.167.4-microsoft-standard-WSL2", {}, None, False),
        ("6.8.0-generic", {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"}, None, False),
        ("6.8.0-generic", {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, None, False),
        ("6.8.0-generic", {}, "6.2", False),
    ],
)
def test_segments_grow_where_they_can_and_nobody_says_otherwise(release, environment, hip, expected, monkeypatch):
    said = []
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(runtime.platform, "release", lambda: release)
    monkeypatch.setattr(runtime.sys, "platform", "linux")
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", said.append)
    assert runtime._set_allocator() == expected
    assert said == (["expandable_segments:True"] if expected else [])


def test_the_first_vector_function_of_a_process_is_called_on_one_value(monkeypatch):
    """A first call that is divided among threads can be wrong (runtime._start_vector_functions). It is so in a few
    processes of a hundred, so the call itself is tested."""
    sizes, real = [], torch.Tensor.cos
    monkeypatch.setattr(torch.Tensor, "cos", lambda x: sizes.append(x.numel()) or real(x))
    resolve("cpu")
    assert sizes == [1]
