"""What a plan is for: `auto` takes what fits, a run that does not fit is refused before it loads, and what is suggested
then runs."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.synthetic import random_base

from graftune.cli import main
from graftune.errors import GraftuneError
from graftune.observe.console import Console
from graftune.observe.events import read_events
from graftune.plan import Bytes, Setup, cards, job, rehearse
from graftune.settings.config import Config
from graftune.training import prepare
from tests.support import specs
from tests.support.rehearsed_once import key_of
from tests.training.runs import write_data

QUIET = Console(quiet=True)
MIB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def _rehearsed_once() -> Iterator[None]:
    """What a step takes follows from its setup (tests/plan/test_plan.py), and these tests ask for the same ones with
    more and less memory: one rehearsal of each is enough."""
    made: dict[str, Bytes] = {}

    def once(setup: Setup, launched: object = None) -> Bytes:
        key = key_of(setup)
        if key is None:
            return rehearse(setup)
        if key not in made:
            made[key] = rehearse(setup)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "rehearse", once)
        yield


def job_for(folder: Path, memory: int = 0, **more: Any) -> job.Job:
    """Of a run that answers no prompts: what those take is test_plan.py's."""
    values = {"base": str(folder), "device": "cuda", "max_seq_len": 64, "samples": 0} | more
    return prepare.job_of(Config.of(values), QUIET, memory=memory)


def test_auto_takes_the_largest_micro_batch_and_then_the_least_recompute(tiny_folder) -> None:
    from graftune.plan import resolve_auto

    folder = tiny_folder("llama")
    large = resolve_auto(job_for(folder, 80 << 30, tokens_per_step=65536))
    assert (large.recompute, large.capacity) == ("none", 8192)
    assert resolve_auto(job_for(folder, 80 << 30)).capacity == 4096, "no more than a step has"

    def limit(policy: str, size: int) -> int:
        return job_for(folder, 80 << 30).plan(policy, size).needed + job.CONTEXT_BYTES

    found = resolve_auto(job_for(folder, limit("selective", 4096)))
    assert found.fits and found.needed <= limit("selective", 4096)
    assert found.recompute in ("none", "selective")
    fixed = resolve_auto(job_for(folder, limit("full", 4096), tokens_per_micro_batch=4096))
    assert fixed.capacity == 4096 and fixed.fits


def test_on_a_cpu_auto_is_1024_unless_memory_is_short(tiny_folder) -> None:
    from graftune.plan import resolve_auto

    folder = tiny_folder("llama")
    wide = resolve_auto(job_for(folder, 8 << 30, device="cpu"))
    assert (wide.recompute, wide.capacity) == ("none", 1024)
    short = job_for(folder, 8 << 30, device="cpu").plan("none", 512).needed
    assert resolve_auto(job_for(folder, short, device="cpu")).capacity == 512


