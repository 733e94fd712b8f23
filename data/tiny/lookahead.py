"""An auxiliary loss of the tiny backbone's training: from one place, predict tokens beyond the next one too.

Multi-token prediction (Gloeckle et al. 2024, "Better & Faster Large Language Models via Multi-token Prediction";
DeepSeek-V3, section 2.2): a model whose hidden states look ahead is an easier subject for draft heads, as today's large
models are that were trained so. The blocks here are thrown away with the training run; nothing of them is in the model.
Knows nothing of chats, optimizers or schedules.
"""

from __future__ import annotations

from random import Random

import torch
from torch import Tensor, nn
from torch.nn import functional as F

AHEAD = 4  # block k predicts the token k + 1 places on
DECAY = 0.8  # of a block's weight with each place further ahead
DRAWN = 2  # blocks trained per micro-batch; their weight makes up for the others


class Lookahead(nn.Module):
    """Block k: h + SiLU(W_k h + b_k), read by the model's own unembedding; W and b start at zero."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(AHEAD))
        for block in self.blocks:
            nn.init.zeros_(block.weight)
            nn.init.zeros_(block.bias)

    def losses(self, hidden: Tensor, unembed: nn.Module, ids: Tensor, weights: Tensor, rng: Random) -> Tensor:
        """Sum over `DRAWN` blocks of DECAY**k x their weighted cross-entropy, unbiased for all `AHEAD` blocks.

        `hidden` is [B, T-1, d], where row t predicts ids[:, t + 1]; `weights` [B, T-1] is that next token's weight, and
        a block's loss at t is weighted by the weight of the token that it predicts.
        """
        total = hidden.new_zeros((), dtype=torch.float32)
        for ahead in rng.sample(range(1, AHEAD + 1), DRAWN):
            if ids.shape[1] <= ahead + 1:
                continue
            block = self.blocks[ahead - 1]
            seen = hidden[:, :-ahead]
            logits = unembed(seen + F.silu(block(seen))).float()
            losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1 + ahead :].flatten(), reduction="none")
            total = total + DECAY**ahead * (losses * weights[:, ahead:].flatten()).sum()
        return total * (AHEAD / DRAWN)
