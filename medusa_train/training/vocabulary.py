"""The draft vocabulary of a run (`medusa_vocab_size`), from its training text. Knows no heads and no loss."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from medusa_train.config.schema import TrainConfig
from medusa_train.data.dataset import EncodedDataset
from medusa_train.data.vocabulary import coverage, frequent_tokens, token_counts
from medusa_train.errors import ConfigError


def check_vocabulary(cfg: TrainConfig, vocab_size: int) -> None:
    """Refuse a draft vocabulary that is not smaller than the backbone's; asked before anything is loaded.

    Raises:
        ConfigError: it is not.
    """
    size = cfg.drafted.settings.get("vocab_size")
    if size is not None and size >= vocab_size:
        raise ConfigError(
            f"medusa_vocab_size: {size:,} is not less than the {vocab_size:,} tokens of {cfg.base_model}; leave it out"
        )


def draft_vocabulary(cfg: TrainConfig, train: EncodedDataset, tokenizer: Any, vocab_size: int) -> Tensor | None:
    """The tokens that heads are made for, long [N]; None: all of the backbone's `vocab_size`.

    Raises:
        ConfigError: `medusa_vocab_size` is too small for the special tokens that occur.
    """
    size = cfg.drafted.settings.get("vocab_size")
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
