"""What every draft must do in training and in decoding; knows no particular draft and no decoding loop."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from medusa_train.models.features import Features
from medusa_train.models.unembedding import Unembedding
from medusa_train.trees.tree import Tree


@dataclass(frozen=True)
class Proposal:
    """Guessed tokens at the nodes of a tree.

    Attributes:
        tokens: long [B, n + 1], each row its root first, in the tree's node order.
        tree: where they stand, the same for all rows.
    """

    tokens: Tensor
    tree: Tree


class Draft(nn.Module):
    """K heads that guess the tokens after the backbone's own next one.

    Head k (k = 1..K) at position t predicts the token at t + k + 1; the backbone itself predicts t + 1.
    """

    num_heads: int

    @abstractmethod
    def hidden(self, feats: Features) -> Iterator[Tensor]:
        """Training: for k = 1..K the state [B, T, d] that head k's unembedding reads."""

    @abstractmethod
    def unembed(self, k: int) -> Unembedding:
        """Head k's own matrix and logit transform, k = 1..K."""

    @abstractmethod
    def start(self, feats: Features, lengths: Sequence[int]) -> Any:
        """Decoding: the state after prefill, from the features [B, T, d] of B prompts.

        Args:
            lengths: of the prompts; what lies behind a shorter one is padding.
        """

    @abstractmethod
    def propose(self, state: Any, roots: Tensor, tree: Tree) -> Proposal:
        """Guess the tokens of `tree` below `roots` (long [B], the backbone's own next tokens).

        Args:
            tree: not empty, with its tensors on the device of `roots`.
        """

    @abstractmethod
    def advance(self, state: Any, feats: Features, paths: Sequence[Sequence[int]]) -> Any:
        """The state after a verification pass with features [B, n + 1, d] accepted the nodes `paths`.

        Args:
            paths: one per row, the root first.
        """

    @abstractmethod
    def take(self, state: Any, rows: Sequence[int]) -> Any:
        """The state of `rows` alone, in that order; the others are done."""


def last_states(feats: Features, places: Sequence[int]) -> Tensor:
    """The hidden state of each row at its own place, [B, d]."""
    if len(places) == 1:
        return feats.hidden[:, places[0]]
    device = feats.hidden.device
    return feats.hidden[torch.arange(len(places), device=device), torch.tensor(places, device=device)]
