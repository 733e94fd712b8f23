"""Fit dynamic trees to traces: the temperatures of the heads, how many heads to use, and what a node costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from medusa_train.tree_search.fit import TreeCandidate
from medusa_train.tree_search.traces import Trace
from medusa_train.trees.dynamic import KEY, DynamicTrees, StepSize, scaled_log_probs
from medusa_train.trees.tree import Tree

#: Positions below which a head keeps temperature 1.
MIN_POSITIONS = 50
CHOICES = 100  # choices of nodes that are timed
_LEAST_TEMPERATURE, _MOST_TEMPERATURE = 0.1, 10.0


class Simulation(NamedTuple):
    """Means over the steps of simulated decoding: tokens, nodes, and milliseconds by the measured latencies."""

    tokens_per_step: float
    nodes: float
    step_ms: float

    @property
    def rate(self) -> float:
        """Tokens per millisecond."""
        return self.tokens_per_step / self.step_ms


@dataclass(frozen=True)
class DynamicFit:
    """Fitted dynamic trees, and their simulated result.

    Attributes:
        expected: simulated on the answers that the temperatures were fitted to.
    """

    trees: DynamicTrees
    expected: Simulation

    def record(self) -> dict[str, Any]:
        """Return the entry of tree.json."""
        expected = {name: round(value, 4) for name, value in self.expected._asdict().items()}
        return {KEY: {**self.trees.record(), "expected": expected}}


def fit_dynamic_trees(
    traces: Sequence[Trace],
    by_size: Sequence[TreeCandidate],
    timed: Sequence[TreeCandidate] = (),
    fixed: Callable[[int], Tree] | None = None,
) -> DynamicFit | None:
    """Fit the dynamic trees with the most tokens per second in simulation, over all numbers of heads, 0 included.

    Args:
        traces: with log-probabilities.
        by_size: fixed trees, the empty one and at least one larger.
        timed: further trees timed side by side; those of equal size but different depth give the cost of a head.
        fixed: returns a fixed tree of a given size, to compare with.

    Returns:
        None without log-probabilities or without fixed trees of several sizes.
    """
    by_size = sorted(by_size, key=lambda one: one.tree.size)
    if len(by_size) < 2 or by_size[0].tree.size or not traces or any(trace.log_probs is None for trace in traces):
        return None
    temperatures, per_head = fit_temperatures(traces), head_ms(timed)
    plain = by_size[0]
    best = DynamicFit(DynamicTrees((), _sizes(by_size, 0, 0.0)), Simulation(1.0, 0.0, plain.step_ms))
    for heads in range(1, len(temperatures) + 1):
        used, sizes = tuple(temperatures[:heads]), _sizes(by_size, heads, per_head)
        choosing = choosing_ms(traces, DynamicTrees(used, sizes))
        trees = DynamicTrees(used, tuple(one._replace(step_ms=one.step_ms + choosing) for one in sizes))
        expected = simulate(traces, trees)
        if expected.rate > best.expected.rate:
            best = DynamicFit(trees, expected)
    if fixed is None or not best.trees.heads:
        return best
    nodes, latencies = [one.tree.size for one in by_size], _not_decreasing([one.step_ms for one in by_size])
    equal = round(float(np.interp(best.expected.step_ms, latencies, nodes)))
    trees = DynamicTrees(best.trees.temperatures, best.trees.sizes, fixed(max(equal, 1)))
    return DynamicFit(trees, best.expected)


def fit_temperatures(traces: Sequence[Trace]) -> list[float]:
    """Return the temperature of every head that makes the traced tokens most likely, see `trees.dynamic.calibrate`.

    A head's guesses matter only if those before it are accepted. So it is calibrated at the positions where the tokens
    before it are among the best guesses of the earlier heads: text is easier to predict there than elsewhere, and the
    product over a path needs this conditional probability.
    """
    log_probs = [trace.log_probs for trace in traces if trace.log_probs is not None]
    ranks = np.concatenate([np.array(trace.ranks) for trace in traces])
    targets = np.concatenate([np.array(trace.targets) for trace in traces])
    guesses = np.concatenate(log_probs)
    reached, temperatures = np.ones(len(ranks), dtype=bool), []
    for head in range(ranks.shape[1]):
        used = reached & (targets > head)
        enough = int(used.sum()) >= MIN_POSITIONS
        temperatures.append(_best_temperature(guesses[used, head], ranks[used, head]) if enough else 1.0)
        reached &= ranks[:, head] >= 0
    return temperatures


def _best_temperature(log_probs: NDArray[Any], ranks: NDArray[Any]) -> float:
    """Return the temperature with the least negative log-likelihood, which has one minimum.

    Args:
        log_probs: [N, R]. ranks: [N], -1 for a token that is not among the guesses.
    """

    def loss(temperature: float) -> float:
        scaled = scaled_log_probs(log_probs, temperature)
        return -float(scaled[np.arange(len(ranks)), ranks].mean())  # -1 is the last class, all other tokens

    low, high = _LEAST_TEMPERATURE, _MOST_TEMPERATURE
    for _ in range(6):  # a finer grid between the neighbours of the best point
        grid = np.geomspace(low, high, 9).tolist()
        best = min(range(9), key=lambda index, grid=grid: loss(grid[index]))  # type: ignore[misc]
        low, high = grid[max(best - 1, 0)], grid[min(best + 1, 8)]
    return (low * high) ** 0.5


def simulate(traces: Sequence[Trace], trees: DynamicTrees) -> Simulation:
    """Simulate decoding the traced answers with dynamic trees, one row at a time."""
    tokens = steps = nodes = 0
    milliseconds = 0.0
    for trace in traces:
        assert trace.log_probs is not None
        probabilities, position = trees.calibrated(trace.log_probs).tolist(), 0
        while position < len(trace.ranks) - 1:
            (paths,) = trees.choose([probabilities[position]])
            chosen, path, accepted = set(paths), trace.path(position), 0
            while accepted < len(path) and path[: accepted + 1] in chosen:
                accepted += 1
            position += accepted + 1
            steps += 1
            nodes += len(paths)
            milliseconds += trees.step_ms(len(paths))
        tokens += len(trace.ranks) - 1
    count = max(steps, 1)
    return Simulation(tokens / count if steps else 1.0, nodes / count, milliseconds / count or trees.step_ms(0))


# What does a step cost?


def head_ms(timed: Sequence[TreeCandidate]) -> float:
    """Return the milliseconds of a further head: the slope of latencies over depth among trees of equal size.

    0 where no two trees of a size differ in depth, or where noise is larger.
    """
    groups: dict[int, list[TreeCandidate]] = {}
    for one in timed:
        groups.setdefault(one.tree.size, []).append(one)
    covariance = variance = 0.0
    for group in groups.values():
        depths, times = np.array([one.tree.max_depth for one in group]), np.array([one.step_ms for one in group])
        covariance += float(((depths - depths.mean()) * (times - times.mean())).sum())
        variance += float(((depths - depths.mean()) ** 2).sum())
    return max(covariance / variance, 0.0) if variance else 0.0


def choosing_ms(traces: Sequence[Trace], trees: DynamicTrees) -> float:
    """Return the mean milliseconds of choosing the nodes of a step, which fixed trees do without."""
    log_probs = np.concatenate([trace.log_probs for trace in traces if trace.log_probs is not None])
    timed = log_probs[:: max(1, len(log_probs) // CHOICES)]
    started = time.perf_counter()
    for one in timed:
        trees.choose([trees.calibrated(one).tolist()])
    return 1000 * (time.perf_counter() - started) / len(timed)


def _sizes(by_size: Sequence[TreeCandidate], heads: int, per_head: float) -> tuple[StepSize, ...]:
    """Return step sizes with latencies for a fixed number of heads; each timed tree ran as many heads as it is deep.

    The smallest size, without nodes, was timed as plain decoding. Dynamic trees run the heads before they choose no
    node, so its latency is extrapolated from the next two sizes.
    """
    corrected = [one.step_ms + per_head * (heads - one.tree.max_depth) for one in by_size]
    if heads and len(by_size) > 2:
        (one, ms), (two, more) = ((by_size[index].tree.size, corrected[index]) for index in (1, 2))
        corrected[0] = max(corrected[0], min(ms, ms - one * (more - ms) / (two - one)))
    least = min(one.step_ms for one in by_size) / 2  # noise in `per_head` must not make a step free
    latencies = _not_decreasing([max(one, least) for one in corrected])
    return tuple(StepSize(one.tree.size, ms, one.tokens_per_step) for one, ms in zip(by_size, latencies, strict=True))


def _not_decreasing(values: Sequence[float]) -> list[float]:
    """Return the nearest non-decreasing sequence (pool adjacent violators): noise must not make nodes free."""
    pools: list[tuple[float, int]] = []
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (first, many), (second, more) = pools[-2:]
            pools[-2:] = [((first * many + second * more) / (many + more), many + more)]
    return [mean for mean, count in pools for _ in range(count)]
