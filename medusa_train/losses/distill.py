"""Losses against a teacher's distributions, a chunk of both logits at a time; knows no model, draft or recipe."""

from __future__ import annotations

from torch import Tensor

from medusa_train.losses.linear import LinearSums, Teacher, linear_loss
from medusa_train.losses.matrix import UnembeddingLike


def linear_kl(
    hidden: Tensor,
    unembedding: UnembeddingLike,
    teacher_hidden: Tensor,
    teacher_unembedding: UnembeddingLike,
    targets: Tensor,
    *,
    ahead: int = 0,
    chunk: int | None = None,
) -> LinearSums:
    """Sum over rows of `KL(p_teacher || p_student)` in nats, without the [N, V] logits of either.

    Self-distillation's loss of the language model (Medusa, section 2.3.2; SPEC 1). Nothing flows back into the
    teacher. Where its distribution is the student's to the bit, value and gradients are exactly 0.

    Args:
        hidden: [N, d], the student's. unembedding: weight [V, d], bias [V] or None, softcap, scale, low_rank.
        teacher_hidden: [N, d']. teacher_unembedding: the teacher's, of the same V tokens; its LoRA branch, if it has
            one, counts without dropout.
        targets: long [N]. Rows with IGNORE are dropped before every product; the others' token ids serve `correct`
            and `ce_sum` only.
        ahead: row n is compared with the teacher's row n + ahead.
        chunk: rows per chunk; by default `chunk_rows`.

    Raises:
        IndexError: a target is neither IGNORE nor in [0, V), or a row that counts has no row `ahead` of it.
        ValueError: the teacher has another number of rows or tokens.
    """
    teacher = Teacher(teacher_hidden, teacher_unembedding, ahead, share=1.0, divergence=True)
    return linear_loss(hidden, unembedding, targets, teacher, chunk)


def linear_soft_cross_entropy(
    hidden: Tensor,
    unembedding: UnembeddingLike,
    teacher_hidden: Tensor,
    teacher_unembedding: UnembeddingLike,
    targets: Tensor,
    rho: float,
    *,
    ahead: int = 0,
    chunk: int | None = None,
) -> LinearSums:
    """Sum over rows of the cross-entropy against `rho * p_teacher + (1 - rho) * onehot(target)`, in nats.

    The soft target of `medusa_distillation_regularization` (SPEC 6; the teacher's probabilities, where the fork took
    the student's own), and of heads that learn from distributions: head k at position t has `ahead` = k, for the
    teacher at t + k predicts the token at t + k + 1, as the head does.

    Arguments and errors as in `linear_kl`, and:

    Args:
        rho: share of the teacher in the target; 0 is plain cross-entropy, 1 that against the teacher alone.

    Raises:
        ValueError: rho is not in [0, 1].
    """
    if not 0.0 <= rho <= 1.0:
        raise ValueError(f"rho is the teacher's share of the target, a number in [0, 1], not {rho}")
    teacher = Teacher(teacher_hidden, teacher_unembedding, ahead, share=rho, divergence=False)
    return linear_loss(hidden, unembedding, targets, teacher, chunk)
