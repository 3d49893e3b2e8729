"""The gated delta rule in Triton, in chunks of 64 tokens that never span two documents (tiles.py, reference.py).

    solve       all chunks at once: the triangular systems
    factors     all chunks at once: what follows from their inverses without the state
    scan        chunk after chunk, in parallel over documents, heads and columns: the states, and what chunks write
    output      all chunks at once
    local       all chunks at once: the gradient of what a chunk writes, from its own outputs
    scan_back   from the last chunk to the first: the gradients of the states, and the rest of the above
    grad_values, grad_queries, grad_keys   all chunks at once: the gradients of v and beta; of q; of k; and in all of
                them a part of the decay's

Sums are fp32, the state in a scan too; the states that the scan stores, w, u, W and their gradients have the dtype of
the inputs. Nothing is added atomically, so results are identical to the bit in every run, and a document's results do
not depend on the other documents.

The forward saves G [V, T] and the norms [2, K, T] in fp32 and the inverse [T, V, 64]: 36 MB for 8,192 tokens with 16
key and 32 value heads of 128 in bf16. w, W and the states, 0.27 GB, are computed again in the backward.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from graftune.kernels import launch
from graftune.kernels.attention import Documents
from graftune.kernels.gated_delta import backward_kernels, forward_kernels, tiles
from graftune.kernels.gated_delta.reference import EPS
from graftune.kernels.gated_delta.tiles import CHUNK, ChunkTables, DeltaTile

STEP = DeltaTile(32, 4, 1)

Kept = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # w [T, V, D], W [T, V, E], states [N, V, D, E]


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, docs: Documents,
    scale: float, out: torch.Tensor, state: torch.Tensor | None, final_state: bool, tiled: bool,
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:  # fmt: skip
    tokens, heads, _ = v.shape
    table = tiles.tables(docs, tokens)
    total = torch.empty(heads, tokens, dtype=torch.float32, device=q.device)
    norms = torch.empty(2, k.shape[1], tokens, dtype=torch.float32, device=q.device)
    inverse = torch.empty(tokens, heads, CHUNK, dtype=q.dtype, device=q.device)
    small, key_heads = (total, norms, inverse), k.shape[1]
    options = _options(k, v, tiles.tile("solve", v), tiled)
    del options["E"], options["BE"]
    forward_kernels.solve[(len(table.bounds), key_heads)](
        q, k, decay, beta, table.bounds, *small, tokens, key_heads, heads, q.stride(0), k.stride(0), EPS,
        SOLVE="ieee" if q.dtype == torch.float32 else tiles.SOLVE_PRECISION,
        BLOCK=tiles.SOLVE_BLOCK, LEVELS=(CHUNK // tiles.SOLVE_BLOCK).bit_length() - 1, **options,
    )  # fmt: skip
    kept, final = _states(k, v, beta, table, small, state, final_state, tiled)
    size = tiles.tile("output", v)
    forward_kernels.output[(len(table.bounds), heads)](
        q, k, kept[1], table.bounds, total, norms, kept[2], out, scale, tokens, key_heads, heads, q.stride(0),
        k.stride(0), out.stride(0), **_options(k, v, size, tiled),
    )  # fmt: skip
    return small, final


def backward(
    grad_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor,
    docs: Documents, scale: float, saved: tuple[torch.Tensor, ...],
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor], grad_decay: torch.Tensor, grad_beta: torch.Tensor,
    tiled: bool,
) -> None:  # fmt: skip
    tokens, heads, _ = v.shape
    table = tiles.tables(docs, tokens)
    total, norms, inverse = saved
    (w, written, states), _ = _states(k, v, beta, table, (total, norms, inverse), None, False, tiled)
    grad_w, grad_states = torch.empty_like(written), torch.empty_like(states)
    size = tiles.tile("local", v)
    backward_kernels.local[(len(table.bounds), heads)](
        q, k, grad_out, table.bounds, total, norms, grad_w, scale, tokens, k.shape[1], heads, q.stride(0), k.stride(0),
        grad_out.stride(0), **_options(k, v, size, tiled),
    )  # fmt: skip
    size = tiles.tile("scan_back", v)
    backward_kernels.scan_back[_scan_grid(table, v, size)](
        q, k, w, grad_out, grad_w, *table, total, norms, grad_states, scale, tokens, k.shape[1], heads, q.stride(0),
        k.stride(0), grad_out.stride(0), **_options(k, v, size, tiled),
    )  # fmt: skip
    del w
    grad_q, grad_k, grad_v = grads
    pairs = torch.empty(tokens, heads, 2, CHUNK, dtype=q.dtype, device=q.device)
    size = tiles.tile("grad_values", v)
    backward_kernels.grad_values[(len(table.bounds), heads)](
        grad_out, v, beta, table.bounds, total, norms, inverse, written, grad_w, pairs, grad_v, grad_decay, grad_beta,
        scale, tokens, k.shape[1], heads, grad_out.stride(0), v.stride(0), grad_v.stride(0),
        **_options(k, v, size, tiled),
    )  # fmt: skip
    del grad_w
    grid = len(table.bounds), k.shape[1]
    size = tiles.tile("grad_queries", v)
    backward_kernels.grad_queries[grid](
        grad_out, q, k, table.bounds, total, norms, pairs, states, grad_q, grad_decay, scale, tokens, k.shape[1],
        heads, grad_out.stride(0), q.stride(0), k.stride(0), grad_q.stride(0), **_options(k, v, size, tiled),
    )  # fmt: skip
    size = tiles.tile("grad_keys", v)
    backward_kernels.grad_keys[grid](
        q, k, grad_v, table.bounds, total, norms, pairs, written, states, grad_states, grad_k, grad_decay, tokens,
        k.shape[1], heads, q.stride(0), k.stride(0), grad_v.stride(0), grad_k.stride(0), **_options(k, v, size, tiled),
    )  # fmt: skip


def step_(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor,
    scale: float, out: torch.Tensor, tiled: bool,
) -> None:  # fmt: skip
    (sequences, heads, width), key_heads = v.shape, k.shape[1]
    columns = min(STEP.columns, launch.power_of_two(width))
    forward_kernels.step[(sequences, heads, triton.cdiv(width, columns))](
        q, k, v, decay, beta, state, out, scale, EPS, key_heads, heads, q.stride(0), k.stride(0), v.stride(0),
        out.stride(0), D=k.shape[2], E=width, BD=launch.power_of_two(k.shape[2]), BE=columns,
        GROUP=heads // key_heads, TILED=tiled, num_warps=STEP.warps,
    )  # fmt: skip


def _states(
    k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor, table: ChunkTables, small: Kept, before: torch.Tensor | None,
    final_state: bool, tiled: bool,
) -> tuple[Kept, torch.Tensor | None]:  # fmt: skip
    """w, W and the states before the chunks, from G, the norms and the inverses; and the states after the documents, if
    wanted."""
    (tokens, key_heads, width), (_, heads, value_width) = k.shape, v.shape
    w, written = (torch.empty(tokens, heads, n, dtype=k.dtype, device=k.device) for n in (width, value_width))
    size = tiles.tile("factors", v)
    forward_kernels.factors[(len(table.bounds), heads)](
        k, v, beta, table.bounds, *small, w, written, tokens, key_heads, heads, k.stride(0), v.stride(0),
        **_options(k, v, size, tiled),
    )  # fmt: skip
    states = torch.empty(len(table.bounds), heads, width, value_width, dtype=k.dtype, device=k.device)
    shape = len(table.first) - 1, heads, width, value_width
    final = torch.empty(shape, dtype=torch.float32, device=k.device) if final_state else None
    size = tiles.tile("scan", v)
    forward_kernels.scan[_scan_grid(table, v, size)](
        k, w, written, *table, small[0], small[1], before, states, final, tokens, key_heads, heads, k.stride(0),
        BEFORE=before is not None, AFTER=final_state, **_options(k, v, size, tiled),
    )  # fmt: skip
    return (w, written, states), final


def _scan_grid(table: ChunkTables, v: torch.Tensor, size: DeltaTile) -> tuple[int, int, int]:
    return len(table.first) - 1, v.shape[1], triton.cdiv(v.shape[2], size.columns)


def _options(k: torch.Tensor, v: torch.Tensor, size: DeltaTile, tiled: bool) -> dict[str, Any]:
    """The compile-time constants and launch options that all kernels of the chunks share."""
    width = k.shape[2]
    return {
        "D": width, "E": v.shape[2], "BD": launch.power_of_two(width, 16), "BE": size.columns,
        "GROUP": v.shape[1] // k.shape[1], "TILED": tiled, "C": CHUNK,
        "PRECISION": "ieee" if k.dtype == torch.float32 else "tf32", "num_warps": size.warps, "num_stages": size.stages,
    }  # fmt: skip
