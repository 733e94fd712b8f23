"""Grouped-query attention with a mask, without copying keys and values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from medusa_train.models.hf_config import key_value_heads
from medusa_train.rounding import ceil_div, round_up

#: Name under which `folded_head_forward` is registered with transformers.
FOLDED_HEADS = "sdpa_folded_heads"

#: On a CPU, attention in bfloat16 is computed as two matrix products if the batch has at least this
#: many rows, and at most this many queries per key head. torch's fused kernel calls a small product
#: for each row and head, which takes twice as long in a batch of 32 with one query. With fewer rows
#: or more queries it is faster.
_PRODUCT_ROWS, _PRODUCT_QUERIES = 8, 32

#: On a GPU, attention is computed as two matrix products if there are at most this many rows of
#: scores, and torch's memory-efficient kernel would leave a quarter of the multiprocessors idle (it
#: runs one block per head and `_BLOCK_QUERIES` queries).
_GPU_SCORE_ROWS, _BLOCK_QUERIES = 2500, 64
_GPU_SCORES = 2**26  # most scores of these products: 256 MB in float32, held twice

# score of keys that a bool mask hides. In transformers' `generate`, padding may attend to nothing:
# with -inf its softmax would be NaN
_HIDDEN = torch.finfo(torch.bfloat16).min

# torch's memory-efficient kernel on a GPU copies a mask whose rows don't start at multiples of this
# many numbers
_MASK_ALIGNMENT = 8


def use_folded_heads(model: Any) -> str:
    """Switch a model from "sdpa" to `folded_head_forward` if that is faster; return the name of its
    attention implementation.

    It is faster with grouped query heads, and in 16 bits.
    """
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    grouped = key_value_heads(config) != heads
    if config._attn_implementation == "sdpa" and (
        grouped or model.dtype in (torch.bfloat16, torch.float16)
    ):
        AttentionInterface.register(FOLDED_HEADS, folded_head_forward)
        AttentionMaskInterface.register(FOLDED_HEADS, sdpa_mask)
        model.set_attn_implementation(FOLDED_HEADS)
    return str(config._attn_implementation)


def folded_head_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention in transformers' interface: query [B, H, q, d], key and value [B, H_kv, S,
    d] -> [B, q, H, d].

    Decoding passes use `folded_head_attention`; all other passes (prompts, training, a mask per
    head) use transformers' "sdpa".
    """
    unsupported = any(
        kwargs.get(name) is not None for name in ("position_bias", "softcap", "cache")
    )
    if unsupported or not _is_decoding(query, key, attention_mask, dropout):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    out = folded_head_attention(query, key, value, attention_mask, scaling)
    return out.transpose(1, 2).contiguous(), None


def folded_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Compute grouped-query attention, [B, H, q, d] -> [B, H, q, d_v].

        query   H = 6 heads, q rows each     ->   H_kv = 2 heads, 3 q rows each
        mask    q rows                       ->   the same q rows, 3 times

    The query heads that share a key head become rows of one product. With a mask, transformers'
    "sdpa" copies keys and values for each query head, because torch's masked GPU kernels do not
    support groups (`enable_gqa` falls back to the kernel that stores all scores). Here only the q
    rows of the mask are copied.

    Args:
        query: [B, H, q, d].
        key: [B, H_kv, S, d].
        value: [B, H_kv, S, d_v].
        mask: additive or bool, [1 or B, 1, q, S]; None: every query attends to every key.
        scaling: factor on the scores; by default 1 / sqrt(d).
        dropout: dropout probability of the attention weights.
    """
    # 1. the query heads of a key head as rows of one product
    kv_heads = key.shape[1]
    q = query.shape[2]
    groups = query.shape[1] // kv_heads
    folded = query.reshape(len(query), kv_heads, groups * q, query.shape[3])
    rows = folded.shape[2]
    # 2. two matrix products, if they are faster
    if not dropout and _use_products(folded, key, mask):
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        if query.is_cuda and mask is not None:
            out = _attention_in_float32(folded, key, value, mask, scale)
        else:
            out = _attention_by_products(folded, key, value, mask, scale)
        return out.reshape(*query.shape[:3], value.shape[3])
    # 3. or torch's kernel. In bfloat16 on a CPU it is slower for one row than for two
    bfloat16_on_cpu = query.dtype == torch.bfloat16 and query.device.type == "cpu"
    if rows == 1 and bfloat16_on_cpu:
        folded = folded.expand(-1, -1, 2, -1)
    if mask is not None and q == 1:
        mask = mask.expand(-1, -1, folded.shape[2], -1)
    elif mask is not None:
        mask = _repeat_rows(mask, groups)
    out = scaled_dot_product_attention(
        folded, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling
    )
    return out[:, :, :rows].reshape(*query.shape[:3], value.shape[3])


def _use_products(folded: Tensor, key: Tensor, mask: Tensor | None) -> bool:
    """Return whether two matrix products are faster than torch's kernel."""
    if folded.device.type == "cpu":
        return _use_products_on_cpu(folded)
    return _use_products_on_gpu(folded, key, mask)


