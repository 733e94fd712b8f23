"""The lm_head as a value, with its LoRA branch and logit transforms; and the input embedding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from medusa_train.errors import TargetModelError

#: A head with a token bias first takes this many best tokens without the bias, then ranks them
#: again with it.
CANDIDATES = 64


@dataclass(frozen=True)
class LowRank:
    """A LoRA branch that adds `scaling * B A dropout(h)` to a matrix product W h.

    Attributes:
        a: A, [r, d].
        b: B, [V, r].
        scaling: lora_alpha / r.
        dropout: applied to h in this branch only; the identity outside training.
    """

    a: Tensor
    b: Tensor
    scaling: float
    dropout: Callable[[Tensor], Tensor]

    def project_down(self, hidden: Tensor) -> Tensor:
        """Compute `scaling * A dropout(h)`, the input of B, [..., d] -> [..., r]."""
        return linear(self.dropout(hidden).to(self.a.dtype), self.a) * self.scaling


def low_rank_of(module: Any) -> LowRank | None:
    """Return the LoRA branch of a linear layer with an active PEFT adapter, else None.

    Raises:
        TargetModelError: the adapter is DoRA or LoRA with a bias, which only other programs write.
    """
    if not getattr(module, "lora_A", None):
        return None
    if module.disable_adapters or not module.active_adapters:
        return None
    (key,) = module.active_adapters
    is_dora = key in getattr(module, "lora_variant", {})
    if is_dora or module.lora_B[key].bias is not None:
        raise TargetModelError(
            "DoRA and LoRA with a bias are not supported on lm_head; merge the adapter into the"
            " model"
        )
    return LowRank(
        a=module.lora_A[key].weight,
        b=module.lora_B[key].weight,
        scaling=module.scaling[key],
        dropout=module.lora_dropout[key],
    )


@dataclass(frozen=True)
class LMHead:
    """The matrix from hidden states to logits, of the target model or of a draft's head.

        raw logits = W h + b  (+ LoRA branch, or + R e)
        logits     = scale * raw                                    without a soft cap
                   = softcap * tanh(scale * raw / softcap)          with one

    A value, not a module: it refers to parameters of other modules and has none of its own.

    Attributes:
        weight: W, [V, d].
        bias: b, [V], or None.
        softcap: Gemma's `final_logit_softcapping`, or None.
        scale: factor on the logits (Granite divides by `logits_scaling`, Cohere multiplies by
            `logit_scale`).
        low_rank: LoRA branch added to W h, or None.
        token_map: token id of each logit of a reduced vocabulary, long [V]; None: logit i belongs
            to token i.
        token_bias: R, [V, r], instead of `low_rank`: it adds R e to W h. The hidden states are then
            [h ; e] of width d + r, where e is the embedding of the token before the predicted one.
    """

    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None
    scale: float = 1.0
    low_rank: LowRank | None = None
    token_map: Tensor | None = None
    token_bias: Tensor | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits, [..., d] -> [..., V]."""
        return self.transform(self.raw_logits(hidden))

    def raw_logits(self, hidden: Tensor) -> Tensor:
        """Compute logits before scale and soft cap (same order), [..., d] -> [..., V]."""
        if self.token_bias is None:
            return self._product(hidden)
        h, e = self._split(hidden)
        logits = self._product(h)
        return logits + linear(e, self.token_bias).to(logits.dtype)

    def guesses(self, hidden: Tensor, logits: Tensor, count: int) -> Tensor:
        """Return the indices of the `count` best logits, ranked as in decoding, the best first,
        long [N, min(count, V)].

        Args:
            hidden: hidden states [N, d].
            logits: logits of `hidden`, [N, V].
            count: number of indices.
        """
        count = min(count, logits.shape[-1])
        if self.token_bias is None:
            return logits.topk(count).indices
        # as in decoding: candidates without the bias, then ranked again with it
        h, e = self._split(hidden)
        num_candidates = min(max(count, CANDIDATES), logits.shape[-1])
        best = self._product(h).topk(num_candidates)  # [N, c]
        ranked = rank_candidates(best.values, best.indices, self.token_bias, e[:, None])
        return ranked[:, 0, :count]

    def _split(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Split [h ; e] into h [..., d] and e [..., r], e in the dtype of R."""
        assert self.token_bias is not None
        size = self.weight.shape[1]  # d
        return hidden[..., :size], hidden[..., size:].to(self.token_bias.dtype)

    def _product(self, hidden: Tensor) -> Tensor:
        """Compute `W h + b` with the LoRA branch, [..., d] -> [..., V]."""
        if hidden.dtype != self.weight.dtype and not torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(self.weight.dtype)  # a float32 head may share a bfloat16 matrix
        logits = linear(hidden, self.weight, self.bias)
        if self.low_rank is not None:
            down = self.low_rank.project_down(hidden)  # [..., r]
            logits = logits + linear(down, self.low_rank.b).to(logits.dtype)
        return logits

    def transform(self, logits: Tensor) -> Tensor:
        """Apply scale and soft cap to raw logits of any shape [..., V]."""
        return transform_logits(logits, self.scale, self.softcap)

    @torch.no_grad()
    def restrict_to(self, tokens: Tensor) -> LMHead:
        """Return a copy, without gradients, for only the logits of `tokens` (long [N]), in that
        order.

        Its softmax is the original one restricted to `tokens`: `exp(l_i) / sum_j exp(l_j)`.
        """
        kept = tokens.to(self.weight.device)
        low_rank = self.low_rank
        if low_rank is not None:
            low_rank = replace(low_rank, b=low_rank.b[kept])
        return replace(
            self,
            weight=self.weight[kept],
            bias=None if self.bias is None else self.bias[kept],
            low_rank=low_rank,
            token_map=self.tokens_of(kept),
            token_bias=None if self.token_bias is None else self.token_bias[kept],
        )

    def indices_of(self, tokens: Tensor) -> Tensor:
        """Return the index of the logit of each token id (any shape), long; -1 for tokens outside a
        reduced vocabulary.
        """
        if self.token_map is None:
            return tokens
        ids, logit_of_id = self.token_map.sort()
        nearest = torch.searchsorted(ids, tokens.contiguous()).clamp_(max=len(ids) - 1)
        return torch.where(ids[nearest] == tokens, logit_of_id[nearest], -1)

    def tokens_of(self, indices: Tensor) -> Tensor:
        """Return the token id of each logit index (any shape), long."""
        if self.token_map is None:
            return indices
        return self.token_map[indices]


def transform_logits(logits: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Apply scale and soft cap to raw logits of any shape [..., V]."""
    if scale != 1.0:
        logits = logits * scale
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    return logits


def rank_candidates(
    scores: Tensor, candidates: Tensor, token_bias: Tensor, embedded: Tensor
) -> Tensor:
    """Rank the candidates of a head again, once for each possible previous token; ties keep their
    order.

    Args:
        scores: raw logits of the candidates without the bias, the greatest first, [B, c].
        candidates: indices of these logits, long [B, c].
        token_bias: R, [V, r].
        embedded: embeddings of m possible previous tokens, [B, m, r].

    Returns:
        The candidates, the best first, long [B, m, c].
    """
    bias = embedded @ token_bias[candidates].transpose(1, 2)  # [B, m, c]
    dtype = torch.promote_types(scores.dtype, torch.float32)
    biased = scores.to(dtype)[:, None] + bias  # [B, m, c]
    order = biased.argsort(dim=-1, descending=True, stable=True)
    return candidates[:, None].expand(order.shape).gather(2, order)


@dataclass(frozen=True)
class Embedding:
    """The target model's frozen input embedding: drafts that use it neither train nor save it.

    Attributes:
        table: the target model's embedding module, token ids [...] -> vectors [..., d].
        scale: factor that the target model applies before its first layer (Granite's
            `embedding_multiplier`).
    """

    table: Callable[[Tensor], Tensor]
    scale: float = 1.0

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Tensor:
        """Return the vectors of token ids, long [...] -> [..., d]."""
        vectors = self.table(tokens)
        if self.scale != 1.0:
            vectors = vectors * self.scale
        return vectors
