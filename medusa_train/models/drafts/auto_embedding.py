"""Bidirectional attention among the vectors of K heads: each hears what the others will say; knows no draft."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

#: Rows that one launch of a CUDA attention kernel takes: the limit of a grid's second and third side.
ROWS = 65_535


class HeadAttention(nn.Module):
    """`x + W_o Attention(RMSNorm(x))` over the K vectors of one position, every one seeing all (Amphista, Eq. 5).

    Norm and residual are not published and ours. W_o is 0 at the start, so that the block begins as the identity.

    Args:
        hidden_size: d. num_attention_heads, head_dim: of the backbone's layers.
    """

    def __init__(self, hidden_size: int, num_attention_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_attention_heads = num_attention_heads
        inner = num_attention_heads * head_dim
        self.norm = nn.RMSNorm(hidden_size, eps=1e-6, dtype=dtype)
        self.qkv = nn.Linear(hidden_size, 3 * inner, bias=False, dtype=dtype)
        self.out = nn.Linear(inner, hidden_size, bias=False, dtype=dtype)
        nn.init.zeros_(self.out.weight)

    def forward(self, x: Tensor) -> Tensor:
        """[N, K, d] -> [N, K, d]."""
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, self.num_attention_heads, -1))  # [N, K, 3, heads, head_dim]
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        return x + self.out(_attend(q, k, v).transpose(1, 2).flatten(2))


class AutoEmbedding(nn.Module):
    """A learned position per head and one or more blocks of `HeadAttention` (Amphista, section 3.2, Eq. 4 and 5).

    The positions are 0 at the start (ours): untrained, every vector passes as it is.

    Args:
        num_blocks: 1; the alpha variant has 2 (section A.2.3). num_heads: K. The others: see `HeadAttention`.
    """

    def __init__(
        self,
        num_blocks: int,
        num_heads: int,
        hidden_size: int,
        num_attention_heads: int,
        head_dim: int,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(num_heads, hidden_size, dtype=dtype))
        self.blocks = nn.ModuleList(
            HeadAttention(hidden_size, num_attention_heads, head_dim, dtype) for _ in range(num_blocks)
        )

    def forward(self, vectors: Tensor) -> Tensor:
        """The vectors of all heads [..., K, d] -> what their unembeddings read, [..., K, d]."""
        x = (vectors + self.positions).flatten(0, -3)
        for block in self.blocks:
            x = block(x)
        return x.unflatten(0, vectors.shape[:-2])


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of [N, heads, K, head_dim], by pieces that a CUDA kernel takes."""
    if len(q) <= ROWS:
        return scaled_dot_product_attention(q, k, v)
    pieces = zip(q.split(ROWS), k.split(ROWS), v.split(ROWS), strict=True)
    return torch.cat([scaled_dot_product_attention(*piece) for piece in pieces])