def _use_products_on_cpu(folded: Tensor) -> bool:
    """Return whether two matrix products are faster on a CPU. Under torch.compile one program
    serves all batches, so the answer does not depend on their size.
    """
    batch, _, rows, _ = folded.shape
    if folded.dtype != torch.bfloat16:
        return False
    if torch.compiler.is_compiling():
        return batch > 1
    return batch >= _PRODUCT_ROWS and rows <= _PRODUCT_QUERIES


def _use_products_on_gpu(folded: Tensor, key: Tensor, mask: Tensor | None) -> bool:
    """Return whether two matrix products are faster on a GPU: on NVIDIA's, with a mask, in 16 bits,
    for few scores.

    Compiled passes keep torch's kernel: the traced products had not compiled after two minutes.
    """
    if not folded.is_cuda or not torch.version.cuda:
        return False
    if mask is None or folded.element_size() != 2:
        return False
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return False
    batch, kv_heads, rows, _ = folded.shape
    score_rows = batch * kv_heads * rows
    if score_rows > _GPU_SCORE_ROWS or score_rows * key.shape[2] > _GPU_SCORES:
        return False
    blocks = batch * kv_heads * ceil_div(rows, _BLOCK_QUERIES)
    processors = torch.cuda.get_device_properties(folded.device).multi_processor_count
    return blocks <= 3 * processors // 4


def _attention_by_products(
    folded: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """Compute attention of folded queries [B, H_kv, G q, d] as two matrix products, one for all
    scores and one for all values.

    Scores are rounded to the dtype of the queries, as in transformers' "eager" attention. They are
    computed as K Q^T, because oneDNN would transpose all keys for Q K^T.
    """
    queries = (folded * scale).transpose(2, 3).contiguous()  # [B, H_kv, d, G q]
    scores = torch.matmul(key, queries).transpose(2, 3).contiguous()  # [B, H_kv, G q, S]
    if mask is not None:
        scores_by_head = scores.unflatten(2, (-1, mask.shape[2]))
        if mask.dtype == torch.bool:
            scores_by_head.masked_fill_(~mask[:, :, None], _HIDDEN)
        else:
            scores_by_head.add_(mask[:, :, None])
    return torch.matmul(scores.softmax(-1), value)


def _attention_in_float32(
    folded: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float
) -> Tensor:
    """Compute attention of folded queries on a GPU as two matrix products, with scores in float32
    as in torch's kernels.
    """
    queries = folded.flatten(0, 1)  # [B H_kv, G q, d]
    keys = key.flatten(0, 1).transpose(1, 2)  # [B H_kv, d, S]
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=torch.float32).masked_fill_(~mask, _HIDDEN)
    scores = torch.bmm(queries, keys, out_dtype=torch.float32)
    scores = scores.view(*folded.shape[:2], -1, *mask.shape[2:])  # [B, H_kv, G, q, S]
    scores = torch.add(mask[:, :, None], scores, alpha=scale).flatten(2, 3)
    weights = scores.softmax(-1).to(value.dtype)
    return torch.bmm(weights.flatten(0, 1), value.flatten(0, 1)).unflatten(0, folded.shape[:2])


def _repeat_rows(mask: Tensor, times: int) -> Tensor:
    """Repeat the rows of a mask [B, 1, q, S], -> [B, 1, times * q, S].

    On a GPU the rows of the result are aligned in memory; otherwise torch would copy it again.
    """
    if times == 1:
        return mask
    batch, _, q, keys = mask.shape
    width = keys
    if mask.device.type != "cpu":
        width = round_up(keys, _MASK_ALIGNMENT)
    repeated = mask.new_empty(batch, times, q, width)[..., :keys]
    return repeated.copy_(mask.expand(-1, times, -1, -1)).flatten(1, 2)[:, None]


def _is_decoding(query: Tensor, key: Tensor, mask: Tensor | None, dropout: float) -> bool:
    """Return whether there are no gradients, no dropout, and few queries: with one mask for all
    heads, or a single query without a mask.

    The mask of a prefill with a sliding window has as many queries as keys: repeating it would take
    more memory than copying the keys.
    """
    if torch.is_grad_enabled() or dropout:
        return False
    q = query.shape[2]
    if mask is None:
        return q == 1
    if mask.shape[1] != 1:
        return False
    return q == 1 or q < key.shape[2]
