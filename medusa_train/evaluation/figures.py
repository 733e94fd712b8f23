"""Compute the figures of an evaluation from its timed answers: rates, speedups, overhead,
acceptance, equal answers.

A rate is a ratio of sums (total tokens over total time); None if its denominator is zero, that is
if nothing of the kind was measured. Intervals are bootstrap intervals over the questions of a
bench.
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
from medusa_train.tree_search.fit import Trace, head_accuracy, tokens_per_step
from medusa_train.trees.tree import Tree

#: By name: numbers (None: not measured), lists of them (`ctar`, `chain_rates`), and mappings
# (`baselines`, `intervals`, `scores`).
Figures = dict[str, Any]
Interval = tuple[float, float]

RESAMPLES, PAIRED_RESAMPLES = 2000, 10_000
SEED = 20
#: Least number of batches, or of a server's blocks, from which the spread of times can be told.
LEAST_BATCHES, LEAST_BLOCKS = 5, 3


def by_category(records: Sequence[TurnRecord]) -> dict[str, Figures]:
    """Compute `summarize` per category, in the order in which the categories first appear."""
    groups: dict[str, list[TurnRecord]] = {}
    for record in records:
        groups.setdefault(record.category, []).append(record)
    return {category: summarize(group) for category, group in groups.items()}


def summarize(records: Sequence[TurnRecord]) -> Figures:
    """Compute all figures of one group of answers (a category, or the whole bench)."""
    tree = [record.tree for record in records if record.tree is not None]
    traces = [record.trace for record in records if record.trace is not None]
    without_loops = [record for record in records if not is_looping(record.answer.tokens)]
    rates = {name: _rates(sums) for name, sums in _sums(records).items()}
    ratios, intervals = _ratios(_sums(records)), speed_intervals(records)
    first_token = sum(answer.prefill_seconds * answer.rows for answer in tree) / max(len(tree), 1)
    baselines = {
        name: {
            "tokens_per_s": _number(rates[name].tokens_per_s),
            "tokens_per_step": _number(rates[name].tokens_per_step),
            "speedup": _number(ratios.get(f"over_{name}")),
            "speedup_interval": intervals.get(f"over_{name}"),
            "equal_to_plain": sum(
                record.baselines[name].tokens == record.plain.tokens for record in records
            ),
        }
        for name in rates
        if name != "tree"
    }
    return {
        "acceleration_rate": _number(ratios.get("acceleration_rate")),
        "overhead": _number(ratios.get("overhead")),
        "speedup": _number(ratios.get("speedup")),
        "speedup_over_generate": _number(ratios.get("speedup_over_generate")),
        "speedup_over_fastest": _number(ratios.get("speedup_over_fastest")),
        "tokens_per_s": _number(ratios.get("tokens_per_s")),
        "baseline_tokens_per_s": _number(rates["plain"].tokens_per_s),
        "generate_tokens_per_s": (
            _number(rates["generate"].tokens_per_s) if "generate" in rates else None
        ),
        "answers": len(records),
        "equal_answers": _count(records, "float32", Verdict.EQUAL),
        "tie_answers": _count(records, "float32", Verdict.TIE),
        "equal_answers_bf16": _count(records, "bfloat16", Verdict.EQUAL),
        "scores": summarize_scores(records),
        "looping_answers": len(records) - len(without_loops),
        "speedup_without_loops": _number(_ratios(_sums(without_loops)).get("speedup")),
        "time_to_first_token_s": first_token or None,
        "accepted_lengths": accepted_lengths(tree),
        "ctar": ctar(tree),
        "chain_rates": chain_rates(traces),
        "head_accuracy": head_accuracy(traces) if traces else None,
        "baselines": baselines,
        "intervals": {
            name: interval for name, interval in intervals.items() if not name.startswith("over_")
        },
    }


class Rates(NamedTuple):
    """Rates of a decoder [...], each a ratio of sums over answers.

    Attributes:
        tokens_per_s: with the prefill's time.
        tokens_per_step: without the tokens of the prefill, which is no step; 1.0 for plain
            decoding.
        pass_seconds: of a decoding pass (of a batch: over all its rows), prefill excluded.
    """

    tokens_per_s: Tensor
    tokens_per_step: Tensor
    pass_seconds: Tensor


def _rates(sums: Tensor) -> Rates:
    """Compute rates [...] from the sums [..., 6] of a decoder."""
    tokens, seconds, step_tokens, steps, decode_seconds, passes = sums.unbind(-1)
    return Rates(tokens / seconds, step_tokens / steps, decode_seconds / passes)


def _sums(records: Sequence[TurnRecord]) -> dict[str, Tensor]:
    """Return by decoder the sums [6] of tokens and seconds; and of the decoding steps' tokens,
    steps, seconds, passes.

    "tree" is absent without one.
    """
    answers: dict[str, list[TimedAnswer]] = {}
    for record in records:
        for name, answer in {
            **({} if record.tree is None else {"tree": record.tree}),
            **record.baselines,
        }.items():
            answers.setdefault(name, []).append(answer)
    rows = {
        name: [
            [
                len(a.tokens),
                a.seconds,
                len(a.tokens) - a.prefill_tokens,
                a.steps,
                a.decode_seconds,
                a.passes,
            ]
            for a in made
        ]
        for name, made in answers.items()
    }
    return {
        name: torch.tensor(values, dtype=torch.float64).sum(dim=0) for name, values in rows.items()
    }


def _ratios(sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Compute the tree's rates and its ratios to the baselines [...] from the sums [..., 6] of
    every decoder.

    Empty without a tree.
    """
    if "tree" not in sums:
        return {}
    rates = {name: _rates(part) for name, part in sums.items()}
    tree, plain, generate = rates["tree"], rates["plain"], rates.get("generate")
    over_generate = None if generate is None else tree.tokens_per_s / generate.tokens_per_s
    fastest = (
        plain.tokens_per_s
        if generate is None
        else torch.maximum(plain.tokens_per_s, generate.tokens_per_s)
    )
    return {
        "acceleration_rate": tree.tokens_per_step,
        "overhead": tree.pass_seconds / plain.pass_seconds,
        "speedup": tree.tokens_per_s / plain.tokens_per_s,
        **({} if over_generate is None else {"speedup_over_generate": over_generate}),
        "speedup_over_fastest": tree.tokens_per_s / fastest,
        "tokens_per_s": tree.tokens_per_s,
        **{
            f"over_{name}": tree.tokens_per_s / one.tokens_per_s
            for name, one in rates.items()
            if name != "tree"
        },
    }


