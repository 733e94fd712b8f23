"""Kangaroo: the backbone's first layers and a small adapter draft token after token
(self-speculative decoding).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from medusa_train.models.backbone import Backbone
from medusa_train.models.drafts.base import Draft, Proposal, at_last_nodes, at_positions
from medusa_train.models.drafts.draft_layer import (
    DraftLayer,
    init_from_layer,
    layer_to_copy,
    mlp_of,
)
from medusa_train.models.drafts.lm_heads import copy_lm_head, count_lm_head
from medusa_train.models.features import Features, FeatureSpec, TokenRows
from medusa_train.models.layer_split import LayerRunner
from medusa_train.models.lm_head import LMHead
from medusa_train.trees.kv_cache import BatchCache, TreeCache
from medusa_train.trees.masks import additive_mask, apply_sliding_window, mask_with_prefix
from medusa_train.trees.tree import Level, Tree

Run = Callable[[Tensor, int, int], Tensor]


class KangarooDraft(Draft):
    """The early-exit model `lm_head . A . M[:l]` of the backbone M (Kangaroo, Early Exiting as
    Self-Drafting Model).

    The adapter A is a norm, causal attention with a residual, and a final norm; lm_head is the
    backbone's. The paper's other architectures are built, too (Kangaroo, The Architecture of the
    Adapter Module). A is initialised from layer l, which it replaces, and from the backbone's final
    norm. (The paper does not say how; on the tiny backbone random weights need more than twice the
    tokens.) At position t the adapter predicts the token t + 1, as the backbone does, so one
    adapter drafts to any depth. In `Draft`, head k at position t predicts the token t + k + 1; here
    that is the adapter's output at position t + k.

    Drafting runs the first l layers once for every token and leaves their keys and values in the
    backbone's cache; verification continues from these states (`Proposal.early`).

    Drafting stops early where the current draft tokens carry no more than the share eta of the
    draft's probability (Kangaroo, Dynamic Drafting Steps with Early-Exiting): in a chain, the
    confidence of the last token. That token is still verified. The paper drafts greedy chains. In a
    tree the share is that of all guesses of the level, weighted by the probability of their paths.
    Rows of a batch stop together when the last of them would, so under sampling the draws of a row
    depend on the other rows, but their distribution does not.

    Args:
        backbone: the model whose layers, angles and lm_head are used; none of its parameters
            belongs to the draft.
        num_heads: gamma, the maximum number of drafted tokens, and so the depth of the deepest
            tree.
        exit_layer: l; in the paper 2 for a 7B model and 3 for 13B.
        threshold: eta, the confidence up to which drafting stops; 0 to never stop.
        mlp_size: width of an MLP after the attention; 0 for none, as in the paper.
        attention: False leaves out the attention; the adapter then reads each position alone.
        share_lm_head: False trains an lm_head of the draft's own, which starts as a copy of the
            backbone's.
        dtype: dtype of the adapter; by default the backbone's.

    Raises:
        BackboneError: `exit_layer` is out of range, or layers of this architecture can't be run
            separately.
    """

    setting_names = (
        "num_heads",
        "exit_layer",
        "threshold",
        "mlp_size",
        "attention",
        "share_lm_head",
    )
    runs_backbone = True

    def __init__(
        self,
        backbone: Backbone,
        *,
        num_heads: int = 6,
        exit_layer: int = 2,
        threshold: float = 0.6,
        mlp_size: int = 0,
        attention: bool = True,
        share_lm_head: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.exit_layer = exit_layer
        self.num_heads = num_heads
        self.threshold = threshold
        self.mlp_size, self.attention, self.share_lm_head = mlp_size, attention, share_lm_head
        self.needs = FeatureSpec(early=(exit_layer,))
        self.shared = backbone.lm_head()
        self.own_lm_head: nn.Linear | None = None
        if not share_lm_head:
            (rows, size), dtype = self.shared.weight.shape, dtype or backbone.dtype
            bias = self.shared.bias is not None
            self.own_lm_head = nn.Linear(size, rows, bias=bias, dtype=dtype, device=backbone.device)
            copy_lm_head([self.own_lm_head], self.shared)
        self.adapter = DraftLayer(backbone, mlp_size=mlp_size, attention=attention, dtype=dtype)
        self._backbone = backbone
        self.split = backbone.split_at(exit_layer)
        init_from_layer(self.adapter.body.layers[0], backbone.layer(exit_layer))
        init_from_layer(self.adapter.body.norm, backbone.body.norm)
        body: Any = self.adapter.body
        self.runner = LayerRunner(
            body, (getattr(body.config, "layer_types", None) or ["full_attention"])[:1]
        )

    @classmethod
    def count_parameters(
        cls,
        model: Any,
        *,
        mlp_size: int = 0,
        attention: bool = True,
        share_lm_head: bool = True,
        **_: Any,
    ) -> int:
        """A final norm; the attention of one layer, and the MLP's share of a layer's, with a norm
        each; an lm_head.
        """
        layer: Any = layer_to_copy(model)
        width = model.get_output_embeddings().weight.shape[1]
        total: int = width + (0 if share_lm_head else count_lm_head(model, None))
        if attention:
            total += sum(parameter.numel() for parameter in layer.self_attn.parameters()) + width
        if mlp_size:
            config = model.config.get_text_config()
            mlp, size = mlp_of(layer, config)
            elements = sum(parameter.numel() for parameter in getattr(layer, mlp).parameters())
            total += elements * mlp_size // getattr(config, size) + width
        return total

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
        """Return the backbone's lm_head, or the draft's own."""
        own = self.own_lm_head
        return (
            self.shared if own is None else replace(self.shared, weight=own.weight, bias=own.bias)
        )

    # Decoding. The adapter reads each position together with the one after it, so the last one
    # waits for the root.

    def start(
        self, feats: Features, tokens: Tensor, lengths: Sequence[int], cache: TreeCache
    ) -> KangarooState:
        """Run the adapter over the prompts but for their last positions."""
        assert feats.early is not None
        before = [length - 1 for length in lengths]
        state = KangarooState(
            cache, cache.single_layer(), at_positions(feats.early, before)[:, None]
        )
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        self.adapter.extend(self.cast(feats.early), positions, state.adapter_cache)
        state.adapter_cache.commit_rows(before)
        return state

    def propose(self, state: KangarooState, roots: Tensor, tree: Tree) -> Proposal:
        """Fill the tree level by level: all nodes pass the first layers, those with children also
        the adapter.
        """
        cache, adapter_cache, read = state.cache, state.adapter_cache, tree.by_level.inner_nodes
        lengths, last = cache.row_lengths(roots.device), self._backbone.max_context - 1
        # nodes past the context are never accepted
        positions = (tree.depths[None] + lengths).clamp(max=last)
        mask = None
        if (
            isinstance(cache, BatchCache)
            or tree.max_depth < tree.size
            or self._backbone.window is not None
        ):
            mask = mask_with_prefix(cache, additive_mask(tree.ancestors, self._backbone.dtype))
        first_layers = self.split.inputs(positions, mask, cache.length)
        positions = (read.depths[None] + (lengths - 1)).clamp(max=last)
        mask = mask_with_prefix(adapter_cache, additive_mask(read.ancestors, self._dtype))
        mask = apply_sliding_window(mask, positions, adapter_cache.length, self.adapter.window)
        adapter = self.runner.inputs(positions, mask)
        state.columns = tree.by_level.columns

        def run_first(tokens: Tensor, first: int, last: int) -> Tensor:
            return self.split.run_first(tokens, first_layers.slice(first, last), cache)

        def run_adapter(states: Tensor, first: int, last: int) -> Tensor:
            return self.runner.run(states, range(1), adapter.slice(first, last), adapter_cache)

        return self.fill(state.last, roots, tree, run_first, run_adapter, self.threshold)

    def fill(
        self,
        last: Tensor,
        roots: Tensor,
        tree: Tree,
        run_first: Run,
        run_adapter: Run,
        threshold: float = 0.0,
    ) -> Proposal:
        """Fill the tree below `roots`, given the early states [B, 1, d] of the positions before
        them.

        Args:
            run_first: runs the first layers over tokens, the nodes first .. last - 1.
            run_adapter: runs the adapter over states, the positions first .. last - 1 of
                `TreeLevels.inner_nodes`.
            threshold: eta; 0 to fill the whole tree.
        """
        levels = tree.by_level
        tokens, early, mass = (
            [roots[:, None]],
            list[Tensor](),
            torch.ones(1, 1, device=roots.device),
        )
        deepest = tree.max_depth
        for depth, level in enumerate(levels.levels):
            early.append(run_first(tokens[-1], level.first, level.last))
            if depth == deepest:
                break
            states, first, end = early[-1], level.inner_first + 1, level.inner_last + 1
            if level.inner is not None:
                states = states[:, level.inner]
            elif depth == 0:
                states, first = torch.cat([last, states], dim=1), 0
            states = run_adapter(self.cast(states), first, end)
            logits = self.logits(
                self.runner.body.norm(states[:, level.inner_first - level.inner_last :])
            )
            guesses, mass, share = self._guess(logits, level, mass, threshold)
            tokens.append(guesses)
            if share is not None and bool((share <= threshold).all()):
                # these tokens are still verified, so their early states are needed
                deepest = depth + 1
        return Proposal(torch.cat(tokens, dim=1), levels.truncate(deepest), torch.cat(early, dim=1))

    def logits(self, states: Tensor) -> Tensor:
        """Return the draft's logits [..., V] of the adapter's states [..., d], in at least float32."""
        if self.own_lm_head is None:
            logits = self._backbone.logits(states.to(self._backbone.dtype))
        else:
            logits = self.shared.transform(self.own_lm_head(states))
        return logits if logits.dtype == torch.float64 else logits.float()

    def _guess(
        self, logits: Tensor, level: Level, mass: Tensor, threshold: float
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Tokens [B, next] of the next level by rank, the probability of their paths, and their
        share of this level's.

        Args:
            logits: [B, m, V] at the inner nodes.
            mass: [B, nodes], probability of this level's paths under the draft, up to a factor.
        """
        best, tokens = (
            logits.max(-1, keepdim=True) if level.width == 1 else logits.topk(level.width)
        )
        tokens = tokens.flatten(1)[:, level.candidates]
        if not threshold:
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
        self,
        state: KangarooState,
        feats: Features,
        proposal: Proposal,
        paths: Sequence[Sequence[int]],
    ) -> KangarooState:
        """Commit what the adapter read of the accepted paths: all nodes but the last ones."""
        early, cache = (
            feats.early if proposal.early is None else proposal.early,
            state.adapter_cache,
        )
        assert early is not None
        # `propose` was not called, so the adapter has not read the position before the root
        if proposal.early is None:
            positions = torch.zeros_like(proposal.tokens) + cache.row_lengths(early.device)
            mask = mask_with_prefix(cache, early.new_zeros(1, 1, dtype=self._dtype))
            self.adapter.extend(self.cast(state.last), positions, cache, mask)
        cache.keep_rows([[0, *(1 + state.columns[node] for node in path[:-1])] for path in paths])
        state.last = at_last_nodes(early, paths)[:, None]
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

    Attributes:
        cache: the backbone's; the draft fills its first layers.
        adapter_cache: the adapter's, of all committed positions but the last one.
        last: early states of the last position, [B, 1, d].
        columns: of the nodes of the last tree among those that the adapter read, see `TreeLevels`.
    """

    cache: TreeCache
    adapter_cache: TreeCache
    last: Tensor
    columns: Sequence[int] = ()

    def select_rows(self, rows: Sequence[int]) -> KangarooState:
        """Keep `rows` only, in that order."""
        assert isinstance(self.adapter_cache, BatchCache)
        self.adapter_cache.select_rows(rows)
        self.last = self.last[list(rows)]
        return self

    def append_rows(self, other: KangarooState, cache: TreeCache) -> KangarooState:
        """Append rows whose prompts the adapter has just read; their keys and values are in `cache`
        already.
        """
        assert isinstance(self.adapter_cache, BatchCache)
        assert isinstance(other.adapter_cache, BatchCache)
        self.adapter_cache.append_rows(other.adapter_cache, cache.capacity)
        self.last = torch.cat([self.last, other.last])
        return self
