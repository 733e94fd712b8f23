"""Training examples: rows of tokenized chats, truncated to whole answers, and the validation split."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from medusa_train.data.conversation import Conversation
from medusa_train.data.tokenize import ChatEncoder

Outcome = Literal["complete", "truncated", "too_long", "unsupervised"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)


@dataclass(frozen=True, slots=True)
class Example:
    """A row of a tokenized conversation, truncated to the maximum length.

    Attributes:
        tokens: int32 [T].
        supervised: bool [T], the loss mask; the last is always true.
        key: `content_key` of the kept messages, so that conversations which differ only in the truncated part count
            as duplicates; the same for all rows of a conversation.
        id, source: of the record.
        row: index among the rows of its conversation.
    """

    tokens: Tensor
    supervised: Tensor
    key: str
    id: str
    source: str
    row: int = 0

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def prompts(self) -> list[list[int]]:
        """Return the prompt of each answer: all tokens before it, its header included."""
        before = torch.cat([self.supervised.new_ones(1), self.supervised[:-1]])
        starts = torch.nonzero(self.supervised & ~before).flatten().tolist()
        return [self.tokens[:start].tolist() for start in starts]


def encode_examples(conversation: Conversation, encoder: ChatEncoder, max_length: int) -> tuple[list[Example], Outcome]:
    """Tokenize a conversation into rows of at most `max_length` tokens, truncating each after a complete answer.

    Tokens after the last supervised one are dropped. A row that is still too long keeps as many complete answers as
    fit.

    Returns:
        The rows (see `ChatEncoder.encode`) and "complete" or "truncated"; or an empty list and the reason: "too_long"
        (every row's first answer ends beyond `max_length`) or "unsupervised" (no answer, or no supervised token).

    Raises:
        DataError: the template does not support the conversation.
    """
    rows = [row for row in (row.trimmed() for row in encoder.encode(conversation)) if row is not None and row.ids]
    if not rows:
        return [], "unsupervised"
    fitting = [part for part in (row.trimmed(max_length) for row in rows) if part is not None]
    if not fitting:
        return [], "too_long"
    kept = [part for part in fitting if part.ids]
    if not kept:
        return [], "unsupervised"
    key = conversation.first(kept[-1].ends[-1][0]).content_key
    examples = [
        Example(
            torch.tensor(part.ids, dtype=torch.int32),
            torch.tensor(part.supervised, dtype=torch.bool),
            key,
            conversation.id,
            conversation.source,
            number,
        )
        for number, part in enumerate(kept)
    ]
    is_complete = sum(len(part.ends) for part in kept) == sum(len(row.ends) for row in rows)
    return examples, "complete" if is_complete else "truncated"


def select_validation(keys: Sequence[str], share: float, seed: int) -> list[bool]:
    """Choose the validation set by content.

    Contents are ranked by a hash with `seed`; the first ones are held out until `share` of all conversations is
    reached. So the split does not depend on the order of files, and duplicates are on the same side of it.

    Args:
        keys: `Example.key` of each conversation.
        share: fraction to hold out, 0 to below 1. If above 0 and there are two contents, at least one is held out and
            at least one is left.
        seed: random seed.

    Returns:
        For each conversation whether it is in the validation set.
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
    if not chosen:  # every content has more duplicates than `share` allows: hold out the rarest
        chosen.add(min(order, key=lambda key: sizes[key]))
    return [key in chosen for key in keys]
