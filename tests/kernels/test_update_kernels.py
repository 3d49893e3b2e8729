"""The update (norm, clip, AdamW, copy, zero) by its kernels against the references, and both against torch's own."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from graftune.kernels import adamw, blocks, grad_norm
from graftune.kernels.blocks import ArenaSpan, BlockTable
from graftune.kernels.grad_norm import reference as grad_norm_reference

NAN = float("nan")
BLOCK = 64  # small: the interpreter is slow, and several blocks make a few hundred elements
HYPER = {"lr": 3e-3, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.1, "divisor": 7.0, "clip": 0.5}
COPIES = [torch.bfloat16, torch.float16, torch.float32]

# segments (slices of the arena), elements, and from where on nothing decays
LAYOUTS = {
    "one element": ([[slice(0, 1)]], 1, 1),
    "one whole block": ([[slice(0, 64)]], 64, 64),
    "odd": ([[slice(0, 333)]], 333, 333),
    "decay ends inside a block": ([[slice(0, 400)]], 400, 201),
    "nothing decays": ([[slice(0, 130)]], 130, 0),
    "layers": ([[slice(0, 200)], [slice(200, 411)], [slice(411, 417)]], 417, 417),
    "layers in several slices": (
        [[slice(0, 150), slice(301, 309)], [slice(150, 300), slice(309, 311)], [slice(300, 301), slice(311, 450)]],
        450,
        305,
    ),
}


def table_of(layout: str, device: str, block: int | None = BLOCK) -> BlockTable:
    segments, _, decayed = LAYOUTS[layout]
    return BlockTable.of(blocks.arena_spans(segments, decayed), block=block, device=device)


class Run:
    """All that an update touches, with fresh weights, and NaN wherever something is to be written."""

    def __init__(self, table: BlockTable, size: int, device: str, copy: torch.dtype = torch.float32, scaled=False):
        def zeros(n: int) -> torch.Tensor:
            return torch.zeros(n, device=device)

        self.table, self.device = table, device
        self.weights = torch.randn(size).to(device)
        self.grads, self.m, self.v = zeros(size), zeros(size), zeros(size)
        self.compute = self.weights if copy == torch.float32 else self.weights.to(copy)
        self.row = zeros(7)
        self.set()
        self.loss_sum = torch.zeros((), device=device)
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        self.ok = torch.zeros((), dtype=torch.bool, device=device)
        self.scaler = torch.tensor([1024.0, 5.0], device=device) if scaled else None
        self.poison()

    def set(self, **values: float) -> None:
        self.row.copy_(torch.tensor([{**HYPER, **values}[name] for name in adamw.Hyper._fields]))

    def poison(self) -> None:
        self.report = torch.full((3,), NAN, device=self.device)
        self.factors = torch.full((self.table.segments,), NAN, device=self.device)
        self.partials = torch.full((len(self.table),), NAN, device=self.device)

    def clip(self, loss: float = 21.0) -> None:
        self.poison()
        self.loss_sum.fill_(loss)
        grad_norm.clip(
            self.grads, self.table, self.row, self.loss_sum, self.count, self.report, self.factors, self.ok,
            self.scaler, self.partials,
        )  # fmt: skip

    def update(self, grads: torch.Tensor, loss: float = 21.0) -> None:
        self.grads.copy_(grads)
        self.clip(loss)
        adamw.step(
            self.weights, self.grads, self.m, self.v, self.compute, self.table, self.row, self.count, self.ok,
            self.factors,
        )  # fmt: skip

    def state(self) -> dict[str, torch.Tensor]:
        names = ["weights", "grads", "m", "v", "compute", "loss_sum", "count", "ok", "report", "factors", "scaler"]
        kept = {name: getattr(self, name) for name in names}
        return {name: x.clone().cpu() for name, x in kept.items() if x is not None}


def same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name in want:
        tolerance = {torch.bfloat16: 8e-3, torch.float16: 1e-3}.get(want[name].dtype, 2e-6)
        torch.testing.assert_close(
            got[name], want[name], rtol=tolerance, atol=1e-7, equal_nan=True, msg=lambda m, name=name: f"{name}: {m}"
        )


def copied(run: Run) -> bool:
    """Whether the copy is the weights rounded: to the bit, but for Triton's interpreter, which cuts bf16 off."""
    want = run.weights.to(run.compute.dtype)
    if run.device == "cpu" and want.dtype == torch.bfloat16:
        return bool(((run.compute.view(torch.int16).int() - want.view(torch.int16).int()).abs() <= 1).all())
    return torch.equal(run.compute, want)


