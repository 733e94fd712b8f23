"""Fit every kind of tree to traced answers, time steps, and choose a tree; with the figures for its page."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from medusa_train.checkpoint.load_model import LoadedModel
from medusa_train.errors import CheckpointError
from medusa_train.evaluation.metrics import node_acceptance
from medusa_train.inference.decoding_form import DecodingForm
from medusa_train.inference.dynamic_fit import DynamicFit, fit_dynamic_trees
from medusa_train.inference.traces import Trace, head_accuracy, tokens_per_step, trace_answers
from medusa_train.inference.tree_fit import SEARCHES, TreeCandidate, compare_searches, joint_trees, shallower_trees
from medusa_train.inference.tree_search import LATENCY_ROUNDS, SIZES, measure_step_latency, median_prompt
from medusa_train.progress import RunProgress
from medusa_train.trees.tree import Tree

LARGEST = 63  # nodes; TensorRT-LLM takes no more
MIN_CONVERSATIONS = 4

#: The prompts of one conversation, one per turn of the assistant, as token ids.
Prompts = list[list[int]]


def trace_conversations(
    model: LoadedModel,
    conversations: Sequence[Prompts],
    token_budget: int,
    max_new_tokens: int,
    on_tokens: Callable[[int], None],
) -> list[list[Trace]]:
    """Let the backbone answer prompts greedily until `token_budget` tokens are generated, and trace the heads' ranks.

    Args:
        on_tokens: called with the length of each answer.

    Returns:
        The traces of each conversation that has an answer of two tokens or more.
    """
    assert model.draft is not None
    traces = trace_answers(
        model.backbone,
        model.draft,
        [prompt for prompts in conversations for prompt in prompts],
        max_new_tokens=max_new_tokens,
        token_budget=token_budget,
        on_answer=on_tokens,
    )
    owners = [index for index, prompts in enumerate(conversations) for _ in prompts]
    traced: dict[int, list[Trace]] = {}
    for prompt, trace in traces.items():
        traced.setdefault(owners[prompt], []).append(trace)
    return list(traced.values())


@dataclass(frozen=True)
class NamedCandidate(TreeCandidate):
    """A tree that was timed side by side with others.

    Attributes:
        name: the search that found it, or "named" for the user's tree.
    """

    name: str


@dataclass(frozen=True)
class CalibrationResult:
    """The chosen tree and everything that it was chosen from.

    Attributes:
        trees: by search and size, the tree of at most that many nodes that was fitted to all traces.
        curves: by search and size, tokens per step on conversations that the tree was not fitted to.
        latency: measured milliseconds of a step by number of nodes, at some sizes.
        nodes: the size with the most tokens per second.
        candidates: each search's best tree, timed side by side.
        accuracy: top-1 to top-10 accuracy per head, [K][10].
        accepted: share of steps that accept each node of the chosen tree.
        about: number of conversations, answers and tokens that this is based on.
        form: in which the steps were timed.
        dynamic: the dynamic trees; None if they could not be fitted.
    """

    trees: Mapping[str, Mapping[int, Tree]]
    curves: Mapping[str, Mapping[int, float]]
    latency: Mapping[int, float]
    nodes: int
    candidates: Sequence[NamedCandidate]
    accuracy: Sequence[Sequence[float]]
    accepted: Sequence[float] | None
    about: Mapping[str, Any] = field(default_factory=dict)
    form: DecodingForm | None = None
    dynamic: DynamicFit | None = None

    @property
    def best(self) -> Tree:
        """The chosen tree."""
        return self.trees["joint"][self.nodes]

    def step_ms(self, nodes: int) -> float:
        """Return the latency of a step with a tree of `nodes` nodes, interpolated between the measured sizes."""
        return interpolate(self.latency, nodes)

    def sizes(self, search: str = "joint") -> list[dict[str, float]]:
        """Return the curve of a search as JSON values, at the sizes for which it has a tree."""
        return [
            {
                "nodes": nodes,
                "tokens_per_step": round(rate, 4),
                "step_ms": round(self.step_ms(nodes), 4),
                "tokens_per_s": round(1000 * rate / self.step_ms(nodes), 1),
            }
            for nodes, rate in sorted(self.curves[search].items())
            if self.trees[search][nodes].size == nodes
        ]

    def tree_record(self) -> dict[str, Any]:
        """Return what tree.json holds beside the paths."""
        return {
            "nodes": self.nodes,
            "tokens_per_step": round(self.curves["joint"][self.nodes], 4),
            "step_ms": round(self.step_ms(self.nodes), 4),
            "head_accuracy": [[round(share, 4) for share in row] for row in self.accuracy],
            "calibration": dict(self.about),
            "sizes": self.sizes(),
            **({} if self.form is None else self.form.record()),
            **({} if self.dynamic is None else self.dynamic.record()),
        }

    def as_json(self) -> dict[str, Any]:
        """Return the content of calibration.json."""
        return {
            **self.tree_record(),
            "medusa_choices": [list(path) for path in self.best.paths],
            "accepted": None if self.accepted is None else [round(share, 4) for share in self.accepted],
            "searches": {name: self.sizes(name) for name in self.curves},
            "latency_ms": {str(nodes): round(ms, 4) for nodes, ms in sorted(self.latency.items())},
            "candidates": [
                {
                    "name": candidate.name,
                    "nodes": candidate.tree.size,
                    "tokens_per_step": round(candidate.tokens_per_step, 4),
                    "step_ms": round(candidate.step_ms, 4),
                    "tokens_per_s": round(candidate.tokens_per_s, 1),
                    "medusa_choices": [list(path) for path in candidate.tree.paths],
                }
                for candidate in self.candidates
            ],
        }


def search(
    model: LoadedModel,
    conversations: Sequence[Sequence[Trace]],
    prompts: Sequence[list[int]],
    progress: RunProgress,
    named: Tree | None = None,
) -> CalibrationResult:
    """Fit trees by every search, time steps, and choose the size with the most expected tokens per second.

    Args:
        conversations: the traces of each conversation.
        prompts: the steps are timed after the median one.
        named: another tree to time beside the candidates.

    Raises:
        CheckpointError: there are fewer than `MIN_CONVERSATIONS` conversations.
    """
    if len(conversations) < MIN_CONVERSATIONS:
        raise CheckpointError(
            f"only {len(conversations)} conversations with an answer; calibration needs {MIN_CONVERSATIONS} or more"
        )
    sizes = range(LARGEST + 1)
    traces = [trace for conversation in conversations for trace in conversation]
    with progress.phase("fitting trees", ticking=True):
        curves = {one.search: one.by_size for one in compare_searches(conversations, sizes)}
        trees = {name: fit(traces, sizes) for name, fit in SEARCHES.items()}
    prompt = median_prompt(model.backbone, prompts)
    by_size = {tree.size: tree for tree in (trees["joint"][size] for size in SIZES)}
    latency = dict(zip(by_size, _time_steps(model, list(by_size.values()), prompt, progress), strict=True))
    fixed = [TreeCandidate(tree, curves["joint"][nodes], latency[nodes]) for nodes, tree in by_size.items()]

    def best_size(name: str) -> int:
        """Return the size with the most tokens per second, among those for which the search has a tree."""
        exact = [nodes for nodes in sizes if trees[name][nodes].size == nodes]
        return max(exact, key=lambda nodes: curves[name][nodes] / interpolate(latency, nodes))

    nodes = best_size("joint")
    rivals = [(name, trees[name][best_size(name)], curves[name][best_size(name)]) for name in SEARCHES]
    with progress.phase("fitting trees", ticking=True):
        rivals += [("joint", tree, rate) for tree, rate in _shallower(conversations, trees["joint"][nodes])]
    if named is not None:
        rivals.append(("named", named, tokens_per_step(traces, named)))
    steps = _time_steps(model, [tree for _, tree, _ in rivals], prompt, progress)
    candidates = [NamedCandidate(tree, rate, ms, name) for (name, tree, rate), ms in zip(rivals, steps, strict=True)]
    of_equal_size = [one for one in candidates if one.name == "joint"]
    joint = max(of_equal_size, key=lambda one: one.tokens_per_s)
    candidates = [joint, *(one for one in candidates if one.name != "joint")]
    trees["joint"][nodes], curves["joint"][nodes] = joint.tree, joint.tokens_per_step
    tokens = sum(len(trace.ranks) for trace in traces)
    about = {"conversations": len(conversations), "answers": len(traces), "tokens": tokens}
    accepted = node_acceptance(traces, joint.tree)
    accuracy, form = head_accuracy(traces), DecodingForm.of(model.backbone)
    dynamic = None
    if model.draft is not None and model.draft.guesses_at_once:
        with progress.phase("fitting trees", ticking=True):
            dynamic = fit_dynamic_trees(traces, fixed, of_equal_size, trees["joint"].__getitem__)
    return CalibrationResult(trees, curves, latency, nodes, candidates, accuracy, accepted, about, form, dynamic)


def _time_steps(model: LoadedModel, trees: Sequence[Tree], prompt: list[int], progress: RunProgress) -> list[float]:
    """Return the median milliseconds of a step with each tree."""
    assert model.draft is not None
    rounds = (LATENCY_ROUNDS + 1) * len(trees)
    with progress.phase("timing steps", rounds, "continuations") as phase:  # not ticking: no thread beside the decoder
        return measure_step_latency(model.backbone, model.draft, trees, prompt, phase.advance)


def _shallower(conversations: Sequence[Sequence[Trace]], tree: Tree) -> list[tuple[Tree, float]]:
    """Return joint trees as large as `tree` and less deep, with their tokens per step on other conversations.

    Every level costs time beyond its nodes', so a shallower tree may be faster.
    """
    traces = [trace for conversation in conversations for trace in conversation]
    shallower = shallower_trees(tree, lambda size, depth: joint_trees(traces, [size], depth)[size])
    searches = {str(one.max_depth): partial(joint_trees, max_depth=one.max_depth) for one in shallower}
    rates = {one.search: one.by_size[tree.size] for one in compare_searches(conversations, [tree.size], searches)}
    return [(one, rates[str(one.max_depth)]) for one in shallower]


def interpolate(measured: Mapping[int, float], at: int) -> float:
    """Interpolate linearly between the measured points; outside of them, return the nearest one's value."""
    points = sorted(measured)
    index = bisect_left(points, at)
    if index == len(points):
        return measured[points[-1]]
    if index == 0 or points[index] == at:
        return measured[points[index]]
    low, high = points[index - 1], points[index]
    share = (at - low) / (high - low)
    return (1 - share) * measured[low] + share * measured[high]
