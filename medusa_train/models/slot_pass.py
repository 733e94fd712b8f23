"""A pass over the nodes of a tree in which all shapes and addresses are fixed: what a CUDA graph captures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from medusa_train.models.backbone import Backbone
from medusa_train.models.features import PLAIN, Features, FeatureSpec
from medusa_train.trees.static_cache import SlotCache


@dataclass(frozen=True)
class SlotPass:
    """Inputs of a pass over n + 1 nodes of B rows, apart from their tokens.

    Attributes:
        positions: position ids, long [B, n + 1].
        masks: by layer type, sliding windows applied, additive [B, 1, n + 1, key_length].
        slots: columns of the cache that the nodes are written to, long [B, n + 1].
        storage: of the backbone's cache, [layers, 2, rows, kv_heads, columns, head_dim] with columns > key_length, of
            which the first B rows are used.
        key_length: number of columns that attention reads.
    """

    positions: Tensor
    masks: Mapping[str, Tensor]
    slots: Tensor
    storage: Tensor
    key_length: int

    def cache(self, first: int = 0, last: int | None = None) -> SlotCache:
        """Return the cache for a pass over the nodes first .. last - 1."""
        return slot_cache(self.storage, self.slots[:, first:last], self.key_length)


def slot_cache(storage: Tensor, slots: Tensor, key_length: int) -> SlotCache:
    """Return a cache that writes to `slots`, long [B, q], of the first B rows of a storage, see `SlotPass`."""
    return SlotCache(storage.unbind(), slots[0] if storage.shape[2] == 1 else slots, key_length)


def run_slots(
    backbone: Backbone, tokens: Tensor, nodes: SlotPass, need: FeatureSpec = PLAIN, early: Tensor | None = None
) -> tuple[Features, Tensor]:
    """Return features and logits [B, n + 1, V] of `tokens`, long [B, n + 1]; see `Backbone.run`.

    Args:
        need: which hidden states to return.
        early: [B, n + 1, d], states after the layers of `need`, whose keys and values are written already.
    """
    if early is not None:
        split = backbone.split_at(*need.early)
        feats = split.run_rest(early, split.with_masks(nodes.positions, nodes.masks), nodes.cache())
        return feats, backbone.logits(feats.hidden)
    same_everywhere = len(nodes.masks) == 1 or backbone.window is None
    mask = next(iter(nodes.masks.values()))
    compiled = backbone.compiled_for(need)
    if compiled is not None and same_everywhere and compiled.covers(*tokens.shape):
        slots, mask = (nodes.slots[0], mask) if len(tokens) == 1 else (nodes.slots, mask.contiguous())
        # a view of the inputs has strides that the program was not compiled for
        tokens = tokens.clone(memory_format=torch.contiguous_format)
        return compiled(tokens, nodes.positions, mask, slots, nodes.storage)
    with backbone.masked_attention(enabled=True), backbone.early_states(need) as captured:
        out = backbone.body(
            input_ids=tokens,
            attention_mask=mask if same_everywhere else dict(nodes.masks),
            position_ids=nodes.positions,
            past_key_values=nodes.cache(),
            use_cache=True,
        )
    early = torch.cat(captured, dim=-1) if captured else None
    return Features(out.last_hidden_state, early), backbone.logits(out.last_hidden_state)
