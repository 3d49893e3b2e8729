"""A run over fp8 begins by rounding the base by its own data: the pass over the model, the run around it, the resume.

FP8 needs a GPU; here its references compute, by the run's own code."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from graftune.step.calibrate import Calibration

from graftune.api import train
from graftune.batch import Example
from graftune.config import Config, LoraConfig
from graftune.data.pack import pack
from graftune.kernels import fp8, launch
from graftune.model.frozen import Fp8
from graftune.observe.console import Console
from graftune.observe.events import evals, read_events, steps
from graftune.step import calibrate, codes
from graftune.training import prepare
from graftune.weights import checkpoint
from graftune.weights.load import group_sources
from tests import oracle, tiny
from tests.training.runs import adapter_bytes, write_data

QUIET = Console(quiet=True)
LORA = LoraConfig(rank=4, alpha=8.0)
LIMIT = 7e-7  # of this small model: about a third of what one code for all costs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Widths are multiples of 16, and tokens share a mean and a few directions, as those of trained models do: what a
    weight reads is correlated."""
    model = tiny.hf_model
    with pytest.MonkeyPatch.context() as patch:
        options = {"intermediate_size": 96, "num_hidden_layers": 4}
        patch.setitem(tiny.VARIANT_OPTIONS, "llama-untied", options)

        def correlated(variant: str) -> Any:
            made = model(variant)
            with torch.no_grad():
                table = made.model.embed_tokens.weight
                table.mul_(0.1).add_(torch.randn(len(table), 4) @ torch.randn(4, table.shape[1])).add_(
                    2 * torch.randn(table.shape[1])
                )
            return made

        patch.setattr(tiny, "hf_model", correlated)
        return tiny.make_folder("llama-untied", tmp_path_factory.mktemp("correlated") / "base")


def texts(count: int, seed: int) -> list[list[int]]:
    drawn = torch.Generator().manual_seed(seed)
    return [torch.randint(0, tiny.VOCAB, (40,), generator=drawn).tolist() for _ in range(count)]


def batches(seed: int, count: int = 4) -> list[Any]:
    return [pack([Example(text, [True] * len(text)) for text in texts(8, seed + i)]) for i in range(count)]


def apply(ours: oracle.Ours, seed: int = 10) -> Calibration:
    made = calibrate.calibrate(ours.decoder, batches(seed), lambda layer, group: group_sources(ours.base, layer, group))
    ours.arena.publish()
    return made


def divergence(ours: oracle.Ours, exact: oracle.Ours, **how: Any) -> float:
    """Mean KL of the logits of other texts than those it was calibrated on."""
    a, b = (model.logits(texts(12, 99), **how).log_softmax(-1) for model in (exact, ours))
    return float((a.exp() * (a - b)).sum(-1).mean())


def unrounded(ours: oracle.Ours) -> list[torch.Tensor]:
    """As if rounding the weights had cost nothing."""
    streams = [calibrate.Through.of(ours.decoder, batch, "cpu") for batch in batches(10)]
    ours.decoder.set_inputs(2)
    for block in ours.decoder.blocks:
        for stream in streams:
            stream.x = stream.behind(block)
    return [stream.x for stream in streams]


def weights_alone(patch: pytest.MonkeyPatch) -> None:
    """Products of the codes with activations as they are."""
    patch.setattr(Fp8, "matmul", lambda self, x: (x @ self.weight.float().t()).mul_(self.scale))


