"""Medusa heads: K residual blocks with an unembedding each, reading one hidden state; knows no loss and no loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from medusa_train.errors import BackboneError
from medusa_train.models.backbone import Backbone
from medusa_train.models.drafts.base import Draft, Proposal
from medusa_train.models.features import Features
from medusa_train.models.unembedding import Unembedding
from medusa_train.trees.tree import Tree


class ResBlock(nn.Module):
    """`x + SiLU(W1 x + b1)` with W1 = 0 and b1 = 0 at the start, so that it begins as the identity."""

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size, dtype=dtype)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., d] -> [..., d]."""
        return x + silu(self.linear(x))


class MedusaState(NamedTuple):
    """The hidden state [1, d] whose next token is the coming root."""

    hidden: Tensor


class MedusaDraft(Draft):
    """K Medusa heads, `p_k = softmax(W2_k (SiLU(W1_k h + b1_k) + h))` (Medusa, section 2.1.1, Eq. 1).

    W1 = 0, b1 = 0 and W2 = a copy of lm_head at the start (the paper's text swaps the two), so an untrained head
    gives the backbone's own next-token logits to the bit. Each head and each block has weights of its own.

    Args:
        hidden_size, vocab_size: d and V of the backbone. num_heads: K. num_layers: residual blocks per head.
        bias: whether the unembeddings carry a bias, as the backbone's lm_head does.
        softcap, scale: the backbone's logit transform, see `Unembedding`.
        shared: the backbone's own unembedding, for heads without a matrix of their own ("version 2": about 11 % of
            the parameters at the shape of a 7B model); it is read, never trained or saved by the heads.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        num_heads: int = 5,
        num_layers: int = 1,
        *,
        bias: bool = False,
        softcap: float | None = None,
        scale: float = 1.0,
        shared: Unembedding | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_layers = num_layers
        self.hidden_size = hidden_size
        self.vocab_size = vocab_size
        self.softcap = softcap
        self.scale = scale
        self.shared = shared
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResBlock(hidden_size, dtype) for _ in range(num_layers))) for _ in range(num_heads)
        )
        self.lm_heads = nn.ModuleList(
            nn.Linear(hidden_size, vocab_size, bias=bias, dtype=dtype) for _ in range(0 if shared else num_heads)
        )

    @classmethod
    def from_backbone(
        cls,
        backbone: Backbone,
        num_heads: int = 5,
        num_layers: int = 1,
        *,
        share_lm_head: bool = False,
        dtype: torch.dtype | None = None,
    ) -> MedusaDraft:
        """Untrained heads that predict what `backbone` predicts, on its device; dtype by default its own."""
        own = backbone.unembedding()
        draft = cls(
            backbone.hidden_size,
            backbone.vocab_size,
            num_heads,
            num_layers,
            bias=own.bias is not None,
            softcap=own.softcap,
            scale=own.scale,
            shared=own if share_lm_head else None,
            dtype=dtype or backbone.dtype,
        ).to(backbone.device)
        with torch.no_grad():
            for head in draft.lm_heads:
                assert isinstance(head, nn.Linear)
                head.weight.copy_(own.weight)
                if own.bias is not None:
                    head.bias.copy_(own.bias)
        return draft

    def check_fits(self, backbone: Backbone) -> None:
        """Raise BackboneError unless d and V are the backbone's."""
        if (self.hidden_size, self.vocab_size) != (backbone.hidden_size, backbone.vocab_size):
            raise BackboneError(
                f"these heads are for hidden size {self.hidden_size} and {self.vocab_size} tokens; "
                f"{backbone.name or 'the backbone'} has {backbone.hidden_size} and {backbone.vocab_size}"
            )

    def hidden_at(self, states: Tensor, k: int) -> Tensor:
        """Head k's state [..., d] from the backbone's [..., d], k = 1..K."""
        return self.blocks[k - 1](states)

    def hidden(self, feats: Features) -> Iterator[Tensor]:
        """For k = 1..K the state [B, T, d] that head k's unembedding reads."""
        for k in range(1, self.num_heads + 1):
            yield self.hidden_at(feats.hidden, k)

    def unembed(self, k: int) -> Unembedding:
        """Head k's W2, or the shared one, with the backbone's logit transform."""
        if self.shared is not None:
            return self.shared
        head = self.lm_heads[k - 1]
        assert isinstance(head, nn.Linear)
        return Unembedding(head.weight, head.bias, self.softcap, self.scale)

    def head_logits(self, states: Tensor, k: int) -> Tensor:
        """Head k's logits [..., V] at the backbone's states [..., d]."""
        return self.unembed(k).logits(self.hidden_at(states, k))

    def start(self, feats: Features) -> MedusaState:
        """Heads look at the last position only."""
        return MedusaState(feats.hidden[:, -1])

    def propose(self, state: MedusaState, root: Tensor, tree: Tree) -> Proposal:
        """The best `tree.width` tokens of every head that the tree reads, laid out by rank."""
        best = [
            # soft-capping and scaling keep the order of logits, so the raw product is enough
            self.unembed(k).raw(self.hidden_at(state.hidden, k)).topk(tree.width).indices
            for k in range(1, tree.max_depth + 1)
        ]
        guesses = torch.cat(best, dim=1)[0]  # [max_depth * width]
        return Proposal(torch.cat([root, guesses[tree.guess_index.to(guesses.device)]]), tree)

    def advance(self, state: MedusaState, feats: Features, path: list[int]) -> MedusaState:
        """The state of the last accepted node."""
        return MedusaState(feats.hidden[:, path[-1]])
