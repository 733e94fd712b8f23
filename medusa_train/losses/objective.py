"""The training objective: a weighted sum of the losses of the language model and of the draft
heads, and the schedule of lambda0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from medusa_train.data.batch import IGNORE_INDEX, Batch, shift_labels
from medusa_train.losses.graph_cut import GraphCut
from medusa_train.losses.linear_loss import LossSums, Teacher, linear_loss
from medusa_train.models.drafts.base import Draft
from medusa_train.models.lm_head import LMHead


@dataclass(frozen=True)
class LMSums:
    """The language model's sums over the valid targets of one micro-batch; detached scalars.

    Attributes:
        ce: cross-entropy against the labels in nats.
        kl: KL to the teacher in nats; 0 without a teacher.
        count: number of valid targets.
    """

    ce: Tensor
    kl: Tensor
    count: Tensor


@dataclass(frozen=True)
class ObjectiveOutput:
    """One micro-batch's contribution to the loss of the global batch.

    Attributes:
        loss: scalar, differentiable unless gradients were computed with it. The contributions of
            all micro-batches add up to the loss of the global batch.
        head_correct: number of top-1 hits of each head, long [K].
        head_counts: number of valid targets of each head, long [K].
        head_in_vocab: number of valid targets in the head's vocabulary, long [K]; only these have a
            loss.
        lm: sums of the language model; None if it is frozen.
    """

    loss: Tensor
    head_correct: Tensor
    head_counts: Tensor
    head_in_vocab: Tensor
    lm: LMSums | None


class Objective:
    """`L = L_LM + lambda0 * sum_k c^k * L_k`, each term a mean over its valid targets (Medusa,
    Training Strategies).

    Means are over the global batch. Heads count from 1, k = 1 .. K, so the first head has weight
    c^1 and index 0 in tensors of shape [K]. At position t, head k predicts the label at t + k + 1,
    and the language model the label at t + 1. A position counts if that label is supervised, even
    if t itself is in a prompt. The label and the teacher's position t + k are always in the
    document of t.

    With a frozen target model there is no L_LM and no lambda0: Medusa-1 minimizes
    L = sum_k c^k * L_k.

    A head over a reduced vocabulary S has no loss for targets y outside S, and averages over the
    targets in S: `L_k = 1/|{t: y in S}| * sum_{t: y in S} CE(q_t, p_k,t)`, where p_k,t is its
    softmax over S. With teacher weight s, `q_t = s * p0_{t+k|S} + (1 - s) * onehot(y)`, where
    `p0_{|S}(x) = p0(x) / sum_{x' in S} p0(x')` for x in S is the teacher's distribution restricted
    to S.

    Args:
        draft: the draft whose heads are trained.
        decay: c, `medusa_decay_coefficient`.
        lm: the language model's loss: None (frozen), "ce" against labels, or "kl" to the
            teacher (`medusa_self_distillation`).
        rho: weight of the teacher in the target of "ce" (`medusa_distillation_regularization`);
            unused by "kl".
        heads_coefficient: maximum of lambda0, `medusa_heads_coefficient`.
        schedule: the schedule of lambda0, `medusa_scheduler`.
        soft_targets: weight of the teacher in the heads' targets. Head k at position t is compared
            with the teacher at t + k.
        weight: factor on the heads' loss with a frozen target model, instead of lambda0.

    Attributes:
        teacher_weight: the teacher's weight in the language model's target.
    """

    def __init__(
        self,
        draft: Draft,
        decay: float,
        *,
        lm: Literal["ce", "kl"] | None = None,
        rho: float = 0.0,
        heads_coefficient: float = 1.0,
        schedule: str = "constant",
        soft_targets: float = 0.0,
        weight: float = 1.0,
    ) -> None:
        self.draft = draft
        self.decay = decay
        self.lm = lm
        self.teacher_weight = {None: 0.0, "ce": rho, "kl": 1.0}[lm]
        self.heads_coefficient = heads_coefficient
        self.schedule = schedule
        self.soft_targets = soft_targets
        self.weight = weight

    @property
    def terms(self) -> dict[str, Any]:
        """The settings that define the loss, for a checkpoint: losses before and after a change of
        one of them are not comparable.

        `weight` is not included, because it scales the whole loss. `schedule` is not included
        either: validation weights the heads with `heads_coefficient`, the schedule's final value.
        """
        return {
            "number of heads": self.draft.trained_heads,
            "decay coefficient": self.decay,
            "soft targets": self.soft_targets,
            "LM loss": self.lm,
            "distillation regularization": self.teacher_weight,
            "heads coefficient": self.heads_coefficient,
        }

    @property
    def needs_teacher(self) -> bool:
        """Whether `loss_and_gradients` needs a teacher."""
        return self.teacher_weight > 0.0 or self.soft_targets > 0.0

    def head_weight(self, k: int) -> float:
        """Return the weight of head k's mean loss."""
        return self.decay**k

    def target_counts(self, batch: Batch) -> Tensor:
        """Count the targets of each term that have a loss: long [K], or [1 + K] with the language
        model's first.

        The sum of these counts over the global batch (micro-batches and processes) is the argument
        `counts_total` of `loss_and_gradients`.
        """
        targets = self._logit_indices(self._head_targets(batch))
        if self.lm is not None:
            targets.insert(0, _targets(batch, 0))
        return _count(targets)

    def loss_and_gradients(
        self,
        hidden_states: Any,
        batch: Batch,
        counts_total: Tensor,
        *,
        progress: float = 0.0,
        lm_head: LMHead | None = None,
        teacher: tuple[Tensor, LMHead] | None = None,
        grad_scale: float | None = None,
    ) -> ObjectiveOutput:
        """Compute one micro-batch's contribution to L, and its gradients if `grad_scale` is given.

        With `grad_scale`, the gradients of each term are computed right after its value. Then only
        the activations of one head are in memory at a time, and no gradients except those in
        `.grad`.

        Args:
            hidden_states: the target model's hidden states for this batch, with a graph if the
                target model is trained. The language model's loss needs `final` [B, T, d].
            batch: labels and segments [B, T], and the other tensors that the draft reads.
            counts_total: `target_counts` summed over the global batch; a term without targets
                contributes 0.
            progress: step / max_steps, for lambda0.
            lm_head: the target model's lm_head with its LoRA branch; required for the language
                model's loss.
            teacher: the teacher's hidden states [B, T, d'] for the same batch, and the lm_head to
                apply to them; required if `needs_teacher`. In Medusa-1, the frozen target model is
                the teacher.
            grad_scale: if given, `grad_scale` times the gradients of L are accumulated in `.grad`,
                and the returned loss has no graph. States in `hidden_states` must not have a graph
                either, see `GraphCut`.
        """
        # 1. the factor on each term's sum; the factor on its gradients is `grad_scale` times larger
        lm_factor, head_factors = self._factors(counts_total, progress)
        contributions: list[Tensor] = []

        # 2. the term of the language model
        lm: LMSums | None = None
        if lm_factor is not None:
            assert lm_head is not None
            states = hidden_states.final.flatten(0, -2)  # [B * T, d]
            target = _targets(batch, 0).flatten()  # [B * T]
            soft_target = _teacher(teacher, 0, self.teacher_weight, divergence=self.lm == "kl")
            scale = _scaled(lm_factor, grad_scale)
            term = linear_loss(states, lm_head, target, soft_target, grad_scale=scale)
            contributions.append(term.loss_sum * lm_factor)
            lm = LMSums(term.ce_sum, term.kl_sum, (target != IGNORE_INDEX).sum())

        # 3. the terms of the heads
        scales = [_scaled(factor, grad_scale) for factor in head_factors]
        targets = self._head_targets(batch)
        indices = self._logit_indices(targets)
        heads = self._head_terms(hidden_states, batch, indices, teacher, scales)
        for head, factor in zip(heads, head_factors, strict=True):
            contributions.append(head.loss_sum * factor)

        # 4. the sum of all terms
        return ObjectiveOutput(
            loss=torch.stack(contributions).sum(),
            head_correct=torch.stack([head.correct for head in heads]),
            head_counts=_count(targets),
            head_in_vocab=_count(indices),
            lm=lm,
        )

    def _head_terms(
        self,
        hidden_states: Any,
        batch: Batch,
        indices: Sequence[Tensor],
        teacher: tuple[Tensor, LMHead] | None,
        scales: Sequence[float | None],
    ) -> list[LossSums]:
        """Return the sums of each head. If `scales` are numbers, also run the backward pass of each
        head, which accumulates its gradients.

        Args:
            hidden_states, batch, teacher: see `loss_and_gradients`.
            indices: logit indices of each head's targets, long [B, T] each.
            scales: factor on the gradients of each head, or None.
        """
        # 1. restrict the teacher to the heads' vocabulary
        tokens = self.draft.lm_head(1).token_map  # the same for all heads
        if teacher is not None and tokens is not None and self.soft_targets:
            hidden, teacher_head = teacher
            teacher = (hidden, teacher_head.restrict_to(tokens))
        # 2. head by head. If heads share layers, the gradients of all heads are collected first,
        # and then pass through the shared layers once
        terms: list[LossSums] = []
        cut = GraphCut()
        for k, states in enumerate(self.draft.head_states(hidden_states, batch), start=1):
            scale = scales[k - 1]
            if scale is not None and not self.draft.independent_heads:
                states = cut.detach(states)
            student = states.flatten(0, -2)  # [B * T, d]
            target = indices[k - 1].flatten()  # [B * T]
            soft_target = _teacher(teacher, k, self.soft_targets)
            lm_head = self.draft.lm_head(k)
            terms.append(linear_loss(student, lm_head, target, soft_target, grad_scale=scale))
        cut.backward()
        return terms

    def _factors(self, totals: Tensor, progress: float) -> tuple[float | None, list[float]]:
        """Return the factor on each term's sum in L, its weight over its number of targets: of the
        language model (None if it is frozen), and of each head.

        Args:
            totals: number of targets of each term in the global batch, long [K] or [1 + K].
            progress: step / max_steps, for lambda0.
        """
        counts = totals.tolist()
        lm: float | None = None
        heads_weight = self.weight
        if self.lm is not None:
            lm_count = counts.pop(0)
            lm = 1.0 / max(1, lm_count)
            heads_weight = self.heads_coefficient * lambda0(self.schedule, progress)
        heads: list[float] = []
        head_numbers = range(1, self.draft.trained_heads + 1)
        for k, count in zip(head_numbers, counts, strict=True):
            weight = heads_weight * self.head_weight(k)
            heads.append(weight / max(1, count))
        return lm, heads

    def _head_targets(self, batch: Batch) -> list[Tensor]:
        """Return the targets of each head, long [B, T] each; IGNORE_INDEX at positions that the
        draft does not train.
        """
        targets = [_targets(batch, k) for k in range(1, self.draft.trained_heads + 1)]
        positions = self.draft.loss_positions(batch)
        if positions is None:
            return targets
        return [target.masked_fill(~positions, IGNORE_INDEX) for target in targets]

    def _logit_indices(self, targets: Sequence[Tensor]) -> list[Tensor]:
        """Return the logit indices of each head's targets, long [B, T] each; IGNORE_INDEX if a
        target is not in the head's vocabulary.
        """
        head = self.draft.lm_head(1)  # all heads have the same vocabulary
        if head.token_map is None:
            return list(targets)
        indices = [head.indices_of(target) for target in targets]
        return [index.masked_fill(index < 0, IGNORE_INDEX) for index in indices]