def _number(value: Tensor | None) -> float | None:
    return None if value is None or not torch.isfinite(value) else float(value)


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
    return [sum(lengths[least:]) / sum(lengths) for least in range(1, len(lengths))]


def chain_rates(traces: Sequence[Trace]) -> list[float]:
    """Simulate decoding with the chain of the first k heads' top-1 tokens; return the tokens per
    step for k = 1..K.

    Servers that draft without a tree (vLLM's Medusa) decode like this. Empty without traces.
    """
    num_heads = len(traces[0].ranks[0]) if traces else 0
    return [tokens_per_step(traces, Tree.chain(k)) for k in range(1, num_heads + 1)]


def _count(records: Iterable[TurnRecord], dtype: str, verdict: Verdict) -> int | None:
    """Count the answers with `verdict`; None if the dtype was not run."""
    verdicts = [record.exact[dtype] for record in records if dtype in record.exact]
    return sum(one is verdict for one in verdicts) if verdicts else None


# Intervals


def interval(samples: Tensor, share: float = 0.95) -> Interval | None:
    """Return the central interval that holds `share` of the samples [R]; None if over a tenth of
    them is not finite.
    """
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

    The unit of resampling is a question with all its turns, since the turns of a conversation are
    not independent. The questions of a batch share its time, so ratios of times are resampled by
    batch, and left out with fewer than `LEAST_BATCHES`. Empty with fewer than two questions or
    without a tree.
    """
    questions: dict[int | str, list[TurnRecord]] = {}
    for record in records:
        questions.setdefault(record.question_id, []).append(record)
    if len(questions) < 2 or records[0].tree is None:
        return {}
    result = _bootstrap(questions.values())
    if any(record.plain.rows > 1 for record in records):
        batches: dict[float, list[TurnRecord]] = {}
        for turns in questions.values():
            # each has an equal share of its batch's time
            batches.setdefault(turns[0].plain.seconds, []).extend(turns)
        timed = _bootstrap(batches.values()) if len(batches) >= LEAST_BATCHES else {}
        result = {**timed, "acceleration_rate": result["acceleration_rate"]}
    return result


def _bootstrap(units: Iterable[Sequence[TurnRecord]]) -> dict[str, Interval | None]:
    sums = [_sums(records) for records in units]
    rows = torch.cat([torch.stack([one[name] for one in sums]) for name in sums[0]], dim=1)
    drawn = dict(zip(sums[0], resample(rows).split(6, dim=1), strict=True))
    return {name: interval(samples) for name, samples in _ratios(drawn).items()}


class Counts(NamedTuple):
    """Totals of a question's answers: tokens (without the prefill's) and decoding steps, or tokens
    and seconds.
    """

    tokens: int
    steps: float


def compare_rates(
    first: Mapping[str, Counts], second: Mapping[str, Counts], resamples: int = PAIRED_RESAMPLES
) -> tuple[float, Interval]:
    """Return the ratio of the second run's rate (tokens over steps) to the first one's, with its 95
    % interval.

    A paired percentile bootstrap over questions: one that is easy to draft is easy for both runs,
    and resampling pairs removes that variance (Efron and Tibshirani, "An Introduction to the
    Bootstrap"). A rate is a ratio of sums over the drawn questions; the turns of a question are not
    independent and form one unit.

    Raises:
        DataError: the questions differ, or there are fewer than two in which both runs made steps.
    """
    if set(first) != set(second):
        unpaired = sorted(set(first) ^ set(second))[:5]
        raise DataError(
            f"only one of the two runs answered {', '.join(unpaired)}: measure both on the same"
            " questions"
        )
    names = [
        question for question in sorted(first) if first[question].steps and second[question].steps
    ]
    if len(names) < 2:
        raise DataError("comparing two runs needs two or more questions")
    rows = torch.tensor([[*first[name], *second[name]] for name in names], dtype=torch.float64)

    def ratio(sums: Tensor) -> Tensor:
        return (sums[..., 2] / sums[..., 3]) / (sums[..., 0] / sums[..., 1])

    bounds = interval(ratio(resample(rows, resamples)))
    assert bounds is not None  # every question has steps
    return float(ratio(rows.sum(dim=0))), bounds


def block_interval(first: Sequence[Counts], second: Sequence[Counts]) -> Interval | None:
    """Return the 95 % interval of the ratio of rates in `compare_rates`, from the same blocks of
    both runs.

    What is measured together shares the machine's speed of the moment, so blocks are the
    independent units; there are few, so the interval is Student's, around the logarithm, with the
    jackknife's standard error. None with fewer than `LEAST_BLOCKS` blocks.
    """
    count = len(first)
    if count < LEAST_BLOCKS:
        return None
    rows = torch.tensor(
        [[*one, *other] for one, other in zip(first, second, strict=True)], dtype=torch.float64
    )
    whole = rows.sum(dim=0)
    sums = torch.cat([whole[None], whole - rows])
    logs = (sums[:, 2] / sums[:, 3] / (sums[:, 0] / sums[:, 1])).log()
    error = ((count - 1) * logs[1:].var(correction=0)).sqrt()
    low, high = (logs[0] + sign * student_quantile(count - 1) * error for sign in (-1, 1))
    return float(low.exp()), float(high.exp())


def student_quantile(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t, to 1 % from 2 degrees of freedom on (Abramowitz,
    Stegun 26.7.5).
    """
    z = 1.959964
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, start=1))
