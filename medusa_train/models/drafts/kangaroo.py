"""Kangaroo: the backbone's first layers and a small adapter draft token after token (self-speculative decoding)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from medusa_train.models.backbone import Backbone
from medusa_train.models.drafts.base import Draft, Proposal, at_last_nodes
from medusa_train.models.drafts.layers import DraftLayer, init_from_layer, layer_to_copy
from medusa_train.models.features import Features, FeatureSpec, TokenRows
from medusa_train.models.layer_split import LayerInputs, LayerRunner
from medusa_train.models.lm_head import LMHead
from medusa_train.trees.kv_cache import BatchCache, TreeCache
from medusa_train.trees.masks import additive_mask, apply_sliding_window, mask_with_prefix
from medusa_train.trees.tree import Level, Tree, TreeLevels


class KangarooDraft(Draft):
    """The early-exit model `lm_head . A . M[:l]` of the backbone M (Kangaroo, Early Exiting as Self-Drafting Model).

    The adapter A is a norm, causal attention with a residual, and a final norm, without an MLP (but see `mlp_size`);
    lm_head is the backbone's. A is initialised from layer l, which it replaces, and from the backbone's final norm.
    (The paper does not say how; on the tiny backbone random weights need more than twice the tokens.) At position t the
    adapter predicts the token t + 1, as the backbone does, so one adapter drafts to any depth. In `Draft`, head k at
    position t predicts the token t + k + 1; here that is the adapter's output at position t + k.

    Drafting runs the first l layers once for every token and leaves their keys and values in the backbone's cache;
    verification continues from these states (`Proposal.early`).

    Drafting stops early where the current draft tokens carry no more than the share eta of the draft's probability
    (Kangaroo, Dynamic Drafting Steps with Early-Exiting): in a chain, the confidence of the last token. That token is
    still verified. The paper drafts greedy chains. In a tree the share is that of all guesses of the level, weighted by
    the probability of their paths. Rows of a batch stop together when the last of them would, so under sampling the
    draws of a row depend on the other rows, but their distribution does not.

    Args:
        backbone: the model whose layers, angles and lm_head are used; none of its parameters belongs to the draft.
        num_heads: gamma, the maximum number of drafted tokens, and so the depth of the deepest tree.
        exit_layer: l; in the paper 2 for a 7B model and 3 for 13B.
        threshold: eta, the confidence up to which drafting stops; 0 to never stop.
        mlp_size: width of an MLP after the attention; 0 for none, as in the paper.
        dtype: dtype of the adapter; by default the backbone's.

    Raises:
        BackboneError: `exit_layer` is out of range, or layers of this architecture can't be run separately.
    """

    can_append_rows = True
    setting_names = ("num_heads", "exit_layer", "threshold", "mlp_size")
    runs_backbone = True

    def __init__(
        self,
        backbone: Backbone,
        *,
        num_heads: int = 6,
        exit_layer: int = 2,
        threshold: float = 0.6,
        mlp_size: int = 0,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.exit_layer = exit_layer
        self.num_heads = num_heads
        self.threshold = threshold
        self.mlp_size = mlp_size
        self.needs = FeatureSpec(early=(exit_layer,))
        self.shared = backbone.lm_head()
        self.adapter = DraftLayer(backbone, mlp_size=mlp_size, dtype=dtype)
        self._backbone = backbone
        self.split = backbone.split_at(exit_layer)
        init_from_layer(self.adapter.body.layers[0], backbone.layer(exit_layer))
        init_from_layer(self.adapter.body.norm, backbone.body.norm)
        body: Any = self.adapter.body
        self.runner = LayerRunner(body, (getattr(body.config, "layer_types", None) or ["full_attention"])[:1])

    @classmethod
    def count_parameters(
        cls, model: Any, *, num_heads: int, exit_layer: int, threshold: float, mlp_size: int = 0
    ) -> int:
        """The attention of one layer and two norms; with an MLP its share of the layer's MLP, and a third norm."""
        layer: Any = layer_to_copy(model)
        width = model.get_output_embeddings().weight.shape[1]
        attention = sum(parameter.numel() for parameter in layer.self_attn.parameters()) + 2 * width
        if not mlp_size:
            return attention
        mlp = sum(parameter.numel() for parameter in layer.mlp.parameters())
        return attention + mlp * mlp_size // model.config.get_text_config().intermediate_size + width

    # Training

    @property
    def trained_heads(self) -> int:
        """One: predictions of t + 1 and of later tokens train the same weights."""
        return 1

    def head_states(self, feats: Features, batch: TokenRows) -> Iterator[Tensor]:
        """Yield the adapter's states [B, T, d], shifted by one position."""
        yield self.states(feats, batch).roll(-1, dims=1)

    def teacher_forced_states(self, feats: Features, batch: TokenRows) -> Iterator[Tensor]:
        """Yield for k = 1..num_heads the adapter's states [B, T, d], shifted by k positions."""
        states = self.states(feats, batch)
        for k in range(1, self.num_heads + 1):
            yield states.roll(-k, dims=1)  # positions that wrap around have no target

    def states(self, feats: Features, batch: TokenRows) -> Tensor:
        """Return the adapter's states [B, T, d]; position t predicts the token t + 1."""
        assert feats.early is not None
        return self.adapter(self.cast(feats.early), batch.positions, batch.segments)

    def lm_head(self, k: int) -> LMHead:
        """Return the backbone's lm_head."""
        return self.shared

    # Decoding

    def start(self, feats: Features, tokens: Tensor, lengths: Sequence[int], cache: TreeCache) -> KangarooState:
        """Run the adapter over the prompts."""
        assert feats.early is not None
        # one more position than the backbone's cache, for padding where only other rows have unread states
        adapter_cache = cache.single_layer(cache.capacity + 1)
        state = KangarooState(cache, adapter_cache, [0] * len(lengths), tokens.device)
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        self.adapter.extend(self.cast(feats.early), positions, state.adapter_cache)
        state.adapter_cache.commit_rows(lengths)
        return state

    def propose(self, state: KangarooState, roots: Tensor, tree: Tree) -> Proposal:
        """Fill the tree level by level: all nodes pass the first layers, those with children also the adapter."""
        levels = state.levels_of(tree)
        first_layers, adapter = self._inputs(state, levels)
        tokens, early = [roots[:, None]], []
        mass = torch.ones((), device=roots.device).expand(len(roots), 1)
        deepest = tree.max_depth
        for depth, level in enumerate(levels.levels):
            inputs = first_layers.slice(level.first, level.last)
            early.append(self.split.run_first(tokens[-1], inputs, state.cache))
            if depth == deepest:
                break
            logits = self._logits(state, early[-1], level, adapter)
            guesses, mass, share = self._guess(logits, level, mass)
            tokens.append(guesses)
            if share is not None and bool((share <= self.threshold).all()):
                deepest = depth + 1  # these tokens are still verified, so their early states are needed
        return Proposal(torch.cat(tokens, dim=1), levels.truncate(deepest), torch.cat(early, dim=1))

    def _inputs(self, state: KangarooState, levels: TreeLevels) -> tuple[LayerInputs, LayerInputs]:
        """Inputs of all nodes for the first layers, and of unread states and inner nodes for the adapter."""
        backbone, window, num_unread = self._backbone, self.adapter.window, state.num_unread
        lengths = state.cache.row_lengths(state.device)
        # nodes past the context are never accepted
        positions = (levels.tree.depths[None] + lengths).clamp(max=backbone.max_context - 1)
        adapter_positions = positions[:, levels.inner]
        if num_unread:
            unread_positions = torch.arange(-num_unread, 0, device=positions.device)[None] + lengths
            adapter_positions = torch.cat([unread_positions, adapter_positions], dim=1)
        single_chain = state.is_single_chain(levels)
        mask = None
        if not single_chain or backbone.layer_types != {"full_attention"}:
            mask = mask_with_prefix(state.cache, state.node_mask(levels, backbone.dtype))
        first_layers = self.split.inputs(positions, mask, state.cache.length)
        if single_chain and not num_unread and window is None:
            return first_layers, self.runner.inputs(adapter_positions, None)
        mask = mask_with_prefix(state.adapter_cache, state.adapter_mask(levels, self._dtype))
        mask = apply_sliding_window(mask, adapter_positions, state.adapter_cache.length, window)
        return first_layers, self.runner.inputs(adapter_positions, mask)

    def _logits(self, state: KangarooState, early: Tensor, level: Level, inputs: LayerInputs) -> Tensor:
        """Logits [B, m, V] at a level's inner nodes. With the root the adapter also reads the unread states."""
        states = early if level.inner is None else early[:, level.inner]
        first, last = level.inner_first + state.num_unread, level.inner_last + state.num_unread
        if level.first == 0 and state.unread is not None:
            states, first = torch.cat([state.unread, states], dim=1), 0
        states = self.runner.run(self.cast(states), range(1), inputs.slice(first, last), state.adapter_cache)
        states = self.runner.body.norm(states[:, level.inner_first - level.inner_last :])
        return self.logits(states)

    def logits(self, states: Tensor) -> Tensor:
        """Return the draft's logits [..., V] of the adapter's states [..., d], in at least float32."""
        logits = self._backbone.logits(states.to(self._backbone.dtype))
        return logits if logits.dtype == torch.float64 else logits.float()

    def top_tokens(self, logits: Tensor, level: Level) -> tuple[Tensor, Tensor]:
        """Return the best logits [B, m, width] at a level's inner nodes, and the tokens [B, next] of the next level."""
        best, tokens = logits.max(-1, keepdim=True) if level.width == 1 else logits.topk(level.width)
        return best, tokens.flatten(1)[:, level.candidates]

    def _guess(self, logits: Tensor, level: Level, mass: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Tokens [B, next] of the next level by rank, the probability of their paths, and their share of this level's.

        Args:
            logits: [B, m, V] at the inner nodes.
            mass: [B, nodes], probability of this level's paths under the draft, up to a factor.
        """
        best, tokens = self.top_tokens(logits, level)
        if not self.threshold:
            return tokens, mass, None
        p = (best - logits.logsumexp(-1, keepdim=True)).exp().flatten(1)[:, level.candidates]
        inner_mass = mass if level.inner is None else mass[:, level.inner]
        next_mass = (inner_mass / inner_mass.sum(1, keepdim=True))[:, level.parents] * p
        return tokens, next_mass, next_mass.sum(1)

    @contextmanager
    def no_early_exit(self) -> Iterator[None]:
        """Within this context drafting never stops early."""
        threshold, self.threshold = self.threshold, 0.0
        try:
            yield
        finally:
            self.threshold = threshold

    def advance(
        self, state: KangarooState, feats: Features, proposal: Proposal, paths: Sequence[Sequence[int]]
    ) -> KangarooState:
        """Commit what the adapter read of the accepted paths."""
        if proposal.early is None:  # `propose` was not called, so the adapter has not read the roots
            assert feats.early is not None
            state.add_unread(feats.early)
        else:
            state.commit_paths(proposal.early, proposal.tree.max_depth, paths)
        return state

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.adapter.parameters()).dtype

    def cast(self, states: Tensor) -> Tensor:
        """Cast to the adapter's dtype, which in training may be more precise than the backbone's."""
        return states.to(self._dtype)


@dataclass
class KangarooState:
    """The decoding state of B rows.

    The adapter reads only nodes that have children, so it may lack the last node of an accepted path (in a chain: if
    every draft token was accepted). Such states are kept in `unread` and are read together with the next root.

    Attributes:
        cache: the backbone's; the draft fills its first layers. adapter_cache: the adapter's.
        unread: [B, m, d], early states that the adapter has not read, the newest last; None if no row has any.
        unread_counts: how many of the m states belong to each row, counted from the newest; the others are padding.
    """

    cache: TreeCache
    adapter_cache: TreeCache
    unread_counts: list[int]
    device: torch.device
    unread: Tensor | None = None
    _levels: TreeLevels | None = None
    _masks: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict)

    @property
    def num_unread(self) -> int:
        """m, the width of `unread`."""
        return 0 if self.unread is None else self.unread.shape[1]

    def levels_of(self, tree: Tree) -> TreeLevels:
        """Return the levels of `tree`; masks of another tree are dropped."""
        if self._levels is not tree.by_level:
            self._levels = tree.by_level
            self._masks.clear()
        return tree.by_level

    def is_single_chain(self, levels: TreeLevels) -> bool:
        """Return whether each part of a pass is a single position that attends to the whole cache."""
        return not isinstance(self.cache, BatchCache) and levels.tree.max_depth == levels.tree.size

    def node_mask(self, levels: TreeLevels, dtype: torch.dtype) -> Tensor:
        """Return the mask among the nodes of a tree, additive [n + 1, n + 1]."""
        if (-1, dtype) not in self._masks:
            self._masks[-1, dtype] = additive_mask(levels.tree.ancestors, dtype)
        return self._masks[-1, dtype]

    def adapter_mask(self, levels: TreeLevels, dtype: torch.dtype) -> Tensor:
        """Return the adapter's mask among unread states and inner nodes, additive [1 or B, q, q].

        m = 2, root, child    x          in rows whose first state is padding:   x
                              x x                                                x x
                              x x x                                              . x x
                              x x x x                                            . x x x
        """
        m = self.num_unread
        if (m, dtype) not in self._masks:
            n = len(levels.inner)
            visible = torch.ones(m + n, m + n, dtype=torch.bool, device=levels.inner.device).tril()
            visible[m:, m:] = levels.tree.ancestors[levels.inner][:, levels.inner]
            self._masks[m, dtype] = additive_mask(visible, dtype)[None]
        mask = self._masks[m, dtype]
        if all(count == m for count in self.unread_counts):
            return mask
        counts = torch.tensor(self.unread_counts, device=mask.device)[:, None]
        padding = torch.arange(m, device=mask.device) < m - counts  # [B, m]
        mask = mask.repeat(len(self.unread_counts), 1, 1)
        mask[:, m:, :m].masked_fill_(padding[:, None], float("-inf"))
        return mask

    def add_unread(self, early: Tensor) -> None:
        """Add one committed position per row that the adapter has not read, with early states [B, 1, d]."""
        self.unread = early if self.unread is None else torch.cat([self.unread, early], dim=1)
        self.unread_counts = [count + 1 for count in self.unread_counts]

    def commit_paths(self, early: Tensor, depth: int, paths: Sequence[Sequence[int]]) -> None:
        """Commit what the adapter read of the accepted `paths`; last nodes that it did not read become unread states.

        Args:
            early: [B, n + 1, d] of the verified tree. depth: of that tree, whose last level the adapter did not read.
        """
        assert self._levels is not None
        columns, m = self._levels.columns, self.num_unread
        kept, unread_counts = [], []
        for path, count in zip(paths, self.unread_counts, strict=True):
            complete = columns[path[-1]] is not None and len(path) <= depth
            nodes = path if complete else path[:-1]
            kept.append([*range(m - count, m), *(m + (columns[node] or 0) for node in nodes)])
            unread_counts.append(0 if complete else 1)
        self.adapter_cache.keep_rows(kept)
        self.unread_counts, self.unread = unread_counts, None
        if any(unread_counts):
            self.unread = at_last_nodes(early, paths)[:, None]

    def select_rows(self, rows: Sequence[int]) -> KangarooState:
        """Keep `rows` only, in that order."""
        assert isinstance(self.adapter_cache, BatchCache)
        self.adapter_cache.select_rows(rows)
        self.unread_counts = [self.unread_counts[row] for row in rows]
        self.unread = self.unread[list(rows)] if self.unread is not None and any(self.unread_counts) else None
        return self

    def append_rows(self, other: KangarooState, cache: TreeCache) -> KangarooState:
        """Append rows whose prompts the adapter has just read; their keys and values are in `cache` already."""
        assert isinstance(self.adapter_cache, BatchCache)
        assert isinstance(other.adapter_cache, BatchCache)
        self.adapter_cache.append_rows(other.adapter_cache, self.cache.capacity + 1)
        if self.unread is not None:
            padding = self.unread.new_zeros(len(other.unread_counts), *self.unread.shape[1:])
            self.unread = torch.cat([self.unread, padding])
        self.unread_counts = [*self.unread_counts, *other.unread_counts]
        return self
