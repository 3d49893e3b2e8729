"""Joins documents with the columns that generation kept from before them: these are put in front of the document's new
tokens, so that a convolution treats both as one document. It convolves a few more rows, but needs no second input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from graftune.kernels import launch


class Columns(NamedTuple):
    """Indices that join documents [T, D] with `reach` columns before each, [S, reach, D]."""

    order: torch.Tensor  # [T + S * reach]: for each joined row, its row in the documents followed by the columns
    positions: torch.Tensor  # of the joined rows in their documents
    tokens: torch.Tensor  # [T]: the joined rows that are tokens
    last: torch.Tensor  # [S * reach]: as `order`, for the last rows of each joined document

    @staticmethod
    def of(lengths: Sequence[int], reach: int, device: torch.device) -> Columns:
        order, positions, tokens, last = list[int](), list[int](), list[int](), list[int]()
        start, total = 0, sum(lengths)
        for index, length in enumerate(lengths):
            columns = range(total + index * reach, total + (index + 1) * reach)
            rows = [*columns, *range(start, start + length)]
            tokens += range(len(order) + reach, len(order) + len(rows))
            positions += range(len(rows))
            order += rows
            last += rows[len(rows) - reach :]
            start += length
        packed = launch.uploaded([*order, *positions, *tokens, *last], device)
        return Columns(*packed.split([len(order), len(positions), len(tokens), len(last)]))

    def join(self, x: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        return torch.cat((x, before.flatten(0, 1))).index_select(0, self.order)

    def last_of(self, x: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """The last columns of the joined documents, [S, reach, D]."""
        return torch.cat((x, before.flatten(0, 1))).index_select(0, self.last).view_as(before)
