"""What the kernels of `split_attention` compute, in plain torch: for tests of whole models, in which
Triton's interpreter would take many minutes.
"""

import torch
from torch import Tensor

HIDDEN = float("-inf")
#: Keys of a split: few, so that short texts have several.
PER_SPLIT = 8


def split_in_torch(
    folded: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scale: float,
    per_split: int = PER_SPLIT,
) -> Tensor:
    """Compute attention of folded queries, [B, H, M, d] -> [B, H, M, d], split by split.

    Letters and arguments as in `models.split_attention`.
    """
    batch, _, rows, _ = folded.shape
    groups = rows // mask.shape[2]
    seen = mask.expand(batch, -1, -1, -1).repeat(1, 1, groups, 1)  # [B, 1, M, S]
    wide = torch.float64 if folded.dtype == torch.float64 else torch.float32
    tops, totals, parts = [], [], []
    for start in range(0, key.shape[2], per_split):
        columns = slice(start, start + per_split)
        # 1. scores, and the largest of each query
        products = folded.to(wide) @ key[:, :, columns].to(wide).transpose(2, 3)
        scores = products * scale + seen[..., columns].to(wide)  # [B, H, M, per_split]
        top = scores.amax(-1)  # [B, H, M]
        # 2. weights relative to it; where nothing is visible, -inf minus -inf would be NaN
        base = top.masked_fill(top == HIDDEN, 0.0)
        weights = (scores - base[..., None]).exp()
        tops.append(top)
        totals.append(weights.sum(-1))
        values = value[:, :, columns]
        parts.append(weights.to(values.dtype).to(wide) @ values.to(wide))  # [B, H, M, d]
    # 3. the merge
    highest = torch.stack(tops).amax(0)
    highest = highest.masked_fill(highest == HIDDEN, 0.0)
    shares = [(top - highest).exp() for top in tops]  # 0: a split in which nothing is visible
    weight = sum(total * share for total, share in zip(totals, shares, strict=True))
    merged = sum(part * share[..., None] for part, share in zip(parts, shares, strict=True))
    weight = torch.as_tensor(weight)
    return (merged / weight.masked_fill(weight == 0, 1.0)[..., None]).to(folded.dtype)


class CountedSplits:
    """Takes the kernel's place, and counts calls and the splits of the longest."""

    def __init__(self) -> None:
        self.calls = 0
        self.most_splits = 0

    def __call__(
        self, folded: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float
    ) -> Tensor:
        self.calls += 1
        self.most_splits = max(self.most_splits, -(-key.shape[2] // PER_SPLIT))
        return split_in_torch(folded, key, value, mask, scale)
