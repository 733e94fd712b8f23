"""Training objectives: the weighted sum of the language model's loss and the draft heads' losses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from medusa_train.data.batch import IGNORE_INDEX, Batch, shift_labels
from medusa_train.losses.chunks import Teacher
from medusa_train.losses.fused_losses import GraphCut, LossSums, linear_loss
from medusa_train.losses.logits import LMHeadLike
from medusa_train.losses.weights import head_weight, lambda0


class DraftHeads(Protocol):
    """The interface of a draft that the objective needs."""

    @property
    def trained_heads(self) -> int:
        """K, the number of heads with a loss."""

    @property
    def independent_heads(self) -> bool:
        """Whether heads share no trained layers: the graph of one can be freed before the next one's is built."""

    def head_states(self, feats: Any, batch: Any) -> Iterator[Tensor]:
        """For k = 1..K the state [B, T, d] that head k's lm_head reads."""

    def lm_head(self, k: int) -> LMHeadLike:
        """Head k's matrix and logit transform, k = 1..K."""


class TeacherStates:
    """A teacher's hidden states [B, T, d] and its lm_head."""

    def __init__(self, hidden: Tensor, lm_head: LMHeadLike) -> None:
        """Keep the states [B, T, d], and lm_head over all tokens."""
        self.hidden = hidden
        self._whole = self._part = lm_head
        self._tokens: Tensor | None = None  # the vocabulary of _part

    def target(self, tokens: Tensor | None, k: int, weight: float, *, divergence: bool) -> Teacher:
        """Return its part, `weight`, of the target of a predictor of token t + k + 1 over `tokens` (None for all).

        What is restricted to the tokens is shared by all heads. Rows are flattened, so t + k can point into the next
        row. That happens only where t + k + 1 is not a valid target, and such positions are ignored.
        """
        if tokens is not self._tokens:
            self._part = self._whole if tokens is None else self._whole.restrict_to(tokens)
            self._tokens = tokens
        states = self.hidden.flatten(0, -2)
        return Teacher(states, self._part, k, weight, divergence)


@dataclass(frozen=True)
class LMSums:
    """The language model's sums over the valid targets of one micro-batch; detached scalars, in nats.

    Attributes:
        loss: the minimized loss.
        ce: cross-entropy against the labels.
        kl: KL to the teacher, 0 without one.
        correct: top-1 hits.
        count: valid targets.
    """

    loss: Tensor
    ce: Tensor
    kl: Tensor
    correct: Tensor
    count: Tensor


@dataclass(frozen=True)
class ObjectiveOutput:
    """One micro-batch's contribution to the loss of the global batch.

    Attributes:
        loss: scalar, differentiable unless gradients were computed with it; the contributions of all micro-batches
            add up to the loss of the global batch.
        head_sums: [K], summed cross-entropy against the labels in nats, also with soft targets; detached.
        head_correct: long [K], top-1 hits.
        head_counts: long [K], valid targets in this micro-batch.
        head_in_vocab: long [K], valid targets in the head's vocabulary; only these have a loss.
        lm: sums of the language model, None if it is frozen.
    """

    loss: Tensor
    head_sums: Tensor
    head_correct: Tensor
    head_counts: Tensor
    head_in_vocab: Tensor
    lm: LMSums | None


