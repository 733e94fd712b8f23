"""Compute the figures of an evaluation from its timed answers: rates, speedups, overhead, acceptance, equal answers.

A rate is a ratio of sums (total tokens over total time), except `mean_speedup`, a mean over questions. A ratio is
None if its denominator is zero, that is if nothing of the kind was measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from medusa_train.data.conversation import is_looping
from medusa_train.evaluation.answer_scores import summarize_scores
from medusa_train.evaluation.bootstrap import Interval, speed_intervals
from medusa_train.evaluation.records import TimedAnswer, TurnRecord, Verdict
from medusa_train.inference.traces import AcceptedLength, Trace, head_accuracy, tokens_per_step
from medusa_train.trees.tree import Ranks, Tree

#: By name: numbers (None: not measured), lists of them (`ctar`, `chain_rates`), and mappings (`baselines`,
#: `intervals`, `scores`).
Figures = dict[str, Any]


def by_category(records: Sequence[TurnRecord]) -> dict[str, Figures]:
    """Compute `summarize` per category, in the order in which the categories first appear."""
    groups: dict[str, list[TurnRecord]] = {}
    for record in records:
        groups.setdefault(record.category, []).append(record)
    return {category: summarize(group) for category, group in groups.items()}


def summarize(records: Sequence[TurnRecord]) -> Figures:
    """Compute all figures of one group of answers (a category, or the whole bench)."""
    tree = [record.tree for record in records if record.tree is not None]
    plain = [record.plain for record in records]
    generate = [record.generate for record in records]
    traces = [record.trace for record in records if record.trace is not None]
    tree_rate, plain_rate, generate_rate = (tokens_per_second(answers) for answers in (tree, plain, generate))
    fastest = max((rate for rate in (plain_rate, generate_rate) if rate is not None), default=None)
    intervals = speed_intervals(records)
    chains = chain_rates(traces)
    return {
        "acceleration_rate": acceleration_rate(tree),
        "overhead": overhead(tree, plain),
        "speedup": _ratio(tree_rate, plain_rate),
        "speedup_over_generate": _ratio(tree_rate, generate_rate),
        "speedup_over_fastest": _ratio(tree_rate, fastest),
        "tokens_per_s": tree_rate,
        "baseline_tokens_per_s": plain_rate,
        "generate_tokens_per_s": generate_rate,
        "answers": len(records),
        "equal_answers": _count(records, "float32", Verdict.EQUAL),
        "tie_answers": _count(records, "float32", Verdict.TIE),
        "equal_answers_bf16": _count(records, "bfloat16", Verdict.EQUAL),
        "scores": summarize_scores(records),
        "looping_answers": sum(is_looping(record.answer.tokens) for record in records),
        "mean_speedup": mean_speedup(records),
        "speedup_without_loops": speedup([record for record in records if not is_looping(record.answer.tokens)]),
        "time_to_first_token_s": time_to_first_token(tree),
        "plain_time_to_first_token_s": time_to_first_token(plain),
        "accepted_lengths": accepted_lengths(tree),
        "ctar": ctar(tree),
        "chain_acceleration_rate": chains[-1] if chains else None,
        "chain_rates": chains,
        "head_accuracy": head_accuracy(traces) if traces else None,
        "baselines": compare_baselines(records, intervals),
        "intervals": {name: interval for name, interval in intervals.items() if not name.startswith("over_")},
    }


def acceleration_rate(answers: Sequence[TimedAnswer]) -> float | None:
    """Return tokens per decoding step; 1.0 for plain decoding.

    The first token of an answer comes from the prefill, which is not a step, and does not count.
    """
    tokens = sum(len(answer.tokens) - answer.prefill_tokens for answer in answers)
    return _ratio(tokens, sum(answer.steps for answer in answers))


def overhead(tree: Sequence[TimedAnswer], plain: Sequence[TimedAnswer]) -> float | None:
    """Return the latency of a decoding pass with the tree over that of a plain pass."""
    return _ratio(step_seconds(tree), step_seconds(plain))


def step_seconds(answers: Sequence[TimedAnswer]) -> float | None:
    """Return the mean latency of a decoding pass (of a batch: over all its rows) in seconds, prefill excluded."""
    return _ratio(sum(answer.decode_seconds for answer in answers), sum(answer.passes for answer in answers))


def tokens_per_second(answers: Sequence[TimedAnswer]) -> float | None:
    """Return total tokens over total wall time, prefill included."""
    return _ratio(sum(len(answer.tokens) for answer in answers), sum(answer.seconds for answer in answers))


def time_to_first_token(answers: Sequence[TimedAnswer]) -> float | None:
    """Return the mean seconds to the first token; None if the decoder does not report it."""
    return _ratio(sum(answer.prefill_seconds * answer.rows for answer in answers), len(answers)) or None


def speedup(records: Sequence[TurnRecord], baseline: str = "plain") -> float | None:
    """Return the tokens per second of the tree's answers over those of a baseline."""
    tree = [record.tree for record in records if record.tree is not None]
    return _ratio(tokens_per_second(tree), tokens_per_second([record.baselines[baseline] for record in records]))


