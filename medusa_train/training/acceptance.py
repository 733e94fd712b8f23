"""Tokens per step that a tree of guesses would bring on held-out text, from the heads' ranks. Knows no model, no loss.

Ranks of the true continuation go in, for every position of every answer; out come the best tree of a fixed size and
the steps that decoding with it would take (`inference.ranks`, `inference.calibrate`: the same counting as after the
run, there over the backbone's own greedy answers).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from medusa_train.data.targets import IGNORE, shift
from medusa_train.inference.calibrate import fit_tree
from medusa_train.inference.ranks import Trace, tokens_per_step
from medusa_train.trees.tree import Tree

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
    roots = pad((shift(labels, 0, segments) != IGNORE).int(), (1, 1)).diff(dim=1)  # 1 where a run begins, -1 behind it
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
