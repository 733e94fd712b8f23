"""Reduced draft vocabulary (`vocab_size` of a draft): its most frequent targets, for heads with a
smaller lm_head.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from medusa_train.data.examples import EncodedDataset
from medusa_train.errors import ConfigError

#: Share of the targets in the draft vocabulary below which the user is warned.
NOTABLE_COVERAGE = 0.9


def choose_draft_vocabulary(
    size: int | None, train: EncodedDataset, tokenizer: Any, vocab_size: int, key: str
) -> Tensor | None:
    """Return the `size` tokens that heads predict, long [size] in ascending order; None for all
    (`size` None).
    """
    if size is None:
        return None
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    special |= set(tokenizer.all_special_ids)
    return frequent_tokens(token_counts(train, vocab_size), size, special, key=key)


def token_counts(dataset: EncodedDataset, vocab_size: int) -> Tensor:
    """Count the supervised tokens of a data set, long [V]."""
    targets = torch.cat([example.tokens[example.supervised] for example in dataset.examples])
    return targets.bincount(minlength=vocab_size)


def frequent_tokens(
    counts: Tensor, size: int, special: Collection[int] = (), *, key: str = "medusa_vocab_size"
) -> Tensor:
    """Return the `size` tokens with the highest `counts` [V], long [size] in ascending order.

    Ties go to smaller ids; so do rows beyond the number of distinct tokens. Tokens of `special`
    (end of turn, for instance) that occur are always included. The result depends on the counts
    only, so all processes agree. `key` is the name of the size in errors.
    """
    kept = torch.zeros_like(counts, dtype=torch.bool)
    kept[[token for token in special if token < len(counts) and counts[token]]] = True
    num_kept = int(kept.sum())
    if num_kept > size:
        raise ConfigError(
            f"{key}: {size:,} is less than the {num_kept:,} special tokens in the data"
        )
    priority = torch.where(kept, counts.max() + 1, counts)
    chosen = priority.argsort(descending=True, stable=True)[:size]
    return chosen.sort().values


def coverage(counts: Tensor, token_map: Tensor) -> float:
    """Return the share of all counted tokens that are in the vocabulary; 1 if there are none."""
    total = int(counts.sum())
    if not total:
        return 1.0
    return int(counts[token_map].sum()) / total


def describe_vocabulary(
    token_map: Tensor,
    train: EncodedDataset,
    validation: EncodedDataset,
    vocab_size: int,
    *,
    key: str | None = "medusa_vocab_size",
) -> str:
    """Describe in one line how much of the training and validation targets the draft vocabulary
    covers.

    Args:
        key: the key of its size, if it was chosen from these training data; None: it came with
            trained heads.
    """
    counts = token_counts(train, vocab_size)
    line = (
        f"{len(token_map):,} of {vocab_size:,} tokens, covering {coverage(counts, token_map):.2%}"
        " of training targets"
    )
    if len(validation):
        validation_counts = token_counts(validation, vocab_size)
        line += f" and {coverage(validation_counts, token_map):.2%} of validation targets"
    if key is None:
        return line
    distinct = int((counts > 0).sum())
    line += f"; {distinct:,} distinct tokens occur in training targets"
    unused = int((counts[token_map] == 0).sum())
    if unused:
        line += f", the other {unused:,} rows are filled with unused tokens of the lowest ids"
    return line


def warn_of_coverage(
    token_map: Tensor,
    train: EncodedDataset,
    validation: EncodedDataset,
    vocab_size: int,
    *,
    key: str | None = "medusa_vocab_size",
) -> str | None:
    """Return a warning if the draft vocabulary covers less than `NOTABLE_COVERAGE` of the training
    or validation targets; `key` as for `describe_vocabulary`.
    """
    low = []
    for name, dataset in (("training", train), ("validation", validation)):
        if not len(dataset):
            continue
        share = coverage(token_counts(dataset, vocab_size), token_map)
        if share < NOTABLE_COVERAGE:
            low.append(f"{share:.2%} of {name} targets")
    if not low:
        return None
    advice = f"Set a larger {key}"
    if key is None:
        advice = "New heads, without lora_model_dir, get a vocabulary of these data"
    return (
        f"warning: the draft vocabulary covers only {' and '.join(low)}: the heads cannot draft the"
        f" other tokens. {advice}"
    )
