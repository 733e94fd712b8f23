"""Compute bootstrap intervals over the questions of a bench, for one run's speeds and for two runs' rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from medusa_train.errors import DataError
from medusa_train.evaluation.records import TimedAnswer, TurnRecord

Interval = tuple[float, float]

RESAMPLES = 2000
SEED = 20


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
    """Compute 95 % percentile bootstrap intervals of the ratios in `metrics.summarize`, by the same names.

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


PAIRED_RESAMPLES = 10_000


class Counts(NamedTuple):
    """Totals of a question's answers: tokens (without the prefill's) and decoding steps, or tokens and seconds."""

    tokens: int
    steps: float


@dataclass(frozen=True)
class RateComparison:
    """The acceleration rates of two runs on the same questions, with 95 % intervals of their difference and ratio.

    Attributes:
        first, second: tokens per decoding step of each run.
        difference, ratio: second minus first, and second over first.
        difference_interval, ratio_interval: their 95 % intervals.
        questions: number of questions compared.
    """

    first: float
    second: float
    difference: float
    difference_interval: Interval
    ratio: float
    ratio_interval: Interval
    questions: int


def compare_rates(
    first: Mapping[str, Counts], second: Mapping[str, Counts], resamples: int = PAIRED_RESAMPLES
) -> RateComparison:
    """Compare the acceleration rates of two runs by a paired percentile bootstrap over questions.

    A question that is easy to draft is easy for both runs; resampling pairs removes that variance from the difference
    (Efron and Tibshirani, "An Introduction to the Bootstrap"). A rate is a ratio of sums over the drawn questions; the
    turns of a question are not independent and form one unit.

    Args:
        first: totals of the first run by question, summed over its turns.
        second: totals of the second run.
        resamples: number of bootstrap samples.

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
    tokens, steps, other_tokens, other_steps = resample(rows, resamples).unbind(dim=1)
    rates = torch.stack([tokens / steps, other_tokens / other_steps])
    sums = rows.sum(dim=0).tolist()
    one, two = sums[0] / sums[1], sums[2] / sums[3]
    return RateComparison(
        one,
        two,
        two - one,
        _finite_interval(rates[1] - rates[0]),
        two / one,
        _finite_interval(rates[1] / rates[0]),
        len(names),
    )


def _finite_interval(samples: Tensor) -> Interval:
    bounds = interval(samples)
    assert bounds is not None  # every question has steps
    return bounds
