"""Tokenized conversations and batches of them: collation, sample packing, and the shifted labels of
each head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

IGNORE_INDEX = -100


@dataclass(frozen=True, slots=True)
class Example:
    """A row of a tokenized conversation, truncated to the maximum length.

    Attributes:
        tokens: int32 [T].
        supervised: bool [T], the loss mask. The last token is always supervised.
        key: `content_key` of the chat up to the first answer that is trained. All rows of a
            conversation have the same key.
        source: where the record was read, as `file:line`.
        row: index among the rows of its conversation.
        dataset: index of its data set, in the order of the configuration.
        prompt: `content_key` of the chat up to its first user turn. Chats with the same prompt are
            on the same side of the split.
    """

    tokens: Tensor
    supervised: Tensor
    key: str
    source: str
    row: int = 0
    dataset: int = 0
    prompt: str = ""

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def prompts(self) -> list[list[int]]:
        """Return the prompt of each answer: all tokens before it, its header included."""
        before = torch.cat([self.supervised.new_ones(1), self.supervised[:-1]])  # [T]
        starts = torch.nonzero(self.supervised & ~before).flatten().tolist()
        return [self.tokens[:start].tolist() for start in starts]


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack whole documents into rows of at most `capacity` tokens (first-fit decreasing bin
    packing).

    Documents are placed from the longest to the shortest (ties in the order of `lengths`), each
    into the first row with enough space. This takes at most 11/9 of the optimal number of rows,
    plus one.

        capacity 10, lengths 4 7 3 6   ->   rows [7 3] [6 4], that is [[1, 2], [3, 0]]

    60,000 documents take a second.
    """
    if not lengths:
        return []
    if min(lengths) < 1 or max(lengths) > capacity:
        raise ValueError(
            f"documents must have 1 to {capacity} tokens, got {min(lengths)} to {max(lengths)}"
        )
    free = np.full(len(lengths), capacity)  # free tokens of each row
    rows: list[list[int]] = []
    longest_first = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    for index in longest_first:
        row = int(np.argmax(free[: len(rows) + 1] >= lengths[index]))
        if row == len(rows):
            rows.append([])
        rows[row].append(index)
        free[row] -= lengths[index]
    return rows


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one or more documents (conversations), right-padded.

    Attention must stay within the documents of a row (`models.document_attention`).

    Attributes:
        tokens: int64 [B, T].
        labels: int64 [B, T], the token itself if it is supervised, else `IGNORE_INDEX`. Not
            shifted.
        positions: int64 [B, T], from 0 in each document. They continue over padding.
        segments: int64 [B, T], index of the document within its row; -1 for padding.
        records: `file:line` of each document, row by row.
        documents: the documents of each row, on the CPU, for the cache of hidden states. None if
            the rows were not collated from examples.
        draw: seed for the draft's random choices in this batch (the anchors of DFlash). It depends
            on the run's seed, the epoch and the index of the batch. None in validation, which draws
            nothing.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    segments: Tensor
    records: list[str]
    documents: Sequence[Sequence[Example]] | None = None
    draw: int | None = None

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch with its tensors on `device`, in one transfer."""
        moved = torch.stack([self.tokens, self.labels, self.positions, self.segments]).to(device)
        tokens, labels, positions, segments = moved.unbind()
        return replace(self, tokens=tokens, labels=labels, positions=positions, segments=segments)


def collate(rows: Sequence[Sequence[Example]]) -> Batch:
    """Concatenate the documents of each row, and pad all rows to the longest.

    tokens      a b c d e .        (two documents of three and two tokens, and one padding position)
    labels      - - c - e -        (c and e are supervised)
    positions   0 1 2 0 1 2
    segments    0 0 0 1 1 -
    """
    longest = max(sum(map(len, row)) for row in rows)
    shape = (len(rows), longest)  # [B, T]
    # Padding is masked, so any valid token id will do.
    tokens = torch.zeros(shape, dtype=torch.long)
    labels = torch.full(shape, IGNORE_INDEX, dtype=torch.long)
    positions = torch.zeros(shape, dtype=torch.long)
    segments = torch.full(shape, -1, dtype=torch.long)
    records = []
    for number, row in enumerate(rows):
        start = 0
        for segment, example in enumerate(row):
            end = start + len(example)
            example_labels = torch.where(example.supervised, example.tokens.long(), IGNORE_INDEX)
            tokens[number, start:end] = example.tokens
            labels[number, start:end] = example_labels
            segments[number, start:end] = segment
            # The next document overwrites its part. The last document's positions continue over
            # padding.
            positions[number, start:] = torch.arange(longest - start)
            records.append(example.source)
            start = end
    return Batch(tokens, labels, positions, segments, records, rows)


def shift_labels(labels: Tensor, k: int, segments: Tensor) -> Tensor:
    """Align labels with the positions that predict them: `out[b, t] = labels[b, t + k + 1]`.

    k = 0 is next-token prediction by the language model; Medusa head k >= 1 predicts the token k +
    1 positions ahead (Medusa, Medusa Heads). Only the label decides whether a position counts:
    position t itself may be in a prompt. Targets never cross a document boundary, and the last k +
    1 positions have none.

        labels    a b c | d e f        (two documents, segments 0 0 0 1 1 1)
        shift 0   b c - | e f -
        shift 1   c - - | f - -

    Args:
        labels: [B, T] token ids, `IGNORE_INDEX` where unsupervised.
        k: offset beyond the next token, 0 or more.
        segments: [B, T] document of each position, contiguous within a row (padding: -1).

    Returns:
        [B, T], `IGNORE_INDEX` where there is no target.
    """
    offset = k + 1
    out = torch.full_like(labels, IGNORE_INDEX)  # [B, T]
    if offset < labels.shape[1]:
        same_document = segments[:, offset:] == segments[:, :-offset]  # [B, T - offset]
        out[:, :-offset] = torch.where(same_document, labels[:, offset:], IGNORE_INDEX)
    return out
