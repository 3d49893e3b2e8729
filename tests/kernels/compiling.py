"""Every kernel that a step on a GPU launches, compiled for that GPU where there is none: `python -m
tests.kernels.compiling [--distinct | --one-each] [SETTING ...]`.

Triton's interpreter runs what its compiler refuses. Steps are rehearsed as the memory plan does it, on tensors without
memory, and what they would launch is compiled for Hopper, once a signature. With `--distinct` each kernel is compiled
once, as the launch with the most flags set, and of those the one with the most arguments that are multiples of 16,
because its loads are pipelined and take the most shared memory. With `--one-each`, of these one of each folder of
kernels: what they share is compiled with it. Needs no GPU; not under TRITON_INTERPRET.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, NamedTuple

import torch
from triton import compile as compiled
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from graftune.data.pack import Capacities
from graftune.kernels import attention, draw, gated_delta, paged_attention, rehearsal, rope
from graftune.kernels.attention import Documents
from graftune.plan import Setup, rehearse
from graftune.settings.sections import LoraConfig
from tests.plan.test_plan import biased, gpu, spec
from tests.support import quantised, specs

HOPPER = GPUTarget("cuda", 90, 32)
KINDS = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float8_e4m3fn: "fp8e4nv",
    torch.uint8: "u8", torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64", torch.bool: "i1",
    torch.float64: "fp64",
}  # fmt: skip
SHARED = 227 << 10  # bytes of shared memory that a program may have on a Hopper
SETTINGS = {
    "bf16": lambda: gpu(),
    "short": lambda: gpu(backend="triton"),
    "dropout, norms, clipped by layer": lambda: gpu(
        lora=LoraConfig(rank=4, dropout=0.1, train_norms=True), clip_mode="layer"
    ),
    "qk norm, bias": lambda: gpu(spec=biased(width=256, ffn=1024, vocab=4000)),
    "options of attention": lambda: gpu(
        spec=specs.with_options(spec(width=256, ffn=1024, vocab=4000)), lora=LoraConfig(rank=4, train_norms=True)
    ),
    "convolutions": lambda: gpu(
        spec=spec(width=256, ffn=1024, vocab=4000, family="lfm2", convolutions=(0, 1))
    ),
    "every weight": lambda: gpu(method="full"),
    "nf4": lambda: gpu(kind="nf4", recompute="full"),
    "blocks, floats": lambda: blocks("Q4_1", "IQ4_XS", "F16"),
    "blocks, more": lambda: blocks("IQ4_NL", "Q6_K", "Q4_K"),
    "fp8": lambda: gpu(kind="fp8"),
    "fp8, 8B": lambda: gpu(
        kind="fp8", lora=LoraConfig(rank=16), shape=Capacities(8192, 4, 2048, 8192),
        spec=spec(layers=2, width=4096, ffn=14336, heads=32, kv_heads=8, head_width=128, vocab=128256),
    ),  # many tokens are another choice of tiles, and of kernels
    "8B, rank 32": lambda: gpu(
        lora=LoraConfig(rank=32), shape=Capacities(8192, 4, 2048, 8192),
        spec=spec(layers=2, width=4096, ffn=14336, heads=32, kv_heads=8, head_width=128, vocab=128256),
    ),
}  # fmt: skip


def blocks(kind: str, table: str, mixed: str) -> Setup:
    """A GGUF's own, of three kinds."""
    made = gpu(kind="keep", recompute="full")
    shape = spec(layers=2, width=256, ffn=1024, vocab=4000)
    return dataclasses.replace(made, base=quantised.gguf_base(kind, shape, table, mixed))


def delta_rule(dtype: torch.dtype, launched: rehearsal.Launched) -> None:
    """Launches the delta rule's kernels for the heads of Qwen3.5."""

    def meta(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=rehearsal.META)

    with rehearsal.rehearsing(rehearsal.Rehearsal(rehearsal.Device("cuda"), launched=launched)):
        docs = Documents(meta(5, dtype=torch.int32), None, 2048)
        (q, k, v), decay = meta(4096, 64, 128).split((16, 16, 32), 1), meta(4096, 32, dtype=torch.float32)
        saved, _ = gated_delta.forward(q, k, v, decay, decay, docs, 1.0, v)
        gated_delta.backward(v, q, k, v, decay, decay, docs, 1.0, saved, (q, k, v), decay, decay)
        gated_delta.step_(q, k, v, decay, decay, meta(4096, 32, 128, 128, dtype=torch.float32), 1.0, v)


def sampling(launched: rehearsal.Launched) -> None:
    """Draws of 64 sequences over a vocabulary of 151,936 tokens, and attention over pages."""

    def meta(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=rehearsal.META)

    with rehearsal.rehearsing(rehearsal.Rehearsal(rehearsal.Device("cuda"), launched=launched)):
        for mode in (draw.GREEDY, draw.WHOLE, draw.LIMITED):
            settings = draw.DrawSettings.of(1.0, 0, 1.0, 0, rehearsal.META)
            draw.draw(meta(64, 151936, dtype=torch.float32), mode, settings, meta(64), meta(64))
        for (heads, key_heads, width), window, cap, dtype in (
            ((32, 8, 128), 0, 0.0, torch.bfloat16), ((9, 3, 64), 0, 0.0, torch.bfloat16),
            ((8, 4, 256), 512, 50.0, torch.bfloat16), ((8, 1, 512), 0, 0.0, torch.bfloat16),
            ((32, 8, 128), 0, 0.0, torch.float32),
        ):  # fmt: skip
            pool = meta(4096 * 16, key_heads, width, dtype=dtype)
            starts, table = meta(65, dtype=torch.int32), meta(64, 256, dtype=torch.int32)
            for lengths, tokens in ((None, 64), ((32,) * 64, 2048)):
                paged = paged_attention.PagedKeys(table, starts, meta(64), meta(tokens), lengths, 4096)
                q = meta(tokens, heads, width, dtype=dtype)
                sinks = meta(heads, dtype=torch.float32) if cap else None
                paged_attention.store_(q[:, :key_heads], q[:, :key_heads], pool, pool, meta(tokens))
                paged_attention.forward(q, pool, pool, paged, 1.0, window, q, cap, sinks)


