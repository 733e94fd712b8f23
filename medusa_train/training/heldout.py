"""Losses, top-1..top-10 shares and acceptance length of the heads on held-out text. Knows no optimizer, no files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from medusa_train.data.dataset import Batch
from medusa_train.data.targets import IGNORE, shift
from medusa_train.inference.ranks import MAX_RANK, rank_of
from medusa_train.losses.distill import linear_kl
from medusa_train.losses.linear_ce import linear_cross_entropy
from medusa_train.losses.objective import Objective
from medusa_train.losses.schedules import head_weight
from medusa_train.models.drafts.base import Draft
from medusa_train.models.features import Features
from medusa_train.models.unembedding import Unembedding
from medusa_train.training.acceptance import Acceptance, RankedConversation, ranked_conversations, simulate
from medusa_train.training.distributed import ALONE, World
from medusa_train.training.student import Student

ROWS = 512  # positions whose logits exist at once: [ROWS, V]


@dataclass(frozen=True)
class HeldOut:
    """What a held-out evaluation found.

    Attributes:
        loss: the heads', `sum_k c^k * head_loss[k]`, nats; comparable with the training loss of a frozen backbone.
        objective: what evaluations are compared by, nats: `loss` where the backbone is frozen, see `whole_objective`.
        head_loss: mean cross-entropy per head, nats per valid target that the head's vocabulary holds.
        top: per head the share of valid targets among its best 1, 2, ..., 10 guesses.
        targets: valid targets per head. known: those of them that the head's vocabulary holds.
        lm_loss: mean cross-entropy of the backbone itself, nats per token; None where it is frozen.
        lm_kl: mean KL from the backbone without its adapter, nats per token; None without an adapter.
        conversations: the ranks of what came next, see `ranked_conversations`.
    """

    loss: float
    objective: float
    head_loss: list[float]
    top: list[list[float]]
    targets: list[int]
    known: list[int]
    lm_loss: float | None = None
    lm_kl: float | None = None
    conversations: list[RankedConversation] = field(default_factory=list, repr=False, compare=False)

    @cached_property
    def acceptance(self) -> Acceptance | None:
        """The best tree and what it would bring, counted when it is first asked for; None: too few conversations."""
        return simulate(self.conversations)

    def figures(self) -> dict[str, Any]:
        """The record for metrics.jsonl."""
        accepted = self.acceptance
        return {
            "loss": self.loss,
            "objective": self.objective,
            "head_loss": self.head_loss,
            "head_top1": [shares[0] for shares in self.top],
            "head_top": self.top,
            "targets": self.targets,
            **({} if self.known == self.targets else {"targets_in_vocabulary": self.known}),
            **({} if self.lm_loss is None else {"lm_loss": self.lm_loss}),
            **({} if self.lm_kl is None else {"lm_kl": self.lm_kl}),
            **({} if accepted is None else {"acceptance_length": accepted.length}),
        }


@torch.no_grad()
def evaluate_held_out(
    student: Student,
    draft: Draft,
    batches: Iterable[Batch],
    objective: Objective,
    stop: Callable[[], bool] = lambda: False,
    world: World = ALONE,
) -> HeldOut | None:
    """Measure the heads on `batches`, assistant tokens only, with never more than [ROWS, V] logits in memory.

    Several processes take turns with the batches, and all of them find the same.

    Args:
        student: run as in training, with its dropout off.
        draft: the heads, run with their dropout off too.
        batches: the whole held-out set, once.
        objective: what the run minimises, for the weights of the terms.
        stop: asked before every batch; True gives up.
        world: the processes that measure together.

    Returns:
        The figures, or None when `stop` said so.
    """
    sums = torch.zeros(draft.num_heads, dtype=torch.float64)
    hits = torch.zeros(draft.num_heads, MAX_RANK, dtype=torch.long)
    targets = torch.zeros(draft.num_heads, dtype=torch.long)
    known = torch.zeros(draft.num_heads, dtype=torch.long)
    own = _OwnLoss()
    conversations: list[list[RankedConversation]] = []  # of each batch
    was_training = draft.training
    student.train(False)
    draft.eval()
    try:
        for batch in _in_turn(batches, world):
            if stop():
                return None
            batch = batch.to(student.backbone.device)
            feats = student.features(batch, draft.needs)
            ranks = torch.full((*batch.labels.shape, draft.num_heads), -1, dtype=torch.int8)
            with student.precision.autocast():
                for i, hidden in enumerate(draft.traced(feats, batch)):
                    wanted = shift(batch.labels, i + 1, batch.segments)
                    valid = wanted != IGNORE
                    head = draft.unembed(i + 1)
                    rows = head.places(wanted[valid])
                    loss, places = _score(hidden[valid], rows, head)
                    sums[i] += loss
                    known[i] += int((rows >= 0).sum())
                    hits[i] += torch.bincount(places[places >= 0], minlength=MAX_RANK).cumsum(dim=0)
                    targets[i] += len(places)
                    ranks[..., i][valid.cpu()] = places.to(ranks.dtype)
                if student.joint:
                    own.add(student, batch, feats)
            conversations.append(ranked_conversations(batch.labels.cpu(), batch.segments.cpu(), ranks))
    finally:
        student.train()
        draft.train(was_training)
    sums, hits, targets, known = (world.sum(found) for found in (sums, hits, targets, known))
    own.add_up(world)
    means = sums / known.clamp(min=1)
    trained = means[: draft.trained_heads]
    weighted = sum(head_weight(k, objective.decay) * float(mean) for k, mean in enumerate(trained, start=1))
    whole = whole_objective(objective, weighted, own.loss, own.kl)
    shares = hits / targets.clamp(min=1)[:, None]
    return HeldOut(
        float(weighted),
        whole,
        means.tolist(),
        shares.tolist(),
        targets.tolist(),
        known.tolist(),
        own.loss,
        own.kl,
        _in_order(world.gather(conversations)),
    )


def _in_turn(batches: Iterable[Batch], world: World) -> Iterator[Batch]:
    """This process's batches: every `world.size`-th one.

    In the last round some processes may have none; they run one of the others', of which nothing counts, for a model
    that is split over all processes runs in all of them.
    """
    around: list[Batch] = []
    for batch in batches:
        around.append(batch)
        if len(around) == world.size:
            yield around[world.rank]
            around = []
    if world.rank < len(around):
        yield around[world.rank]
    elif around:
        yield replace(around[0], labels=torch.full_like(around[0].labels, IGNORE))


def _in_order(gathered: list[list[list[RankedConversation]]]) -> list[RankedConversation]:
    """All conversations of all processes' batches, in the order of the held-out set."""
    rounds = zip_longest(*gathered, fillvalue=[])
    return [conversation for batches in rounds for batch in batches for conversation in batch]


