"""Losses, top-1..top-10 shares and acceptance length of the heads on held-out text. Knows no optimizer, no files."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from medusa_train.data.dataset import Batch
from medusa_train.data.targets import IGNORE_INDEX, shift_labels
from medusa_train.inference.traces import MAX_RANK, Trace, rank_of, tokens_per_step
from medusa_train.inference.tree_fit import fit_tree
from medusa_train.losses.fused_linear import linear_cross_entropy, linear_kl
from medusa_train.losses.objective import Objective
from medusa_train.losses.schedules import head_weight
from medusa_train.models.drafts.base import Draft
from medusa_train.models.features import Features
from medusa_train.models.lm_head import LMHead
from medusa_train.training.backbone_recipe import BackboneRecipe
from medusa_train.training.distributed import SINGLE_PROCESS, World
from medusa_train.trees.tree import Tree

ROWS = 512  # positions whose logits exist at once: [ROWS, V]


@dataclass(frozen=True)
class ValidationResult:
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

    def record(self) -> dict[str, Any]:
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
def validate(
    recipe: BackboneRecipe,
    draft: Draft,
    batches: Iterable[Batch],
    objective: Objective,
    stop: Callable[[], bool] = lambda: False,
    world: World = SINGLE_PROCESS,
) -> ValidationResult | None:
    """Measure the heads on `batches`, assistant tokens only, with never more than [ROWS, V] logits in memory.

    Several processes take turns with the batches, and all of them find the same.

    Args:
        recipe: run as in training, with its dropout off.
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
    recipe.train(False)
    draft.eval()
    try:
        for batch in _in_turn(batches, world):
            if stop():
                return None
            batch = batch.to(recipe.backbone.device)
            feats = recipe.features(batch, draft.needs)
            ranks = torch.full((*batch.labels.shape, draft.num_heads), -1, dtype=torch.int8)
            with recipe.precision.autocast():
                for i, hidden in enumerate(draft.teacher_forced_states(feats, batch)):
                    wanted = shift_labels(batch.labels, i + 1, batch.segments)
                    valid = wanted != IGNORE_INDEX
                    head = draft.lm_head(i + 1)
                    rows = head.rows_of(wanted[valid])
                    loss, places = _score(hidden[valid], rows, head)
                    sums[i] += loss
                    known[i] += int((rows >= 0).sum())
                    hits[i] += torch.bincount(places[places >= 0], minlength=MAX_RANK).cumsum(dim=0)
                    targets[i] += len(places)
                    ranks[..., i][valid.cpu()] = places.to(ranks.dtype)
                if recipe.joint:
                    own.add(recipe, batch, feats)
            conversations.append(ranked_conversations(batch.labels.cpu(), batch.segments.cpu(), ranks))
    finally:
        recipe.train()
        draft.train(was_training)
    sums, hits, targets, known = (world.sum(found) for found in (sums, hits, targets, known))
    own.add_up(world)
    means = sums / known.clamp(min=1)
    trained = means[: draft.trained_heads]
    weighted = sum(head_weight(k, objective.decay) * float(mean) for k, mean in enumerate(trained, start=1))
    whole = whole_objective(objective, weighted, own.loss, own.kl)
    shares = hits / targets.clamp(min=1)[:, None]
    return ValidationResult(
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
        yield replace(around[0], labels=torch.full_like(around[0].labels, IGNORE_INDEX))


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

    def add(self, recipe: BackboneRecipe, batch: Batch, feats: Features) -> None:
        wanted = shift_labels(batch.labels, 0, batch.segments).flatten()
        self._count += int((wanted != IGNORE_INDEX).sum())
        hidden = feats.hidden.flatten(0, 1)
        if recipe.adapter is None:
            self._ce += float(linear_cross_entropy(hidden, recipe.unembedding(), wanted).ce_sum)
            return
        self._has_teacher = True
        teacher, unembedding = recipe.teacher(batch, feats)
        sums = linear_kl(hidden, recipe.unembedding(), teacher.hidden.flatten(0, 1), unembedding, wanted)
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


def _score(hidden: Tensor, wanted: Tensor, unembedding: LMHead) -> tuple[float, Tensor]:
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


#: Nodes of the tree, the same in every evaluation so that all of them compare. Few enough to pay on a CPU and many
#: enough to show what lower ranks are worth; the run's last tree is sized by measured latency instead.
NODES = 16
#: Answer tokens at most that are decoded on paper (a second or two); of more, every n-th conversation is taken.
TRACED = 50_000

#: One conversation: per answer an int8 tensor [tokens, K], as `Trace.ranks`.
RankedConversation = list[Tensor]


@dataclass(frozen=True)
class Acceptance:
    """The best tree of the heads as they are, and what it would bring.

    Attributes:
        tree: fitted to all conversations.
        length: tokens per step (1.0: nothing accepted), on conversations that a tree was not fitted to.
    """

    tree: Tree
    length: float

    def record(self, step: int) -> dict[str, Any]:
        """The content of a checkpoint's tree.json, from the evaluation after `step` steps."""
        return self.tree.record(
            nodes=self.tree.size, tokens_per_step=round(self.length, 4), fitted_to="held-out text", step=step
        )


def ranked_conversations(labels: Tensor, segments: Tensor, ranks: Tensor) -> list[RankedConversation]:
    """Cut a batch's ranks into answers, conversation by conversation.

    The state at t has the backbone's next token t + 1 as its root, so an answer is a run of positions whose next
    token is supervised. Heads learn from the states before it too, and where turns are short beyond its end; decoding
    starts and ends within the answer, so those ranks are left out.

    Args:
        labels, segments: [B, T], of the batch.
        ranks: int8 [B, T, K], head k's at t being that of the token at t + k + 1; -1 past the last guess kept.
    """
    roots = pad((shift_labels(labels, 0, segments) != IGNORE_INDEX).int(), (1, 1)).diff(
        dim=1
    )  # 1 where a run begins, -1 behind it
    found: dict[tuple[int, int], RankedConversation] = {}
    starts, ends = (roots == 1).nonzero().tolist(), (roots == -1).nonzero().tolist()
    for (row, start), (_, end) in zip(starts, ends, strict=True):
        answer = ranks[row, start:end].clone()
        for k in range(1, answer.shape[1] + 1):
            answer[max(len(answer) - k, 0) :, k - 1] = -1
        found.setdefault((row, int(segments[row, start])), []).append(answer)
    return list(found.values())


def simulate(conversations: Sequence[RankedConversation], nodes: int = NODES) -> Acceptance | None:
    """Find the best tree of `nodes` nodes, and the tokens per step to expect of it; None with fewer than two.

    Rare paths overfit, so no answer is judged by a tree that was fitted to it: a tree fitted to every other
    conversation is judged on the rest, and the other way round, and the mean of both is taken. Which of a fit's
    recounts is best is decided on the fitted half too. The tree that is returned is fitted to all of them, so it rests
    on twice as much as those that were judged.
    """
    total = sum(len(answer) for conversation in conversations for answer in conversation)
    taken = conversations[:: max(1, math.ceil(total / TRACED))]
    if len(taken) < 2:
        return None
    traces = [[_trace(answer) for answer in conversation] for conversation in taken]
    first, second = ([trace for answers in traces[half::2] for trace in answers] for half in (0, 1))
    length = (_crossed(first, second, nodes) + _crossed(second, first, nodes)) / 2
    everything = first + second
    return Acceptance(fit_tree(everything, everything, nodes), length)


def _crossed(fit: Sequence[Trace], judge: Sequence[Trace], nodes: int) -> float:
    return tokens_per_step(judge, fit_tree(fit, fit, nodes))


def _trace(ranks: Tensor) -> Trace:
    tokens, heads = ranks.shape
    return Trace(ranks.tolist(), [min(heads, tokens - 1 - place) for place in range(tokens)])
