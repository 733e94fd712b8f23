"""The attention of an EAGLE-3 layer in training: it also attends to keys of earlier steps."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    apply_rotary_pos_emb,
    repeat_kv,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from medusa_train.trees.masks import additive_mask

#: Number of positions that steps after the first compute at a time.
BLOCK = 256


class TrainingAttention:
    """The attention of all steps in training (EAGLE-3, Draft Model Training).

    In decoding, a position attends to the target model's states up to itself and to its own draft
    tokens so far. In training, step k drafts token k of all T positions at once. So position t
    attends to the keys of step 1 up to t, and to only its own key of each later step:

                        keys of step 1    of step 2    of step 3
        position 0      x . .             x . .        x . .
        position 1      x x .             . x .        . x .        T = 3, in step 3
        position 2      x x x             . . x        . . x

    The object belongs to one pass over a batch: it is called once for each step, in order, and
    keeps the keys and values of all steps.

    In later steps, most keys are masked for most positions. So positions are computed in blocks,
    with the keys of step 1 up to the block's end, and the block's own keys of later steps. This
    needs about half of the products with step 1. The backward pass recomputes the blocks, since
    each would keep a copy of these keys.

    Args:
        mask: additive mask of step 1, [B, 1, T, T]; None: causal.
    """

    def __init__(self, mask: Tensor | None) -> None:
        self._mask = mask
        self._keys: list[Tensor] = []  # one per step, [B, heads, T, head_dim]
        self._values: list[Tensor] = []

    def __call__(
        self, attention: LlamaAttention | Qwen3Attention, x: Tensor, angles: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Attend in the next step, [B, T, 2 d] -> [B, T, d].

        Args:
            attention: module whose weights are used.
            x: inputs of all positions, [B, T, 2 d].
            angles: cosines and sines of rotary positions.
        """
        # 1. this step's queries, keys and values: [B, heads or kv_heads, T, head_dim]
        head_dim = attention.head_dim
        query = attention.q_proj(x).unflatten(-1, (-1, head_dim))  # [B, T, heads, head_dim]
        key = attention.k_proj(x).unflatten(-1, (-1, head_dim))
        if isinstance(attention, Qwen3Attention):
            query = attention.q_norm(query)
            key = attention.k_norm(key)
        query = query.transpose(1, 2)
        key = key.transpose(1, 2)
        value = attention.v_proj(x).unflatten(-1, (-1, head_dim)).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, *angles)

        # 2. append keys and values to those of the earlier steps: [B, heads, T, head_dim]
        groups = attention.num_key_value_groups
        self._keys.append(repeat_kv(key, groups))
        self._values.append(repeat_kv(value, groups))

        # 3. attend: step 1 like any causal layer, later steps block by block
        if len(self._keys) == 1:
            out = _attend(attention, query, self._keys[0], self._values[0], self._mask)
        else:
            keys = tuple(self._keys)
            values = tuple(self._values)
            blocks = []
            for index, block in enumerate(query.split(BLOCK, dim=2)):
                attended = checkpoint(
                    self._attend_block,
                    attention,
                    block,
                    index * BLOCK,
                    keys,
                    values,
                    use_reentrant=False,
                )
                blocks.append(attended)
            out = torch.cat(blocks, dim=2)  # [B, heads, T, head_dim]

        # 4. join the heads
        joined = out.transpose(1, 2).flatten(2)  # [B, T, heads * head_dim]
        projected: Tensor = attention.o_proj(joined)
        return projected

    def _attend_block(
        self,
        attention: LlamaAttention | Qwen3Attention,
        query: Tensor,
        start: int,
        keys: tuple[Tensor, ...],
        values: tuple[Tensor, ...],
    ) -> Tensor:
        """Compute attention for the positions start .. start + q - 1, in a step after the first.

        Args:
            attention: module whose scale is used.
            query: [B, heads, q, head_dim].
            start: first position of the block.
            keys, values: one per step, [B, heads, T, head_dim].

        Returns:
            [B, heads, q, head_dim].
        """
        size = query.shape[2]  # q
        end = start + size
        later_steps = len(keys) - 1
        # 1. keys of step 1 up to the block's end, then the block's keys of each later step
        key = _joined(keys, start, end)  # [B, heads, end + later_steps * q, head_dim]
        value = _joined(values, start, end)
        # 2. in step 1, a query attends to all positions up to its own
        if self._mask is None:
            ones = torch.ones(size, end, dtype=torch.bool, device=query.device)
            first_mask = additive_mask(ones.tril(start), query.dtype)[None, None]  # [1, 1, q, end]
        else:
            first_mask = self._mask[:, :, start:end, :end]  # [B, 1, q, end]
        # 3. in each later step, only to its own position
        diagonal = torch.eye(size, dtype=torch.bool, device=query.device)
        own_mask = additive_mask(diagonal, query.dtype).repeat(1, later_steps)
        own_mask = own_mask.expand(len(first_mask), 1, -1, -1)  # [1 or B, 1, q, later_steps * q]
        mask = torch.cat([first_mask, own_mask], dim=3)
        return _attend(attention, query, key, value, mask)


def _joined(by_step: tuple[Tensor, ...], start: int, end: int) -> Tensor:
    """Concatenate the keys or values that the block start .. end - 1 attends to: the first step's
    up to `end`, and the block's own of each later step.
    """
    parts = [by_step[0][:, :, :end]]
    parts += [later[:, :, start:end] for later in by_step[1:]]
    return torch.cat(parts, dim=2)


def _attend(
    attention: LlamaAttention | Qwen3Attention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
) -> Tensor:
    """Compute attention of queries [B, heads, q, head_dim]; causal without a mask."""
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=attention.scaling
    )
