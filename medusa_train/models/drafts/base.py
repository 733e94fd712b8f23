"""What every draft must do in training and in decoding; knows no particular draft and no decoding loop."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from medusa_train.models.features import Features
from medusa_train.models.unembedding import Unembedding
from medusa_train.trees.tree import Tree


@dataclass(frozen=True)
class Proposal:
    """Guessed tokens at the nodes of a tree.

    Attributes:
        tokens: long [n + 1], the root first, in the tree's node order.
        tree: where they stand.
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
    def start(self, feats: Features) -> Any:
        """Decoding: the state after prefill, from the whole prompt's features [1, T, d]."""

    @abstractmethod
    def propose(self, state: Any, root: Tensor, tree: Tree) -> Proposal:
        """Guess the tokens of `tree` below `root` (long [1], the backbone's own next token)."""

    @abstractmethod
    def advance(self, state: Any, feats: Features, path: list[int]) -> Any:
        """The state after a verification pass with features [1, n + 1, d] accepted the nodes `path` (root first)."""
