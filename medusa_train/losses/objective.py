"""What a recipe minimises: the language model's loss and the heads'. Knows no model class, optimizer or process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from medusa_train.data.targets import IGNORE_INDEX, shift_labels
from medusa_train.losses.fused_linear import LossSums, linear_cross_entropy, linear_kl, linear_soft_cross_entropy
from medusa_train.losses.projection import LMHeadLike
from medusa_train.losses.schedules import head_weight, lambda0


class DraftHeads(Protocol):
    """A draft, as far as a loss is concerned."""

    @property
    def trained_heads(self) -> int:
        """K, the number of heads that have a loss of their own."""

    def head_states(self, feats: Any, batch: Any) -> Iterator[Tensor]:
        """For k = 1..K the state [B, T, d] that head k's unembedding reads."""

    def lm_head(self, k: int) -> LMHeadLike:
        """Head k's matrix and logit transform, k = 1..K."""


class BackboneStates(Protocol):
    """A backbone's features, as far as a loss is concerned."""

    @property
    def hidden(self) -> Tensor:
        """[B, T, d], what the backbone's own unembedding reads: position t predicts the token t + 1."""


class LabelledBatch(Protocol):
    """A batch, as far as a loss is concerned: right-padded rows of tokens."""

    @property
    def labels(self) -> Tensor:
        """Long [B, T]: the token itself where it is supervised, else IGNORE_INDEX."""

    @property
    def segments(self) -> Tensor:
        """Long [B, T]: which document a position belongs to; -1 is padding."""


@dataclass(frozen=True)
class LMSums:
    """The language model's sums over one micro-batch's valid targets; detached scalars, nats.

    Attributes:
        loss: what is minimised. ce: cross-entropy against the labels. kl: KL to the teacher, 0 without one.
        correct: top-1 hits. count: valid targets.
    """

    loss: Tensor
    ce: Tensor
    kl: Tensor
    correct: Tensor
    count: Tensor


@dataclass(frozen=True)
class ObjectiveOutput:
    """One micro-batch's share of the loss over the whole global batch.

    Attributes:
        loss: scalar, differentiable, all terms in one. The shares of all micro-batches add up to the global batch's
            loss.
        head_sums: [K], sum of cross-entropies against the labels in nats, soft targets or not; detached.
        head_kl_sums: [K], sum of KL to the teacher in nats, 0 where the heads have none; detached.
        head_correct: long [K], top-1 hits.
        head_counts: long [K], valid targets in this micro-batch, each a hit or a miss.
        head_in_vocab: long [K], those among them that the head's vocabulary holds: what has a loss.
        lm: the language model's, None where it is not trained.
    """

    loss: Tensor
    head_sums: Tensor
    head_kl_sums: Tensor
    head_correct: Tensor
    head_counts: Tensor
    head_in_vocab: Tensor
    lm: LMSums | None


