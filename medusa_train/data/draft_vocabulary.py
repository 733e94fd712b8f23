"""Reduced draft vocabulary (`vocab_size` of a draft): the most frequent targets of the training
data, for heads with a smaller lm_head.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from medusa_train.config.draft_sections import DraftConfig
from medusa_train.data.examples import EncodedDataset
from medusa_train.errors import ConfigError

#: Share of the targets in the draft vocabulary below which the user is warned.
NOTABLE_COVERAGE = 0.9


@dataclass(frozen=True)
class DraftVocabulary:
    """The tokens that heads predict, if these are not all tokens.

    Attributes:
        tokens: long [size] in ascending order.
        vocab_size: vocabulary size of the target model.
        key: configuration key of the size, if the tokens were chosen from the training data; None
            if they came with trained heads.
    """

    tokens: Tensor
    vocab_size: int
    key: str | None = None

    @classmethod
    def choose(
        cls, section: DraftConfig, train: EncodedDataset, tokenizer: Any, vocab_size: int
    ) -> DraftVocabulary | None:
        """Choose the vocabulary of new heads; None if they predict all tokens."""
        size = section.settings.get("vocab_size")
        if size is None:
            return None
        added = tokenizer.added_tokens_decoder.items()
        special = {token for token, entry in added if entry.special}
        special |= set(tokenizer.all_special_ids)
        key = section.vocab_size_key
        tokens = frequent_tokens(token_counts(train, vocab_size), size, special, key=key)
        return cls(tokens, vocab_size, key)

    def describe(self, train: EncodedDataset, validation: EncodedDataset) -> list[str]:
        """Return a line on the share of the targets that are in the vocabulary, and a warning if it
        is less than `NOTABLE_COVERAGE` of the training or the validation targets.
        """
        counts = token_counts(train, self.vocab_size)
        shares = {"training": coverage(counts, self.tokens)}
        if len(validation):
            held_out = token_counts(validation, self.vocab_size)
            shares["validation"] = coverage(held_out, self.tokens)
        covered = {name: f"{share:.2%} of {name} targets" for name, share in shares.items()}
        line = (
            f"{len(self.tokens):,} of {self.vocab_size:,} tokens, covering"
            f" {' and '.join(covered.values())}"
        )
        advice = "New heads, without lora_model_dir, get a vocabulary of these data"
        if self.key is not None:
            advice = f"Set a larger {self.key}"
            line += f"; {int((counts > 0).sum()):,} distinct tokens occur in training targets"
            if unused := int((counts[self.tokens] == 0).sum()):
                line += (
                    f", the other {unused:,} rows are filled with unused tokens of the lowest ids"
                )
        low = [covered[name] for name, share in shares.items() if share < NOTABLE_COVERAGE]
        if not low:
            return [line]
        warning = (
            f"warning: the draft vocabulary covers only {' and '.join(low)}: the heads cannot draft"
            f" the other tokens. {advice}"
        )
        return [line, warning]


def token_counts(dataset: EncodedDataset, vocab_size: int) -> Tensor:
    """Count the supervised tokens of a data set, long [V]."""
    targets = torch.cat([example.tokens[example.supervised] for example in dataset.examples])
    return targets.bincount(minlength=vocab_size)


def frequent_tokens(
    counts: Tensor, size: int, special: Collection[int] = (), *, key: str = "medusa_vocab_size"
) -> Tensor:
    """Return the `size` tokens with the highest `counts` [V], long [size] in ascending order.

    Ties go to smaller ids. If there are fewer than `size` distinct tokens, unused tokens of the
    lowest ids fill the rest. Tokens of `special` (end of turn, for instance) that occur are always
    included. The result depends on the counts only, so all processes agree. Errors call the size
    `key`.
    """
    is_kept = torch.zeros_like(counts, dtype=torch.bool)
    is_kept[[token for token in special if token < len(counts) and counts[token]]] = True
    num_kept = int(is_kept.sum())
    if num_kept > size:
        raise ConfigError(
            f"{key}: {size:,} is less than the {num_kept:,} special tokens in the data"
        )
    priority = torch.where(is_kept, counts.max() + 1, counts)
    chosen = priority.argsort(descending=True, stable=True)[:size]
    return chosen.sort().values


def coverage(counts: Tensor, token_map: Tensor) -> float:
    """Return the share of the counted tokens that are in the vocabulary."""
    return int(counts[token_map].sum()) / int(counts.sum())
