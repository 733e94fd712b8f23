"""Which tokens the training text consists of mostly, for heads that know no others; knows no model and no loss."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from medusa_train.config.schema import TrainConfig
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


def check_vocabulary(cfg: TrainConfig, vocab_size: int) -> None:
    """Refuse a draft vocabulary that is not smaller than the backbone's; asked before anything is loaded.

    Raises:
        ConfigError: it is not.
    """
    size = cfg.draft_config.settings.get("vocab_size")
    if size is not None and size >= vocab_size:
        raise ConfigError(
            f"medusa_vocab_size: {size:,} is not less than the {vocab_size:,} tokens of {cfg.base_model}; leave it out"
        )


def choose_draft_vocabulary(cfg: TrainConfig, train: EncodedDataset, tokenizer: Any, vocab_size: int) -> Tensor | None:
    """The tokens that heads are made for, long [N]; None: all of the backbone's `vocab_size`.

    Raises:
        ConfigError: `medusa_vocab_size` is too small for the special tokens that occur.
    """
    size = cfg.draft_config.settings.get("vocab_size")
    if size is None:
        return None
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    return frequent_tokens(token_counts(train, vocab_size), size, special | set(tokenizer.all_special_ids))


def describe_vocabulary(token_map: Tensor, train: EncodedDataset, held_out: EncodedDataset, vocab_size: int) -> str:
    """How much of the text it holds, in a line."""
    parts = [
        f"{coverage(token_counts(text, vocab_size), token_map):.2%} of what is {what}"
        for text, what in ((train, "learnt"), (held_out, "held out"))
        if len(text)
    ]
    return f"{len(token_map):,} of {vocab_size:,} tokens, {' and '.join(parts)}"
