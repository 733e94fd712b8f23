"""What every draft must do in training and in decoding; knows no particular draft and no decoding loop."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from medusa_train.models.features import PLAIN, Features, FeatureSpec, TokenRows
from medusa_train.models.lm_head import LMHead
from medusa_train.models.prepack import prepack_linears
from medusa_train.trees.kv_cache import TreeCache
from medusa_train.trees.tree import Tree

if TYPE_CHECKING:
    from medusa_train.models.backbone import Backbone


@dataclass(frozen=True)
class Proposal:
    """Guessed tokens at the nodes of a tree.

    Attributes:
        tokens: long [B, n + 1], each row its root first, in the tree's node order.
        tree: where they stand, the same for all rows, with its tensors on the device of `tokens`. It may be smaller
            than the one that was asked for; a draft that cuts trees short keeps what it made of them, since the loop
            keeps their masks.
        early: [B, n + 1, d], the nodes' states after the first `needs.early` layers of the backbone where the draft
            has run these itself, keys and values pending in the backbone's cache: verification runs the others only.
    """

    tokens: Tensor
    tree: Tree
    early: Tensor | None = None


class Draft(nn.Module):
    """K heads that guess the tokens after the backbone's own next one.

    Head k (k = 1..K) at position t predicts the token at t + k + 1; the backbone itself predicts t + 1.

    Attributes:
        needs: which states of the backbone it reads, in training and in decoding.
        num_heads: K, how deep a tree it can fill.
    """

    needs: FeatureSpec = PLAIN
    num_heads: int

    @classmethod
    @abstractmethod
    def from_backbone(cls, backbone: Backbone, *args: Any, **kwargs: Any) -> Draft:
        """An untrained draft for `backbone`, on its device.

        Args:
            backbone: whose parts it is made like; it holds what it shares with it outside its parameters.
            kwargs: `settings`, and `dtype` of its parameters, by default the backbone's.
        """

    @property
    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """What makes the same kind of draft anew, as JSON keeps it: keyword arguments of `from_backbone`."""

    @classmethod
    @abstractmethod
    def count_parameters(cls, model: Any, *args: Any, **kwargs: Any) -> int:
        """How many numbers a draft with these `settings` would learn.

        Args:
            model: a transformers causal LM, of which only the shapes may be there (the meta device).
        """

    @property
    def trained_heads(self) -> int:
        """For how many k `hidden` yields; fewer than K where one head drafts all depths."""
        return self.num_heads

    @property
    def draft_vocab_size(self) -> int | None:
        """How many different tokens it can guess at a place; None: all that the backbone knows."""
        return None

    @abstractmethod
    def head_states(self, feats: Features, batch: TokenRows) -> Iterator[Tensor]:
        """Training: for k = 1..trained_heads the state [B, T, d] that head k's unembedding reads.

        Position t is compared with the token t + k + 1 of its own document; what is yielded where there is none does
        not matter, but must not come from another document where there is one.

        Args:
            feats: as `needs` says, of the same rows. batch: tokens, positions and segments [B, T].
        """

    def teacher_forced_states(self, feats: Features, batch: TokenRows) -> Iterator[Tensor]:
        """For k = 1..K the state [B, T, d] by which head k ranks the token t + k + 1, given the true ones before it."""
        return self.head_states(feats, batch)

    def prepack(self) -> bool:
        """Lay the weights out for decoding on a CPU where that is faster, see `models.packed`; says whether."""
        return prepack_linears(self)

    @abstractmethod
    def lm_head(self, k: int) -> LMHead:
        """Head k's own matrix and logit transform, k = 1..K."""

    @abstractmethod
    def start(self, feats: Features, tokens: Tensor, lengths: Sequence[int], cache: TreeCache) -> Any:
        """Decoding: the state after prefill, from the features [B, T, d] of B prompts.

        Args:
            tokens: long [B, T], the prompts. lengths: of the prompts; what lies behind a shorter one is padding.
            cache: the backbone's, with the prompts committed (a `BatchCache` where there are several). Its capacity
                is enough for a draft's own one too; a draft that runs layers of the backbone keeps it.
        """

    @abstractmethod
    def propose(self, state: Any, roots: Tensor, tree: Tree) -> Proposal:
        """Guess the tokens of `tree` below `roots` (long [B], the backbone's own next tokens).

        A state is proposed from once, then `advance`d.

        Args:
            tree: not empty, with its tensors on the device of `roots`.
        """

    def no_early_exit(self) -> AbstractContextManager[None]:
        """Within: proposals fill the whole tree, however doubtful its guesses, as simulated acceptance assumes."""
        return nullcontext()

    @abstractmethod
    def advance(self, state: Any, feats: Features, proposal: Proposal, paths: Sequence[Sequence[int]]) -> Any:
        """The state after a verification pass with features [B, n + 1, d] accepted the nodes `paths`.

        Args:
            proposal: what was verified; of the roots alone where the loop did not ask for more.
            paths: one per row, the root first.
        """

    @abstractmethod
    def select_rows(self, state: Any, rows: Sequence[int]) -> Any:
        """The state of `rows` alone, in that order; the others are done."""


def hidden_at_positions(feats: Features, places: Sequence[int]) -> Tensor:
    """The hidden state of each row at its own place, [B, d]."""
    if len(places) == 1:
        return feats.hidden[:, places[0]]
    device = feats.hidden.device
    return feats.hidden[torch.arange(len(places), device=device), torch.tensor(places, device=device)]
