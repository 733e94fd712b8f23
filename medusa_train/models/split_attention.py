"""Attention of few queries over many keys on a GPU, split over the keys, as a Triton kernel.

    split 0 | split 1 | split 2      a program reads the keys of one split, and keeps for each query the
    keys ------------------->        largest score, the sum of weights and the weighted sum of values
            merge                    a second kernel merges the splits by their largest scores

A step has too few queries to fill a GPU by queries alone (Flash-Decoding, Dao et al. 2023). torch's
kernels either do not split the keys or take no mask of a tree; products write and read all scores.

Letters: B rows, H key heads, G query heads that share one, n queries of a mask, M = G n folded queries, S
keys, d the size of a head.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from medusa_train.models.rounding import ceil_div

#: Most queries of a mask: a pass over more of them fills the GPU without splits.
MOST_QUERIES = 128
#: Sizes of a head: powers of two, by which the kernel's tiles are built.
HEAD_SIZES = (16, 32, 64, 128, 256)
#: Bytes of a number: products of float32 would take many times as long.
ITEM_SIZES = (2,)

# programs that are started for each multiprocessor: two run at a time
_PROGRAMS_PER_PROCESSOR = 2
_MOST_SPLITS = 32
# of a program: folded queries at most, and keys that are read at a time
_MOST_ROWS = 64
_KEYS = 64
_LARGE_HEAD, _KEYS_OF_LARGE_HEAD = 256, 32
#: Of a program. With three stages the largest tiles take 139 kB of shared memory on an H100, with two
# 102, of which two fit a multiprocessor.
STAGES, WARPS = 2, 4


@triton.jit(do_not_specialize=["rows", "queries", "splits"])
def _attend(
    query,
    key,
    value,
    mask,
    parts,
    tops,
    totals,
    scale,
    rows,
    queries,
    keys,
    kv_heads,
    per_split,
    splits,
    query_batch,
    query_head,
    query_row,
    key_batch,
    key_head,
    key_column,
    value_batch,
    value_head,
    value_column,
    mask_batch,
    mask_row,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Attend from `ROWS` folded queries of a head to the keys of one split."""
    block = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)  # of all rows of the batch
    split = tl.program_id(2)
    batch = head // kv_heads
    kv_head = head % kv_heads
    row = block * ROWS + tl.arange(0, ROWS)
    dim = tl.arange(0, DIM)
    is_row = row < rows

    # 1. the queries [ROWS, d]
    at = query + batch * query_batch + kv_head * query_head
    q = tl.load(at + row[:, None] * query_row + dim[None, :], mask=is_row[:, None], other=0.0)
    seen = mask + batch * mask_batch + (row % queries)[:, None] * mask_row

    # 2. the keys of this split, some at a time; never one behind `keys`, where memory may hold NaN
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    summed = tl.zeros([ROWS, DIM], tl.float32)
    key += batch * key_batch + kv_head * key_head
    value += batch * value_batch + kv_head * value_head
    for start in range(0, per_split, KEYS):
        column = split * per_split + start + tl.arange(0, KEYS)
        is_key = column < keys
        offset = column.to(tl.int64)
        k = tl.load(
            key + offset[None, :] * key_column + dim[:, None], mask=is_key[None, :], other=0.0
        )  # [d, KEYS]
        added = tl.load(seen + column[None, :], mask=is_key[None, :], other=float("-inf"))
        scores = tl.dot(q, k, input_precision="ieee") * scale + added.to(tl.float32)
        highest = tl.maximum(top, tl.max(scores, 1))
        # where nothing was visible so far, -inf minus -inf would be NaN
        base = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp(scores - base[:, None])  # [ROWS, KEYS]
        shrink = tl.exp(top - base)
        total = total * shrink + tl.sum(weights, 1)
        v = tl.load(
            value + offset[:, None] * value_column + dim[None, :], mask=is_key[:, None], other=0.0
        )  # [KEYS, d]
        summed = summed * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = highest

    # 3. what the merge reads
    place = (head * rows + row) * splits + split
    tl.store(parts + place[:, None] * DIM + dim[None, :], summed, mask=is_row[:, None])
    tl.store(tops + place, top, mask=is_row)
    tl.store(totals + place, total, mask=is_row)


