"""The interfaces of drafts: proposing trees in decoding, and head states in training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from medusa_train.errors import MedusaError
from medusa_train.models.lm_head import LMHead
from medusa_train.models.target_states import HiddenStates, TokenRows
from medusa_train.trees.lookahead_branch import AnyTree, LookaheadBranch, TreeAndBranch
from medusa_train.trees.masks import causal_mask
from medusa_train.trees.row_trees import RowTrees
from medusa_train.trees.transformers_adapters import (
    NodeInputs,
    PassCache,
    PromptCache,
    node_cache,
)
from medusa_train.trees.tree import Tree

if TYPE_CHECKING:
    from medusa_train.data.batch import Batch
    from medusa_train.models.target_model import TargetModel

D = TypeVar("D", bound="Draft")


@dataclass(frozen=True)
class Proposal:
    """Draft tokens at the nodes of a tree.

    Attributes:
        tokens: long [B, n + 1], each row's root first, in the tree's node order.
        tree: the tree of all rows, or one tree per row, with its tensors on the device of `tokens`.
            A `Tree` may be smaller than the requested one.
        aux: states of the nodes after the first `aux_layers` layers of the target model, [B, n + 1,
            d], if the draft ran these layers itself and wrote their keys and values to the target
            model's KV cache. Verification then runs only the remaining layers.
        branch: further tokens of the pass, which are not verified; the draft gets their logits
            (`Proposer.observe`). Not together with `aux`.
    """

    tokens: Tensor
    tree: Tree | RowTrees
    aux: Tensor | None = None
    branch: LookaheadBranch | None = None

    def pass_inputs(self) -> tuple[Tensor, AnyTree]:
        """Return all tokens of the pass, the branch tokens last, and the tree that they form."""
        if self.branch is None:
            return self.tokens, self.tree
        tokens = torch.cat([self.tokens, self.branch.tokens], dim=1)  # [B, n + 1 + m]
        return tokens, TreeAndBranch(self.tree, self.branch.layout)


class TreeSize(NamedTuple):
    """The largest tree that a draft may propose, including its branch tokens.

    Attributes:
        size: largest number of nodes below the root.
        depth: largest depth.
    """

    size: int
    depth: int


@dataclass(frozen=True)
class AcceptedPath:
    """The accepted nodes of the last verified tree of B rows, which a draft reads next.

        last tree    root - a - b              path    0 1 4
                          |   `- c             tokens  root a c        and then the last token
                          `- d                 starts  position of `root`
                                               lengths position of the last token

    Paths differ in length, so all tensors along the path are right-padded to P nodes: the longest
    path, or in steps of fixed shape the depth of the tree plus 1. A draft may read and store the
    padding: it comes after the accepted nodes, where it is masked and later overwritten.

    Attributes:
        hidden_states: states of all nodes of the tree, [B, n + 1, d].
        tokens: tokens of all nodes, long [B, n + 1].
        path: accepted nodes, the root first, long [B, P].
        counts: number of accepted nodes, long [B].
        starts: position of the root, long [B].
    """

    hidden_states: HiddenStates
    tokens: Tensor
    path: Tensor
    counts: Tensor
    starts: Tensor

    @property
    def lengths(self) -> Tensor:
        """Position of the last token, long [B]."""
        return self.starts + self.counts

    def along_path(self, values: Tensor) -> Tensor:
        """Select the accepted nodes' values [B, P, ...] from all nodes' values [B, n + 1, ...]."""
        if len(values) == 1:  # index_select takes a third of the time of advanced indexing
            return values.index_select(1, self.path[0])
        return values[self._rows[:, None], self.path]

    def last(self, values: Tensor) -> Tensor:
        """Select the last accepted node's values [B, ...] from the path's values [B, P, ...]."""
        if len(values) == 1:
            return values.index_select(1, self.counts - 1)[:, 0]
        return values[self._rows, self.counts - 1]

    def following(self, last_tokens: Tensor) -> Tensor:
        """Return the token after each accepted node, long [B, P]: the next token of the path, and
        after the last node the row's token of `last_tokens`, long [B].
        """
        after = self.along_path(self.tokens).roll(-1, dims=1)  # [B, P]
        return after.index_put((self._rows, self.counts - 1), last_tokens)

    @property
    def _rows(self) -> Tensor:
        """Indices of the rows, long [B]."""
        return torch.arange(len(self.path), device=self.path.device)


class CachedLayer(Protocol):
    """A layer of a draft whose keys and values are kept in a KV cache."""

    window: int | None

    def run(
        self, states: Tensor, positions: Tensor, mask: Tensor | None, cache: PassCache
    ) -> Tensor:
        """Run q positions, [B, q, ...] -> [B, q, d], whose keys and values the cache stores.

        Args:
            states: inputs of the layer, [B, q, ...].
            positions: position ids, long [B, q].
            mask: additive mask [B, 1, q, key_length], sliding windows applied; None for prompts.
            cache: writes to the KV cache.
        """


def read_prompts(layer: CachedLayer, states: Tensor, cache: PromptCache) -> Tensor:
    """Run a layer over prompts, [B, q, ...] -> [B, q, d]. They continue after the `cache.length`
    positions in the cache.
    """
    return layer.run(states, cache.positions(states), None, cache)


@dataclass(frozen=True)
class DraftCache:
    """The KV cache of one layer of a draft in one step: row b holds the keys and values of what the
    layer has read.

    Attributes:
        storage: [1, 2, rows, kv_heads, columns, head_dim], columns > key_length.
        key_length: number of columns that attention reads.
        max_position: largest position id of the model's context.
    """

    storage: Tensor
    key_length: int
    max_position: int

    def read_path(self, layer: CachedLayer, states: Tensor, starts: Tensor) -> Tensor:
        """Run a layer over an accepted path, [B, P, ...] -> [B, P, d].

        Args:
            layer: the layer of this cache.
            states: its inputs along the path, [B, P, ...].
            starts: position of the first node, long [B].
        """
        offsets = torch.arange(states.shape[1], device=starts.device)
        columns = starts[:, None] + offsets  # [B, P]
        mask = causal_mask(columns, self.key_length, layer.window, states.dtype)
        return self.run(layer, states, columns, columns, mask)

    def run(
        self, layer: CachedLayer, states: Tensor, columns: Tensor, positions: Tensor, mask: Tensor
    ) -> Tensor:
        """Run a layer over q positions, [B, q, ...] -> [B, q, d].

        Args:
            layer: the layer of this cache.
            states: its inputs, [B, q, ...].
            columns: columns that the keys and values are written to, long [B, q].
            positions: position ids, long [B, q]. Those past the context are clamped; such nodes are
                never accepted.
            mask: additive mask [B, 1, q, key_length].
        """
        cache = node_cache(self.storage, columns, self.key_length)
        return layer.run(states, positions.clamp(max=self.max_position), mask, cache)


@dataclass(frozen=True)
class DraftStep:
    """Inputs of a draft in one decoding step of B rows.

    Attributes:
        accepted: the path that the last step accepted.
        last_tokens: last token of each row, accepted but not verified yet, long [B].
        last_token_list: the last tokens on the host.
        caches: KV caches of the draft's own layers, `Proposer.num_caches` of them.
        request_states: result of `Proposer.new_request_state` for each active row. A pass may have
            more rows.
        tree: the tree to fill, with its tensors on the device of the last tokens. Drafts that
            choose the shape of their trees ignore it.
        nodes: inputs of the target model's layers at the nodes of the tree, for drafts that run
            these layers. None for drafts that choose the shape of their trees.
        may_stop: whether the draft may look at its draft tokens and stop early. It may not in
            replayed steps, which always do the same work.
    """

    accepted: AcceptedPath
    last_tokens: Tensor
    last_token_list: Sequence[int]
    caches: Sequence[DraftCache]
    request_states: Sequence[Any]
    tree: Tree
    nodes: NodeInputs | None
    may_stop: bool


class Proposer:
    """The interface of a draft in decoding: it proposes trees of tokens after the last token.

    In each step, `extend` reads the accepted path, and `propose` fills a tree below the last token:

        target model   .. x_t-1  x_t | x_t+1: the last token (accepted but not verified): the root
        draft                        |        tokens for x_t+2, x_t+3, ..: the levels of the tree

    Proposals depend on the text, the earlier steps and the draft, never on tokens that are drawn in
    the same step, so sampling stays lossless.

    A draft needs `max_depth` and `propose`. The other members have defaults, and the headings below
    name the drafts that define them. `MergedDraft` passes calls on to its two drafts.

    Attributes:
        max_depth: K, the depth of the deepest tree that it can fill.
        fixed_shape: whether it fills the given tree, with the same work every time, so that steps
            can be replayed as CUDA graphs. Otherwise it chooses the shape of its trees (dynamic
            trees, copied text).
        aux_layers: target model layers whose outputs the draft reads as auxiliary hidden states
            (Kangaroo, EAGLE-3, DFlash).
    """

    max_depth: int
    fixed_shape: bool = True
    aux_layers: tuple[int, ...] = ()

    # Every draft

    def extend(self, step: DraftStep) -> Any:
        """Read the accepted path; return what `propose` needs.

        The padding of the path may be read too, see `AcceptedPath`.
        """
        return None

    def propose(self, step: DraftStep, states: Any) -> Proposal:
        """Propose draft tokens below the last tokens, for `step.tree`, which is not empty.

        Args:
            step: inputs of the step.
            states: the result of `extend`.
        """
        raise NotImplementedError

    def limits(self, tree: Tree) -> TreeSize:
        """Return the limits of proposals for `tree`; a size of 0 means plain decoding."""
        return TreeSize(tree.size, tree.max_depth)

    # Drafts with layers of their own that attend to earlier positions: Hydra's prefix layer,
    # Amphista, Kangaroo, EAGLE-3, DFlash

    @property
    def num_caches(self) -> int:
        """Number of its own layers that need a KV cache."""
        return 0

    def prefill(
        self, hidden_states: HiddenStates, tokens: Tensor, caches: Sequence[PromptCache]
    ) -> None:
        """Read B prompts. Drafts without caches need not define it.

        The last position of each prompt is read again as the accepted path of the first step.

        Args:
            hidden_states: states of the right-padded prompts, [B, T, d].
            tokens: tokens of the prompts, long [B, T].
            caches: one for each layer of the draft. They hold `length` positions before these.
        """

    # Drafts that may have a reduced vocabulary: all trained ones but Kangaroo

    @property
    def draft_vocab_size(self) -> int | None:
        """Size of a reduced vocabulary; None if every token of the target model can be drafted."""
        return None

    # Drafts that copy text, which they keep for each request: prompt lookup, REST, lookahead

    def new_request_state(self, prompt: Sequence[int]) -> Any:
        """Return the state that the draft keeps for a request on the host; None: no state."""
        return None

    def extend_request_state(self, state: Any, tokens: Sequence[int]) -> None:
        """Add accepted tokens, the root's first, to the state of `new_request_state`."""

    # Lookahead, which guesses by branch tokens

    def observe(self, request_states: Sequence[Any], proposal: Proposal, logits: Tensor) -> None:
        """Read the target model's logits at the branch tokens of a proposal. Drafts without branch
        tokens need not define it.

        Args:
            request_states: results of `new_request_state`, one for each active row.
            proposal: the verified proposal.
            logits: logits at the outputs of its branch, [B, outputs, V].
        """

    # Kangaroo, which may stop at an unlikely token, and whose layer must read every position once

    def no_early_exit(self) -> AbstractContextManager[None]:
        """Within this context, proposals fill the whole tree, even with unlikely tokens, as
        simulations assume.
        """
        return nullcontext()

    def skip_proposal(self, step: DraftStep, states: Any) -> None:
        """Called instead of `propose` in a step that verifies only the last tokens."""