class Objective:
    """`L = L_LM + lambda0 * sum_k c^k * L_k`, each term a mean over its own valid targets (Medusa, section 2.2).

    The means are over the whole global batch, and only the target's label decides whether a position counts: the
    hidden state itself may lie in the prompt. Head k at position t learns the label at t + k + 1, the language model
    that at t + 1. Targets never cross a document's end; nor does a teacher's position t + k, which lies between.

    Without a language model's loss (the backbone frozen) lambda0 does not apply: Medusa-1's is L = sum_k c^k * L_k.

    A head over a reduced vocabulary S has no loss where its target y is not in S, and divides by the targets that are:
    `L_k = 1/|{t: y in S}| * sum_{t: y in S} CE(q_t, p_k,t)`, p_k,t being its softmax over S. With a share s of the
    teacher `q_t = s * p0_{t+k|S} + (1 - s) * onehot(y)`, where `p0_{|S}(x) = p0(x) / sum_{x' in S} p0(x')` for x in S
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
        """Choose the terms.

        Args:
            draft: the heads.
            decay: c, `medusa_decay_coefficient`.
            lm: the language model's loss: None (it is frozen), "ce" against the labels, or "kl" from the teacher
                (`medusa_self_distillation`).
            rho: the teacher's share of the target of "ce" (`medusa_distillation_regularization`); "kl" ignores it.
            heads_coefficient: lambda0's peak, `medusa_heads_coefficient`. schedule: lambda0's, `medusa_scheduler`.
            soft_heads: the teacher's share of the heads' targets: head k at t against the teacher at t + k.
            weight: factor on the heads' loss while the backbone is frozen, where lambda0 does not apply.

        Raises:
            ValueError: no such schedule, or a share outside [0, 1].
        """
        for name, share in (("rho", rho), ("soft_heads", soft_heads)):
            if not 0.0 <= share <= 1.0:
                raise ValueError(f"{name} is the teacher's share of a target, a number in [0, 1], not {share}")
        lambda0(schedule, 0.0)  # refuses unknown schedules before the first step
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
        """Whether `loss` wants a teacher's features and unembedding."""
        return self.lm == "kl" or self.rho > 0.0 or self.soft_heads > 0.0

    def heads_weight(self, progress: float) -> float:
        """Factor on the heads' loss after the share `progress` of the run."""
        return self.weight if self.lm is None else self.heads_coefficient * lambda0(self.schedule, progress)

    def target_counts(self, batch: LabelledBatch) -> Tensor:
        """Targets of each term that have a loss, long: [K] the heads', or [1 + K] with the language model's first.

        Summed over a global batch (micro-batches and processes) they are `loss`'s `counts_total`.
        """
        heads = [self._known(batch, k, self.draft.lm_head(k)) for k in range(1, self.draft.trained_heads + 1)]
        own = [] if self.lm is None else [self._targets(batch, 0)]
        return torch.stack([(target != IGNORE_INDEX).sum() for target in (*own, *heads)])

    def loss(
        self,
        feats: Any,
        batch: LabelledBatch,
        counts_total: Tensor,
        *,
        progress: float = 0.0,
        lm_head: LMHeadLike | None = None,
        teacher: BackboneStates | None = None,
        teacher_lm_head: LMHeadLike | None = None,
    ) -> ObjectiveOutput:
        """One micro-batch's share of L.

        Args:
            feats: the backbone's features of this batch, as the draft reads them; with a graph where the backbone is
                trained. With a language model's loss it has `hidden` [B, T, d].
            batch: labels and segments [B, T]; all that the draft reads of it besides.
            counts_total: `counts` summed over the global batch; a term with no target contributes 0.
            progress: step / max_steps, for lambda0.
            lm_head: the backbone's own, LoRA branch included; needed for a language model's loss.
            teacher, teacher_lm_head: features of the same batch, and the matrix they belong to; needed where
                `needs_teacher`. In Medusa-1 the frozen backbone is the teacher: `feats` and its unembedding.

        Raises:
            ValueError: an argument that this objective needs is missing.
        """
        judge: _Judge | None = None
        if teacher is not None and teacher_lm_head is not None:
            judge = _Judge(teacher.hidden, teacher_lm_head)
        elif self.needs_teacher:
            raise ValueError("this objective compares with a teacher: pass teacher and teacher_lm_head")
        terms: list[LossSums] = []
        if self.lm is not None:
            if lm_head is None:
                raise ValueError("this objective trains the language model: pass lm_head")
            target = self._targets(batch, 0)
            terms.append(_term(feats.hidden, lm_head, target, 0, judge, self.rho, self.lm == "kl"))
        for k, hidden in enumerate(self.draft.head_states(feats, batch), start=1):
            head = self.draft.lm_head(k)
            terms.append(_term(hidden, head, self._known(batch, k, head), k, judge, self.soft_heads))
        valid = [(self._targets(batch, k) != IGNORE_INDEX).sum() for k in range(1, self.draft.trained_heads + 1)]
        return self._weigh(terms, torch.stack(valid), self.target_counts(batch), counts_total, progress)

    def _weigh(
        self, terms: list[LossSums], valid: Tensor, counts: Tensor, totals: Tensor, progress: float
    ) -> ObjectiveOutput:
        first = 0 if self.lm is None else 1  # where the heads begin
        scale = self.heads_weight(progress)
        weights = [1.0] * first + [scale * head_weight(k, self.decay) for k in range(1, self.draft.trained_heads + 1)]
        sums = torch.stack([term.loss_sum for term in terms])
        heads = terms[first:]
        lm = terms[0]
        return ObjectiveOutput(
            loss=(sums * (sums.new_tensor(weights) / totals.to(sums).clamp(min=1.0))).sum(),
            head_sums=torch.stack([term.ce_sum for term in heads]),
            head_kl_sums=torch.stack([term.kl_sum for term in heads]),
            head_correct=torch.stack([term.correct for term in heads]),
            head_counts=valid,
            head_in_vocab=counts[first:],
            lm=LMSums(lm.loss_sum.detach(), lm.ce_sum, lm.kl_sum, lm.correct, counts[0]) if first else None,
        )

    @staticmethod
    def _targets(batch: LabelledBatch, k: int) -> Tensor:
        return shift_labels(batch.labels, k, batch.segments)

    def _known(self, batch: LabelledBatch, k: int, head: LMHeadLike) -> Tensor:
        """Head k's targets [B, T] as rows of its matrix, IGNORE_INDEX where there is none."""
        target = self._targets(batch, k)
        if head.token_map is None:
            return target
        places = head.rows_of(target)
        return torch.where(places < 0, IGNORE_INDEX, places)


class Medusa1Objective(Objective):
    """`L1 = sum_k c^k * CE_k`: the backbone frozen, the heads alone (Medusa, section 2.2.1, Eq. 1)."""

    def __init__(self, draft: DraftHeads, decay: float, *, soft_heads: float = 0.0) -> None:
        """`decay` is c, `medusa_decay_coefficient`; `soft_heads` the frozen backbone's share of the targets."""
        super().__init__(draft, decay, soft_heads=soft_heads)


class _Judge:
    """A teacher's states [B, T, d] with the unembedding that they belong to."""

    def __init__(self, hidden: Tensor, unembedding: LMHeadLike) -> None:
        self.hidden = hidden
        self._whole = self._part = unembedding
        self._tokens: Tensor | None = None  # that _part is over

    def over(self, tokens: Tensor | None) -> LMHeadLike:
        """Its unembedding over these tokens alone; None: all. The rows are copied once for all heads."""
        if tokens is not self._tokens:
            self._part = self._whole if tokens is None else self._whole.restrict_to(tokens)
            self._tokens = tokens
        return self._part


def _term(
    hidden: Tensor,
    unembedding: LMHeadLike,
    target: Tensor,
    k: int,
    judge: _Judge | None,
    share: float,
    divergence: bool = False,
) -> LossSums:
    """Sums of the predictor of t + k + 1: states [B, T, d] against targets [B, T] (rows) and the teacher at t + k.

    The rows of a batch are laid end to end, so t + k may seem to reach into the next one; where t + k + 1 is a valid
    target it does not, for that lies in the same row and document.
    """
    hidden, target = hidden.flatten(0, -2), target.flatten()
    if judge is None or not (divergence or share):
        return linear_cross_entropy(hidden, unembedding, target)
    states, theirs = judge.hidden.flatten(0, -2), judge.over(unembedding.token_map)
    if divergence:
        return linear_kl(hidden, unembedding, states, theirs, target, ahead=k)
    return linear_soft_cross_entropy(hidden, unembedding, states, theirs, target, share, ahead=k)