@triton.jit(do_not_specialize=["splits"])
def _merge(parts, tops, totals, out, splits, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Merge the splits of one folded query."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, WIDTH)
    dim = tl.arange(0, DIM)
    is_split = split < splits
    place = row * splits + split
    top = tl.load(tops + place, mask=is_split, other=float("-inf"))
    total = tl.load(totals + place, mask=is_split, other=0.0)
    part = tl.load(
        parts + place[:, None] * DIM + dim[None, :], mask=is_split[:, None], other=0.0
    )  # [WIDTH, d]
    highest = tl.max(top, 0)
    share = tl.exp(top - tl.where(highest == float("-inf"), 0.0, highest))  # 0: a split unseen
    weight = tl.sum(total * share, 0)
    merged = tl.sum(part * share[:, None], 0) / tl.where(weight == 0.0, 1.0, weight)
    tl.store(out + row * DIM + dim, merged.to(out.dtype.element_ty))


def can_split(folded: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Return whether `split_attention` computes this pass: few queries with an additive mask, in 16
    bits.
    """
    if mask is None or not mask.is_floating_point() or mask.shape[1] != 1:
        return False
    dims = (folded.shape[3], key.shape[3], value.shape[3])
    inner = (key.stride(3), value.stride(3), mask.stride(3))
    return (
        folded.element_size() in ITEM_SIZES
        and mask.shape[2] <= MOST_QUERIES
        and dims[0] in HEAD_SIZES
        and len(set(dims)) == 1
        and set(inner) == {1}
    )


@torch.library.custom_op("medusa_train::split_attention", mutates_args=())
def split_attention(
    folded: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float
) -> Tensor:
    """Compute attention of folded queries, [B, H, M, d] -> [B, H, M, d].

    torch.compile takes it as one operation, which reads a part of the cache in place.

    Args:
        key, value: [B, H, S, d]. mask: additive, [1 or B, 1, n, S], M a multiple of n.
        scale: of the scores.
    """
    batch, heads, rows, dim = folded.shape
    keys = key.shape[2]
    if folded.stride(3) != 1:
        folded = folded.contiguous()
    mask = mask.expand(batch, -1, -1, -1)

    # 1. the tiles of a program
    block_rows, block_keys = block_sizes(rows, dim)
    blocks = triton.cdiv(rows, block_rows)

    # 2. as many splits as fill the GPU, of at least two tiles of keys
    programs = _PROGRAMS_PER_PROCESSOR * _processors(folded.device)
    per_split, splits = split_sizes(keys, programs // (batch * heads * blocks), block_keys)

    # 3. both kernels
    places = batch * heads * rows * splits
    parts = folded.new_empty(places, dim, dtype=torch.float32)
    tops = folded.new_empty(places, dtype=torch.float32)
    totals = torch.empty_like(tops)
    out = torch.empty_like(folded, memory_format=torch.contiguous_format)
    _attend[(blocks, batch * heads, splits)](
        folded,
        key,
        value,
        mask,
        parts,
        tops,
        totals,
        scale,
        rows,
        mask.shape[2],
        keys,
        heads,
        per_split,
        splits,
        *folded.stride()[:3],
        *key.stride()[:3],
        *value.stride()[:3],
        mask.stride(0),
        mask.stride(2),
        ROWS=block_rows,
        KEYS=block_keys,
        DIM=dim,
        num_warps=WARPS,
        num_stages=STAGES,
    )
    width = triton.next_power_of_2(splits)
    _merge[(batch * heads * rows,)](
        parts, tops, totals, out, splits, DIM=dim, WIDTH=width, num_warps=merge_warps(dim, width)
    )
    return out


@split_attention.register_fake
def _(folded: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    return torch.empty_like(folded, memory_format=torch.contiguous_format)


def split_sizes(keys: int, most: int, tile: int) -> tuple[int, int]:
    """Return the keys of a split, which are whole tiles, and how many splits there are.

    Args:
        most: splits that fill the GPU.
        tile: keys that are read at a time.
    """
    splits = min(most, ceil_div(keys, 2 * tile), _MOST_SPLITS)
    tiles = ceil_div(keys, max(1, splits) * tile)
    per_split = tiles * tile
    return per_split, ceil_div(keys, per_split)


def merge_warps(dim: int, width: int) -> int:
    """Return the warps of a merge: one holds 4,096 numbers in its registers."""
    return max(1, dim * width // 4096)


def block_sizes(rows: int, dim: int) -> tuple[int, int]:
    """Return how many of `rows` folded queries a program takes, and keys at a time."""
    keys = _KEYS_OF_LARGE_HEAD if dim >= _LARGE_HEAD else _KEYS
    return min(_MOST_ROWS, max(16, triton.next_power_of_2(rows))), keys


@cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 132  # of an H100: Triton's interpreter runs on a CPU
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
