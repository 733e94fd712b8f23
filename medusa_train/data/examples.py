"""A conversation -> the tokens that are trained on, cut to length; knows nothing of files and batches."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from medusa_train.data.chat import ChatEncoder, Encoded
from medusa_train.data.conversation import Conversation

Outcome = Literal["whole", "cut", "too_long", "unsupervised"]


@dataclass(frozen=True, slots=True)
class Example:
    """What is kept of a conversation: `tokens` [T] int32 and `supervised` [T] bool; the last is always true.

    `key` is the `content_key` of the turns that are kept, so that two which differ only in what was cut off
    are known to be equal.
    """

    tokens: Tensor
    supervised: Tensor
    key: str
    id: str
    source: str

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def prompts(self) -> list[list[int]]:
        """Return the tokens before each answer, the earlier turns and the answer's header included."""
        before = torch.cat([self.supervised.new_ones(1), self.supervised[:-1]])
        starts = torch.nonzero(self.supervised & ~before).flatten().tolist()
        return [self.tokens[:start].tolist() for start in starts]


def fit(conversation: Conversation, encoder: ChatEncoder, limit: int) -> tuple[Example | None, Outcome]:
    """Encode a conversation in at most `limit` tokens, never cutting inside an answer.

    What follows the last supervised token is left out, as nothing is learnt from it. A conversation that is
    still too long keeps as many whole answers as fit.

    Returns:
        The example and "whole" or "cut"; or None and why: "too_long" (even the first answer ends beyond `limit`)
        or "unsupervised" (it has no answer, or nothing in it is to be learnt).

    Raises:
        DataError: the template cannot take the conversation.
    """
    ends = [i for i, message in enumerate(conversation.messages, start=1) if message.role == "assistant"]
    if not ends:
        return None, "unsupervised"
    encoded = encoder.encode(conversation).trimmed()
    if not encoded.ids:
        return None, "unsupervised"
    if len(encoded.ids) <= limit:
        return _example(encoded, conversation.first(ends[-1])), "whole"
    best, low, high = None, 0, len(ends)
    while low < high:  # how many answers fit: `low` do, `high` and more may not
        middle = (low + high) // 2
        part = conversation.first(ends[middle])
        encoded = encoder.encode(part).trimmed()
        if len(encoded.ids) <= limit:
            best, low = (encoded, part), middle + 1
        else:
            high = middle
    if best is None:
        return None, "too_long"
    return (_example(*best), "cut") if best[0].ids else (None, "unsupervised")


def hold_out(keys: Sequence[str], share: float, seed: int) -> list[bool]:
    """Choose which conversations are held out, by their contents alone.

    Each content gets a number drawn from `seed`; the smallest numbers are held out until `share` of all is
    reached. So the choice is the same in every order of the files, and two equal conversations are never
    parted (one in training would make the other's evaluation worthless).

    Args:
        keys: `Example.key` of each.
        share: 0 (none) to below 1. At least one is held out and at least one is left, if there are two contents.
        seed: of the choice.
    """
    sizes = Counter(keys)
    if share <= 0 or len(sizes) < 2:
        return [False] * len(keys)
    room = min(max(1, round(share * len(keys))), len(keys) - 1)
    chosen: set[str] = set()
    order = sorted(sizes, key=lambda key: hashlib.sha256(f"{seed}/{key}".encode()).digest())
    for key in order:
        if sizes[key] <= room:
            chosen.add(key)
            room -= sizes[key]
    if not chosen:  # every content stands there more often than `share` has room for: the rarest one has to do
        chosen.add(min(order, key=lambda key: sizes[key]))
    return [key in chosen for key in keys]


def _example(encoded: Encoded, kept: Conversation) -> Example:
    return Example(
        tokens=torch.tensor(encoded.ids, dtype=torch.int32),
        supervised=torch.tensor(encoded.supervised, dtype=torch.bool),
        key=kept.content_key,
        id=encoded.id,
        source=encoded.source,
    )