def test_a_run_that_does_not_fit_is_refused_before_loading_and_the_suggestion_runs(
    tiny_folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, data = tiny_folder("llama"), write_data(tmp_path / "data.jsonl")
    line = [
        "train", str(folder), str(data), "--device", "cpu", "--compute-dtype", "fp32", "--rank", "4", "--samples", "0",
        "--tokens-per-step", "512", "--tokens-per-micro-batch", "512", "--recompute", "none", "--max-steps", "2",
        "--threads", "1", "--base-dtype", "fp32",
    ]  # fmt: skip
    config = Config.of({"base": str(folder), "data": str(data), "device": "cpu", "tokens_per_step": 512, "rank": 4})
    planned = prepare.job_of(config, QUIET, memory=1 << 40)
    free = planned.plan("full", 512, planned.place("fp32")).needed
    assert free < planned.plan("selective", 512, planned.place("fp32")).needed
    monkeypatch.setattr(job, "free_bytes", lambda device: free)

    with monkeypatch.context() as loading:
        loading.setattr(prepare, "open_session", lambda *_, **__: pytest.fail("the model was loaded"))
        assert main([*line, "--out", str(tmp_path / "refused")]) == 2
    said = capsys.readouterr().err
    assert not (tmp_path / "refused").exists()
    sentence = said.splitlines()[-1]
    assert re.search(
        r"training needs [\d.]+ MiB of memory and [\d.]+ MiB are free; recompute full would need", sentence
    )

    line[line.index("--recompute") + 1] = "full"
    assert main([*line, "--out", str(tmp_path / "suggested")]) == 0
    events = read_events(tmp_path / "suggested" / "metrics.jsonl")
    (memory,) = [event for event in events if event["event"] == "memory"]
    document = json.loads((tmp_path / "suggested" / "plan.json").read_text())
    assert memory["planned"] == document["expected"] and memory["measured"] > 0 and memory["step"] == 1
    assert document["settings"]["recompute"] == "full" and document["fits"]
    assert "memory: planned" in capsys.readouterr().err


@pytest.mark.thorough
def test_the_nearest_setting_may_be_a_smaller_micro_batch_or_fewer_bits(tiny_folder) -> None:
    folder = tiny_folder("llama-untied")
    asked = {"tokens_per_micro_batch": 4096, "recompute": "offload", "base_dtype": "bf16"}
    whole = job_for(folder, 80 << 30, **asked)
    from graftune.plan import best, nearest, refusal

    for size, kind in ((1024, "bf16"), (64, "nf4")):
        free = whole.plan("offload", size, whole.place(kind)).needed + job.CONTEXT_BYTES
        tight = job_for(folder, free, **asked)
        found = nearest(tight, best(tight))
        assert found is not None and found.fits and found.capacity >= size
        assert "tokens_per_micro_batch" in str(refusal(tight, best(tight)))
    hopeless = job_for(folder, job.CONTEXT_BYTES + MIB, **asked)
    assert nearest(hopeless, best(hopeless)) is None
    assert "take a smaller model or a larger card" in str(refusal(hopeless, best(hopeless)))


@pytest.mark.thorough
def test_a_gguf_is_offered_its_own_blocks_before_others(smollm2: Path, tiny_folder, monkeypatch) -> None:
    from graftune.kernels.gguf_dequant import KINDS
    from graftune.plan import best, nearest, refusal

    asked = {"base_dtype": "fp32", "compute_dtype": "bf16", "recompute": "offload", "tokens_per_micro_batch": 64}

    def of_three_layers(memory: int) -> job.Job:
        made = job_for(smollm2, memory, **asked)
        made.base = made.setup("offload", 64, made.placement).with_layers([0, 1, 2]).base
        return made

    whole = of_three_layers(80 << 30)
    needed = {kind: whole.plan("offload", 64, whole.place(kind)).needed for kind in ("keep", "nf4", "fp32")}
    assert max(needed["keep"], needed["nf4"]) < needed["fp32"]
    enough = max(needed["keep"], needed["nf4"]) + job.CONTEXT_BYTES
    tight = of_three_layers(enough)
    found = nearest(tight, best(tight))
    assert found is not None and found.settings["base_dtype"] == "keep"
    assert "base_dtype keep would need" in str(refusal(tight, best(tight)))
    first = next(t.dtype_name for t in tight.base.tensors.values() if len(t.shape) == 2)
    with monkeypatch.context() as unknown:  # blocks that no kernel of ours reads
        unknown.delitem(KINDS, first)
        found = nearest(tight, best(tight))
        assert found is None or found.settings["base_dtype"] == "nf4"
    folder = job_for(tiny_folder("llama-untied"), job.CONTEXT_BYTES + MIB, **asked)
    folder.free = folder.plan("offload", 64, folder.place("nf4")).needed
    found = nearest(folder, best(folder))
    assert found is not None and found.settings["base_dtype"] == "nf4"


@pytest.mark.thorough
def test_what_the_host_lacks_is_refused_too(tiny_folder) -> None:
    from graftune.plan import best, largest, nearest, refusal

    asked = job_for(tiny_folder("llama"), 80 << 30, tokens_per_micro_batch=4096, recompute="offload")
    assert asked.host_free is None, "the machine that has the card is not known"
    plan = best(asked)
    asked.host_free = plan.bytes.host
    assert best(asked).fits and best(asked).document()["host_free"] == plan.bytes.host
    asked.host_free -= 1
    short = best(asked)
    assert short.fits_device and not short.fits and 0 < largest(asked, "offload") < 1 << 17
    found = nearest(asked, short)
    assert found is not None and (found.recompute, found.capacity) == ("full", 4096)
    said = str(refusal(asked, short))
    assert re.search(r"training needs [\d.]+ MiB of pinned host memory and [\d.]+ MiB are free; recompute full", said)


@pytest.mark.thorough
def test_the_largest_micro_batch_is_the_largest(tiny_folder) -> None:
    from graftune.plan import largest

    asked = job_for(tiny_folder("llama"), 1000 << 20)
    sizes = {policy: largest(asked, policy) for policy in ("none", "full")}
    assert 0 < sizes["none"] < sizes["full"] < 1 << 17
    for policy, size in sizes.items():
        assert asked.plan(policy, size).fits and not asked.plan(policy, size + 512).fits, (policy, size)
    asked.longest = sizes["none"] + 512
    assert largest(asked, "none") == 0


def test_a_micro_batch_below_512_tokens_may_be_the_largest(tiny_folder) -> None:
    from graftune.plan import largest

    asked = job_for(tiny_folder("llama"), 1000 << 20)
    asked.longest = 64
    least, more = (asked.plan("none", size).needed for size in (128, 512))
    assert least < more
    asked.free = (least + more) // 2
    assert 64 <= largest(asked, "none") < 512


# The command


def test_plan_command_for_a_card_that_is_not_here(tiny_folder, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["plan", str(tiny_folder("llama")), "--device", "cuda", "--samples", "0"]
    assert main([*line, "--memory", "24GiB", "--json", "--max-seq-len", "64"]) == 0
    document = json.loads(capsys.readouterr().out)
    owners = ("base", "adapters", "gradients", "moments", "saved activations", "workspaces", "CUDA context")
    assert all(document["owners"][name] > 0 for name in owners)
    assert document["fits"] and document["needed"] <= document["free"] < 24 << 30
    assert document["largest"]["none"] <= document["largest"]["full"] <= document["largest_looked_for"]
    assert main([*line, "--memory", "24GiB", "--max-seq-len", "64"]) == 0
    shown = capsys.readouterr().out
    assert "131072 or more" in shown
    assert "saved activations" in shown and "largest micro-batch that fits" in shown and "█" in shown
    one = ("--max-seq-len", "512", "--tokens-per-step", "512", "--recompute", "offload", "--base-dtype", "nf4")
    assert main([*line, "--memory", "601MiB", *one]) == 2  # one choice: all are rehearsed where none fits
    said = capsys.readouterr()
    assert "gradients" in said.out and "take a smaller model" in said.err
    if not torch.cuda.is_available():
        assert main(line) == 2
        assert "--memory 24GiB" in capsys.readouterr().err


def test_plan_without_triton_says_so(tiny_folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "rehearse", rehearse)  # anew
    monkeypatch.setitem(sys.modules, "triton.runtime", None)
    with pytest.raises(GraftuneError, match="the package triton is not installed"):
        job_for(tiny_folder("llama"), 24 << 30).plan("none", 64)


def large_job(gpu: str, ranks: int = 0, memory: int = 0, **more: Any) -> job.Job:
    """Of a model in the shape of Llama 3's 70B, on a card that is not here, with its own memory or another's."""
    shape = {
        **{"family": "llama", "layers": 80, "width": 8192, "ffn": 28672, "heads": 64, "kv_heads": 8, "head_width": 128},
        **{"vocab": 128256, "norm_eps": 1e-5, "rope_theta": 5e5, "max_positions": 8192, "tied": False},
    }
    values = {"device": "cuda", "base_dtype": "nf4", "max_seq_len": 1024, "tokens_per_step": 1024, "recompute": "full"}
    config = Config.of(values | more)
    runtime, card = job.runtime_for(config, memory, cards.find(gpu))
    base = random_base(specs.made(**shape), torch.device("cpu"))
    return job.Job(config, base, runtime, 1024, job.any_data(1024), card, evaluates=False, ranks=ranks)


@pytest.mark.thorough
def test_a_base_that_does_not_fit_is_fetched_from_host_memory() -> None:
    """70B in 4 bits on a card of 24 GB; if that had 140 GB it would be resident."""
    from graftune.plan import best, refusal

    tight = large_job("4090")
    found = best(tight)
    assert found.fits and found.settings["base_on"] == "host" and tight.placement.on_host
    assert "in host memory" in tight.placement.describe()
    assert 30 << 30 < found.bytes.host < 42 << 30 and found.needed < 23 << 30
    roomy = large_job("4090", memory=140 << 30)
    assert best(roomy).settings["base_on"] == "device" and not roomy.placement.fetched and not best(roomy).transfer

    refused = large_job("4090", base_on="device")
    assert not best(refused).fits and "base_on host" in str(refusal(refused, best(refused)))
    with pytest.raises(GraftuneError, match="shard_base is yes and this process is the only one"):
        large_job("4090", shard_base="yes")


@pytest.mark.thorough
def test_ranks_share_a_base_that_none_of_them_can_hold() -> None:
    from graftune.plan import best

    four = large_job("4090", ranks=4)
    found = best(four)
    assert found.fits and (found.settings["shard_base"], found.settings["base_on"]) == ("yes", "device")
    assert four.placement.ranks == 4 and 8 << 30 < found.bytes.owners["base"] < 12 << 30
    asked = best(large_job("4090", ranks=4, memory=140 << 30, shard_base="yes"))
    assert asked.settings["shard_base"] == "yes" and asked.bytes.owners["base"] < 12 << 30
    roomy = best(large_job("4090", ranks=4, memory=140 << 30))
    assert roomy.settings["shard_base"] == "no", "auto divides only what does not fit"
    both = large_job("4090", ranks=2, shard_base="yes", base_on="host")
    assert best(both).fits and best(both).bytes.host < 22 << 30, "half of it in each rank's host memory"


@pytest.mark.thorough
def test_a_plan_says_whether_the_transfer_hides() -> None:
    """By arithmetic that a reader can do: bytes over the link's rate against operations over the card's."""
    found = large_job("h200", base_on="host", tokens_per_micro_batch=8192).plan("full", 8192)
    seconds = re.search(r"([\d.]+) s over the link, where 8192 tokens compute for about ([\d.]+) s", found.transfer)
    assert seconds is not None, found.transfer
    parameters, tables = 68.4e9, 128256 * 8192
    assert float(seconds[1]) == pytest.approx((0.516 * parameters + 2 * tables) / 50e9, rel=0.05)
    assert float(seconds[2]) == pytest.approx(2 * (parameters + tables) * 8192 / (0.6 * 989e12), rel=0.05)
    assert found.transfer.endswith("hides behind the compute") and found.document()["transfer"] == found.transfer
    short = large_job("h200", base_on="host", tokens_per_micro_batch=1024)
    enough = re.search(r"waits for the link; from about (\d+) tokens", short.plan("full", 1024).transfer)
    assert enough is not None and 3000 < int(enough[1]) < 6000


@pytest.mark.thorough
def test_fewer_samples_at_once_where_memory_is_short(tiny_folder, tmp_path: Path, capsys) -> None:
    """A whole round, or halves of it until one fits; a number that is asked for stays."""
    from graftune.plan import best
    from graftune.rl.prepare import job_of

    reward, base = tmp_path / "reward.py", str(tiny_folder("llama-shallow"))
    reward.write_text("def reward(completions, **columns): ...\n")
    values = {"base": base, "device": "cuda", "max_seq_len": 256, "answer_tokens": 200, "reward": [str(reward)]}
    values |= {"prompts_per_round": 32, "group": 8, "recompute": "full", "tokens_per_micro_batch": 256}

    def made(memory: int, at_once: int = 0) -> job.Job:
        return job_of(Config.of(values | {"samples_at_once": at_once}), QUIET, memory=memory)

    large = made(80 << 30)
    assert best(large).settings["samples_at_once"] == 256 and large.cache is not None and large.cache.places == 256
    memory = best(made(80 << 30, 64)).needed + 64 * 1024 + job.CONTEXT_BYTES
    short = made(memory)
    assert best(short).fits and short.at_once == 64 and short.cache is not None and short.cache.places == 64
    assert not best(made(memory, 256)).fits
    line = ["plan", base, "--reward", str(reward), "--group", "4", "--prompts-per-round", "2", "--gpu", "4090"]
    assert main([*line, "--recompute", "full", "--max-seq-len", "512", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings"]["samples_at_once"] == 8 and found["owners"]["cache of generation"] > 0


def test_an_8b_in_nf4_samples_and_trains_on_12_gib() -> None:
    """8 samples of 1,024 tokens after a prompt of 256; the CUDA context is part of the 12 GiB."""
    from benchmarks.cases import parse
    from benchmarks.random_bases import base_of

    from graftune.infer.cache import CACHE, Request
    from graftune.plan import best, runtime_for
    from graftune.training.prepare import training_job

    case, longest, memory = parse("8b-nf4-4x2048"), 256 + 1024, 12 << 30
    asked = {"recompute": "selective", "tokens_per_micro_batch": 2048, "loss": "ppo", "max_seq_len": longest}  # as auto
    config = case.config(torch.device("cuda"), **asked)
    runtime, card = runtime_for(config, memory)
    about, sampled = (config, base_of(case, runtime.device), runtime, card, memory, longest, None), (256, longest, 8)
    made = training_job(*about, evaluates=False, sampled=(Request(*sampled),))
    assert made.shapes(1 << 20).capacity == 16384, "the plan is for no more tokens than the round has"
    plan = best(made)
    assert plan.fits and plan.needed + job.CONTEXT_BYTES <= memory and made.at_once == 8
    assert 1 << 30 <= plan.bytes.owners[CACHE] < 1.1 * (1 << 30), "the prompt is there once"


def test_a_micro_batch_of_a_small_round_is_planned_as_the_round() -> None:
    from graftune.infer.cache import Request
    from graftune.plan import any_data, round_data

    shape = round_data((Request(30, 40, 8), Request(20, 30, 8)), 40)
    small, half = shape(4096), shape(512)
    assert small.capacity == 1024 and small.max_rows == 256 and small.longest == 64  # 560 tokens, 160 of them drawn
    assert half == any_data(40)(512)._replace(max_rows=256)