def pair(layout: str, device: str, **settings) -> tuple[Run, Run]:
    """The same run twice: one for the kernels, one for the reference (on the CPU)."""
    size = LAYOUTS[layout][1]
    ours, plain = (
        Run(table_of(layout, device), size, device, **settings),
        Run(table_of(layout, "cpu"), size, "cpu", **settings),
    )
    for x, y in ((ours.weights, plain.weights), (ours.compute, plain.compute)):
        x.copy_(y)
    return ours, plain


def both(ours: Run, plain: Run, monkeypatch: pytest.MonkeyPatch, grads: torch.Tensor, loss: float = 21.0) -> None:
    from graftune.kernels import launch

    ours.update(grads.to(ours.device), loss)
    with monkeypatch.context() as patch:
        patch.setattr(launch, "fused", lambda x: False)
        plain.update(grads, loss)
    same(ours.state(), plain.state())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_table_covers_every_element_once_and_crosses_nothing(layout):
    segments, size, decayed = LAYOUTS[layout]
    table = table_of(layout, "cpu")
    seen = torch.zeros(size, dtype=torch.int64)
    for start, stop, segment, decay in zip(table.starts, table.stops, table.segment, table.decay, strict=True):
        assert 0 < stop - start <= BLOCK and start // BLOCK == (stop - 1) // BLOCK
        assert any(part.start <= start and stop <= part.stop for part in segments[segment])
        assert (stop <= decayed) if decay else (start >= decayed)
        seen[start:stop] += 1
    assert (seen == 1).all()
    assert len(table.first) == table.segments + 1 == len(segments) + 1
    for segment in range(table.segments):
        assert (table.segment[table.first[segment] : table.first[segment + 1]] == segment).all()
    assert table.longest == table.first.diff().max()
    kinds = [x.dtype for x in (table.starts, table.stops, table.segment, table.decay, table.first)]
    assert kinds == [torch.int64, torch.int64, torch.int32, torch.float32, torch.int32]


def test_blocks_grow_with_the_arena():
    for size in (1, 1000, 10**6, 67 * 10**6, 430 * 10**6, 8 * 10**9):
        block = blocks.block_size(size)
        assert block % 1024 == 0 and size / block <= 100_000
    assert len(BlockTable.of([ArenaSpan(0, 430_000_000, 0, True)])) <= 100_000
    with pytest.raises(AssertionError, match="overlap"):
        BlockTable.of([ArenaSpan(0, 10, 0, True), ArenaSpan(9, 12, 1, True)])


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("layout", "copy"), [*((name, COPIES[0]) for name in LAYOUTS), ("odd", COPIES[1]), ("layers", COPIES[2])]
)
def test_updates_are_the_reference_s(layout, copy, device, kernels_on, monkeypatch):
    torch.manual_seed(1)
    ours, plain = pair(layout, device, copy=copy)
    for step in range(3):
        ours.set(clip=[0.5, 0.0, 100.0][step])
        plain.set(clip=[0.5, 0.0, 100.0][step])
        both(ours, plain, monkeypatch, torch.randn(len(plain.weights)) * 10)
        assert not ours.grads.any() and ours.loss_sum == 0 and ours.count == step + 1
    assert copied(ours)