def wide_attention(launched: rehearsal.Launched) -> None:
    """Launches attention over the heads of Gemma 4's layers without a window, whose values are their keys."""

    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=rehearsal.META)

    tokens, heads = 8192, (16, 1, 512)
    with rehearsal.rehearsing(rehearsal.Rehearsal(rehearsal.Device("cuda"), launched=launched)):
        docs, product = Documents(meta(5, dtype=torch.int32), None, 2048), meta(tokens, 17 * 512)
        (cos, sin), norm = meta(2, tokens, 256, dtype=torch.float32), meta(512, dtype=torch.float32)
        norms = {"q_norm": norm, "k_norm": norm, "v_norm": norm, "eps": 1e-6, "v_from_k": True}
        q, k, v = rope.parts(rope.finish_(product, cos, sin, heads, **norms).flatten(1), heads)
        out, stats = attention.forward(q, k, v, docs, 1.0, 0, "triton")
        grads = attention.grad_buffers(q, k, "triton") or (meta(*q.shape), meta(*k.shape), meta(*v.shape))
        attention.backward(out, q, k, v, out, stats, docs, 1.0, 0, grads, "triton")
        rope.finish_backward(grads, meta(*product.shape), cos, sin, heads, product, **norms)


# Kernels that are launched without a step around them.
ALONE = {
    "sampling": sampling,
    "heads of 512": wide_attention,
    "delta rule": lambda launched: delta_rule(torch.bfloat16, launched),
    "delta rule, fp32": lambda launched: delta_rule(torch.float32, launched),
}


class Launch(NamedTuple):
    """A kernel, and what its compiler is told of the arguments."""

    fn: Any
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    options: dict[str, Any]
    attributes: dict[tuple[int, ...], Any]

    @property
    def weight(self) -> tuple[int, int]:
        """How much of the kernel it compiles: flags that are set, and aligned arguments."""
        return sum(value is True for value in self.constants.values()), len(self.attributes)


class Launches:
    """What was launched, each once; `distinct` as in the header."""

    def __init__(self, distinct: bool) -> None:
        self.distinct = distinct
        self.seen: dict[str, Launch] = {}

    def run(self, fn: Any, grid: Any, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        given = dict(given)
        options = {name: given.pop(name) for name in ("num_warps", "num_stages") if name in given}
        values = dict(zip(fn.arg_names, args, strict=False)) | given
        signature: dict[str, Any] = {}
        constants: dict[tuple[int, ...], Any] = {}
        attributes: dict[tuple[int, ...], Any] = {}

        def typed(value: Any, path: tuple[int, ...], constant: bool, plain: bool) -> Any:
            """A parameter's type; what the compiler may know of its value goes to the tables above."""
            if constant or value is None or (isinstance(value, int) and value == 1 and not plain):
                constants[path] = value
                return "constexpr"
            if isinstance(value, tuple):
                return tuple(typed(each, (*path, i), False, plain) for i, each in enumerate(value))
            if isinstance(value, float):
                return "fp32"
            tensor = isinstance(value, torch.Tensor)
            at = value.storage_offset() * value.element_size() if tensor else value
            if at % 16 == 0 and not (plain and not tensor):
                attributes[path] = [["tt.divisibility", 16]]
            return "*" + KINDS[value.dtype] if tensor else "i32" if abs(value) < 2**31 else "i64"

        for index, name in enumerate(fn.arg_names):
            parameter = fn.params[index]
            signature[name] = typed(values[name], (index,), parameter.is_constexpr, parameter.do_not_specialize)
        made = Launch(fn, signature, constants, options, attributes)
        details = "" if self.distinct else (signature, constants, options, attributes)
        key = f"{fn.__module__}.{fn.__name__} {details}"
        if key not in self.seen or made.weight > self.seen[key].weight:
            self.seen[key] = made


def fault(launch: Launch) -> str:
    """Why it does not compile; nothing if it does."""
    source = ASTSource(launch.fn, launch.signature, launch.constants, launch.attributes)
    try:
        made = compiled(source, target=HOPPER, options=launch.options)
        if made.metadata.shared > SHARED:
            raise MemoryError(f"{made.metadata.shared} bytes of shared memory, and there are {SHARED}")
    except Exception as error:  # whatever the compiler raises is what this is about
        return f"{launch.fn.__module__}.{launch.fn.__name__}: {str(error)[-600:]}"
    return ""


def main(names: list[str]) -> int:
    flags = {"--distinct", "--one-each"}.intersection(names)
    launches = Launches(distinct=bool(flags))
    for name in [name for name in names if name not in flags] or [*SETTINGS, *ALONE]:
        if name in ALONE:
            ALONE[name](launches.run)
        else:
            rehearse(SETTINGS[name](), launched=launches.run)
    tried = [launch for _, launch in sorted(launches.seen.items())]
    if "--one-each" in flags:
        tried = list({launch.fn.__module__.split(".")[2]: launch for launch in tried}.values())
    failed = list(filter(None, map(fault, tried)))
    print(*failed, f"{len(tried)} compiled, {len(failed)} failed", sep="\n")
    return int(bool(failed) or not tried)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
