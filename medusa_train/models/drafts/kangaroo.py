"""Kangaroo: the backbone's first layers and a small adapter draft token after token
(self-speculative decoding).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from medusa_train.models.backbone import Backbone
from medusa_train.models.drafts.base import Draft, DraftStep, Proposal
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
from medusa_train.trees.slots import PromptCache, compact, slot_cache
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

    @property
    def num_caches(self) -> int:
        """One, for the adapter."""
        return 1

    def prefill(self, feats: Features, tokens: Tensor, caches: Sequence[PromptCache]) -> None:
        """Run the adapter over the prompts."""
        assert feats.early is not None
        self.adapter.extend(self.cast(feats.early), caches[0])

    def read(self, step: DraftStep) -> Tensor:
        """Keep the accepted inner nodes among the adapter's keys; return the early states [B, 1, d]
        of the last accepted nodes, which the adapter has not read.
        """
        accepted = step.accepted
        # accepted nodes move right behind the keys before their root
        path = step.tree.by_level.inner_columns[accepted.path]  # [B, D + 1], among inner nodes
        compact(step.caches[0].storage, accepted.starts, path)
        assert accepted.feats.early is not None
        return accepted.last(accepted.along_path(accepted.feats.early))[:, None]

    def guess(self, step: DraftStep, states: Tensor) -> Proposal:
        """Fill the tree level by level: all nodes pass the first layers, those with children also
        the adapter.
        """
        tree = step.tree
        nodes = step.nodes
        assert nodes is not None
        levels = tree.by_level
        # 1. where the adapter's positions stand: the last accepted node, then the inner nodes
        read = levels.inner_nodes
        starts = step.accepted.lengths[:, None] - 1  # [B, 1]
        slots = starts + torch.arange(read.size + 1, device=starts.device)  # [B, 1 + inner]
        masks = levels.inner_masks(0, self.adapter.window, self._dtype)
        mask = masks.at(starts[:, 0], step.caches[0].key_length)
        positions = (starts + read.depths).clamp(max=step.caches[0].max_position)
        adapter = self.runner.inputs(positions, mask)
        first_layers = self.split.inputs(nodes.positions, nodes.masks)

        def run_first(tokens: Tensor, first: int, last: int) -> Tensor:
            return self.split.run_first(
                tokens, first_layers.slice(first, last), nodes.cache(first, last)
            )

        def run_adapter(states: Tensor, first: int, last: int) -> Tensor:
            draft_cache = step.caches[0]
            cache = slot_cache(draft_cache.storage, slots[:, first:last], draft_cache.key_length)
            return self.runner.run(states, range(1), adapter.slice(first, last), cache)

        # 2. level by level
        threshold = self.threshold if step.may_stop else 0.0
        return self.fill(states, step.roots, tree, run_first, run_adapter, threshold)

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
        tokens = [roots[:, None]]
        early: list[Tensor] = []
        mass = torch.ones(1, 1, device=roots.device)
        deepest = tree.max_depth
        for depth, level in enumerate(levels.levels):
            # 1. the first layers run over all nodes of the level
            early.append(run_first(tokens[-1], level.first, level.last))
            if depth == deepest:
                break
            # 2. the adapter over those with children, at the root also over the position before it
            states = early[-1]
            first = level.inner_first + 1
            end = level.inner_last + 1
            if level.inner is not None:
                states = states[:, level.inner]
            elif depth == 0:
                states = torch.cat([last, states], dim=1)
                first = 0
            states = run_adapter(self.cast(states), first, end)
            inner = states[:, level.inner_first - level.inner_last :]  # [B, m, d]
            # 3. its guesses are the nodes of the next level
            logits = self.logits(self.runner.body.norm(inner))  # [B, m, V]
            guesses, mass, share = self._guess(logits, level, mass, threshold)
            tokens.append(guesses)
            if share is not None and bool((share <= threshold).all()):
                # these tokens are still verified, so their early states are needed
                deepest = depth + 1
        return Proposal(torch.cat(tokens, dim=1), levels.truncate(deepest), torch.cat(early, dim=1))

    def skip_guess(self, step: DraftStep, states: Tensor) -> None:
        """Let the adapter read the last accepted nodes, which the next step takes as read."""
        step.caches[0].read_path(self.adapter, self.cast(states), step.accepted.lengths - 1)

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

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.adapter.parameters()).dtype

    def cast(self, states: Tensor) -> Tensor:
        """Cast to the adapter's dtype, which in training may be more precise than the backbone's."""
        return states.to(self._dtype)