class Objective:
    """`L = L_LM + lambda0 * sum_k c^k * L_k`, each term a mean over its valid targets (Medusa, Training Strategies).

    Means are over the global batch. Head k at position t predicts the label at t + k + 1, the language model the one at
    t + 1; a position counts if that label is supervised, even if t itself is in a prompt. Targets, and the teacher's
    position t + k before them, never cross a document boundary.

    With a frozen backbone there is no L_LM and no lambda0: Medusa-1 minimizes L = sum_k c^k * L_k.

    A head over a reduced vocabulary S has no loss for targets y outside S, and averages over those in S:
    `L_k = 1/|{t: y in S}| * sum_{t: y in S} CE(q_t, p_k,t)`, p_k,t being its softmax over S. With teacher
    weight s, `q_t = s * p0_{t+k|S} + (1 - s) * onehot(y)`, where `p0_{|S}(x) = p0(x) / sum_{x' in S} p0(x')` for x in S
    is the teacher's distribution restricted to S.
    """

    def __init__(
        self,
        draft: DraftHeads,
        decay: float,
        *,
        lm: Literal["ce", "kl"] | None = None,
        rho: float = 0.0,
        heads_coefficient: float = 1.0,
        schedule: str = "constant",
        soft_heads: float = 0.0,
        weight: float = 1.0,
    ) -> None:
        """Configure the terms.

        Args:
            draft: the heads.
            decay: c, `medusa_decay_coefficient`.
            lm: the language model's loss: None (frozen), "ce" against labels, or "kl" to the teacher
                (`medusa_self_distillation`).
            rho: weight of the teacher in the target of "ce" (`medusa_distillation_regularization`); unused by "kl".
            heads_coefficient: maximum of lambda0, `medusa_heads_coefficient`.
            schedule: of lambda0, `medusa_scheduler`.
            soft_heads: weight of the teacher in the heads' targets: head k at t against the teacher at t + k.
            weight: factor on the heads' loss with a frozen backbone, instead of lambda0.

        Raises:
            ValueError: unknown schedule, or a weight outside [0, 1].
        """
        for name, value in (("rho", rho), ("soft_heads", soft_heads)):
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"{name} is the teacher's weight in a target and must be in [0, 1], got {value}")
        lambda0(schedule, 0.0)  # raises for unknown schedules
        self.draft = draft
        self.decay = decay
        self.lm = lm
        self.rho = rho if lm == "ce" else 0.0
        self.heads_coefficient = heads_coefficient
        self.schedule = schedule
        self.soft_heads = soft_heads
        self.weight = weight

    @property
    def needs_teacher(self) -> bool:
        """Whether `loss` needs a teacher's features and lm_head."""
        return self.lm == "kl" or self.rho > 0.0 or self.soft_heads > 0.0

    def heads_weight(self, progress: float) -> float:
        """Return the factor on the heads' loss at `progress`, the completed fraction of the run."""
        return self.weight if self.lm is None else self.heads_coefficient * lambda0(self.schedule, progress)

    def head_weight(self, k: int) -> float:
        """Return the weight of head k's mean loss."""
        return head_weight(k, self.decay)

    def target_counts(self, batch: Batch) -> Tensor:
        """Count the targets of each term that have a loss: long [K], or [1 + K] starting with the language model's.

        Their sum over the global batch (micro-batches and processes) is the argument `counts_total` of `loss`.
        """
        heads = [self._target_rows(batch, k, self.draft.lm_head(k)) for k in range(1, self.draft.trained_heads + 1)]
        own = [] if self.lm is None else [self._targets(batch, 0)]
        return torch.stack([(target != IGNORE_INDEX).sum() for target in (*own, *heads)])

    def loss(
        self,
        feats: Any,
        batch: Batch,
        counts_total: Tensor,
        *,
        progress: float = 0.0,
        lm_head: LMHeadLike | None = None,
        teacher: Tensor | None = None,
        teacher_lm_head: LMHeadLike | None = None,
        grad_scale: float | None = None,
    ) -> ObjectiveOutput:
        """Compute one micro-batch's contribution to L.

        With `grad_scale` the gradients of each term are computed right after its value, so that at any time there are
        the activations of one head and no gradients besides those in `.grad`.

        Args:
            feats: the backbone's features of this batch for the draft, with a graph if the backbone is trained. The
                language model's loss needs `hidden` [B, T, d].
            batch: labels and segments [B, T], and what the draft reads besides.
            counts_total: `target_counts` summed over the global batch; a term without targets contributes 0.
            progress: step / max_steps, for lambda0.
            lm_head: of the backbone, with its LoRA branch; required for the language model's loss.
            teacher, teacher_lm_head: its hidden states [B, T, d'] of the same batch, and the lm_head to apply to them;
                required if `needs_teacher`. In Medusa-1 the frozen backbone is the teacher.
            grad_scale: if given, `grad_scale` times the gradients of L are accumulated in `.grad`, and the returned
                loss has no graph. States in `feats` must not have one either, see `GraphCut`.

        Raises:
            ValueError: a required argument is missing.
        """
        factors = self._factors(counts_total, progress)
        scales = [None if grad_scale is None else grad_scale * factor for factor in factors]
        teacher_states = self._teacher_states(teacher, teacher_lm_head)
        terms: list[LossSums] = []
        if self.lm is not None:
            if lm_head is None:
                raise ValueError("this objective trains the language model: pass lm_head")
            target, kl, scale = self._targets(batch, 0), self.lm == "kl", scales[0]
            weight = 1.0 if kl else self.rho
            terms.append(
                _predictor_loss(
                    feats.hidden, lm_head, target, 0, teacher_states, weight, divergence=kl, grad_scale=scale
                )
            )
        terms += self._head_terms(feats, batch, teacher_states, scales[len(terms) :])
        valid = [(self._targets(batch, k) != IGNORE_INDEX).sum() for k in range(1, self.draft.trained_heads + 1)]
        return self._sum(terms, torch.stack(valid), self.target_counts(batch), factors)

    def _teacher_states(self, teacher: Tensor | None, lm_head: LMHeadLike | None) -> TeacherStates | None:
        if teacher is not None and lm_head is not None:
            return TeacherStates(teacher, lm_head)
        if self.needs_teacher:
            raise ValueError("this objective needs a teacher: pass teacher and teacher_lm_head")
        return None

    def _head_terms(
        self, feats: Any, batch: Batch, teacher: TeacherStates | None, scales: Sequence[float | None]
    ) -> list[LossSums]:
        """Return the sums of each head, and accumulate gradients where `scales` are numbers."""
        terms: list[LossSums] = []
        cut = GraphCut()
        for k, hidden in enumerate(self.draft.head_states(feats, batch), start=1):
            head, scale = self.draft.lm_head(k), scales[k - 1]
            student = hidden if scale is None or self.draft.independent_heads else cut.detach(hidden)
            target = self._target_rows(batch, k, head)
            terms.append(_predictor_loss(student, head, target, k, teacher, self.soft_heads, grad_scale=scale))
        cut.backward()
        return terms

    def _factors(self, totals: Tensor, progress: float) -> list[float]:
        """Return the factor on each term's sum in L: its weight over its number of targets."""
        scale = self.heads_weight(progress)
        weights = [scale * self.head_weight(k) for k in range(1, self.draft.trained_heads + 1)]
        if self.lm is not None:
            weights.insert(0, 1.0)
        return [weight / max(1, count) for weight, count in zip(weights, totals.tolist(), strict=True)]

    def _sum(self, terms: list[LossSums], valid: Tensor, counts: Tensor, factors: list[float]) -> ObjectiveOutput:
        first = 0 if self.lm is None else 1  # index of the first head
        heads = terms[first:]
        lm = terms[0]
        return ObjectiveOutput(
            loss=torch.stack([term.loss_sum * factor for term, factor in zip(terms, factors, strict=True)]).sum(),
            head_sums=torch.stack([term.ce_sum for term in heads]),
            head_correct=torch.stack([term.correct for term in heads]),
            head_counts=valid,
            head_in_vocab=counts[first:],
            lm=LMSums(lm.loss_sum.detach(), lm.ce_sum, lm.kl_sum, lm.correct, counts[0]) if first else None,
        )

    @staticmethod
    def _targets(batch: Batch, k: int) -> Tensor:
        return shift_labels(batch.labels, k, batch.segments)

    def _target_rows(self, batch: Batch, k: int, head: LMHeadLike) -> Tensor:
        """Return head k's targets [B, T] as rows of its lm_head, IGNORE_INDEX where there is none."""
        target = self._targets(batch, k)
        if head.token_map is None:
            return target
        rows = head.rows_of(target)
        return torch.where(rows < 0, IGNORE_INDEX, rows)


def _predictor_loss(
    hidden: Tensor,
    lm_head: LMHeadLike,
    target: Tensor,
    k: int,
    teacher: TeacherStates | None,
    teacher_weight: float,
    *,
    divergence: bool = False,
    grad_scale: float | None = None,
) -> LossSums:
    """Return the sums of the predictor of token t + k + 1, from states [B, T, d] and rows of its lm_head [B, T]."""
    theirs = None
    if teacher is not None and teacher_weight:
        theirs = teacher.target(lm_head.token_map, k, teacher_weight, divergence=divergence)
    states = hidden.flatten(0, -2)
    return linear_loss(states, lm_head, target.flatten(), theirs, grad_scale=grad_scale)
