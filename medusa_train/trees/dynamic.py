"""Choose another tree in every step by the heads' confidences (dynamic trees, as in EAGLE-2)."""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from medusa_train.errors import CheckpointError, DataError
from medusa_train.trees.tree import Ranks, Tree

#: Key of tree.json.
KEY = "dynamic"
#: Lower bound of the total probability of the tokens that are not among a head's best guesses.
_LEAST_REST = 1e-6

Floats = NDArray[np.float64]


class StepSize(NamedTuple):
    """A step with `nodes` nodes below the root: its latency, and the tokens per step of a fixed tree of that size."""

    nodes: int
    step_ms: float
    tokens_per_step: float


@dataclass(frozen=True)
class DynamicTrees:
    """Chooses the tree of each step (like EAGLE-2, Reranking Phase, but for heads that draft independently).

    A node is accepted if every draft token on its path is right. Its probability is the product of their calibrated
    probabilities, and the expected number of accepted nodes is the sum over the tree. So the best tree of n nodes has
    the n most probable ones; parents are at least as probable as their children. n maximises

        B + sum of probabilities - rate(B) * step_ms(B (n + 1) - 1)

    for B rows that share a pass and get n nodes each. `rate` is the tokens per millisecond of the best fixed tree with
    as many heads, so the last term is the number of tokens that this tree would give in the same time. If the
    probabilities are right, decoding is at least as fast as with that tree. Latencies are measured when the trees are
    fitted, not while decoding, so the same text always gets the same trees.

    Attributes:
        temperatures: one per head that is used, see `calibrate`; empty: decode without heads.
        sizes: by increasing number of nodes, 0 first; latencies include the heads and do not decrease.
        equal_latency: a fixed tree whose steps take about as long, to compare with.
    """

    temperatures: tuple[float, ...]
    sizes: tuple[StepSize, ...]
    equal_latency: Tree | None = None
    _plans: dict[int, _Plan] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def heads(self) -> int:
        """Number of heads used, the depth of the deepest tree."""
        return len(self.temperatures)

    @property
    def max_nodes(self) -> int:
        """The most nodes of a tree."""
        return self.sizes[-1].nodes if self.temperatures else 0

    def calibrated(self, log_probs: NDArray[Any]) -> Floats:
        """Return the calibrated probabilities of the heads' best draft tokens, [..., heads, R], see `calibrate`."""
        return calibrate(log_probs, self.temperatures)

    def choose(self, probabilities: Sequence[Sequence[Sequence[float]]]) -> list[list[Ranks]]:
        """Return the paths of the best tree of every row; parents come before their children.

        Args:
            probabilities: [B][heads][R], calibrated. All rows get the same number of nodes, since a pass is padded to
                its largest tree.
        """
        plan = self._plan(len(probabilities))
        rows = [paths_by_product(row) for row in probabilities]
        chosen: list[list[Ranks]] = [[] for _ in rows]
        size, gained, best = 0, 0.0, -plan.costs[0]
        for nodes in range(1, self.max_nodes + 1):
            following = [next(row, None) for row in rows]
            gain = sum(one[0] for one in following if one is not None)
            if gain <= plan.least[nodes - 1] or None in following:
                break
            for paths, one in zip(chosen, following, strict=True):
                assert one is not None
                paths.append(one[1])
            gained += gain
            if gained - plan.costs[nodes] > best:
                size, best = nodes, gained - plan.costs[nodes]
        return [paths[:size] for paths in chosen]

    def step_ms(self, nodes: int) -> float:
        """Return the latency of a pass over `nodes` + 1 tokens, interpolated between the measured ones.

        Beyond the last one it is extrapolated with the slope between the middle and the last measured size.
        """
        last, middle = self.sizes[-1], self.sizes[len(self.sizes) // 2]
        if nodes <= last.nodes or middle.nodes == last.nodes:
            return float(np.interp(nodes, [one.nodes for one in self.sizes], [one.step_ms for one in self.sizes]))
        return last.step_ms + (nodes - last.nodes) * (last.step_ms - middle.step_ms) / (last.nodes - middle.nodes)

    def rate(self, rows: int = 1) -> float:
        """Return the tokens per millisecond of the best fixed tree in a batch of `rows` rows."""
        return max(rows * one.tokens_per_step / self.step_ms(rows * (one.nodes + 1) - 1) for one in self.sizes)

    def _plan(self, rows: int) -> _Plan:
        if rows not in self._plans:
            rate = self.rate(rows)
            costs = [rate * self.step_ms(rows * (nodes + 1) - 1) for nodes in range(self.max_nodes + 1)]
            self._plans[rows] = _Plan.of(costs)
        return self._plans[rows]

    def record(self) -> dict[str, Any]:
        """Return the entry of tree.json."""
        choices = None if self.equal_latency is None else [list(path) for path in self.equal_latency.paths]
        return {
            "temperatures": [round(one, 4) for one in self.temperatures],
            "sizes": [
                {"nodes": one.nodes, "step_ms": round(one.step_ms, 4), "tokens_per_step": round(one.tokens_per_step, 4)}
                for one in self.sizes
            ],
            "equal_latency": choices,
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> DynamicTrees:
        """Read the entry of tree.json.

        Raises:
            ValueError, KeyError, TypeError, DataError: it is not one.
        """
        sizes = tuple(
            StepSize(int(one["nodes"]), float(one["step_ms"]), float(one["tokens_per_step"])) for one in record["sizes"]
        )
        temperatures = tuple(float(one) for one in record["temperatures"])
        if not sizes or sizes[0].nodes != 0 or any(a.nodes >= b.nodes for a, b in pairwise(sizes)):
            raise ValueError("sizes must increase from 0 nodes")
        if min(temperatures, default=1.0) <= 0 or min(one.step_ms for one in sizes) <= 0:
            raise ValueError("temperatures and latencies must be positive")
        choices = record.get("equal_latency")
        return cls(temperatures, sizes, None if choices is None else Tree.from_paths(choices))

    @classmethod
    def load(cls, path: Path) -> DynamicTrees | None:
        """Read the entry of a tree.json; None if it has none, like those of earlier versions.

        Raises:
            CheckpointError: the file cannot be read.
        """
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            entry = record.get(KEY) if isinstance(record, dict) else None
            return None if entry is None else cls.from_record(entry)
        except (OSError, ValueError, KeyError, TypeError, DataError) as error:
            raise CheckpointError(f"{path}: not a tree file ({error})") from error


class _Plan(NamedTuple):
    """The cost of trees of 0, 1, ... nodes in tokens, and the lowest mean cost of a further node over all larger trees.

    Nodes come by decreasing probability: no larger tree is better once the next one's is not above that mean.
    """

    costs: list[float]
    least: list[float]

    @classmethod
    def of(cls, costs: list[float]) -> _Plan:
        count = len(costs)
        least = [min((costs[m] - costs[n]) / (m - n) for m in range(n + 1, count)) for n in range(count - 1)]
        return cls(costs, least)


def paths_by_product(probabilities: Sequence[Sequence[float]]) -> Iterator[tuple[float, Ranks]]:
    """Yield paths with the product of the probabilities of their guesses, the largest first; parents precede children.

    A product never exceeds its parent's, so the first n paths are a tree, and no tree of n nodes has a larger sum.

    Args:
        probabilities: of every head's draft tokens by rank, each at most 1, in any order.
    """
    levels = [sorted(zip(row, range(len(row)), strict=True), key=lambda one: -one[0]) for row in probabilities]
    queue: list[tuple[float, Ranks, int, float]] = []  # minus the product, path, position in level, parent's product

    def push(parent: Ranks, product: float, position: int) -> None:
        level = levels[len(parent)]
        if position < len(level):
            value, rank = level[position]
            heapq.heappush(queue, (-product * value, (*parent, rank), position, product))

    if levels:
        push((), 1.0, 0)
    while queue:
        negative, path, position, above = heapq.heappop(queue)
        yield -negative, path
        push(path[:-1], above, position + 1)
        if len(path) < len(levels):
            push(path, -negative, 0)


def calibrate(log_probs: NDArray[Any], temperatures: Sequence[float]) -> Floats:
    """Scale the confidence of heads in their best R guesses by a temperature each (Guo et al., Temperature Scaling).

    All other tokens count as one further class with the remaining probability, so that another temperature needs no
    pass over the vocabulary.

    Args:
        log_probs: [..., K, R], of the draft tokens in the head's softmax; -inf where there is none.
        temperatures: of the first heads; later ones are left out. Above 1 confidence falls.

    Returns:
        Probabilities [..., len(temperatures), R]; their sums are below 1.
    """
    scaled = scaled_log_probs(log_probs[..., : len(temperatures), :], np.asarray(temperatures, np.float64)[:, None])
    probabilities: Floats = np.exp(scaled[..., :-1])
    return probabilities


def scaled_log_probs(log_probs: NDArray[Any], temperature: Floats | float) -> Floats:
    """Return log-probabilities of the R guesses and of all other tokens together, [..., R + 1], at a temperature."""
    guesses = log_probs.astype(np.float64)
    rest = np.log(np.maximum(1 - np.exp(guesses).sum(-1, keepdims=True), _LEAST_REST))
    scaled = np.concatenate([guesses, rest], axis=-1) / temperature
    scaled -= scaled.max(-1, keepdims=True)
    result: Floats = scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))
    return result
