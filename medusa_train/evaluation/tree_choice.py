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
from medusa_train.inference.tree_fit import SEARCHES, TreeCandidate, compare_searches, joint_trees
from medusa_train.inference.tree_search import (
    LATENCY_ROUNDS,
    SIZES,
    measure_step_latency,
    median_prompt,
    sizes_of_second_round,
    smallest_of_the_fastest,
)
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
        nodes: size of the chosen tree; 0 for plain decoding, if no tree is clearly faster.
        chosen_ms: milliseconds of a step with the chosen tree, on the scale of `latency`.
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
    chosen_ms: float
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
        rows = []
        for nodes, rate in sorted(self.curves[search].items()):
            if self.trees[search][nodes].size == nodes:
                ms = self.chosen_ms if search == "joint" and nodes == self.nodes else self.step_ms(nodes)
                figures = {"step_ms": round(ms, 4), "tokens_per_s": round(1000 * rate / ms, 1)}
                rows.append({"nodes": nodes, "tokens_per_step": round(rate, 4), **figures})
        return rows

    def tree_record(self) -> dict[str, Any]:
        """Return what tree.json holds beside the paths."""
        return {
            "nodes": self.nodes,
            "tokens_per_step": round(self.curves["joint"][self.nodes], 4),
            "step_ms": round(self.chosen_ms, 4),
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
    """Fit trees by every search, time steps, and choose the tree with the most expected tokens per second.

    The joint trees of `SIZES` are timed first. Then the best of them, less deep trees of about its size and plain
    decoding are timed side by side, together with the best trees of the other searches, and one of the joint trees or
    plain decoding is chosen, see `smallest_of_the_fastest`.

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
    with progress.phase("fitting trees", ticking=True):
        rivals = _second_round(conversations, trees, curves, fixed)
    if named is not None:
        rivals.append(("named", named, tokens_per_step(traces, named)))
    steps = _time_steps(model, [tree for _, tree, _ in rivals], prompt, progress)
    candidates = [NamedCandidate(tree, rate, ms, name) for (name, tree, rate), ms in zip(rivals, steps, strict=True)]
    fitted = [one for one in candidates if one.name == "joint"]
    joint = smallest_of_the_fastest(fitted)
    trees["joint"][joint.tree.size], curves["joint"][joint.tree.size] = joint.tree, joint.tokens_per_step
    # both rounds timed the deep tree of that size, so drift between them cancels out
    deep = next(one for one in fitted if one.tree == by_size[joint.tree.size])
    chosen_ms = latency[joint.tree.size] * joint.step_ms / deep.step_ms
    candidates = [joint, *(one for one in candidates if one.name != "joint")]
    tokens = sum(len(trace.ranks) for trace in traces)
    about = {"conversations": len(conversations), "answers": len(traces), "tokens": tokens}
    accepted = node_acceptance(traces, joint.tree)
    accuracy, form = head_accuracy(traces), DecodingForm.of(model.backbone)
    dynamic = None
    if model.draft is not None and model.draft.guesses_at_once:
        with progress.phase("fitting trees", ticking=True):
            dynamic = fit_dynamic_trees(traces, fixed, fitted, trees["joint"].__getitem__)
    return CalibrationResult(
        trees, curves, latency, joint.tree.size, chosen_ms, candidates, accuracy, accepted, about, form, dynamic
    )


def _second_round(
    conversations: Sequence[Sequence[Trace]],
    trees: Mapping[str, Mapping[int, Tree]],
    curves: Mapping[str, Mapping[int, float]],
    timed: Sequence[TreeCandidate],
) -> list[tuple[str, Tree, float]]:
    """Return the trees to time side by side, each with its search and its tokens per step.

    Args:
        timed: the joint trees of `SIZES` with their latencies.
    """
    joint, latency = {one.tree.size: one for one in timed}, {one.tree.size: one.step_ms for one in timed}
    near = sizes_of_second_round(sorted(joint), smallest_of_the_fastest(timed).tree.size)
    rivals = [("joint", joint[nodes].tree, joint[nodes].tokens_per_step) for nodes in near]
    rivals += [("joint", tree, rate) for tree, rate in _shallower(conversations, [joint[one].tree for one in near])]
    for name, by_size in trees.items():
        if name != "joint":  # none of its trees was timed, so its size is chosen by the latencies of joint trees
            speed = {size: curves[name][size] / interpolate(latency, size) for size in by_size}
            best = max((size for size in by_size if by_size[size].size == size), key=speed.__getitem__)
            rivals.append((name, by_size[best], curves[name][best]))
    return rivals


def _time_steps(model: LoadedModel, trees: Sequence[Tree], prompt: list[int], progress: RunProgress) -> list[float]:
    """Return the median milliseconds of a step with each tree."""
    assert model.draft is not None
    rounds = (LATENCY_ROUNDS + 1) * len(trees)
    with progress.phase("timing steps", rounds, "continuations") as phase:  # not ticking: no thread beside the decoder
        return measure_step_latency(model.backbone, model.draft, trees, prompt, phase.advance)


def _shallower(conversations: Sequence[Sequence[Trace]], trees: Sequence[Tree]) -> list[tuple[Tree, float]]:
    """Return joint trees as large as `trees` and less deep, with their tokens per step on other conversations.

    Every level costs time beyond its nodes', so a shallower tree may be faster.
    """
    traces = [trace for conversation in conversations for trace in conversation]
    depths = range(1, max(tree.max_depth for tree in trees))
    searches = {str(depth): partial(joint_trees, max_depth=depth) for depth in depths}
    sizes = [tree.size for tree in trees]
    rates = {one.search: one.by_size for one in compare_searches(conversations, sizes, searches)}
    fitted = {depth: joint_trees(traces, sizes, depth) for depth in depths}
    return [
        (fitted[depth][tree.size], rates[str(depth)][tree.size])
        for tree in trees
        for depth in range(1, tree.max_depth)
        if fitted[depth][tree.size].size == tree.size
    ]


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
