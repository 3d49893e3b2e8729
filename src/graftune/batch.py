"""What travels from the data to the step: one example, one packed micro-batch, one step's figures."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Example:
    """A tokenised example. `supervised[i]` says whether token i is trained (predicted from those before it)."""

    tokens: list[int]
    supervised: list[bool]
    row: int = 0  # row of the source file it came from, counted from 1

    @property
    def response_tokens(self) -> int:
        """Targets this example contributes; its first token has nothing before it and cannot be one."""
        return sum(self.supervised[1:])


@dataclass
class PackedBatch:
    """Examples laid end to end, without padding between them and without attention across them.

    Shapes: T tokens, S documents (+1), R rows whose hidden state predicts a response token. On a captured step all
    three are capacities and the tails are padding (token 0 in a document of its own, row 0 with label -1); eagerly
    they are exact. `lengths` repeats cu_seqlens on the host for the attention path that loops over documents.
    """

    tokens: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64, from 0 in every document
    cu_seqlens: torch.Tensor  # [S+1] int32
    rows: torch.Tensor  # [R] int64, position in T of the state that predicts labels[r]
    labels: torch.Tensor  # [R] int64, -1 where the row is padding
    lengths: tuple[int, ...]  # document lengths; they add up to T
    response_tokens: int  # labels that are not -1

    def to(self, device: torch.device) -> PackedBatch:
        if self.tokens.device == device:
            return self
        moved = {
            k: getattr(self, k).to(device, non_blocking=True)
            for k in ("tokens", "positions", "cu_seqlens", "rows", "labels")
        }
        return PackedBatch(**moved, lengths=self.lengths, response_tokens=self.response_tokens)


@dataclass(frozen=True)
class StepStats:
    """What one optimizer step reports. `loss` and `perplexity` are per response token of the whole step."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    response_tokens: int
    skipped: bool
    tok_s: float
