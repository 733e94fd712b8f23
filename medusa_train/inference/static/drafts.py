"""Drafting in steps whose shapes and addresses are fixed, so that CUDA graphs can replay them.

An accepted path is given as tensors, padded to the tree's depth. A draft's own layers read all of
it and write to slots of their own cache. What the padding writes is after the accepted nodes, where
it is masked and later overwritten.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from medusa_train.inference.static.cache import SlotPass, StaticCache, move_columns
from medusa_train.models.backbone import Backbone
from medusa_train.models.compiled import slot_cache
from medusa_train.models.drafts.amphista import AmphistaDraft
from medusa_train.models.drafts.base import Proposal, Proposer
from medusa_train.models.drafts.draft_layer import DraftLayer
from medusa_train.models.drafts.eagle3 import Eagle3Draft, Eagle3Layer
from medusa_train.models.drafts.hydra import HydraDraft, HydraState
from medusa_train.models.drafts.kangaroo import KangarooDraft
from medusa_train.models.drafts.medusa import MedusaDraft, MedusaState
from medusa_train.models.features import FINAL_STATES, Features, FeatureSpec
from medusa_train.trees.masks import MaskTable
from medusa_train.trees.tree import Tree


@dataclass(frozen=True)
class AcceptedNodes:
    """The accepted nodes of the last verified tree of B rows.

    Attributes:
        feats: of all nodes of that tree, [B, n + 1, d]. tokens: long [B, n + 1].
        path: the accepted nodes, the root first, long [B, D + 1], padded at the end.
        counts: their number, long [B]. starts: position of the root, long [B].
    """

    feats: Features
    tokens: Tensor
    path: Tensor
    counts: Tensor
    starts: Tensor

    @property
    def lengths(self) -> Tensor:
        """Position of the next root, long [B]."""
        return self.starts + self.counts

    def along_path(self, values: Tensor) -> Tensor:
        """Return the values [B, D + 1, ...] of the accepted nodes, of [B, n + 1, ...] of all."""
        return values[self._rows[:, None], self.path]

    def last(self, values: Tensor) -> Tensor:
        """Return the values [B, ...] of the last accepted node, of [B, D + 1, ...] along the path."""
        return values[self._rows, self.counts - 1]

    def following(self, roots: Tensor) -> Tensor:
        """Return the tokens after the accepted nodes, long [B, D + 1]; after the last one the next
        root, long [B].
        """
        return (
            self.along_path(self.tokens)
            .roll(-1, dims=1)
            .index_put((self._rows, self.counts - 1), roots)
        )

    @property
    def _rows(self) -> Tensor:
        return torch.arange(len(self.path), device=self.path.device)


class FixedShapeDraft:
    """Proposes from static buffers, for one answer or batch after the other.

    Args:
        draft: its heads are used. tree: the tree that is filled, with its tensors on the device.
        cache: the backbone's.

    Attributes:
        caches: of the draft's own layers. The caller allocates enough positions before each
            `propose`.
        needs: states of the backbone that it reads.
    """

    def __init__(self, draft: Any, backbone: Backbone, tree: Tree, cache: StaticCache) -> None:
        self.tree = tree
        self.needs: FeatureSpec = FINAL_STATES if draft is None else draft.needs
        self.caches: list[StaticCache] = []
        self._max_position = backbone.max_context - 1
        self._backbone_cache = cache
        self._levels = tree.by_level  # computed here: it copies from the host, which a graph can't

    def start(self, feats: Features, tokens: Tensor, first: int) -> None:
        """Read prompts, [B, T, d] and long [B, T], shorter ones padded behind, for the rows from
        `first` on.

        The last position of each is read again as the first accepted node.
        """

    def propose(self, accepted: AcceptedNodes, roots: Tensor, nodes: SlotPass) -> Proposal:
        """Read the accepted nodes and draft the tokens below `roots`, long [B]."""
        raise NotImplementedError

    def _add_cache(self) -> StaticCache:
        cache = StaticCache(1, self._backbone_cache.capacity, self._backbone_cache.block)
        cache.make_room(self._backbone_cache.rows, 0)
        self.caches.append(cache)
        return cache


class _Medusa(FixedShapeDraft):
    def __init__(
        self, draft: MedusaDraft, backbone: Backbone, tree: Tree, cache: StaticCache
    ) -> None:
        super().__init__(draft, backbone, tree, cache)
        self._draft, self._stacked = draft, draft.stacked()

    def propose(self, accepted: AcceptedNodes, roots: Tensor, nodes: SlotPass) -> Proposal:
        hidden = accepted.last(accepted.along_path(accepted.feats.hidden))
        return self._draft.propose(MedusaState(hidden, self._stacked), roots, self.tree)


class _LayerSteps:
    """A `DraftLayer` that reads accepted paths of D + 1 positions."""

    def __init__(
        self, layer: DraftLayer | Eagle3Layer, cache: StaticCache, depth: int, max_position: int
    ) -> None:
        parameter = next(layer.parameters())
        self._layer = layer
        self._cache = cache
        self._max_position = max_position
        self._offsets = torch.arange(depth + 1, device=parameter.device)
        self._mask = MaskTable(
            self._offsets[:, None] >= self._offsets, self._offsets, layer.window, parameter.dtype
        )

    def prefill(self, states: Tensor, first: int) -> Tensor:
        """Read the prompts of the rows from `first` on, [B, T, d] -> [B, T, d]."""
        return _read_prompts(self._layer, states, self._cache, first)

    def append(self, states: Tensor, starts: Tensor, key_length: int) -> Tensor:
        """Read D + 1 positions from `starts` on, [B, D + 1, d] -> [B, D + 1, d]."""
        slots = starts[:, None] + self._offsets
        cache = slot_cache(self._cache.storage(key_length), slots, key_length)
        positions = slots.clamp(max=self._max_position)
        return self._layer.run_slots(states, positions, self._mask.at(starts, key_length), cache)


def _read_prompts(
    layer: DraftLayer | Eagle3Layer, states: Tensor, cache: StaticCache, first: int
) -> Tensor:
    """Run a layer over prompts, [B, T, d] -> [B, T, d], of the rows from `first` on."""
    positions = torch.arange(states.shape[1], device=states.device).expand(len(states), -1)
    return layer.extend(states, positions, cache.prompt_cache(first, len(states)))


class _Hydra(FixedShapeDraft):
    def __init__(
        self, draft: HydraDraft, backbone: Backbone, tree: Tree, cache: StaticCache
    ) -> None:
        super().__init__(draft, backbone, tree, cache)
        self._draft = draft
        self._prefix: _LayerSteps | None = None
        if draft.prefix is not None:
            self._prefix = _LayerSteps(
                draft.prefix, self._add_cache(), tree.max_depth, self._max_position
            )

    def start(self, feats: Features, tokens: Tensor, first: int) -> None:
        if self._prefix is not None:
            self._prefix.prefill(feats.hidden, first)

    def propose(self, accepted: AcceptedNodes, roots: Tensor, nodes: SlotPass) -> Proposal:
        states = accepted.along_path(accepted.feats.hidden)
        if self._prefix is not None:
            states = self._prefix.append(states, accepted.starts, nodes.key_length)
        return self._draft.propose(HydraState(accepted.last(states), None), roots, self.tree)


class _Amphista(FixedShapeDraft):
    def __init__(
        self, draft: AmphistaDraft, backbone: Backbone, tree: Tree, cache: StaticCache
    ) -> None:
        super().__init__(draft, backbone, tree, cache)
        self._draft, self._stacked = draft, draft.stacked()
        self._layers = [
            _LayerSteps(layer, self._add_cache(), tree.max_depth, self._max_position)
            for layer in draft.layers
            if isinstance(layer, DraftLayer)
        ]

    def start(self, feats: Features, tokens: Tensor, first: int) -> None:
        following = tokens.roll(-1, dims=1)  # the last position is read again with the root
        self._draft.stages(feats.hidden, following, lambda i, x: self._layers[i].prefill(x, first))

    def propose(self, accepted: AcceptedNodes, roots: Tensor, nodes: SlotPass) -> Proposal:
        following = accepted.following(roots)

        def append(i: int, x: Tensor) -> Tensor:
            return self._layers[i].append(x, accepted.starts, nodes.key_length)

        stages = self._draft.stages(accepted.along_path(accepted.feats.hidden), following, append)
        return self._draft.propose_from(
            [accepted.last(stage) for stage in stages], self._stacked, roots, self.tree
        )


class _Kangaroo(FixedShapeDraft):
    """The first layers and the adapter, level by level; no early exit, for which the host would
    wait at every level.
    """

    def __init__(
        self, draft: KangarooDraft, backbone: Backbone, tree: Tree, cache: StaticCache
    ) -> None:
        super().__init__(draft, backbone, tree, cache)
        self._draft = draft
        self._adapter_cache = self._add_cache()
        self._read = self._levels.inner_nodes
        self._columns = torch.tensor(self._levels.columns, device=backbone.device).clamp(min=0)
        self._offsets = torch.arange(self._read.size + 1, device=backbone.device)
        dtype = next(draft.adapter.parameters()).dtype
        self._mask = MaskTable(self._read.ancestors, self._read.depths, draft.adapter.window, dtype)

    def start(self, feats: Features, tokens: Tensor, first: int) -> None:
        assert feats.early is not None
        _read_prompts(
            self._draft.adapter, self._draft.cast(feats.early), self._adapter_cache, first
        )

    def propose(self, accepted: AcceptedNodes, roots: Tensor, nodes: SlotPass) -> Proposal:
        draft, inputs = self._draft, self._draft.split.with_masks(nodes.positions, nodes.masks)
        assert accepted.feats.early is not None
        storage = self._adapter_cache.storage(nodes.key_length)
        move_columns(storage, accepted.starts, self._columns[accepted.path])
        before = accepted.last(accepted.along_path(accepted.feats.early))[:, None]
        starts = accepted.lengths[:, None] - 1
        slots, positions = (
            starts + self._offsets,
            (starts + self._read.depths).clamp(max=self._max_position),
        )
        adapter = draft.runner.inputs(
            positions, self._mask.at(accepted.lengths - 1, nodes.key_length)
        )

        def run_first(tokens: Tensor, first: int, last: int) -> Tensor:
            return draft.split.run_first(tokens, inputs.rows(first, last), nodes.cache(first, last))

        def run_adapter(states: Tensor, first: int, last: int) -> Tensor:
            cache = slot_cache(storage, slots[:, first:last], nodes.key_length)
            return draft.runner.run(states, range(1), adapter.rows(first, last), cache)

        return draft.fill(before, roots, self.tree, run_first, run_adapter)


class _Eagle3(FixedShapeDraft):
    """The layer over the accepted path, then over the inner nodes of each level."""

    def __init__(
        self, draft: Eagle3Draft, backbone: Backbone, tree: Tree, cache: StaticCache
    ) -> None:
        super().__init__(draft, backbone, tree, cache)
        self._draft = draft
        self._cache = self._add_cache()
        self._steps = _LayerSteps(draft.midlayer, self._cache, tree.max_depth, self._max_position)
        inner = self._levels.inner[1:]  # the path ends with the root
        self._depths = tree.depths[inner] - 1
        self._offsets = torch.arange(len(inner), device=inner.device)
        dtype = next(draft.midlayer.parameters()).dtype
        self._mask = MaskTable(tree.ancestors[inner][:, inner], self._depths, None, dtype)

    def start(self, feats: Features, tokens: Tensor, first: int) -> None:
        following = tokens.roll(-1, dims=1)  # the last position is read again with the root
        self._steps.prefill(self._draft.join(following, self._draft.inputs(feats)), first)

    def propose(self, accepted: AcceptedNodes, roots: Tensor, nodes: SlotPass) -> Proposal:
        states = self._draft.join(
            accepted.following(roots), accepted.along_path(self._draft.inputs(accepted.feats))
        )
        states = accepted.last(self._steps.append(states, accepted.starts, nodes.key_length))
        mask = self._mask.at(accepted.lengths, nodes.key_length)
        slots, positions = (
            accepted.lengths[:, None] + self._offsets,
            accepted.lengths[:, None] + self._depths,
        )

        def run(states: Tensor, depth: int, first: int, last: int) -> Tensor:
            cache = slot_cache(
                self._cache.storage(nodes.key_length), slots[:, first:last], nodes.key_length
            )
            clamped = positions[:, first:last].clamp(max=self._max_position)
            return self._draft.midlayer.run_slots(states, clamped, mask[:, :, first:last], cache)

        return self._draft.fill(states, roots, self.tree, run)


_FIXED_SHAPES: dict[type[Proposer], type[FixedShapeDraft]] = {
    MedusaDraft: _Medusa,
    HydraDraft: _Hydra,
    AmphistaDraft: _Amphista,
    KangarooDraft: _Kangaroo,
    Eagle3Draft: _Eagle3,
}


def has_fixed_shape(draft: Proposer | None) -> bool:
    """Return whether a draft fills the tree that it is given, instead of choosing the shape itself."""
    chooses = isinstance(draft, Eagle3Draft) and draft.dynamic is not None
    return isinstance(draft, tuple(_FIXED_SHAPES)) and not chooses


def fixed_shape_draft(
    draft: Proposer, backbone: Backbone, tree: Tree, cache: StaticCache
) -> FixedShapeDraft:
    """Return what drafts `tree` in steps of fixed shape."""
    fixed = next(fixed for kind, fixed in _FIXED_SHAPES.items() if isinstance(draft, kind))
    return fixed(draft, backbone, tree, cache)
