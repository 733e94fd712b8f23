"""The attention of an EAGLE-3 layer in training, where it reads its own outputs of earlier steps."""

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

#: Positions that a later step computes at a time.
BLOCK = 256


class TrainingAttention:
    """What each position attends to in training (EAGLE-3, Draft Model Training).

    In decoding, a position reads the target model's states up to there and its own draft tokens so
    far. In training, step k drafts token k of all T positions at once, so position t reads the
    keys of step 1 up to t, and of the later steps only its own:

                        keys of step 1    of step 2    of step 3
        position 0      x . .             x . .        x . .
        position 1      x x .             . x .        . x .        T = 3, in step 3
        position 2      x x x             . . x        . . x

    The object belongs to one pass over a batch: it is called once for each step, in order, and
    keeps the keys and values of all steps.

    In the later steps most keys are masked for most positions. The positions are therefore computed
    in blocks, with keys of step 1 up to the block's end, and of later steps of the block alone:
    about half of step 1's products. Blocks are computed again in the backward pass, since each
    would keep a copy of these keys.

    Args:
        mask: of step 1, additive [B, 1, T, T]; None: causal.
    """

    def __init__(self, mask: Tensor | None) -> None:
        self._mask = mask
        self._keys: list[Tensor] = []  # of each step, [B, heads, T, head_dim]
        self._values: list[Tensor] = []

    def __call__(
        self, attention: LlamaAttention | Qwen3Attention, x: Tensor, angles: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Attend in the next step, [B, T, 2 d] -> [B, T, d].

        Args:
            attention: whose weights are used. angles: cosines and sines of rotary positions.
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

        # 2. they join those of the steps before: [B, heads, T, head_dim]
        groups = attention.num_key_value_groups
        self._keys.append(repeat_kv(key, groups))
        self._values.append(repeat_kv(value, groups))

        # 3. attend: in step 1 as any causal layer, then block by block
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
        """Attend from the positions start .. start + q - 1, in a step after the first.

        Args:
            query: [B, heads, q, head_dim]. keys, values: of each step, [B, heads, T, head_dim].

        Returns: [B, heads, q, head_dim].
        """
        size = query.shape[2]  # q
        end = start + size
        later_steps = len(keys) - 1
        # 1. step 1 up to the block's end, then the block of each later step
        key = _joined(keys, start, end)  # [B, heads, end + later_steps * q, head_dim]
        value = _joined(values, start, end)
        # 2. of step 1 all positions up to the query's own
        if self._mask is None:
            ones = torch.ones(size, end, dtype=torch.bool, device=query.device)
            first_mask = additive_mask(ones.tril(start), query.dtype)[None, None]  # [1, 1, q, end]
        else:
            first_mask = self._mask[:, :, start:end, :end]  # [B, 1, q, end]
        # 3. of each later step the query's own position
        diagonal = torch.eye(size, dtype=torch.bool, device=query.device)
        own_mask = additive_mask(diagonal, query.dtype).repeat(1, later_steps)
        own_mask = own_mask.expand(len(first_mask), 1, -1, -1)  # [1 or B, 1, q, later_steps * q]
        mask = torch.cat([first_mask, own_mask], dim=3)
        return _attend(attention, query, key, value, mask)


def _joined(of_steps: tuple[Tensor, ...], start: int, end: int) -> Tensor:
    """Keys or values that the block start .. end - 1 reads: of the first step all before its end,
    of the others the block's own.
    """
    parts = [of_steps[0][:, :, :end]]
    parts += [later[:, :, start:end] for later in of_steps[1:]]
    return torch.cat(parts, dim=2)


def _attend(
    attention: LlamaAttention | Qwen3Attention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
) -> Tensor:
    """Attention of [B, heads, q, head_dim]; causal without a mask."""
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=attention.scaling
    )
