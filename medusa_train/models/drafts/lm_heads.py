"""Drafts whose heads each have an output matrix that starts as a copy of lm_head."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from medusa_train.models.drafts.base import Draft
from medusa_train.models.lm_head import LMHead
from medusa_train.models.target_model import TargetModel


class LMHeadsDraft(Draft):
    """A draft whose heads each have an output matrix W2, which starts as a copy of the target
    model's lm_head.

    Attributes:
        lm_heads: W2 of heads 1..K; the subclass sets it, for example to `new_lm_heads`.
        token_map: token ids of a reduced vocabulary, long [N]: logit i belongs to the token
            token_map[i], and other tokens are never drafted. None: all tokens.
        softcap, scale: the target model's logit transform, see `LMHead`.
    """

    lm_heads: nn.ModuleList
    token_map: Tensor | None
    softcap: float | None
    scale: float

    def new_lm_heads(
        self,
        target_model: TargetModel,
        count: int,
        vocab_size: int | None,
        token_map: Tensor | None,
        dtype: torch.dtype,
    ) -> nn.ModuleList:
        """Set the vocabulary and the logit transform; return `count` copies of lm_head, or of its
        rows for the tokens of `token_map`.
        """
        check_token_map(vocab_size, token_map)
        lm_head = target_model.lm_head()
        self.softcap = lm_head.softcap
        self.scale = lm_head.scale
        if token_map is None:
            self.register_buffer("token_map", None)
        else:
            self.register_buffer("token_map", token_map.long())
            lm_head = lm_head.restrict_to(token_map)
        num_tokens, size = lm_head.weight.shape
        has_bias = lm_head.bias is not None
        linears = nn.ModuleList(
            nn.Linear(size, num_tokens, bias=has_bias, dtype=dtype) for _ in range(count)
        )
        copy_lm_head(linears, lm_head)
        return linears

    @property
    def settings(self) -> dict[str, Any]:
        """The settings, including the size of a reduced vocabulary."""
        return {**super().settings, "vocab_size": self.draft_vocab_size}

    def lm_head(self, k: int) -> LMHead:
        """Return head k's W2 with the target model's logit transform."""
        head = self.lm_heads[k - 1]
        assert isinstance(head, nn.Linear)
        return LMHead(head.weight, head.bias, self.softcap, self.scale, token_map=self.token_map)


def check_token_map(vocab_size: int | None, token_map: Tensor | None) -> None:
    """Raise ValueError unless `token_map` has `vocab_size` tokens, or both are None."""
    length = None if token_map is None else len(token_map)
    if vocab_size != length:
        raise ValueError(f"heads over {vocab_size} tokens need a token_map of that length")


@torch.no_grad()
def copy_lm_head(linears: Iterable[nn.Module], lm_head: LMHead) -> None:
    """Copy weight and bias of `lm_head` into linear layers of its shape."""
    for linear in linears:
        assert isinstance(linear, nn.Linear)
        linear.weight.copy_(lm_head.weight)
        if lm_head.bias is not None:
            linear.bias.copy_(lm_head.bias)
