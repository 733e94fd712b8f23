"""The figures of an evaluation, as pure functions of measured answers (SPEC 1, terms). Knows no model and no clock.

Every rate is a ratio of sums (total tokens over total time), but for `mean_speedup`, the mean of the questions' own
ratios, which stands beside it; a ratio whose denominator is zero, because nothing of the kind was measured, is None.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from medusa_train.data.conversation import is_looping
from medusa_train.evaluation.bootstrap import Interval, speed_intervals
from medusa_train.evaluation.records import TimedAnswer, TurnRecord, Verdict
from medusa_train.inference.traces import AcceptedLength, Trace, head_accuracy, tokens_per_step
from medusa_train.trees.tree import Ranks, Tree

#: By name: numbers (None: not measured), lists of them (`ctar`), and mappings (`baselines`, `intervals`).
Figures = dict[str, Any]


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    if numerator is None or denominator is None or denominator <= 0:
        return None
    return numerator / denominator


def acceleration_rate(answers: Sequence[TimedAnswer]) -> float | None:
    """Tokens per decoding step; 1.0 for plain decoding.

    The first token of an answer comes from the prefill, which is not a step, so it does not count.
    """
    return _ratio(sum(len(answer.tokens) - 1 for answer in answers), sum(answer.steps for answer in answers))


def step_seconds(answers: Sequence[TimedAnswer]) -> float | None:
    """Mean latency of one decoding step in seconds, prefill excluded."""
    return _ratio(sum(answer.decode_seconds for answer in answers), sum(answer.steps for answer in answers))


def overhead(tree: Sequence[TimedAnswer], plain: Sequence[TimedAnswer]) -> float | None:
    """Latency of a step with the tree over the latency of a plain step."""
    return _ratio(step_seconds(tree), step_seconds(plain))


def tokens_per_second(answers: Sequence[TimedAnswer]) -> float | None:
    """Total tokens over total wall time, prefill included."""
    return _ratio(sum(len(answer.tokens) for answer in answers), sum(answer.seconds for answer in answers))


def first_difference(first: Sequence[int], second: Sequence[int]) -> int | None:
    """Index of the first token in which two answers differ (where one ends, if it is the other's beginning)."""
    for index, (left, right) in enumerate(zip(first, second, strict=False)):
        if left != right:
            return index
    return None if len(first) == len(second) else min(len(first), len(second))


def _count(records: Iterable[TurnRecord], dtype: str, verdict: Verdict) -> int | None:
    """Answers with that verdict; None when the dtype was not run."""
    verdicts = [record.exact[dtype] for record in records if dtype in record.exact]
    return sum(found is verdict for found in verdicts) if verdicts else None


def speedup(records: Sequence[TurnRecord], baseline: str = "plain") -> float | None:
    """Total tokens over total time of the tree's answers, over the same of a baseline's."""
    tree = [record.tree for record in records if record.tree is not None]
    return _ratio(tokens_per_second(tree), tokens_per_second([record.baselines[baseline] for record in records]))


def mean_speedup(records: Sequence[TurnRecord]) -> float | None:
    """Mean of the questions' own speedups over the empty tree, each with all its turns: short answers count as much."""
    questions: dict[int | str, list[TurnRecord]] = {}
    for record in records:
        questions.setdefault(record.question_id, []).append(record)
    ratios = [ratio for turns in questions.values() if (ratio := speedup(turns)) is not None]
    return fmean(ratios) if ratios else None


def time_to_first_token(answers: Sequence[TimedAnswer]) -> float | None:
    """Mean seconds until the first token; None where a decoder does not say."""
    return _ratio(sum(answer.prefill_seconds for answer in answers), len(answers)) or None


def compare_baselines(
    records: Sequence[TurnRecord], intervals: dict[str, Interval | None]
) -> dict[str, dict[str, object]]:
    """For every baseline: its tokens per second, the tree's speedup over it, and answers that equal the plain ones."""
    compared: dict[str, dict[str, object]] = {}
    for name in records[0].baselines if records else ():
        answers = [record.baselines[name] for record in records]
        compared[name] = {
            "tokens_per_s": tokens_per_second(answers),
            "speedup": speedup(records, name),
            "speedup_interval": intervals.get(f"over_{name}"),
            "equal_to_plain": sum(record.baselines[name].tokens == record.plain.tokens for record in records),
        }
    return compared


def summarize(records: Sequence[TurnRecord]) -> Figures:
    """All figures of one group of answers (a category, or the whole bench)."""
    tree = [record.tree for record in records if record.tree is not None]
    plain = [record.plain for record in records]
    generate = [record.generate for record in records]
    traces = [record.trace for record in records if record.trace is not None]
    speed, baseline, stock = tokens_per_second(tree), tokens_per_second(plain), tokens_per_second(generate)
    fastest = max((rate for rate in (baseline, stock) if rate is not None), default=None)
    intervals = speed_intervals(records)
    return {
        "acceleration_rate": acceleration_rate(tree),
        "overhead": overhead(tree, plain),
        "speedup": _ratio(speed, baseline),
        "speedup_over_generate": _ratio(speed, stock),
        "speedup_over_fastest": _ratio(speed, fastest),
        "tokens_per_s": speed,
        "baseline_tokens_per_s": baseline,
        "generate_tokens_per_s": stock,
        "answers": len(records),
        "equal_answers": _count(records, "float32", Verdict.EQUAL),
        "tie_answers": _count(records, "float32", Verdict.TIE),
        "equal_answers_bf16": _count(records, "bfloat16", Verdict.EQUAL),
        "looping_answers": sum(is_looping(record.answer.tokens) for record in records),
        "mean_speedup": mean_speedup(records),
        "speedup_without_loops": speedup([record for record in records if not is_looping(record.answer.tokens)]),
        "time_to_first_token_s": time_to_first_token(tree),
        "plain_time_to_first_token_s": time_to_first_token(plain),
        "accepted_lengths": accepted_lengths(tree),
        "ctar": ctar(tree),
        "chain_acceleration_rate": chain_acceleration_rate(traces),
        "head_accuracy": accuracy_on_answers(traces),
        "baselines": compare_baselines(records, intervals),
        "intervals": {name: found for name, found in intervals.items() if not name.startswith("over_")},
    }


def by_category(records: Sequence[TurnRecord]) -> dict[str, Figures]:
    """`summarize` for each category, in the order in which the categories first appear."""
    groups: dict[str, list[TurnRecord]] = {}
    for record in records:
        groups.setdefault(record.category, []).append(record)
    return {category: summarize(group) for category, group in groups.items()}


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
    reach = AcceptedLength(tree)
    for trace in traces:
        starts = trace.simulate(reach)
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
