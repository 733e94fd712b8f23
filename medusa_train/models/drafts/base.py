"""The interface of a draft: head states for training, tree proposals for decoding."""

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
        tokens: long [B, n + 1], each row's root first, in the tree's node order.
        tree: the tree of all rows, with its tensors on the device of `tokens`. It may be smaller than the requested
            one. A draft that cuts trees must return the same object for the same cut, since masks are cached by it.
        early: [B, n + 1, d], the nodes' states after the first `needs.early` layers of the backbone, if the draft ran
            these itself and left keys and values pending in the backbone's cache: verification runs only the others.
    """

    tokens: Tensor
    tree: Tree
    early: Tensor | None = None


class Draft(nn.Module):
    """K heads that guess the tokens after the backbone's next token.

    Head k (k = 1..K) at position t predicts the token t + k + 1; the backbone itself predicts t + 1.

    Attributes:
        needs: states of the backbone that the draft reads, in training and in decoding.
        num_heads: K, the depth of the deepest tree that it can fill.
    """

    needs: FeatureSpec = PLAIN
    num_heads: int

    # Construction

    @classmethod
    @abstractmethod
    def from_backbone(cls, backbone: Backbone, *args: Any, **kwargs: Any) -> Draft:
        """Create an untrained draft for `backbone`, on its device.

        Args:
            backbone: what the draft shares with it must not become a parameter of the draft.
            kwargs: `settings`, and `dtype` of the parameters, by default the backbone's.
        """

    @property
    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """JSON-serialisable keyword arguments of `from_backbone` that recreate this draft."""

    @classmethod
    @abstractmethod
    def count_parameters(cls, model: Any, *args: Any, **kwargs: Any) -> int:
        """Return the number of trainable parameters of a draft with these `settings`.

        Args:
            model: a transformers causal LM; it may be on the meta device.
        """

    @property
    def trained_heads(self) -> int:
        """The number of states that `head_states` yields; fewer than K where one head drafts all depths."""
        return self.num_heads

    @property
    def draft_vocab_size(self) -> int | None:
        """Size of a reduced vocabulary; None if every token of the backbone can be guessed."""
        return None

    # Training

    @abstractmethod
    def head_states(self, feats: Features, batch: TokenRows) -> Iterator[Tensor]:
        """Yield for k = 1..trained_heads the states [B, T, d] that `lm_head(k)` reads.

        Position t is compared with the token t + k + 1 of the same document. Where there is none the state is ignored;
        elsewhere it must not depend on other documents.

        Args:
            feats: states as `needs` says, of the same rows. batch: tokens, positions and segments [B, T].
        """

    def teacher_forced_states(self, feats: Features, batch: TokenRows) -> Iterator[Tensor]:
        """Yield for k = 1..K the states [B, T, d] that rank the token t + k + 1, given the true tokens before it."""
        return self.head_states(feats, batch)

    @abstractmethod
    def lm_head(self, k: int) -> LMHead:
        """Return the matrix and logit transform of head k = 1..K."""

    # Decoding

    def prepack(self) -> bool:
        """Prepack the weights for decoding on a CPU where that is faster; return whether it was done."""
        return prepack_linears(self)

    @abstractmethod
    def start(self, feats: Features, tokens: Tensor, lengths: Sequence[int], cache: TreeCache) -> Any:
        """Return the decoding state after the prefill of B prompts.

        Args:
            feats: of the prompts, [B, T, d]. tokens: long [B, T].
            lengths: of the prompts; later positions of a row are padding.
            cache: the backbone's, with the prompts committed; a `BatchCache` for several rows. Its capacity suffices
                for the draft's cache too. A draft that runs layers of the backbone keeps a reference to it.
        """

    @abstractmethod
    def propose(self, state: Any, roots: Tensor, tree: Tree) -> Proposal:
        """Guess the tokens of `tree` below `roots` (long [B], the backbone's next tokens).

        Each state is proposed from at most once before `advance`.

        Args:
            tree: not empty, with its tensors on the device of `roots`.
        """

    def no_early_exit(self) -> AbstractContextManager[None]:
        """Within this context proposals fill the whole tree however unlikely their guesses, as simulations assume."""
        return nullcontext()

    @abstractmethod
    def advance(self, state: Any, feats: Features, proposal: Proposal, paths: Sequence[Sequence[int]]) -> Any:
        """Return the state after a verification pass.

        Args:
            feats: of the verified nodes, [B, n + 1, d].
            proposal: the verified proposal; the roots alone if `propose` was not called.
            paths: the accepted nodes per row, the root first.
        """

    @abstractmethod
    def select_rows(self, state: Any, rows: Sequence[int]) -> Any:
        """Return the state of `rows` only, in that order; the other rows are finished."""


def hidden_at_positions(feats: Features, positions: Sequence[int]) -> Tensor:
    """Return the hidden state of each row at its position, [B, d]."""
    if len(positions) == 1:
        return feats.hidden[:, positions[0]]
    device = feats.hidden.device
    return feats.hidden[torch.arange(len(positions), device=device), torch.tensor(positions, device=device)]
