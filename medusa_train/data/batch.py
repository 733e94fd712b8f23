"""Documents side by side and one after the other, as tensors; knows neither files nor the order of training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from medusa_train.data.targets import IGNORE_INDEX
from medusa_train.data.tokenize import Example


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one or more documents each, filled up at the right.

    `tokens`, `labels` (the token itself where it is to be learnt, else `IGNORE_INDEX`; unshifted), `positions` (from 0
    in each document; padding goes on counting) and `segments` (the document within the row, 0, 1, ...; -1: padding) are
    [B, T] int64. `records` says where each document was read, row by row.

    A row of several documents needs a mask that keeps them apart (`models.document_mask`).
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
    labels = torch.full(shape, IGNORE_INDEX, dtype=torch.long)
    positions = torch.zeros(shape, dtype=torch.long)
    segments = torch.full(shape, -1, dtype=torch.long)
    for number, row in enumerate(rows):
        start = 0
        for segment, example in enumerate(row):
            end = start + len(example)
            tokens[number, start:end] = example.tokens
            labels[number, start:end] = torch.where(example.supervised, example.tokens.long(), IGNORE_INDEX)
            positions[number, start:] = torch.arange(shape[1] - start)
            segments[number, start:end] = segment
            start = end
    return Batch(tokens, labels, positions, segments, [example.source for row in rows for example in row])


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Lay whole documents into rows of at most `capacity` tokens, first-fit-decreasing.

    The longest document goes first, each into the first row that has room for it; among equal lengths the order
    of `lengths` decides. At most 11/9 of the fewest possible rows (plus one) are used, and on chats of many lengths
    next to no room is left over.

        capacity 10, lengths 4 7 3 6   ->   rows [7 3] [6 4], that is [[1, 2], [3, 0]]

    Rows are found by a tree over the room that each has left, so n documents take n log n steps.

    Args:
        lengths: tokens of each document, 1 to `capacity`.
        capacity: tokens of a row.

    Returns:
        The rows, each a list of indices into `lengths`; every index stands in exactly one.

    Raises:
        ValueError: a document is empty or longer than a row.
    """
    if not lengths:
        return []
    if min(lengths) < 1 or max(lengths) > capacity:
        raise ValueError(f"documents must have 1 to {capacity} tokens, these have {min(lengths)} to {max(lengths)}")
    leaves = 1 << (len(lengths) - 1).bit_length()
    room = [capacity] * (2 * leaves)  # node n has children 2n and 2n + 1 and holds the larger of their rooms
    rows: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        node = 1
        while node < leaves:
            node = 2 * node if room[2 * node] >= lengths[index] else 2 * node + 1
        if node - leaves == len(rows):
            rows.append([])
        rows[node - leaves].append(index)
        room[node] -= lengths[index]
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return rows