@pytest.mark.parametrize(("block", "copy"), [(None, COPIES[0]), (4096, COPIES[1]), (8192, COPIES[1])])
def test_a_block_of_a_tile_and_of_several(block, copy, device, kernels_on, monkeypatch):
    """None: the size that an arena of these elements really gets, 1024."""
    size = 2 * (block or 2500) + 77
    edges = (0, size // 2, size - 9, size)
    spans = [ArenaSpan(a, b, min(i, 1), i < 2) for i, (a, b) in enumerate(itertools.pairwise(edges))]
    ours, plain = (Run(BlockTable.of(spans, block=block, device=at), size, at, copy) for at in (device, "cpu"))
    ours.weights.copy_(plain.weights)
    ours.compute.copy_(plain.compute)
    assert ours.table.block == (block or 1024)
    both(ours, plain, monkeypatch, torch.randn(size))
    both(ours, plain, monkeypatch, torch.zeros(size))
    assert ours.ok and ours.report[1] == 0


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("layout", "bad", "scaled"),
    [
        ("layers in several slices", "inf", True),
        ("layers in several slices", "nan", False),
        ("layers in several slices", "nan loss", True),
        ("odd", "-inf", False),
        ("odd", "nan", True),
        ("odd", "nan loss", False),
        ("odd", "inf loss", True),
    ],
)
def test_a_skip_changes_nothing_but_the_gradient(layout, bad, scaled, device, kernels_on, monkeypatch):
    ours, plain = pair(layout, device, copy=torch.bfloat16, scaled=scaled)
    grads = torch.randn(len(plain.weights))
    both(ours, plain, monkeypatch, grads)
    before = ours.state()
    broken, loss = grads.clone(), 21.0
    if bad.endswith("loss"):
        loss = float(bad.split()[0])
    else:
        broken[int(torch.randint(len(broken), ()))] = float(bad)
    both(ours, plain, monkeypatch, broken, loss)
    after = ours.state()
    assert after["report"][2] == 1 and not after["ok"]
    for name in ("weights", "m", "v", "compute", "count"):
        assert torch.equal(after[name], before[name]), name
    assert not after["grads"].any() and after["loss_sum"] == 0
    if scaled:
        assert after["scaler"].tolist() == [512.0, 0.0]
    both(ours, plain, monkeypatch, grads)  # and it goes on
    assert ours.count == 2 and ours.report[2] == 0


def test_a_skip_before_the_first_update(device, kernels_on, monkeypatch):
    """The count is still 0, and so is the bias correction."""
    ours, plain = pair("odd", device, copy=torch.bfloat16)
    both(ours, plain, monkeypatch, torch.full((333,), NAN))
    assert ours.count == 0 and torch.isfinite(ours.weights).all() and not ours.m.any()
    both(ours, plain, monkeypatch, torch.randn(333))
    assert ours.count == 1


@pytest.mark.parametrize("layout", ["odd", "layers in several slices"])
def test_the_loss_scale_divides_out(layout, device, kernels_on, monkeypatch):
    grads, state = torch.randn(LAYOUTS[layout][1]), torch.random.get_rng_state()
    runs = []
    for scaled in (False, True):
        torch.random.set_rng_state(state)
        ours, plain = pair(layout, device, copy=torch.float16, scaled=scaled)
        both(ours, plain, monkeypatch, grads * (1024 if scaled else 1))
        runs.append(ours.state())
    plain_run, scaled_run = runs
    assert scaled_run.pop("scaler").tolist() == [1024.0, 6.0]
    assert torch.equal(scaled_run.pop("factors") * 1024, plain_run.pop("factors"))
    same(scaled_run, plain_run)


