"""Compute the figures of an evaluation from its timed answers: rates, speedups, overhead, acceptance, equal answers.

A rate is a ratio of sums (total tokens over total time); None if its denominator is zero, that is if nothing of the
kind was measured. Intervals are bootstrap intervals over the questions of a bench.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from medusa_train.data.conversation import is_looping
from medusa_train.errors import DataError
from medusa_train.evaluation.answer_scores import summarize_scores
from medusa_train.evaluation.records import TimedAnswer, TurnRecord, Verdict
from medusa_train.tree_search.traces import Trace, head_accuracy, tokens_per_step
from medusa_train.trees.tree import Tree

#: By name: numbers (None: not measured), lists of them (`ctar`, `chain_rates`), and mappings (`baselines`,
#: `intervals`, `scores`).
Figures = dict[str, Any]
Interval = tuple[float, float]

RESAMPLES, PAIRED_RESAMPLES = 2000, 10_000
SEED = 20


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
    return {
        "acceleration_rate": acceleration_rate(tree),
        "overhead": _ratio(step_seconds(tree), step_seconds(plain)),
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
        "speedup_without_loops": speedup([record for record in records if not is_looping(record.answer.tokens)]),
        "time_to_first_token_s": time_to_first_token(tree),
        "accepted_lengths": accepted_lengths(tree),
        "ctar": ctar(tree),
        "chain_rates": chain_rates(traces),
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
    """Count the steps that accepted 0, 1, 2, ... draft tokens, up to the longest."""
    counts = Counter(length for answer in answers for length in answer.accepted)
    return [counts[length] for length in range(max(counts) + 1)] if counts else []


def ctar(answers: Sequence[TimedAnswer]) -> list[float]:
    """Return CTAR(w) for w = 1, 2, ...: the share of steps that accepted at least w draft tokens.

    Source: Kangaroo, consistent token acceptance rate.
    """
    lengths = accepted_lengths(answers)
    steps = sum(lengths)
    return [sum(lengths[least:]) / steps for least in range(1, len(lengths))]


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


# Intervals


def interval(samples: Tensor, share: float = 0.95) -> Interval | None:
    """Return the central interval that holds `share` of the samples [R]; None if over a tenth of them is not finite."""
    finite = samples[torch.isfinite(samples)]
    if len(finite) < 0.9 * len(samples):
        return None
    tail = (1 - share) / 2
    low, high = torch.quantile(finite, torch.tensor([tail, 1 - tail], dtype=finite.dtype)).tolist()
    return low, high


def resample(rows: Tensor, resamples: int = RESAMPLES, seed: int = SEED) -> Tensor:
    """Draw R samples of n rows with replacement from `rows` [n, C]; return their sums [R, C]."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(rows), (resamples, len(rows)), generator=generator)
    counts = torch.zeros(resamples, len(rows), dtype=rows.dtype)
    counts.scatter_add_(1, drawn, torch.ones_like(counts))
    return counts @ rows


def speed_intervals(records: Sequence[TurnRecord]) -> dict[str, Interval | None]:
    """Compute 95 % percentile bootstrap intervals of the ratios in `summarize`, by the same names.

    The unit of resampling is a question with all its turns, since the turns of a conversation are not independent.
    Ratios of sums are recomputed for every sample. Empty with fewer than two questions or without a tree.
    """
    if not records or records[0].tree is None:
        return {}
    questions: dict[int | str, list[TurnRecord]] = {}
    for record in records:
        questions.setdefault(record.question_id, []).append(record)
    if len(questions) < 2:
        return {}
    names = ["tree", *records[0].baselines]
    rows = torch.tensor([_row(turns, names) for turns in questions.values()], dtype=torch.float64)
    sums = dict(zip(names, resample(rows).split(len(_sums([])), dim=1), strict=True))
    return {name: interval(samples) for name, samples in _ratios(sums).items()}


def _row(turns: Sequence[TurnRecord], names: Sequence[str]) -> list[float]:
    row: list[float] = []
    for name in names:
        answers = [turn.tree if name == "tree" else turn.baselines[name] for turn in turns]
        row += _sums([answer for answer in answers if answer is not None])
    return row


def _sums(answers: Sequence[TimedAnswer]) -> list[float]:
    """Sum tokens and seconds; and for the decoding steps alone: tokens, steps, seconds and passes."""
    return [
        sum(len(answer.tokens) for answer in answers),
        sum(answer.seconds for answer in answers),
        sum(len(answer.tokens) - 1 for answer in answers),
        sum(answer.steps for answer in answers),
        sum(answer.decode_seconds for answer in answers),
        sum(answer.passes for answer in answers),
    ]


def _ratios(sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Compute the ratios [R] from the sums [R, 6] of every decoder."""
    tree, plain = sums["tree"], sums["plain"]
    speed = {name: part[:, 0] / part[:, 1] for name, part in sums.items()}
    over = {name: speed["tree"] / rate for name, rate in speed.items() if name != "tree"}
    return {
        "acceleration_rate": tree[:, 2] / tree[:, 3],
        "overhead": tree[:, 4] / tree[:, 5] / (plain[:, 4] / plain[:, 5]),
        "speedup": over["plain"],
        "speedup_over_generate": over["generate"],
        "speedup_over_fastest": speed["tree"] / torch.maximum(speed["plain"], speed["generate"]),
        "tokens_per_s": speed["tree"],
        **{f"over_{name}": ratio for name, ratio in over.items()},
    }


class Counts(NamedTuple):
    """Totals of a question's answers: tokens (without the prefill's) and decoding steps, or tokens and seconds."""

    tokens: int
    steps: float


def compare_rates(
    first: Mapping[str, Counts], second: Mapping[str, Counts], resamples: int = PAIRED_RESAMPLES
) -> tuple[float, Interval]:
    """Return the ratio of the second run's rate (tokens over steps) to the first one's, with its 95 % interval.

    A paired percentile bootstrap over questions: one that is easy to draft is easy for both runs, and resampling pairs
    removes that variance (Efron and Tibshirani, "An Introduction to the Bootstrap"). A rate is a ratio of sums over the
    drawn questions; the turns of a question are not independent and form one unit.

    Args:
        first, second: totals by question, summed over its turns.

    Raises:
        DataError: the questions differ, or there are fewer than two in which both runs made steps.
    """
    if set(first) != set(second):
        unpaired = sorted(set(first) ^ set(second))[:5]
        raise DataError(f"only one of the two runs answered {', '.join(unpaired)}: measure both on the same questions")
    names = [question for question in sorted(first) if first[question].steps and second[question].steps]
    if len(names) < 2:
        raise DataError("comparing two runs needs two or more questions")
    rows = torch.tensor([[*first[name], *second[name]] for name in names], dtype=torch.float64)

    def ratio(sums: Tensor) -> Tensor:
        return (sums[..., 2] / sums[..., 3]) / (sums[..., 0] / sums[..., 1])

    bounds = interval(ratio(resample(rows, resamples)))
    assert bounds is not None  # every question has steps
    return float(ratio(rows.sum(dim=0))), bounds
