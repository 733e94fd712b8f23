"""From a hidden state to logits: matrix, bias, scale and soft cap in one place; knows no model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear


@dataclass(frozen=True)
class LowRank:
    """A LoRA branch beside a matrix: `scaling * B A dropout(h)`.

    Attributes:
        a: [r, d]. b: [V, r]. scaling: lora_alpha / r.
        dropout: acts on h in this branch only; the identity outside training.
    """

    a: Tensor
    b: Tensor
    scaling: float
    dropout: Callable[[Tensor], Tensor]

    def select_rows(self, rows: Tensor) -> LowRank:
        """The branch of these rows of the matrix alone."""
        return replace(self, b=self.b[rows])

    def project_down(self, hidden: Tensor) -> Tensor:
        """`scaling * A dropout(h)`, [..., d] -> [..., r]: what b multiplies."""
        return linear(self.dropout(hidden).to(self.a.dtype), self.a) * self.scaling


def low_rank_of(module: Any) -> LowRank | None:
    """Return the LoRA branch of a linear layer with an active PEFT adapter, else None."""
    if not getattr(module, "lora_A", None) or module.disable_adapters or not module.active_adapters:
        return None
    (name,) = module.active_adapters
    return LowRank(
        module.lora_A[name].weight, module.lora_B[name].weight, module.scaling[name], module.lora_dropout[name]
    )


@dataclass(frozen=True)
class LMHead:
    """`softcap * tanh(scale * (W h + b) / softcap)`; without a soft cap `scale * (W h + b)`.

    Attributes:
        weight: W, [V, d].
        bias: b, [V], or None.
        softcap: Gemma's `final_logit_softcapping`, or None.
        scale: factor on the logits (Granite divides by `logits_scaling`, Cohere multiplies by `logit_scale`).
        low_rank: a LoRA branch that adds to W h, or None.
        token_map: which token each row stands for, long [V], where that is not its number: a reduced vocabulary.
    """

    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None
    scale: float = 1.0
    low_rank: LowRank | None = None
    token_map: Tensor | None = None

    def restrict_to(self, tokens: Tensor) -> LMHead:
        """A copy of the rows of `tokens` (long [N]), in that order.

        Its softmax is this one's restricted to them: `exp(l_i) / sum_j exp(l_j)` over `tokens` alone.
        """
        rows = tokens.to(self.weight.device)
        return replace(
            self,
            weight=self.weight[rows],
            bias=None if self.bias is None else self.bias[rows],
            low_rank=None if self.low_rank is None else self.low_rank.select_rows(rows),
            token_map=rows if self.token_map is None else self.token_map[rows],
        )

    def rows_of(self, tokens: Tensor) -> Tensor:
        """The row of each token of any shape, long; -1 where a reduced vocabulary has none for it."""
        if self.token_map is None:
            return tokens
        known, order = self.token_map.sort()
        near = torch.searchsorted(known, tokens.contiguous()).clamp_(max=len(known) - 1)
        return torch.where(known[near] == tokens, order[near], -1)

    def transform(self, logits: Tensor) -> Tensor:
        """Scale and soft-cap raw logits of any shape [..., V]."""
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    def raw_logits(self, hidden: Tensor) -> Tensor:
        """Logits before scale and soft cap, [..., d] -> [..., V]: the same order, for less."""
        if hidden.dtype != self.weight.dtype and not torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(self.weight.dtype)  # float32 heads on a shared bfloat16 matrix
        logits = linear(hidden, self.weight, self.bias)
        if self.low_rank is not None:
            logits = logits + linear(self.low_rank.project_down(hidden), self.low_rank.b).to(logits.dtype)
        return logits

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., d] -> [..., V]."""
        return self.transform(self.raw_logits(hidden))


@dataclass(frozen=True)
class Embedding:
    """The backbone's input embedding E, frozen: a draft that holds it neither trains nor saves it.

    Attributes:
        table: token ids [...] -> vectors [..., d], the backbone's own module.
        scale: what the backbone multiplies them by on their way to its first layer (Granite's multiplier).
    """

    table: Callable[[Tensor], Tensor]
    scale: float = 1.0

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Tensor:
        """Token ids, long [...] -> [..., d]."""
        vectors = self.table(tokens)
        return vectors if self.scale == 1.0 else vectors * self.scale
