"""Which tokens the training text consists of mostly, for heads that know no others; knows no model and no loss."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from medusa_train.data.dataset import EncodedDataset
from medusa_train.errors import ConfigError


def token_counts(text: EncodedDataset, vocab_size: int) -> Tensor:
    """How often each token is to be learnt in `text`, long [V]; every conversation counts once, whatever its weight."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for example in text.examples:
        counts += torch.bincount(example.tokens[example.supervised], minlength=vocab_size)
    return counts


def frequent_tokens(counts: Tensor, size: int, special: Collection[int] = ()) -> Tensor:
    """The draft vocabulary: the `size` tokens with the highest `counts` [V], long [size], by id.

    Of equally frequent tokens the smaller ids are taken. Tokens of `special` (ends of turns and their like) that occur
    are taken however rare they are. It follows from the counts alone, so it is the same in every process.

    Raises:
        ConfigError: `size` has no room for the special tokens that occur.
    """
    kept = torch.zeros_like(counts, dtype=torch.bool)
    kept[[token for token in special if token < len(counts) and counts[token]]] = True
    if int(kept.sum()) > size:
        raise ConfigError(f"medusa_vocab_size: {size:,} has no room for the {int(kept.sum()):,} special tokens in use")
    ranked = torch.where(kept, counts.max() + 1, counts)
    return ranked.argsort(descending=True, stable=True)[:size].sort().values


def coverage(counts: Tensor, token_map: Tensor) -> float:
    """Share of all counted tokens that a vocabulary holds; 1 where nothing was counted."""
    total = int(counts.sum())
    return int(counts[token_map].sum()) / total if total else 1.0