class Draft(Proposer, nn.Module):
    """K trained heads that draft the tokens after the target model's next token.

    At position t the target model predicts the token t + 1, and head k (k = 1..K) the token
    t + k + 1. Training uses `head_states` and `lm_head`: the loss compares head k's logits with the
    data's token, or with the target model's own prediction. Decoding uses the methods of
    `Proposer`.

    Attributes:
        independent_heads: whether heads share no trained layers, so that training can free the
            activations of one head before it computes the next.
        setting_names: names of the attributes that are in `settings`.
        threshold: a probability. A draft that can stop early stops after draft tokens to which it
            gives at most this probability; 0: it never stops early.
        dynamic: limits of the trees that the draft chooses for each row and step; None: it fills
            the trees that are given to `propose`.
    """

    setting_names: tuple[str, ...] = ()
    threshold: float = 0.0
    dynamic: TreeSize | None = None
    independent_heads: bool = False

    # Construction

    @classmethod
    def from_target_model(cls: type[D], target_model: TargetModel, *args: Any, **kwargs: Any) -> D:
        """Create an untrained draft for `target_model`, on its device.

        Args:
            target_model: its modules that the draft shares must not become parameters of the draft.
            args, kwargs: `settings`, and `dtype` of the parameters (by default the target model's).
        """
        return cls(target_model, *args, **kwargs)

    @property
    def draft_vocab_size(self) -> int | None:
        """N for a reduced vocabulary, with its token ids in the buffer `token_map`; else None."""
        token_map = getattr(self, "token_map", None)
        return None if token_map is None else len(token_map)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load weights, and the reduced vocabulary that they belong to."""
        if self.draft_vocab_size is None:
            return super().load_state_dict(state_dict, strict, assign)
        before = self.get_buffer("token_map").clone()
        result = super().load_state_dict(state_dict, strict, assign)
        if not torch.equal(before, self.get_buffer("token_map")):
            self.restrict_lm_head()
        return result

    def restrict_lm_head(self) -> None:
        """Apply a new `token_map` to lm_head; not needed by drafts with own output matrices."""

    @property
    def settings(self) -> dict[str, Any]:
        """JSON-serializable keyword arguments of `from_target_model` that recreate this draft,
        except `token_map`.
        """
        return {name: getattr(self, name) for name in self.setting_names}

    @classmethod
    def count_parameters(cls, target_model: TargetModel, **settings: Any) -> int:
        """Return the number of trainable parameters with these `settings`. The target model may be
        on the meta device; then the draft needs no memory.
        """
        if settings.get("vocab_size"):
            settings["token_map"] = torch.arange(settings["vocab_size"])
        with torch.device(target_model.device):
            draft = cls.from_target_model(target_model, **settings)
        return sum(parameter.numel() for parameter in draft.parameters())

    def with_dynamic_trees(self: D, limits: TreeSize) -> D:
        """Return a draft with the same weights that chooses a tree of this size for each row and
        step. Only drafts whose configuration section allows `dynamic_trees` support it.

        Raises:
            MedusaError: the trees are deeper than `max_depth`.
        """
        if limits.depth > self.max_depth:
            raise MedusaError(
                f"the dynamic trees are {limits.depth} deep,"
                f" but the draft has {self.max_depth} heads"
            )
        draft = copy(self)  # shallow: parameters are shared
        draft.dynamic = limits
        draft.fixed_shape = False
        return draft

    # Training of every draft

    def head_states(self, hidden_states: HiddenStates, batch: TokenRows) -> Iterator[Tensor]:
        """Yield for k = 1..trained_heads the states [B, T, d] that `lm_head(k)` reads.

        The loss compares position t with the token t + k + 1 of the same document. If there is no
        such token, the state is ignored; otherwise it must not depend on other documents.

        Args:
            hidden_states: states of the same rows, including those of `aux_layers`.
            batch: tokens, positions and segments [B, T].
        """
        raise NotImplementedError

    def lm_head(self, k: int) -> LMHead:
        """Return the matrix and logit transform of head k = 1..K."""
        raise NotImplementedError

    # Training of Kangaroo and EAGLE-3, which train fewer states than they draft depths, and of
    # DFlash, which trains at some positions. `teacher_forced_states` leaves out nothing

    @property
    def trained_heads(self) -> int:
        """The number of states that `head_states` yields; may be less than K if one head drafts all
        depths.
        """
        return self.max_depth

    def loss_positions(self, batch: Batch) -> Tensor | None:
        """Return the positions whose targets count in the loss, bool [B, T]; None: all positions.
        It depends only on the batch.
        """
        return None

    def teacher_forced_states(
        self, hidden_states: HiddenStates, batch: TokenRows
    ) -> Iterator[Tensor]:
        """Yield for k = 1..K the states [B, T, d] that predict the token t + k + 1, given the true
        tokens before it.
        """
        return self.head_states(hidden_states, batch)


def at_positions(values: Tensor, positions: Sequence[int]) -> Tensor:
    """Select from `values` [B, T, ...] each row's value at its position, [B, ...]."""
    if len(positions) == 1:
        return values[:, positions[0]]
    rows = torch.arange(len(positions), device=values.device)
    return values[rows, torch.tensor(positions, device=values.device)]
