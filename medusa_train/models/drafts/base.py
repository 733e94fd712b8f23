"""The interfaces of drafts: tree proposals for decoding, and head states for training."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from medusa_train.models.features import FINAL_STATES, Features, FeatureSpec, TokenRows
from medusa_train.models.lm_head import LMHead
from medusa_train.trees.kv_cache import RowPaths, TreeCache
from medusa_train.trees.row_trees import LookaheadBranch, RowTrees, TreeAndBranch
from medusa_train.trees.tree import Tree

if TYPE_CHECKING:
    from medusa_train.models.backbone import Backbone

D = TypeVar("D", bound="Draft")


@dataclass(frozen=True)
class Proposal:
    """Guessed tokens at the nodes of a tree.

    Attributes:
        tokens: long [B, n + 1], each row's root first, in the tree's node order.
        tree: the tree of all rows, or one tree per row, with its tensors on the device of `tokens`.
            A `Tree` may be smaller than the requested one.
        early: [B, n + 1, d], the nodes' states after `needs.early` layers of the backbone, if the
            draft ran these itself and left keys and values pending in the backbone's cache:
            verification runs only the others.
        branch: further rows of the pass, which are not verified; the draft gets their logits
            (`Proposer.observe`). Not together with `early`.
    """

    tokens: Tensor
    tree: Tree | RowTrees
    early: Tensor | None = None
    branch: LookaheadBranch | None = None

    def rows(self) -> tuple[Tensor, Tree | RowTrees | TreeAndBranch]:
        """Return the tokens of the pass, the branch tokens' last, and the tree that all of them
        form.
        """
        if self.branch is None:
            return self.tokens, self.tree
        return torch.cat([self.tokens, self.branch.tokens], dim=1), TreeAndBranch(
            self.tree, self.branch.layout
        )

    def outputs(self, states: Tensor) -> Tensor:
        """Return the states [B, .., d] of all rows of the pass at those whose logits are read:
        nodes, then outputs.
        """
        if self.branch is None:
            return states
        nodes, read = self.tokens.shape[1], self.branch.layout.outputs
        return torch.cat([states[:, :nodes], states[:, states.shape[1] - read :]], dim=1)


class Limits(NamedTuple):
    """The most nodes below the root, and the most levels, of a proposal, its branch tokens
    included.
    """

    size: int
    depth: int


class Proposer:
    """Guesses the tokens after the backbone's next token, in trees: what decoding needs of a draft.

    Guesses depend on the text, the steps before and the draft, never on tokens that are drawn in
    the same step, so sampling stays lossless.

    Attributes:
        needs: states of the backbone that it reads.
        num_heads: K, the depth of the deepest tree that it can fill.
        runs_backbone: whether `propose` runs layers of the backbone over its draft tokens, see
            `Proposal.early`.
    """

    needs: FeatureSpec = FINAL_STATES
    num_heads: int
    runs_backbone: bool = False

    @property
    def draft_vocab_size(self) -> int | None:
        """Size of a reduced vocabulary; None if every token of the backbone can be drafted."""
        return None

    def limits(self, tree: Tree) -> Limits:
        """Return the limits of proposals for `tree`; a size of 0 means plain decoding."""
        return Limits(tree.size, tree.max_depth)

    @abstractmethod
    def start(
        self, feats: Features, tokens: Tensor, lengths: Sequence[int], cache: TreeCache
    ) -> Any:
        """Return the decoding state after the prefill of B prompts.

        Args:
            feats: of the prompts, [B, T, d]. tokens: long [B, T].
            lengths: of the prompts; later positions of a row are padding.
            cache: the backbone's, with the prompts committed; a `BatchCache` for several rows. Its
                capacity suffices for the draft's cache too. A draft that runs layers of the
                backbone keeps a reference to it.
        """

    @abstractmethod
    def propose(self, state: Any, roots: Tensor, tree: Tree) -> Proposal:
        """Guess the tokens of `tree` below `roots` (long [B], the backbone's next tokens).

        Each state is proposed from at most once before `advance`.

        Args:
            tree: not empty, with its tensors on the device of `roots`; drafts that choose the shape
                of their trees ignore it.
        """

    def no_early_exit(self) -> AbstractContextManager[None]:
        """Within this context proposals fill the whole tree however unlikely their guesses, as
        simulations assume.
        """
        return nullcontext()

    def observe(self, state: Any, proposal: Proposal, logits: Tensor) -> Any:
        """Return the state after a pass with branch tokens, before `advance`; drafts without them
        need not define it.

        Args:
            proposal: the verified proposal. logits: at the outputs of its branch tokens, [B,
                outputs, V].
        """
        return state

    @abstractmethod
    def advance(
        self, state: Any, feats: Features, proposal: Proposal, paths: Sequence[Sequence[int]]
    ) -> Any:
        """Return the state after a verification pass.

        Args:
            feats: of the verified nodes, [B, n + 1, d].
            proposal: the verified proposal; the roots alone if `propose` was not called.
            paths: the accepted nodes per row, the root first; see `RowPaths`.
        """

    def select_rows(self, state: Any, rows: Sequence[int]) -> Any:
        """Return the state of `rows` only, in that order; the other rows are finished."""
        return state.select_rows(rows)

    def append_rows(self, state: Any, other: Any, cache: TreeCache) -> Any:
        """Return the state of the rows of `state`, followed by those of `other`.

        Args:
            state: of the running rows, between two steps; it is not used afterwards.
            other: of the rows that join, as `start` returned it with a cache of theirs; it is not
                used afterwards.
            cache: the one that `state` was started with, to which the rows have been appended. Its
                capacity suffices for the draft's cache too.
        """
        return state.append_rows(other, cache)


class Draft(Proposer, nn.Module):
    """K trained heads that draft the tokens after the backbone's next token.

    Head k (k = 1..K) at position t predicts the token t + k + 1; the backbone itself predicts t +
    1.

    Attributes:
        needs: states of the backbone that the draft reads, in training and in decoding.
        num_heads: K, the depth of the deepest tree that it can fill.
        independent_heads: whether heads share no trained layers, so that training can free the
            activations of one before it computes the next one.
        setting_names: attributes that are `settings`.
        threshold: confidence up to which drafting stops; 0: never.
    """

    setting_names: tuple[str, ...] = ()
    threshold: float = 0.0
    independent_heads: bool = False

    # Construction

    @classmethod
    def from_backbone(cls: type[D], backbone: Backbone, *args: Any, **kwargs: Any) -> D:
        """Create an untrained draft for `backbone`, on its device.

        Args:
            backbone: what the draft shares with it must not become a parameter of the draft.
            kwargs: `settings`, and `dtype` of the parameters, by default the backbone's.
        """
        return cls(backbone, *args, **kwargs)

    @property
    def settings(self) -> dict[str, Any]:
        """JSON-serialisable keyword arguments of `from_backbone` that recreate this draft, except
        `token_map`.
        """
        return {name: getattr(self, name) for name in self.setting_names}

    @classmethod
    @abstractmethod
    def count_parameters(cls, model: Any, *args: Any, **kwargs: Any) -> int:
        """Return the number of trainable parameters with these `settings`; the causal LM may be on
        the meta device.
        """

    @property
    def trained_heads(self) -> int:
        """The number of states that `head_states` yields; fewer than K where one head drafts all
        depths.
        """
        return self.num_heads

    # Training

    @abstractmethod
    def head_states(self, feats: Features, batch: TokenRows) -> Iterator[Tensor]:
        """Yield for k = 1..trained_heads the states [B, T, d] that `lm_head(k)` reads.

        Position t is compared with the token t + k + 1 of the same document. Where there is none
        the state is ignored; elsewhere it must not depend on other documents.

        Args:
            feats: states as `needs` says, of the same rows. batch: tokens, positions and segments
                [B, T].
        """

    def teacher_forced_states(self, feats: Features, batch: TokenRows) -> Iterator[Tensor]:
        """Yield for k = 1..K the states [B, T, d] that rank the token t + k + 1, given the true
        tokens before it.
        """
        return self.head_states(feats, batch)

    @abstractmethod
    def lm_head(self, k: int) -> LMHead:
        """Return the matrix and logit transform of head k = 1..K."""


def at_last_nodes(values: Tensor, paths: Sequence[Sequence[int]]) -> Tensor:
    """Return the values [B, ...] of each row at the last node of its path, of [B, n + 1, ...]."""
    if len(paths) == 1:
        return values[:, paths[0][-1]]
    return values[
        torch.arange(len(paths), device=values.device),
        RowPaths.of(paths, values.device).nodes[:, -1],
    ]


def at_positions(values: Tensor, positions: Sequence[int]) -> Tensor:
    """Return the values [B, ...] of each row at its position, of [B, T, ...]."""
    if len(positions) == 1:
        return values[:, positions[0]]
    return values[
        torch.arange(len(positions), device=values.device),
        torch.tensor(positions, device=values.device),
    ]