def test_the_model_comes_nearer_to_its_base(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exact, nearest, made = (oracle.ours(folder, LORA, base_dtype=k, random_b=False) for k in ("fp32", "fp8", "fp8"))
    found = apply(made)
    assert found.tokens == 4 * 8 * 40 and len(found.digest) == 64
    assert divergence(made, exact) < 0.9 * divergence(nearest, exact), "activations are rounded as before"
    weights_alone(monkeypatch)
    assert divergence(made, exact) < 0.35 * divergence(nearest, exact)


def test_adapters_have_no_part_in_it_and_lie_right_afterwards(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room, as on a GPU, B lies beside the codes at the weight's scales, which are new now; without, apart."""
    apart, fresh = (oracle.ours(folder, LORA, base_dtype="fp8", random_b=b) for b in (True, False))
    monkeypatch.setattr(launch, "roomy", lambda device: True)
    beside = oracle.ours(folder, LORA, base_dtype="fp8")
    assert all(p.room for block in beside.decoder.blocks for p in block.projections)
    beside.arena.weights.copy_(apart.arena.weights)
    assert len({apply(ours).digest for ours in (apart, fresh, beside)}) == 1
    near, base = divergence(beside, apart), divergence(beside, apart, adapted=False)
    assert base == 0 and near < 3e-4
    for block in beside.decoder.blocks:  # as if it still lay at other scales
        assert isinstance(block.qkv.frozen, Fp8)
        block.qkv.frozen.scale.mul_(1.5)
    beside.arena.publish()
    for block in beside.decoder.blocks:
        block.qkv.frozen.scale.div_(1.5)  # type: ignore[union-attr]
    assert divergence(beside, apart) > 10 * near


def test_blocks_see_what_the_rounded_ones_before_them_make(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream that reaches the last block is that of the calibrated model."""
    seen: list[torch.Tensor] = []
    block = calibrate.calibrate_block

    def noted(last: Any, streams: Any, *rest: Any) -> None:
        seen[:] = [stream.x for stream in streams]
        block(last, streams, *rest)

    monkeypatch.setattr(calibrate, "calibrate_block", noted)
    ours = oracle.ours(folder, LORA, base_dtype="fp8", random_b=False)
    apply(ours)
    (first, *_) = batches(10)
    ours.decoder.set_inputs(2)
    stream = calibrate.Through.of(ours.decoder, first, "cpu")
    for before in ours.decoder.blocks[:-1]:
        stream.x = stream.behind(before)
    assert torch.equal(stream.x, seen[0])


@pytest.fixture
def on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "require", lambda device, compute: None)


def settings(folder: Path, out: Path, **more: Any) -> Config:
    data = out.parent / "data.jsonl"
    if not data.exists():
        write_data(data, rows=40)
    values = {
        "base": str(folder), "base_dtype": "fp8", "data": str(data), "out": str(out), "device": "cpu", "rank": 4,
        "compute_dtype": "fp32", "threads": 1, "lr": 0.01, "epochs": 2, "tokens_per_step": 256, "eval_every": 2,
        "tokens_per_micro_batch": 128, "save_every": 2, "keep_last": 99, "samples": 0, "score": False, "patience": 0,
    }  # fmt: skip
    return Config.of(values | more)


def figures(run: Path) -> list[tuple[object, ...]]:
    events = read_events(run / "metrics.jsonl")
    return [tuple(e.get(n) for n in ("step", "loss", "grad_norm")) for e in (*steps(events), *evals(events))]


def digest_of(run: Path) -> str:
    (start,) = [e for e in read_events(run / "metrics.jsonl") if e["event"] == "run_start"]
    return str(start.get("codes", ""))


def test_the_sample_is_the_runs_own_beginning(folder: Path, tmp_path: Path, on_any_device, monkeypatch) -> None:
    monkeypatch.setattr(calibrate, "TOKENS", 500)
    config = settings(folder, tmp_path / "run")
    prepared = prepare.prepare_run(config, QUIET)
    taken = calibrate.sample(prepared.training.examples, prepared.session.config.train)
    assert prepared.calibration is not None
    assert prepared.calibration.tokens == sum(len(b.tokens) for b in taken) and 436 <= prepared.calibration.tokens < 564
    from graftune.training.loop import Run

    first = [batch for step in Run(prepared, QUIET).loader.epoch(0) for batch in step][: len(taken)]
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(taken, first, strict=True))
    monkeypatch.setattr(calibrate, "TOKENS", 10**6)
    every = calibrate.sample(prepared.training.examples, prepared.session.config.train)
    assert sum(len(b.tokens) for b in every) == sum(len(e.tokens) for e in prepared.training.examples)


def test_resumed_is_straight(folder: Path, tmp_path: Path, on_any_device) -> None:
    straight = train(settings(folder, tmp_path / "straight"), console=QUIET).folder
    assert len(digest_of(straight)) == 64
    resumed = tmp_path / "resumed"
    shutil.copytree(straight, resumed)
    shutil.rmtree(resumed / "adapter")
    for step, path in checkpoint.steps(resumed / "checkpoints").items():
        if step > 2:
            shutil.rmtree(path)
    said: list[str] = []
    console = Console(quiet=True)
    console.warn = said.append  # type: ignore[method-assign]
    train(Config.load(resumed / "config.yaml"), console=console, resume=str(resumed))
    assert figures(resumed) == figures(straight) and adapter_bytes(resumed) == adapter_bytes(straight)
    assert not [text for text in said if "fp8" in text]


def test_a_resumed_run_reads_as_many_codes_as_it_began_with(folder: Path, tmp_path: Path, on_any_device, monkeypatch):
    """Whatever this machine would measure."""
    monkeypatch.setattr(codes, "LIMIT", LIMIT)
    run = train(settings(folder, tmp_path / "run", max_steps=2), console=QUIET).folder
    (start,) = [e for e in read_events(run / "metrics.jsonl") if e["event"] == "run_start"]
    assert set(start["inputs"]) == {"1", "2"} and start["cost_of_one_code"] > LIMIT
    assert 0 < start["cost_of_inputs"] <= codes.limit_of(start["cost_of_weights"] - start["noise"])
    monkeypatch.setattr(codes, "LIMIT", 1.0)

    def taken() -> tuple[int, ...]:
        stored = Config.load(run / "config.yaml")
        prepared = prepare.prepare_resume(stored, QUIET, run, stored)
        assert prepared.calibration is not None
        inputs = prepared.calibration.chosen.inputs
        assert inputs == tuple(weight.inputs for weight in prepared.session.decoder.in_fp8)
        return inputs

    assert taken() == tuple(map(int, start["inputs"]))
    log = run / "metrics.jsonl"
    log.write_text(log.read_text().replace(f'"{start["inputs"]}"', "2"))
    assert set(taken()) == {2}, "an earlier version had one number for all"
    fresh = prepare.prepare_run(settings(folder, tmp_path / "other"), QUIET)
    assert fresh.calibration is not None and set(fresh.calibration.chosen.inputs) == {1}


def test_other_codes_on_a_resume_are_told(folder: Path, tmp_path: Path, on_any_device, monkeypatch) -> None:
    run = train(settings(folder, tmp_path / "run", max_steps=2), console=QUIET).folder
    plain, said = calibrate.pack, list[str]()
    monkeypatch.setattr(calibrate, "pack", lambda examples: plain(examples[1:] or examples))
    console = Console(quiet=True)
    console.warn = said.append  # type: ignore[method-assign]
    shutil.rmtree(run / "adapter")  # with it the run would be finished
    train(Config.load(run / "config.yaml"), console=console, resume=str(run))
    assert [text for text in said if "not those that the run began with" in text]


def test_two_codes_where_one_costs_too_much(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one code costs is told apart from what two do, and the model behind the choice is the one that was meant."""
    exact = oracle.ours(folder, LORA, base_dtype="fp32", random_b=False)
    found, far = [], []
    for limit, size in ((1.0, 64 << 20), (1e-9, 4 * tiny.VOCAB * 7)):  # all logits at once, or a few rows of them
        monkeypatch.setattr(codes, "LIMIT", limit)
        monkeypatch.setattr(codes, "LOGITS_BYTES", size)
        ours = oracle.ours(folder, LORA, base_dtype="fp8", random_b=False)
        found.append(apply(ours))
        assert tuple(weight.inputs for weight in ours.decoder.in_fp8) == found[-1].chosen.inputs
        far.append(divergence(ours, exact))
    one, two = found
    assert (set(one.chosen.inputs), set(two.chosen.inputs)) == ({1}, {2}) and one.digest == two.digest
    assert far[1] < 0.5 * far[0] and one.chosen.one == pytest.approx(two.chosen.one, rel=1e-3)
    assert (one.chosen.taken, two.chosen.taken) == (one.chosen.one, 0)
    # By the whole logits: every token but a text's last has one to foretell.
    divergences, losses = [], []
    for batch in batches(10):
        said = []
        for inputs in (1, 2):
            ours.decoder.set_inputs(inputs)
            documents = [part.tolist() for part in batch.tokens.split(list(batch.lengths))]
            said.append(ours.logits(documents, adapted=False)[batch.rows].log_softmax(-1))
        divergences.append((said[1].exp() * (said[1] - said[0])).sum(-1))
        losses.append(-said[1].gather(1, batch.labels.unsqueeze(1)).squeeze(1))
    wanted = torch.cat(divergences).mean() / torch.cat(losses).mean()
    assert one.chosen.one == pytest.approx(float(wanted), rel=1e-3)


def test_two_codes_where_they_save_most(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some weights, so that the rest costs what it may; more than that would be for nothing."""
    ours = oracle.ours(folder, LORA, base_dtype="fp8", random_b=False)
    monkeypatch.setattr(codes, "LIMIT", LIMIT)
    found = apply(ours).chosen
    share = codes.share_of_two(ours.decoder)
    assert 0.3 * LIMIT < found.taken <= LIMIT < found.one and 0 < share < 1
    # Dearer than what one code for all would cost by those products: they were not chosen by their number.
    saved = (found.one - found.taken) / found.one
    assert saved > share
    # What was estimated too low is found out, and where nothing helps all take two.
    monkeypatch.setattr(codes, "mixed", lambda shares, sizes, limit: (1,) * len(shares))
    assert set(codes.choose(ours.decoder, batches(10), "cpu", unrounded(ours)).inputs) == {2}


def test_what_rounding_the_weights_costs(folder: Path) -> None:
    """Against the model of the exact weights, and rows are read once for it and for the codes."""
    exact, ours = (oracle.ours(folder, LORA, base_dtype=kind, random_b=False) for kind in ("fp32", "fp8"))
    read = dict[str, int]()
    for name, source in ours.base.tensors.items():

        def counted(start: int, stop: int, name: str = name, real: Any = source.read) -> torch.Tensor:
            read[name] = read.get(name, 0) + stop - start
            return real(start, stop)

        object.__setattr__(source, "read", counted)
    found = apply(ours).chosen
    projections = {name: len(ours.base.tensors[name].values()) for name in read}
    assert read == projections and len(read) == 4 * 7
    divergences, losses = [], []
    ours.decoder.set_inputs(2)
    for batch in batches(10):
        documents = [part.tolist() for part in batch.tokens.split(list(batch.lengths))]
        meant, said = (m.logits(documents, adapted=False)[batch.rows].log_softmax(-1) for m in (exact, ours))
        divergences.append((meant.exp() * (meant - said)).sum(-1))
        losses.append(-meant.gather(1, batch.labels.unsqueeze(1)).squeeze(1))
    wanted = float(torch.cat(divergences).mean() / torch.cat(losses).mean())
    assert found.weights == pytest.approx(wanted, rel=1e-3) and wanted > 1e-8


def test_inputs_need_not_be_much_better_than_the_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = oracle.ours(folder, LORA, base_dtype="fp8", random_b=False)
    monkeypatch.setattr(codes, "LIMIT", 1e-9)
    shares, costs = [], []
    for share_of_weights in (0.0, 15.0, 1e3):  # its weights cost a fortieth of its inputs
        monkeypatch.setattr(codes, "OF_WEIGHTS", share_of_weights)
        found = apply(ours).chosen
        shares.append(codes.share_of_two(ours.decoder))
        costs.append(found.taken / found.weights)
    assert shares[0] == 1 and 0 < shares[1] < 1 and shares[2] == 0
    assert costs[0] == 0 < costs[1] <= 15.0 < costs[2]
    assert codes.limit_of(float("nan")) == codes.limit_of(float("inf")) == codes.limit_of(-1.0) == 1e-9


def test_no_number_means_two_codes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = oracle.ours(folder, LORA, base_dtype="fp8", random_b=False)
    monkeypatch.setattr(codes, "costs", lambda *how: [float("nan")])
    assert set(codes.choose(ours.decoder, batches(10), "cpu", unrounded(ours)).inputs) == {2}


def test_noise_is_in_every_figure_once() -> None:
    parts, noise = [0.3, 0.1, 0.2, 0.4], 0.05
    assert codes.noise_of(sum(parts) + noise, [part + noise for part in parts]) == pytest.approx(noise)
    assert codes.noise_of(sum(parts), parts) == pytest.approx(0)
    assert codes.noise_of(1.2 * sum(parts), parts) == 0, "they help each other, and there is none"
    assert codes.noise_of(0.0, parts) == 0.1, "not more than the least has"


def test_mixed() -> None:
    shares, sizes = [0.5, 0.11, 0.29, 0.1], [1, 1, 3, 1]
    assert codes.mixed(shares, sizes, 1.0) == (1, 1, 1, 1)
    assert codes.mixed(shares, sizes, 0.9) == (2, 1, 1, 1)
    assert codes.mixed(shares, sizes, 0.45) == (2, 2, 1, 1)
    assert codes.mixed(shares, sizes, 0.0) == (2, 2, 2, 2)


def test_it_can_be_left_out_and_shows_before_the_first_step(folder: Path, tmp_path: Path, on_any_device) -> None:
    """The evaluation before step 1 sees the codes already."""
    first = {}
    for name, more in (("by data", {}), ("nearest", {"calibrate": False}), ("exact", {"base_dtype": "fp32"})):
        run = train(settings(folder, tmp_path / name, max_steps=1, **more), console=QUIET).folder
        first[name] = evals(read_events(run / "metrics.jsonl"))[0]["loss"]
        assert bool(digest_of(run)) == (name == "by data")
    assert len(set(first.values())) == 3
    prepared = prepare.prepare_run(settings(folder, tmp_path / "full", method="full", rank=16), QUIET)
    assert prepared.calibration is None, "nothing is frozen there"


def test_it_shows_how_far_it_is(folder: Path, tmp_path: Path, on_any_device, capsys) -> None:
    prepare.prepare_run(settings(folder, tmp_path / "run"), Console())
    said = capsys.readouterr().err
    assert "calibrating: 0/4 layers" in said
    assert "calibrated: fp8 weights rounded by" in said
