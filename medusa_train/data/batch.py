"""Documents side by side and one after the other, as tensors; knows neither files nor the order of training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from medusa_train.data.examples import Example
from medusa_train.data.targets import IGNORE


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one or more documents each, filled up at the right.

    `tokens`, `labels` (the token itself where it is to be learnt, else `IGNORE`; unshifted), `positions` (from 0 in
    each document; padding goes on counting) and `segments` (the document within the row, 0, 1, ...; -1: padding) are
    [B, T] int64. `records` says where each document was read, row by row.

    A row of several documents needs a mask that keeps them apart (`models.packing_mask`).
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    segments: Tensor
    records: list[str]

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch with its tensors on `device`."""
        return Batch(
            self.tokens.to(device),
            self.labels.to(device),
            self.positions.to(device),
            self.segments.to(device),
            self.records,
        )


def collate(rows: Sequence[Sequence[Example]], pad_id: int) -> Batch:
    """Lay each row's documents one after the other and fill up at the right to the longest row.

    tokens      a b c d e .        (a row of a document of three tokens and one of two, one place of padding)
    positions   0 1 2 0 1 2
    segments    0 0 0 1 1 -
    """
    shape = (len(rows), max(sum(len(example) for example in row) for row in rows))
    tokens = torch.full(shape, pad_id, dtype=torch.long)
    labels = torch.full(shape, IGNORE, dtype=torch.long)
    positions = torch.zeros(shape, dtype=torch.long)
    segments = torch.full(shape, -1, dtype=torch.long)
    for number, row in enumerate(rows):
        start = 0
        for segment, example in enumerate(row):
            end = start + len(example)
            tokens[number, start:end] = example.tokens
            labels[number, start:end] = torch.where(example.supervised, example.tokens.long(), IGNORE)
            positions[number, start:] = torch.arange(shape[1] - start)
            segments[number, start:end] = segment
            start = end
    return Batch(tokens, labels, positions, segments, [example.source for row in rows for example in row])
