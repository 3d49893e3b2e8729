"""Resolves `auto`, and suggests other settings if a run does not fit.

Recomputing costs time (selective an eighth, full a third of the products), while dividing a step into smaller
micro-batches costs little as long as each fills the device. So the order is: no recompute with the largest micro-batch
that fits, down to `ENOUGH` tokens; then the same with more recomputing; then smaller micro-batches.

On a GPU a micro-batch has at most `MOST` tokens: products are at full speed there (an H200 reaches 97% of its rate at
4096), and more tokens only need more memory. On a CPU 1024 are enough. Several ranks divide a step, and a micro-batch
is small enough that each rank gets one.

A run that does not fit is refused before anything is loaded. The message names the nearest setting that fits: the same
micro-batch with more recomputing, then smaller ones, then the base in fewer bits, then the base in host memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from graftune.arithmetic import ceil_div
from graftune.errors import GraftuneError
from graftune.infer.cache import MOST_PLACES
from graftune.observe.memory import human_bytes
from graftune.plan.job import Job, Plan
from graftune.weights.placement import Placement

POLICIES = ("none", "selective", "full", "offload")
MOST = {"cuda": 8192, "cpu": 1024}  # tokens of a micro-batch
ENOUGH = {"cuda": 2048, "cpu": 256}  # tokens that fill the device
LEAST = 64
SECANTS = 8  # sizes that `largest` tries by the secant method before it bisects
FURTHEST = {"cuda": 1 << 17, "cpu": 1 << 14}  # the largest size that `largest` tries


def resolve_auto(job: Job) -> Plan:
    """The plan of the job's settings with `auto` resolved. Refuses a run that does not fit."""
    plan = best(job)
    if not plan.fits:
        raise refusal(job, plan)
    return plan


def best(job: Job) -> Plan:
    """The plan of the first choice that fits; if none fits, of the first. In reinforcement learning a whole round is
    sampled at once if any choice leaves memory for its cache, else a half of it, and so on."""
    for count in samples_at_once(job):
        job.at_once = count
        plan = _best_of_choices(job)
        if plan.fits:
            break
    return plan