def mean_speedup(records: Sequence[TurnRecord]) -> float | None:
    """Return the mean over questions (all turns together) of their speedups, so that short answers weigh as much."""
    questions: dict[int | str, list[TurnRecord]] = {}
    for record in records:
        questions.setdefault(record.question_id, []).append(record)
    ratios = [ratio for turns in questions.values() if (ratio := speedup(turns)) is not None]
    return fmean(ratios) if ratios else None


def compare_baselines(
    records: Sequence[TurnRecord], intervals: dict[str, Interval | None]
) -> dict[str, dict[str, object]]:
    """Return per baseline its rates, the tree's speedup over it, and its answers equal to plain ones."""
    baselines: dict[str, dict[str, object]] = {}
    for name in records[0].baselines if records else ():
        answers = [record.baselines[name] for record in records]
        baselines[name] = {
            "tokens_per_s": tokens_per_second(answers),
            "tokens_per_step": acceleration_rate(answers),
            "speedup": speedup(records, name),
            "speedup_interval": intervals.get(f"over_{name}"),
            "equal_to_plain": sum(record.baselines[name].tokens == record.plain.tokens for record in records),
        }
    return baselines


def first_difference(first: Sequence[int], second: Sequence[int]) -> int | None:
    """Return the index of the first token in which two answers differ; None if they are equal.

    If one answer is a prefix of the other, that is the index just after its end.
    """
    for index, (left, right) in enumerate(zip(first, second, strict=False)):
        if left != right:
            return index
    return None if len(first) == len(second) else min(len(first), len(second))


def accepted_lengths(answers: Sequence[TimedAnswer]) -> list[int]:
    """Count the steps that accepted 0, 1, 2, ... draft tokens, up to the longest; empty without steps."""
    counts = Counter(length for answer in answers for length in answer.accepted)
    return [counts[length] for length in range(max(counts) + 1)] if counts else []


def ctar(answers: Sequence[TimedAnswer]) -> list[float]:
    """Return CTAR(w) for w = 1, 2, ...: the share of steps that accepted at least w draft tokens.

    Source: Kangaroo, consistent token acceptance rate.
    """
    lengths = accepted_lengths(answers)
    steps = sum(lengths)
    return [sum(lengths[least:]) / steps for least in range(1, len(lengths))]


def node_acceptance(traces: Sequence[Trace], tree: Tree) -> list[float] | None:
    """Simulate decoding the traced answers with `tree`; return the share of steps that accept each node.

    The order is that of `tree.paths`. None without any step.
    """
    steps = 0
    accepted: Counter[Ranks] = Counter()
    lengths = AcceptedLength(tree)
    for trace in traces:
        starts = trace.simulate(lengths)
        steps += len(starts)
        for start in starts:
            path = trace.path(start)
            accepted.update(path[:depth] for depth in range(1, len(path) + 1))
    return [accepted[path] / steps for path in tree.paths] if steps else None


def chain_rates(traces: Sequence[Trace]) -> list[float]:
    """Simulate decoding with the chain of the first k heads' top-1 tokens; return the tokens per step for k = 1..K.

    Servers that draft without a tree (vLLM's Medusa) decode like this. Empty without traces.
    """
    num_heads = len(traces[0].ranks[0]) if traces else 0
    return [tokens_per_step(traces, Tree.chain(k)) for k in range(1, num_heads + 1)]


def _count(records: Iterable[TurnRecord], dtype: str, verdict: Verdict) -> int | None:
    """Count the answers with `verdict`; None if the dtype was not run."""
    verdicts = [record.exact[dtype] for record in records if dtype in record.exact]
    return sum(one is verdict for one in verdicts) if verdicts else None


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    if numerator is None or denominator is None or denominator <= 0:
        return None
    return numerator / denominator