def whole_objective(objective: Objective, heads: float, ce: float | None, kl: float | None) -> float:
    """What a run minimises, of held-out means in nats: the heads' alone, or `L_LM + lambda0 * heads`.

    lambda0 is taken at its peak, where every schedule ends, so that all evaluations of a run compare. A target mixed
    with a teacher's (rho) counts as rho * KL + (1 - rho) * CE: its loss but for the teacher's entropy, a constant.

    Args:
        objective: the run's. heads: `sum_k c^k * L_k`.
        ce, kl: of the backbone, against the labels and from its teacher; None: not measured, which counts 0.
    """
    if objective.lm is None:
        return heads
    teachers = 1.0 if objective.lm == "kl" else objective.rho
    own = (1.0 - teachers) * (ce or 0.0) + teachers * (kl or 0.0)
    return own + objective.heads_coefficient * heads


class _OwnLoss:
    """Cross-entropy of the backbone that learns, and its KL from the one that it was; sums over targets."""

    def __init__(self) -> None:
        self._ce = self._kl = 0.0
        self._count = 0
        self._has_teacher = False

    def add(self, student: Student, batch: Batch, feats: Features) -> None:
        wanted = shift(batch.labels, 0, batch.segments).flatten()
        self._count += int((wanted != IGNORE).sum())
        hidden = feats.hidden.flatten(0, 1)
        if student.adapter is None:
            self._ce += float(linear_cross_entropy(hidden, student.unembedding(), wanted).ce_sum)
            return
        self._has_teacher = True
        teacher, unembedding = student.teacher(batch, feats)
        sums = linear_kl(hidden, student.unembedding(), teacher.hidden.flatten(0, 1), unembedding, wanted)
        self._ce += float(sums.ce_sum)
        self._kl += float(sums.kl_sum)

    def add_up(self, world: World) -> None:
        """Put together what all processes have found."""
        sums = world.sum(torch.tensor([self._ce, self._kl, self._count], dtype=torch.float64))
        self._ce, self._kl, self._count = float(sums[0]), float(sums[1]), int(sums[2])

    @property
    def loss(self) -> float | None:
        return self._ce / self._count if self._count else None

    @property
    def kl(self) -> float | None:
        return self._kl / self._count if self._count and self._has_teacher else None


def _score(hidden: Tensor, wanted: Tensor, unembedding: Unembedding) -> tuple[float, Tensor]:
    """Summed cross-entropy of hidden states [N, d] against rows [N] of the matrix, and the ranks [N] (CPU), by chunks.

    A row of -1, for a token that the head lacks, has no loss and no rank.
    """
    loss, ranks = 0.0, [torch.zeros(0, dtype=torch.long)]
    for rows, tokens in zip(hidden.split(ROWS), wanted.split(ROWS), strict=True):
        if not len(tokens):
            continue
        logits = unembedding.logits(rows).float()
        loss += float(cross_entropy(logits, tokens, reduction="sum", ignore_index=-1))
        ranks.append(rank_of(logits, tokens).cpu())
    return loss, torch.cat(ranks)