def samples_at_once(job: Job) -> list[int]:
    """Numbers of samples to try, the best first."""
    asked, most = job.config.rl.samples_at_once, sum(one.samples for one in job.sampled)
    if asked:
        return [min(asked, most)]
    counts = [min(MOST_PLACES, most)]
    while counts[-1] > 1:
        counts.append(counts[-1] // 2)
    return counts


def _best_of_choices(job: Job) -> Plan:
    """The plan of the first choice that fits, else of the first. Frozen weights stay on the device if possible."""
    first: tuple[Plan, Placement] | None = None
    found = list(choices(job))
    for on_host, ranks in job.places:
        job.placement = job.placement.placed_at(on_host, ranks)
        for policy, capacity in found:
            plan = job.plan(policy, capacity)
            # First give up the memory that a placement uses to save a little time.
            while not plan.fits and (less := job.placement.with_less_memory) is not None:
                job.placement = less
                plan = job.plan(policy, capacity)
            if plan.fits:
                return plan
            first = first or (plan, job.placement)
            if (policy, capacity) == found[0] and not job.plan(*found[-1]).fits_device:
                break  # the last choice needs the least device memory
    assert first is not None
    plan, job.placement = first
    return plan


def choices(job: Job) -> Iterator[tuple[str, int]]:
    """(recompute, tokens of a micro-batch), the best first."""
    settings, kind = job.config.train, _kind(job)
    policies = policies_of(job) if settings.recompute == "auto" else (settings.recompute,)
    if settings.tokens_per_micro_batch:
        yield from ((policy, max(settings.tokens_per_micro_batch, job.longest)) for policy in policies)
        return
    sizes = halves(job, min(ceil_div(settings.step_tokens, max(1, job.ranks)), MOST[kind]))
    large = [size for size in sizes if size >= ENOUGH[kind]] or sizes[:1]
    yield from ((policy, size) for policy in policies for size in large)
    yield from ((policy, size) for size in sizes if size not in large for policy in policies)


def refusal(job: Job, plan: Plan) -> GraftuneError:
    kind = "the device's memory" if plan.device == "cuda" else "memory"
    needed, free = plan.needed, plan.free
    if plan.fits_device and plan.host_free is not None:
        kind, needed, free = "pinned host memory", plan.bytes.host, plan.host_free
    return GraftuneError(
        f"training needs {human_bytes(needed)} of {kind} and {human_bytes(free)} are free",
        where=job.base.name or str(job.base.path),
        fix=_fix(job, plan),
    )


def nearest(job: Job, plan: Plan) -> Plan | None:
    """The plan of the first weaker setting that fits, in order of the distance from the settings."""
    has, policies = plan.settings, policies_of(job)
    start = policies.index(has["recompute"])
    weaker = policies[start:]
    if plan.fits_device:  # host memory is short: policies that keep more on the device may fit
        weaker += policies[:start][::-1]
    sizes = [has["tokens_per_micro_batch"]] if job.resuming else halves(job, has["tokens_per_micro_batch"])
    for placement in _placements(job, has["base_dtype"]):
        if not any(job.plan(policy, sizes[-1], placement).fits for policy in weaker):
            continue
        for capacity, policy in itertools.product(sizes, weaker):
            found = job.plan(policy, capacity, placement)
            if found.fits:
                return found
    return None


def largest(job: Job, policy: str) -> int:
    """Tokens of the largest micro-batch that fits with a policy, in steps of 512 up to `furthest`, or a smaller one by
    halving; 0 if none fits.

    Memory grows linearly with tokens once a chunk of logits is full, so a line through the two sizes nearest to the
    free memory leads to the answer or close to it."""
    least, top = ceil_div(job.longest, 512), furthest(job) // 512
    below, beyond = least - 1, top + 1  # in steps: the largest known to fit, and the smallest known not to
    over: dict[int, int] = {}
    while beyond - below > 1:
        if not over:
            steps = max(least, top // 8)
        elif len(over) == 1:  # either end may be the answer
            steps = top if below in over else least
        elif len(over) < SECANTS:
            (a, over_a), (b, over_b) = sorted(over.items(), key=lambda known: abs(known[1]))[:2]
            steps = a - over_a * (b - a) // (over_b - over_a) if over_a != over_b else (below + beyond) // 2
            steps = min(max(steps, below + 1), beyond - 1)
        else:  # memory is not linear here: bisect
            steps = (below + beyond) // 2
        if below < steps < beyond:
            plan = job.plan(policy, steps * 512)
            over[steps] = plan.needed - plan.free
            below, beyond = (steps, beyond) if plan.fits else (below, steps)
    if below >= least:
        return below * 512
    sizes = halves(job, least * 512)[1:]
    if not sizes or not job.plan(policy, sizes[-1]).fits:
        return 0
    return next(size for size in sizes if job.plan(policy, size).fits)


def furthest(job: Job) -> int:
    """The largest micro-batch that `largest` tries."""
    return max(FURTHEST[_kind(job)], ceil_div(job.longest, 512) * 512)


def policies_of(job: Job) -> tuple[str, ...]:
    return POLICIES if _kind(job) == "cuda" else POLICIES[:3]


def halves(job: Job, top: int) -> list[int]:
    """Sizes from `top`, each half of the one before, down to the longest example or to LEAST."""
    least = max(job.longest, LEAST)
    sizes = [max(top, least)]
    while sizes[-1] > least:
        sizes.append(max(sizes[-1] // 2, least))
    return sizes


def _fix(job: Job, plan: Plan) -> str:
    found = nearest(job, plan)
    if found is None:
        larger = "a larger card" if plan.device == "cuda" and not plan.fits_device else "a machine with more memory"
        shorter = f", max_seq_len below {job.longest}" if job.longest > LEAST and not job.resuming else ""
        return f"no recompute policy and no micro-batch makes it fit: take a smaller model{shorter} or {larger}"
    names = ("base_dtype", "base_on", "recompute", "tokens_per_micro_batch")
    changed = [name for name in names if found.settings[name] != plan.settings[name]]
    weaker = ", ".join(f"{name} {found.settings[name]}" for name in changed)
    where = " of the device" if plan.device == "cuda" and plan.fits_device else ""  # host memory is short
    return f"{weaker} would need {human_bytes(found.needed)}{where}"


def _placements(job: Job, has: str) -> list[Placement]:
    """Placements to try: the base as it is, then in fewer bits; then the same in other places, host memory last."""
    places = [*job.places]
    if _kind(job) == "cuda" and job.config.base.base_on == "device" and job.config.train.method == "lora":
        places.append((True, job.placement.ranks))
    kinds = [job.placement if kind == has else job.place(kind) for kind in _fewer_bits(job, has)]
    return [kind.placed_at(*place) for place in places for kind in kinds]


def _fewer_bits(job: Job, has: str) -> list[str]:
    """Formats of the base to try: the present one, then fewer bits if adapters train on it. A GGUF's own blocks come
    first, because they are what is served later."""
    if job.resuming or job.config.train.method != "lora":
        return [has]
    kept = _kind(job) == "cpu" or (job.base.kind == "gguf" and job.can_place("keep"))
    narrower = ("keep", "nf4") if kept else ("nf4",)
    return [has, *(dtype for dtype in narrower if has not in (dtype, "nf4"))]


def _kind(job: Job) -> str:
    return "cuda" if job.runtime.device.type == "cuda" else "cpu"