def lambda0(schedule: str, progress: float) -> float:
    """Return the factor on the heads' loss in joint training, relative to
    `medusa_heads_coefficient`.

    Args:
        schedule: `constant` 1, `linear` s, `sine` sin(pi/2 s), `sine_R` sin(pi/2 s/R) until s = R
            and then 1.
        progress: s = step / max_steps, 0 at the start and 1 at the end; clamped to [0, 1].
    """
    s = min(max(progress, 0.0), 1.0)
    if schedule == "constant":
        return 1.0
    if schedule == "linear":
        return s
    rise = 1.0  # R
    end = schedule.removeprefix("sine").removeprefix("_")
    if end:
        rise = float(end)
    return math.sin(math.pi / 2 * min(s / rise, 1.0))


def _scaled(factor: float, grad_scale: float | None) -> float | None:
    """Return the factor on a term's gradients; None if they are not computed with the loss."""
    if grad_scale is None:
        return None
    return grad_scale * factor


def _targets(batch: Batch, k: int) -> Tensor:
    """Return for each position t the token t + k + 1 of the same document, long [B, T];
    IGNORE_INDEX if there is no such token or it is not supervised.
    """
    return shift_labels(batch.labels, k, batch.segments)


def _count(targets: Sequence[Tensor]) -> Tensor:
    """Count the valid targets in each of several tensors [B, T], long [len(targets)]."""
    return torch.stack([(target != IGNORE_INDEX).sum() for target in targets])


def _teacher(
    teacher: tuple[Tensor, LMHead] | None, k: int, weight: float, *, divergence: bool = False
) -> Teacher | None:
    """Return the teacher for predicting the token t + k + 1; None without one or without weight.

    Rows are flattened, so t + k can point into the next row. That happens only if t + k + 1 is not
    a valid target, and such positions are ignored.
    """
    if teacher is None or not weight:
        return None
    states, lm_head = teacher  # [B, T, d']
    return Teacher(states.flatten(0, -2), lm_head, k, weight, divergence)
