"""Compute the metrics of an evaluation from its turns: rates, speedups, overhead, acceptance, equal
answers.

A rate is a ratio of sums, such as total tokens over total time. It is None if its denominator is
zero, which means that it was not measured. Intervals are bootstrap intervals over the questions of
a benchmark.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from medusa_train.data.conversation import is_looping
from medusa_train.evaluation.answer_scores import LEAST_QUESTIONS, summarize_scores
from medusa_train.evaluation.turns import GENERATE, PLAIN, TREE, TimedAnswer, Turn, Verdict
from medusa_train.tree_search.fit import Trace, head_accuracy, tokens_per_step
from medusa_train.trees.tree import Tree

#: Metrics by name. A value is a number (None: not measured), a list of numbers (`ctar`,
#: `chain_rates`), or a mapping (`baselines`, `intervals`, `scores`).
Metrics = dict[str, Any]
Interval = tuple[float, float]

RESAMPLES = 2000
SEED = 20
#: Metrics of the tree that have an interval in the report.
TREE_RATIOS = (
    "acceleration_rate",
    "overhead",
    "speedup",
    "speedup_over_generate",
    "speedup_over_fastest",
    "tokens_per_s",
)
#: An interval over a server's blocks needs at least this many blocks.
LEAST_BLOCKS = 3


def by_category(turns: Sequence[Turn]) -> dict[str, Metrics]:
    """Compute `metrics` per category, in the order in which the categories first appear."""
    groups: dict[str, list[Turn]] = {}
    for turn in turns:
        groups.setdefault(turn.category, []).append(turn)
    return {category: metrics(group) for category, group in groups.items()}


def metrics(turns: Sequence[Turn]) -> Metrics:
    """Compute all metrics of one group of answered turns (a category, or the whole benchmark)."""
    # 1. rates of each decoder, and the tree's ratios to the others
    totals = _totals(turns)
    ratios = _ratios(totals)
    intervals = speed_intervals(turns)
    baselines: dict[str, Metrics] = {}
    for name, sums in totals.items():
        if name != TREE:
            baselines[name] = {
                "tokens_per_s": _number(sums.tokens_per_s),
                "tokens_per_step": _number(sums.tokens_per_step),
                "speedup": _number(ratios.get(f"tree_over_{name}")),
                "speedup_interval": intervals.get(f"tree_over_{name}"),
                "over_plain": _number(ratios.get(f"{name}_over_plain")),
                "over_plain_interval": intervals.get(f"{name}_over_plain"),
                "equal_to_plain": sum(
                    turn.answers[name].tokens == turn.plain.tokens for turn in turns
                ),
            }

    # 2. the tree's answers and traces, for the draft's metrics
    answers = [turn.tree for turn in turns if turn.tree is not None]
    traces = [turn.trace for turn in turns if turn.trace is not None]
    # each row has a share of its batch's prefill time, but it waits for the whole prefill
    waits = [answer.prefill_seconds * answer.rows for answer in answers]

    # 3. the speedup without answers that loop, because these are easy to draft
    without_loops = [turn for turn in turns if not is_looping(turn.answer.tokens)]

    # 4. the tree's answers compared with the plain ones; None if they were not compared in a dtype
    exact: dict[str, list[Verdict]] = {}
    for dtype in ("float32", "bfloat16"):
        exact[dtype] = [turn.exact[dtype] for turn in turns if dtype in turn.exact]

    def count(dtype: str, verdict: Verdict) -> int | None:
        return exact[dtype].count(verdict) if exact[dtype] else None

    return {
        **{name: _number(ratios.get(name)) for name in TREE_RATIOS},
        "baseline_tokens_per_s": baselines[PLAIN]["tokens_per_s"],
        "generate_tokens_per_s": baselines.get(GENERATE, {}).get("tokens_per_s"),
        "answers": len(turns),
        "equal_answers": count("float32", Verdict.EQUAL),
        "compared_answers": len(exact["float32"]),
        "tie_answers": count("float32", Verdict.TIE),
        "equal_answers_bf16": count("bfloat16", Verdict.EQUAL),
        "compared_answers_bf16": len(exact["bfloat16"]),
        "scores": summarize_scores(turns),
        "looping_answers": len(turns) - len(without_loops),
        "speedup_without_loops": _number(_ratios(_totals(without_loops)).get("speedup")),
        "time_to_first_token_s": sum(waits) / len(waits) if any(waits) else None,
        "accepted_lengths": accepted_lengths(answers),
        "ctar": ctar(answers),
        "chain_rates": chain_rates(traces),
        "head_accuracy": head_accuracy(traces) if traces else None,
        "baselines": baselines,
        "intervals": {name: intervals[name] for name in TREE_RATIOS if name in intervals},
    }


class Totals(NamedTuple):
    """What an answer adds to its decoder's sums (numbers), or these sums (tensors: [] for all
    answers, [R] for R samples of them). A rate is a ratio of two sums.

    Attributes:
        tokens, seconds: of the whole answer, prefill included.
        step_tokens, steps, decode_seconds, passes: prefill excluded.
    """

    tokens: Any
    seconds: Any
    step_tokens: Any
    steps: Any
    decode_seconds: Any
    passes: Any

    @property
    def tokens_per_s(self) -> Any:
        """Tokens per second, prefill included."""
        return self.tokens / self.seconds

    @property
    def tokens_per_step(self) -> Any:
        """Tokens per decoding step, prefill excluded; 1.0 for plain decoding."""
        return self.step_tokens / self.steps

    @property
    def pass_seconds(self) -> Any:
        """Time of a decoding pass (in a batch: of a pass over all rows), prefill excluded."""
        return self.decode_seconds / self.passes


def _totals(turns: Iterable[Turn]) -> dict[str, Totals]:
    """Sum up the answers of each decoder."""
    addends: dict[str, list[Totals]] = {}
    for turn in turns:
        for name, answer in turn.answers.items():
            tokens = len(answer.tokens)
            one = Totals(
                tokens=tokens,
                seconds=answer.seconds,
                step_tokens=tokens - answer.prefill_tokens,
                steps=answer.steps,
                decode_seconds=answer.decode_seconds,
                passes=answer.passes,
            )
            addends.setdefault(name, []).append(one)
    return {
        name: Totals(*torch.tensor(rows, dtype=torch.float64).sum(dim=0))  # [answers, 6] -> [6]
        for name, rows in addends.items()
    }


def _ratios(totals: Mapping[str, Totals]) -> dict[str, Tensor]:
    """Compute `TREE_RATIOS`, [] or [R] each. For each baseline also compute two ratios of tokens
    per second, `tree_over_NAME` and `NAME_over_plain`.

    Empty without a tree.
    """
    if TREE not in totals:
        return {}
    tree, plain = totals[TREE], totals[PLAIN]
    ratios = {
        "acceleration_rate": tree.tokens_per_step,
        "overhead": tree.pass_seconds / plain.pass_seconds,
        "tokens_per_s": tree.tokens_per_s,
    }
    for name, baseline in totals.items():
        if name != TREE:
            ratios[f"tree_over_{name}"] = tree.tokens_per_s / baseline.tokens_per_s
            ratios[f"{name}_over_plain"] = baseline.tokens_per_s / plain.tokens_per_s
    ratios["speedup"] = ratios["speedup_over_fastest"] = ratios["tree_over_plain"]
    if GENERATE in totals:
        ratios["speedup_over_generate"] = ratios["tree_over_generate"]
        ratios["speedup_over_fastest"] = torch.minimum(
            ratios["tree_over_plain"], ratios["tree_over_generate"]
        )
    return ratios


def _number(value: Tensor | None) -> float | None:
    """Return a metric as a number for the report; None if it was not measured."""
    if value is None or not torch.isfinite(value):
        return None
    return float(value)


def accepted_lengths(answers: Sequence[TimedAnswer]) -> list[int]:
    """Count the steps that accepted 0, 1, 2, ... draft tokens, up to the largest number."""
    counts = Counter(length for answer in answers for length in answer.accepted)
    return [counts[length] for length in range(max(counts, default=-1) + 1)]


def ctar(answers: Sequence[TimedAnswer]) -> list[float]:
    """Return CTAR(w) for w = 1, 2, ...: the share of steps that accepted at least w draft tokens.

    Source: Kangaroo, consistent token acceptance rate.
    """
    steps_by_length = accepted_lengths(answers)
    steps = sum(steps_by_length)
    return [sum(steps_by_length[w:]) / steps for w in range(1, len(steps_by_length))]


def chain_rates(traces: Sequence[Trace]) -> list[float]:
    """Simulate decoding with the chain of the first k heads' top-1 tokens; return the tokens per
    step for k = 1..K, or an empty list without traces.

    Servers that draft without a tree (vLLM's Medusa) decode like this.
    """
    if not traces:
        return []
    num_heads = len(traces[0].ranks[0])
    return [tokens_per_step(traces, Tree.chain(k)) for k in range(1, num_heads + 1)]


# Intervals


def interval(samples: Tensor) -> Interval | None:
    """Return the central interval that contains 95 % of the samples [R]; None if more than a tenth
    of them are not finite.
    """
    finite = samples[torch.isfinite(samples)]
    if len(finite) < 0.9 * len(samples):
        return None
    tail = (1 - 0.95) / 2
    shares = torch.tensor([tail, 1 - tail], dtype=finite.dtype)
    low, high = torch.quantile(finite, shares).tolist()
    return low, high


def resample(rows: Tensor, resamples: int = RESAMPLES, seed: int = SEED) -> Tensor:
    """Draw R samples of n rows with replacement from `rows` [n, C]; return their sums [R, C]."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(rows), (resamples, len(rows)), generator=generator)  # [R, n]
    counts = torch.zeros(resamples, len(rows), dtype=rows.dtype)  # how often each row was drawn
    counts.scatter_add_(1, drawn, torch.ones_like(counts))
    return counts @ rows


def speed_intervals(turns: Sequence[Turn]) -> dict[str, Interval | None]:
    """Compute 95 % percentile bootstrap intervals of the ratios in `metrics`, by the same names.

    The unit of resampling is a question with all its turns, since the turns of a conversation are
    not independent. The questions of a batch share its time, so ratios of times are resampled by
    batch.

    Returns:
        An empty dictionary without a tree, or with fewer than `LEAST_QUESTIONS` questions.
        Only `acceleration_rate` if there are fewer than `LEAST_QUESTIONS` batches.
    """
    if not turns or turns[0].tree is None:
        return {}
    intervals = _bootstrap(turns, lambda turn: turn.question_id)
    if any(turn.plain.rows > 1 for turn in turns):
        # only this ratio does not depend on time, so that the questions of a batch are independent
        by_question = {name: intervals[name] for name in intervals if name == "acceleration_rate"}
        intervals = _bootstrap(turns, lambda turn: turn.batch) | by_question
    return intervals


def _bootstrap(
    turns: Sequence[Turn], unit_of: Callable[[Turn], int | str]
) -> dict[str, Interval | None]:
    """Resample whole units of turns; return the interval of every ratio. Empty with fewer than
    `LEAST_QUESTIONS` units.
    """
    units: dict[int | str, list[Turn]] = {}
    for turn in turns:
        units.setdefault(unit_of(turn), []).append(turn)
    if len(units) < LEAST_QUESTIONS:
        return {}
    totals = [_totals(unit) for unit in units.values()]
    decoders = list(totals[0])
    rows = torch.tensor([[one[name] for name in decoders] for one in totals], dtype=torch.float64)
    # [units, decoders, 6] -> [R, decoders, 6]: each sample draws the same units for all decoders
    drawn = resample(rows.flatten(1)).unflatten(1, rows.shape[1:]).unbind(1)
    samples = {name: Totals(*sums.unbind(1)) for name, sums in zip(decoders, drawn, strict=True)}
    return {name: interval(ratio) for name, ratio in _ratios(samples).items()}


class Counts(NamedTuple):
    """Totals over a question's answers. Their quotient `tokens / cost` is a rate.

    Attributes:
        tokens: for tokens per second all tokens; for tokens per step only the tokens of decoding
            steps.
        cost: seconds, or decoding steps.
    """

    tokens: int
    cost: float


def pair_rows(pairs: Iterable[tuple[Counts, Counts]]) -> Tensor:
    """Return [pairs, 4]: tokens and cost of the first run, then tokens and cost of the second."""
    return torch.tensor([[*first, *second] for first, second in pairs], dtype=torch.float64)


def ratio_of_rates(sums: Tensor) -> Tensor:
    """Return the second run's rate divided by the first's [...], from sums [..., 4] of pairs."""
    first_tokens, first_cost, second_tokens, second_cost = sums.unbind(-1)
    first_rate = first_tokens / first_cost
    second_rate = second_tokens / second_cost
    return second_rate / first_rate


def block_interval(first: Sequence[Counts], second: Sequence[Counts]) -> Interval | None:
    """Return the 95 % interval of the ratio of two runs' rates (tokens over cost), from the same
    blocks of both runs. None with fewer than `LEAST_BLOCKS` blocks.

    Questions that are measured at the same time share the machine's momentary speed, so blocks are
    the independent units. Since there are few blocks, this is Student's t interval of the ratio's
    logarithm, with the jackknife's standard error.
    """
    count = len(first)
    if count < LEAST_BLOCKS:
        return None
    rows = pair_rows(zip(first, second, strict=True))
    total = rows.sum(dim=0)
    log_ratio = ratio_of_rates(total).log()
    # the jackknife: the same ratio with each block left out in turn
    ratios_without_block = ratio_of_rates(total - rows).log()  # [blocks]
    error = ((count - 1) * ratios_without_block.var(correction=0)).sqrt()
    margin = student_quantile(count - 1) * error
    return float((log_ratio - margin).exp()), float((log_ratio + margin).exp())


def student_quantile(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t. Its error is at most 1 % for 2 or more degrees of
    freedom.

    Source: Abramowitz and Stegun, 26.7.5.
    """
    z = 1.959964
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, start=1))
