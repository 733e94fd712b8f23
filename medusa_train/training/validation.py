"""Evaluate the heads on held-out data: loss, top-1 to top-10 accuracy, and the acceptance length
(tokens per step) of a simulated tree.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from medusa_train.data.batch import IGNORE_INDEX, Batch, shift_labels
from medusa_train.losses.linear_loss import Teacher, linear_loss
from medusa_train.losses.objective import Objective
from medusa_train.models.drafts.base import Draft
from medusa_train.models.lm_head import LMHead
from medusa_train.models.target_states import HiddenStates
from medusa_train.training.distributed import SINGLE_PROCESS, DistributedContext
from medusa_train.training.target_model_recipe import TargetModelRecipe
from medusa_train.tree_search.fit import MAX_RANK, Trace, fit_trees, tokens_per_step
from medusa_train.tree_search.traces import rank_of

ROWS = 512  # number of positions whose logits [ROWS, V] are in memory at once
#: Number of nodes of the simulated tree. It is fixed, so that all evaluations are comparable: small
#: enough to be useful on a CPU, large enough to show the benefit of lower ranks. The size of the
#: run's tree.json follows from measured latency instead.
NODES = 16
#: At most this many answer tokens are simulated (one or two seconds). Of a larger set, only every
#: n-th conversation is used.
MAX_SIMULATED_TOKENS = 50_000

#: One conversation: an int8 tensor [tokens, K] per answer, like `Trace.ranks`.
RankedConversation = list[Tensor]


@dataclass(frozen=True)
class ValidationResult:
    """The metrics of one evaluation on held-out data.

    Attributes:
        loss: the heads' loss in nats, `sum_k c^k * head_loss[k]`, also with soft targets. It is the
            training loss divided by `Objective.weight`, which is 1 for Medusa-1.
        objective: the value in nats that early stopping compares: `loss` if the target model is
            frozen, otherwise see `validation_objective`.
        head_loss: mean cross-entropy per head, in nats per valid target in the head's vocabulary.
        top: top-1, top-2, ..., top-10 accuracy per head.
        targets: number of valid targets per head.
        in_vocab: number of valid targets in the head's vocabulary, per head.
        lm_loss: mean cross-entropy of the target model in nats per token; None if it is frozen.
        lm_kl: mean KL in nats per token from the target model without its adapter; None if it has
            no adapter.
        conversations: the rank that each head gives to each token, see `ranked_conversations`.
    """

    loss: float
    objective: float
    head_loss: list[float]
    top: list[list[float]]
    targets: list[int]
    in_vocab: list[int]
    lm_loss: float | None = None
    lm_kl: float | None = None
    conversations: list[RankedConversation] = field(default_factory=list, repr=False, compare=False)

    @cached_property
    def acceptance_length(self) -> float | None:
        """Tokens per step with a simulated tree, computed on first access; None if there are too
        few conversations.
        """
        return simulate(self.conversations)

    def record(self) -> dict[str, Any]:
        """Return the metrics, for an evaluation record in metrics.jsonl."""
        record = {
            "loss": self.loss,
            "objective": self.objective,
            "head_loss": self.head_loss,
            "head_top1": [accuracies[0] for accuracies in self.top],
            "head_top": self.top,
            "targets": self.targets,
            "targets_in_vocabulary": self.in_vocab if self.in_vocab != self.targets else None,
            "lm_loss": self.lm_loss,
            "lm_kl": self.lm_kl,
            "acceptance_length": self.acceptance_length,
        }
        return {name: value for name, value in record.items() if value is not None}


@torch.no_grad()
def validate(
    recipe: TargetModelRecipe,
    draft: Draft,
    batches: Iterable[Batch],
    objective: Objective,
    stop: Callable[[], bool] = lambda: False,
    distributed: DistributedContext = SINGLE_PROCESS,
) -> ValidationResult | None:
    """Evaluate the heads on the supervised tokens of `batches`, without dropout and with at most
    [ROWS, V] logits in memory.

    The batches are distributed over the processes, and all processes return the same result.

    Args:
        recipe, draft: the target model and the heads; both are in train mode afterwards.
        batches: one pass over the whole validation set.
        objective: the run's objective. It gives the weights of the terms.
        stop: called before every batch. If it returns True in any process, the evaluation ends and
            returns None.
    """
    # 1. Sum over this process's batches.
    head_sums = torch.zeros(draft.max_depth, 3 + MAX_RANK, dtype=torch.float64)
    lm_sums = torch.zeros(3, dtype=torch.float64)
    conversations: list[list[RankedConversation]] = []  # per batch
    recipe.train(False)
    draft.eval()
    try:
        for batch in _share_of(batches, distributed):
            if distributed.any(stop()):
                return None
            batch = batch.to(recipe.target_model.device)
            hidden_states = recipe.hidden_states(batch, draft.aux_layers)
            with recipe.precision.autocast():
                batch_sums, ranks = _head_sums(draft, batch, hidden_states)
                head_sums += batch_sums
                if recipe.joint:
                    lm_sums += _lm_sums(recipe, batch, hidden_states)
            ranked = ranked_conversations(batch.labels.cpu(), batch.segments.cpu(), ranks)
            conversations.append(ranked)
    finally:
        recipe.train()
        draft.train()
    # 2. Compute the means over all processes, for every head and for the target model.
    loss, targets, in_vocab, hits = distributed.sum(head_sums).split([1, 1, 1, MAX_RANK], dim=1)
    head_loss = (loss / in_vocab.clamp(min=1)).flatten().tolist()
    ce, kl, lm_count = distributed.sum(lm_sums).tolist()
    lm_loss = ce / lm_count if lm_count else None
    lm_kl = kl / lm_count if lm_count and recipe.adapter is not None else None
    weighted = enumerate(head_loss[: draft.trained_heads], start=1)
    heads_loss = sum(objective.head_weight(k) * mean for k, mean in weighted)
    # 3. Bring the conversations into the order of the batches: batch i is from process i % size.
    ordered: list[RankedConversation] = []
    for batches_of_turn in zip(*distributed.gather(conversations), strict=True):
        ordered += itertools.chain.from_iterable(batches_of_turn)
    return ValidationResult(
        loss=heads_loss,
        objective=validation_objective(objective, heads_loss, lm_loss, lm_kl),
        head_loss=head_loss,
        top=(hits / targets.clamp(min=1)).tolist(),
        targets=targets.long().flatten().tolist(),
        in_vocab=in_vocab.long().flatten().tolist(),
        lm_loss=lm_loss,
        lm_kl=lm_kl,
        conversations=ordered,
    )


def validation_objective(
    objective: Objective, heads: float, ce: float | None, kl: float | None
) -> float:
    """Return the validation value of a run's objective, in nats: the heads' loss if the target
    model is frozen, otherwise `L_LM + lambda0 * heads`.

    lambda0 has its peak value, at which every schedule ends, so that all evaluations of a run are
    comparable. L_LM is (1 - rho) * CE + rho * KL, where rho is the weight of the teacher. This
    equals the training loss up to the teacher's entropy, which is constant.

    Args:
        heads: the heads' loss, `sum_k c^k * L_k`.
        ce, kl: the target model's mean cross-entropy and its KL from the teacher; None counts as 0.
    """
    if objective.lm is None:
        return heads
    rho = objective.teacher_weight
    return (1.0 - rho) * (ce or 0.0) + rho * (kl or 0.0) + objective.heads_coefficient * heads


def _head_sums(draft: Draft, batch: Batch, hidden_states: HiddenStates) -> tuple[Tensor, Tensor]:
    """Score the heads on a batch.

    Returns:
        sums: float64 [K, 3 + 10] on the CPU: cross-entropy in nats, number of targets, number of
            targets in the head's vocabulary, and number of targets among the best 1, 2, ..., 10
            guesses.
        ranks: int8 [B, T, K] on the CPU, of every target; -1 if it is not among the best 10.
    """
    sums = torch.zeros(draft.max_depth, 3 + MAX_RANK, dtype=torch.float64)
    ranks = torch.full((*batch.labels.shape, draft.max_depth), -1, dtype=torch.int8)  # [B, T, K]
    for i, hidden in enumerate(draft.teacher_forced_states(hidden_states, batch)):
        # 1. Find the targets of head i + 1.
        target = shift_labels(batch.labels, i + 1, batch.segments)  # [B, T]
        valid = target != IGNORE_INDEX  # [B, T], N entries are true
        head = draft.lm_head(i + 1)
        indices = head.indices_of(target[valid])  # [N]
        # 2. Compute their loss and ranks.
        loss, target_ranks = _score(hidden[valid], indices, head)
        ranks[..., i][valid.cpu()] = target_ranks.to(ranks.dtype)
        # 3. Count the targets among the best 1, 2, ..., 10 guesses.
        ranks_of_targets = target_ranks[target_ranks >= 0]
        hits = torch.bincount(ranks_of_targets, minlength=MAX_RANK).cumsum(dim=0)  # [10]
        num_known = int((indices >= 0).sum())
        counts = [loss, len(indices), num_known, *hits.tolist()]
        sums[i] = torch.tensor(counts, dtype=torch.float64)
    return sums, ranks


def _score(hidden: Tensor, indices: Tensor, head: LMHead) -> tuple[float, Tensor]:
    """Return the summed cross-entropy of states [N, d] and the ranks of their targets, [N] on the
    CPU. Computes `ROWS` states at a time.

    Args:
        indices: [N], the target's index in the head's logits. -1 if the head's vocabulary lacks the
            token; it then has no loss and the rank -1.
    """
    loss = 0.0
    ranks = []
    for states, targets in zip(hidden.split(ROWS), indices.split(ROWS), strict=True):
        logits = head.logits(states).float()  # [ROWS, V]
        loss += float(cross_entropy(logits, targets, reduction="sum", ignore_index=-1))
        guesses = head.guesses(states, logits, MAX_RANK)  # [ROWS, 10]
        ranks.append(rank_of(guesses, targets).cpu())
    return loss, torch.cat(ranks)


def _lm_sums(recipe: TargetModelRecipe, batch: Batch, hidden_states: HiddenStates) -> Tensor:
    """Return the sums of a trained target model's cross-entropy and of its KL from the teacher, and
    the number of targets: float64 [3] on the CPU.
    """
    target = shift_labels(batch.labels, 0, batch.segments).flatten()  # [B * T]
    teacher = None
    if recipe.adapter is not None:
        states, teacher_lm_head = recipe.teacher(batch, hidden_states)  # [B, T, d]
        teacher = Teacher(states.flatten(0, 1), teacher_lm_head, divergence=True)
    hidden = hidden_states.final.flatten(0, 1)  # [B * T, d]
    sums = linear_loss(hidden, recipe.target_model.lm_head(), target, teacher)
    count = (target != IGNORE_INDEX).sum()
    return torch.stack([sums.ce_sum.double(), sums.kl_sum.double(), count.double()]).cpu()


def _share_of(batches: Iterable[Batch], distributed: DistributedContext) -> Iterator[Batch]:
    """Yield every `distributed.size`-th batch, starting at this process's rank.

    All processes get equally many batches, because a model that is partitioned over them must run
    in all of them. In the last round, a process without a batch gets a copy of another batch in
    which all labels are ignored.
    """
    remaining = iter(batches)
    while turn := list(itertools.islice(remaining, distributed.size)):
        if distributed.rank < len(turn):
            yield turn[distributed.rank]
        else:
            yield replace(turn[0], labels=torch.full_like(turn[0].labels, IGNORE_INDEX))


# Simulated acceptance


def ranked_conversations(
    labels: Tensor, segments: Tensor, ranks: Tensor
) -> list[RankedConversation]:
    """Split a batch's ranks into answers, and group the answers by conversation.

    The root of the tree at position t is the target model's token t + 1. So an answer is a run of
    positions whose next token is supervised. Heads are also trained on targets after the end of the
    answer; these are left out, because decoding starts and ends within the answer.

    Args:
        ranks: int8 [B, T, K], the rank that head k at position t gives to the token at t + k + 1;
            -1 if it is beyond the last rank that is kept.
    """
    # 1. Find where answers begin (+1) and end (-1). Rows are padded by one position on both sides.
    is_answer = shift_labels(labels, 0, segments) != IGNORE_INDEX  # [B, T]
    borders = pad(is_answer.int(), (1, 1)).diff(dim=1)  # [B, T + 1]
    starts = (borders == 1).nonzero().tolist()
    ends = (borders == -1).nonzero().tolist()
    conversations: dict[tuple[int, int], RankedConversation] = {}
    for (row, start), (_, end) in zip(starts, ends, strict=True):
        # 2. Take the ranks of an answer; drop the ranks of targets after its end.
        answer = ranks[row, start:end]  # [tokens, K]
        length, num_heads = answer.shape
        target_place = torch.arange(length)[:, None] + torch.arange(1, num_heads + 1)
        answer = answer.masked_fill(target_place >= length, -1)
        # 3. Assign the answer to the document in which it begins.
        document = (row, int(segments[row, start]))
        conversations.setdefault(document, []).append(answer)
    return list(conversations.values())


def simulate(conversations: Sequence[RankedConversation], nodes: int = NODES) -> float | None:
    """Estimate the tokens per step with the best tree of `nodes` nodes; None for fewer than two
    conversations.

    A value of 1.0 means that no guess is accepted. The estimate is two-fold cross-validated: a tree
    is fitted to each half of the conversations and evaluated on the other half; the result is the
    mean.
    """
    # 1. Use only every n-th conversation of a larger set.
    total = sum(len(answer) for conversation in conversations for answer in conversation)
    sample = conversations[:: max(1, math.ceil(total / MAX_SIMULATED_TOKENS))]
    if len(sample) < 2:
        return None
    # 2. Split them into two halves, fit a tree to each half, and evaluate it on the other half.
    first, second = (
        [Trace(answer.tolist()) for conversation in sample[half::2] for answer in conversation]
        for half in (0, 1)
    )
    tree_of_first = fit_trees(first, [nodes])[nodes]
    tree_of_second = fit_trees(second, [nodes])[nodes]
    return (tokens_per_step(second, tree_of_first) + tokens_per_step(first, tree_of_second)) / 2