@pytest.mark.parametrize("on", [True, False], ids=["kernel", "reference"])
def test_the_loss_scale_over_many_steps(on, device, monkeypatch):
    """Scale and good updates after some hundred steps, four of them skipped; fewer through the interpreter."""
    from graftune.kernels import launch

    monkeypatch.setattr(launch, "fused", lambda x: on)
    steps, interval = (60, 5) if on and device == "cpu" else (420, 40)
    if on:
        from graftune.kernels.grad_norm import kernel

        monkeypatch.setattr(kernel, "INTERVAL", interval)
    monkeypatch.setattr(grad_norm_reference, "INTERVAL", interval)
    run = Run(BlockTable.of([ArenaSpan(0, 5, 0, True)], block=BLOCK, device=device), 5, device, scaled=True)
    run.scaler.copy_(torch.tensor([4.0, 0.0]))
    scale, clean, skips = 4.0, 0, {3, 4, 5, steps - 3}
    for step in range(steps):
        run.grads.fill_(float("inf") if step in skips else 1.0)
        run.clip()
        if step in skips:
            scale, clean = max(1.0, scale / 2), 0
        else:
            clean += 1
            if clean == interval:
                scale, clean = min(65536.0, scale * 2), 0
        if step % 17 == 0 or step in skips or not clean:
            assert run.scaler.tolist() == [scale, clean], step
    assert run.scaler.tolist() == [scale, clean]
    assert run.count == steps - len(skips) and scale > 100


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("copy", "on"), [*((copy, True) for copy in COPIES), (COPIES[0], False)], ids=lambda value: str(value)
)
def test_ten_steps_of_torch_s_adamw(copy, on, device, monkeypatch):
    from graftune.kernels import launch

    monkeypatch.setattr(launch, "fused", lambda x: on)
    run = Run(table_of("decay ends inside a block", device), 400, device, copy)
    run.weights.mul_(0.25)  # at 4 torch's fp32 is itself 1e-6 away from its fp64
    decayed, rest = (torch.nn.Parameter(x.clone()) for x in run.weights.split((201, 199)))
    groups = [{"params": [decayed], "weight_decay": 0.1}, {"params": [rest], "weight_decay": 0.0}]
    theirs = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.999), eps=1e-8)
    run.set(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, clip=1.0)
    for step in range(10):
        grads = torch.randn(400, device=device) * 3
        decayed.grad, rest.grad = (x.clone() for x in (grads / HYPER["divisor"]).split((201, 199)))
        norm = torch.nn.utils.clip_grad_norm_([decayed, rest], 1.0)
        theirs.step()
        run.update(grads, loss=14.0)
        assert (run.weights - torch.cat((decayed, rest)).detach()).abs().max() < 1e-6
        assert math.isclose(run.report[1].item(), norm.item(), rel_tol=1e-5)
        assert run.report[0] == 2 and run.count == step + 1
    assert copied(run) if on else torch.equal(run.compute, run.weights.to(copy))


def test_late_bias_corrections(device, kernels_on, monkeypatch):
    """1 - beta^t near its ends: the kernel's own power against the reference's."""
    ours, plain = pair("odd", device)
    for count in (0, 1, 9, 999, 100_000, 2_000_000):
        for run in (ours, plain):
            run.set(beta1=0.9, beta2=0.999)
            run.count.fill_(count)
            run.m.zero_()
            run.v.fill_(1e-4)
        # The reference's fp32 power has an error of its own where 1 - beta^t is small: hence weights, not moments.
        both(ours, plain, monkeypatch, torch.randn(333))


def test_the_norm_is_the_same_to_the_bit_and_holds_large_gradients(device, kernels_on):
    run = Run(table_of("layers in several slices", device), 450, device)
    grads = torch.randn(450, device=device)
    found = []
    for _ in range(3):
        run.grads.copy_(grads)
        run.clip()
        found.append((run.report.clone(), run.factors.clone()))
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
    run.grads.copy_(grads * 1e15)
    run.clip()
    assert run.ok and math.isclose(run.report[1].item(), grads.norm().item() / 7 * 1e15, rel_tol=1e-5)
