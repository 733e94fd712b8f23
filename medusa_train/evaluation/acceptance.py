"""What was accepted and what the heads guessed, as pure functions of measured answers. Knows no model and no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from medusa_train.evaluation.records import TimedAnswer
from medusa_train.inference.ranks import Reach, Trace, head_accuracy, tokens_per_step
from medusa_train.trees.tree import Ranks, Tree


def accepted_lengths(answers: Sequence[TimedAnswer]) -> list[int]:
    """How many steps accepted 0, 1, 2, ... draft tokens, up to the most that any step did; empty without steps."""
    counts = Counter(length for answer in answers for length in answer.accepted)
    return [counts[length] for length in range(max(counts) + 1)] if counts else []


def ctar(answers: Sequence[TimedAnswer]) -> list[float]:
    """CTAR(w) for w = 1, 2, ...: the share of steps in which at least w drafted tokens were accepted (Kangaroo, 5)."""
    lengths = accepted_lengths(answers)
    steps = sum(lengths)
    return [sum(lengths[least:]) / steps for least in range(1, len(lengths))]


def node_acceptance(traces: Sequence[Trace], tree: Tree) -> list[float] | None:
    """Share of the steps in which each node of `tree` is accepted, in the order of `tree.paths`.

    Counted by decoding the traced answers once more on paper. None without any step.
    """
    steps = 0
    accepted: Counter[Ranks] = Counter()
    reach = Reach(tree)
    for trace in traces:
        starts = trace.walk(reach)
        steps += len(starts)
        for start in starts:
            path = trace.path(start)
            accepted.update(path[:depth] for depth in range(1, len(path) + 1))
    return [accepted[path] / steps for path in tree.paths] if steps else None


def chain_acceleration_rate(traces: Sequence[Trace]) -> float | None:
    """Tokens per step that the chain of all heads' first guesses would have had on the traced answers.

    This is what loaders without a tree get of the same heads (vLLM's Medusa).
    """
    return tokens_per_step(traces, Tree.chain(len(traces[0].ranks[0]))) if traces else None


def accuracy_on_answers(traces: Sequence[Trace]) -> list[list[float]] | None:
    """Top-1 .. top-10 accuracy per head [K][10] at every position of the traced answers; None without any."""
    return head_accuracy(traces) if traces else None
