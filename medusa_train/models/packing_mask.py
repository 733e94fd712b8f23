"""Which positions of a packed row may see which; knows no model and no batch."""

from __future__ import annotations

import torch
from torch import Tensor


def packing_mask(segments: Tensor, dtype: torch.dtype) -> Tensor | None:
    """A block-diagonal causal mask: each position sees itself and the earlier ones of its own document.

        segments   0 0 1 1 -       sees  x
                                         x x
                                         . . x
                                         . . x x
                                         . . . . x

    Stock models make such masks from restarting position ids only under conditions that differ between versions,
    and otherwise let documents leak into each other without a word. Padding forms a document of its own, so that no
    position sees nothing at all (a softmax over nothing is NaN). Sliding windows are laid over it by `Backbone.run`:
    within a document positions differ as in a row of its own, and between documents nothing is seen anyway.

    Args:
        segments: [B, T], the document within the row, contiguous; -1: padding.
        dtype: of the backbone. Additive, as attention in transformers' "eager" form takes bool masks for numbers.

    Returns:
        [B, 1, T, T], 0 where seen, else -inf; or None where no row holds two documents, for which the model's own
        causal mask does, and is faster.
    """
    if int(segments.max()) <= 0:
        return None
    length = segments.shape[1]
    seen = segments[:, :, None] == segments[:, None, :]
    seen &= torch.ones(length, length, dtype=torch.bool, device=segments.device).tril()
    mask = torch.zeros(seen.shape, dtype=dtype, device=segments.device)
    return mask.masked_fill_(~seen, float("-inf"))[:, None]
