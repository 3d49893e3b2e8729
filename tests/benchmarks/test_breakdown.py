"""Kernels by kind, steps out of a profile, and the table; names, grids and threads as a profile of an H200 has them."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from benchmarks.breakdown import Kernel, kind_of
from benchmarks.cases import parse

from benchmarks import breakdown

KERNELS = Path(__file__).resolve().parents[2] / "src" / "graftune" / "kernels"


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("products", "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_TNN"),
        ("products", "nvjet_sm90_qqtst_128x128_128x6_1x2_h_bz_ovscale_TNT"),
        ("products", "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16>"),
        ("products", "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int> > >"),
        ("attention", "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1_kernel0_0"),
        ("attention", "void cudnn::fusion::compute_dot_do_o_ragged_specialized<true, 64>(void const*, void const*)"),
        ("attention", "cudnn::fusion::qkv_tma_setup(unsigned int, unsigned int, unsigned int, unsigned int)"),
        ("attention", "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, cutlass::bfloat16_t> >"),
        ("attention", "_grads"),
        ("attention", "_delta"),
        ("adapters", "_columns"),
        ("adapters", "_both"),
        ("adapters", "_add"),
        ("norms", "_norm_backward"),
        ("rope", "_finish_backward"),
        ("rope", "_rope_backward"),
        ("swiglu", "_act_backward"),
        ("codes", "_dequantise"),
        ("codes", "_q4_k"),
        ("codes", "_iq4_xs"),
        ("codes", "_quantise"),
        ("codes", "_transpose"),
        ("codes", "_settle"),
        ("update", "_adamw"),
        ("update", "_square_sums"),
        ("update", "_spread"),
        ("copies", "set_words"),
        ("copies", "memcpy128"),
        ("copies", "Memcpy HtoD (Pinned -> Device)"),
        ("copies", "void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*, int, long, long, long)"),
        ("other", "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::func_wrapper_t> >"),
    ],
)
def test_a_name_has_its_kind(kind: str, name: str) -> None:
    assert kind_of(Kernel(name, 0, 1), parse("1b-4x2048")) == kind


@pytest.mark.parametrize(
    ("kind", "case", "name", "grid", "threads"),
    [
        ("attention", "1b-1x512", "_forward", (8, 32, 1), 128),
        ("norms", "1b-1x512", "_forward", (512, 1, 1), 64),
        ("swiglu", "1b-1x512", "_forward", (512, 2, 1), 256),
        ("norms", "8b-1x512", "_backward", (512, 1, 1), 128),
        ("swiglu", "8b-1x512", "_backward", (512, 4, 1), 256),
        ("swiglu", "350m-full-4x512x4", "_backward", (2048, 1, 1), 256),
        ("norms", "350m-full-4x512x4", "_backward", (2048, 1, 1), 32),
        ("swiglu", "350m-full-4x512x4", "_forward", (2048, 1, 1), 256),  # as wide as one program
        ("norms", "350m-full-4x512x4", "_forward", (2048, 1, 1), 32),
        ("norms", "350m-full-4x512x4", "_add", (256, 1, 1), 128),
        ("adapters", "1b-1x512", "_rows", (8, 1, 8), 128),
        ("loss", "1b-1x512", "_rows", (256, 1, 1), 256),
        ("adapters", "1b-4x2048", "_rows", (128, 1, 1), 256),
        ("loss", "1b-4x2048", "_rows", (2048, 1, 1), 256),
    ],
)
def test_kernels_of_one_name_are_told_apart_by_their_launch(kind, case, name, grid, threads) -> None:
    assert kind_of(Kernel(name, 0, 1, 7, grid, threads), parse(case)) == kind


def test_the_floors_copies_stand_for_dequantisation() -> None:
    copy = Kernel("Memcpy DtoD (Device -> Device)", 0, 1)
    found = [kind_of(copy, parse(name), floor=floor) for name in ("8b-4x2048", "8b-nf4-4x2048") for floor in (0, 1)]
    assert found == ["copies", "copies", "copies", "codes"]


def test_every_kernel_of_ours_has_a_kind() -> None:
    names = {
        name for path in KERNELS.rglob("*.py") for name in re.findall(r"@triton\.jit\ndef (\w+)", path.read_text())
    }
    text = "\n".join(path.read_text() for path in KERNELS.rglob("*.py"))
    launched = {name for name in names if f"{name}[" in text} | {"_legacy", "_q8_0", "_q6_k"}
    case = parse("8b-nf4-4x2048")
    assert len(launched) > 30 and not [name for name in launched if kind_of(Kernel(name, 0, 1), case) == "other"]


def events(steps: int = 3) -> list[dict]:
    """Steps of 100 us, two of them idle, on two streams, and a batch that arrives meanwhile; before them the end of
    another one."""
    made = [("_adamw", -30.0, 20.0, 7)]
    for at in (200.0 * i for i in range(steps)):
        made += [
            ("nvjet_sm90", at, 60.0, 7),
            ("_columns", at + 10, 30.0, 9),
            ("Memcpy HtoD (Pinned -> Device)", at + 5, 2.0, 11),
        ]
        made += [("strange", at + 62, 8.0, 7), ("_adamw", at + 70, 30.0, 7)]  # fmt: skip
    kinds = {True: "gpu_memcpy", False: "kernel"}
    return [
        {"cat": kinds[n.startswith("Mem")], "name": n, "ts": t, "dur": d, "args": {"stream": s}} for n, t, d, s in made
    ] + [{"cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 0, "dur": 5, "args": {}}]


def test_a_profile_is_divided_into_steps_and_summed() -> None:
    groups = breakdown.divided(breakdown.read({"traceEvents": events()}), 3)
    assert [len(group) for group in groups] == [5, 5, 5]
    assert [group[0].start for group in groups] == [0.0, 200.0, 400.0]
    found = breakdown.figures(groups[1], parse("1b-4x2048"))
    assert (found["span_ms"], found["busy_ms"], found["idle_share"]) == (0.1, 0.098, 0.02)
    assert (found["main_ms"], found["beside_ms"], found["streams"]) == (0.098, 0.032, 3)
    assert found["overlapped_ms"] == pytest.approx(0.032)
    assert found["kinds"]["products"] == {"ms": 0.06, "launches": 1} and found["other"] == {"strange": 0.008}
    assert {kind: its["ms"] for kind, its in found["beside"].items()} == {"adapters": 0.03, "copies": 0.002}


def test_a_record_and_its_table(tmp_path, monkeypatch, capsys) -> None:
    """The profile is the one above: there is no GPU here."""
    group = breakdown.divided(breakdown.read({"traceEvents": events()}), 3)[0]
    real = breakdown.observed

    def observed(step, case, device, *, floor, sustain):
        found = real(step, case, device, floor=floor, sustain=sustain)
        return found | breakdown.figures(group[:1] if floor else group, case, floor=floor)

    monkeypatch.setattr(breakdown, "observed", observed)
    monkeypatch.setattr(breakdown, "STEPS", 1)
    out = tmp_path / "breakdown.json"
    words = ["breakdown.py", "tiny-2x32,tiny-nf4-2x32-full", "--json", str(out), "--device", "cpu", "--sustain", "0"]
    monkeypatch.setattr(sys, "argv", [*words, "--commit", "abc"])
    assert breakdown.main() == 0
    record = json.loads(out.read_text())
    assert record["commit"] == "abc" and record["torch"] == torch.__version__ and {"gpu", "date"} <= set(record)
    both, alone = record["breakdown"].values()
    assert "floor" in both and "floor" not in alone, "a step that recomputes has no floor"
    assert both["ours"]["ms"] > 0 and both["floor"]["ms"] > 0 and "attention" in both["ours"]["note"]
    row = {"kind": "products", "ours_ms": 0.06, "ours_launches": 1, "floor_ms": 0.06, "floor_launches": 1}
    assert row in both["table"] and [row["kind"] for row in both["table"]] == [
        "products", "adapters", "update", "copies", "other",
    ]  # fmt: skip
    said = capsys.readouterr().out
    assert "idle 2.0%" in said and "other: strange 0.008" in said and "adapters' thin products" in said


def test_without_a_gpu_there_is_a_time_and_no_kernel(monkeypatch) -> None:
    monkeypatch.setattr(breakdown, "STEPS", 1)
    record = breakdown.broken_down("tiny-1x32", torch.device("cpu"), 0.0)
    assert record["table"] == [] and record["ours"]["ms"] > 0 and "nothing ran on a GPU" in breakdown.said("x", record)
