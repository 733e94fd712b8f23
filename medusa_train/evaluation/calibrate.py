"""`medusa-eval --calibrate`: choose the tree for these heads on this machine; writes tree.json and a report page."""

from __future__ import annotations

import json
import random
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from medusa_train.checkpoint.load_model import LoadedModel
from medusa_train.checkpoint.resolve import ModelPaths
from medusa_train.config.schema import EvalConfig
from medusa_train.data.conversation import Message
from medusa_train.data.tokenize import ChatEncoder
from medusa_train.errors import CheckpointError
from medusa_train.evaluation.choose_dtype import choose_dtype
from medusa_train.evaluation.html_report.calibration import BY_CONSTRUCTION, calibration_page
from medusa_train.evaluation.metrics import node_acceptance
from medusa_train.evaluation.questions import Bench, Question
from medusa_train.evaluation.run import load_model
from medusa_train.evaluation.validation_data import run_config, validation_conversations
from medusa_train.inference.traces import Trace, head_accuracy, tokens_per_step, trace_answers
from medusa_train.inference.tree_fit import SEARCHES, compare_searches, joint_trees, shallower_trees
from medusa_train.inference.tree_search import LATENCY_ROUNDS, SIZES, TreeCandidate, measure_step_latency, median_prompt
from medusa_train.io import replace_text
from medusa_train.progress import RunProgress
from medusa_train.trees.tree import Tree

TREE = "tree.json"
LARGEST = 63  # nodes; TensorRT-LLM takes no more
MIN_CONVERSATIONS = 4

#: The prompts of one conversation, one per turn of the assistant, as token ids.
Prompts = list[list[int]]


def calibrate(cfg: EvalConfig, bench: Bench, paths: ModelPaths, progress: RunProgress) -> list[Path]:
    """Choose the tree with the most expected tokens per second on this machine; returns the paths of the files.

    tree.json goes to the run (or `output_dir`), calibration.html and calibration.json to eval/calibration beside it.

    Raises:
        CheckpointError: there are no heads, or too few prompts.
        BackboneError: the backbone cannot be loaded.
    """
    if paths.heads is None:
        raise CheckpointError("--calibrate chooses a tree for heads; name them with --model")
    dtype = cfg.dtype if cfg.dtype != "auto" else choose_dtype(bench, paths, progress)
    model = load_model(paths, dtype, progress, compiled=cfg.compile)
    chat = ChatEncoder(model.backbone.tokenizer, paths.chat_template)
    conversations = validation_prompts(paths, chat, cfg.seed)
    source = "validation prompts of the run"
    if conversations is None:
        conversations = bench_prompts(bench.questions, chat)
        source = f"questions of bench {bench.name}: evaluate on another one"
    progress.print(f"calibrating on {cfg.calibration_tokens:,} greedy tokens, {source}")
    with progress.phase(f"answering in {dtype}", cfg.calibration_tokens, "tokens", ticking=True) as phase:
        traces = trace_conversations(model, conversations, cfg.calibration_tokens, cfg.max_new_tokens, phase.advance)
    named = None if cfg.tree is None or paths.tree is None else Tree.load(paths.tree)
    result = search(model, traces, [prompt for prompts in conversations for prompt in prompts], progress, named)
    progress.console.print(table(result))
    progress.console.print(BY_CONSTRUCTION, highlight=False, soft_wrap=True)
    progress.print(
        f"chosen: {result.nodes} nodes, {result.curves['joint'][result.nodes]:.2f} tokens per step (simulated on "
        f"conversations that the tree was not fitted to), {result.step_ms(result.nodes):.2f} ms per step in {dtype}"
    )
    progress.console.print(progress.table())
    home = Path(cfg.output_dir) if cfg.output_dir else paths.home
    return save(result, home / TREE, home / "eval" / "calibration", f"Calibration of {paths.home.name}")


def validation_prompts(paths: ModelPaths, chat: ChatEncoder, seed: int) -> list[Prompts] | None:
    """Return the prompts of the run's validation conversations (of all, if it has none), in random order.

    None if there is no run, or its data are gone.
    """
    cfg = run_config(paths)
    result = None if cfg is None else validation_conversations(cfg, chat)
    if result is None:
        return None
    examples = list(result[0])
    random.Random(seed).shuffle(examples)
    return [example.prompts() for example in examples]


def bench_prompts(questions: Sequence[Question], chat: ChatEncoder) -> list[Prompts]:
    """Return the first turns of a bench as prompts; the bench must not be used to measure the tree afterwards."""
    return [[chat.prompt([Message("user", question.turns[0])])] for question in questions]


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
    conversation_traces: list[list[Trace]] = []
    generated = 0

    def count(tokens: int) -> None:
        nonlocal generated
        generated += tokens
        on_tokens(tokens)

    for prompts in conversations:
        traces = trace_answers(
            model.backbone,
            model.draft,
            prompts,
            max_new_tokens=max_new_tokens,
            token_budget=token_budget - generated,
            on_answer=count,
        )
        if traces:
            conversation_traces.append(traces)
        if generated >= token_budget:
            break
    return conversation_traces


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
    """

    trees: Mapping[str, Mapping[int, Tree]]
    curves: Mapping[str, Mapping[int, float]]
    latency: Mapping[int, float]
    nodes: int
    candidates: Sequence[NamedCandidate]
    accuracy: Sequence[Sequence[float]]
    accepted: Sequence[float] | None
    about: Mapping[str, Any] = field(default_factory=dict)

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
    joint = max((one for one in candidates if one.name == "joint"), key=lambda one: one.tokens_per_s)
    candidates = [joint, *(one for one in candidates if one.name != "joint")]
    trees["joint"][nodes], curves["joint"][nodes] = joint.tree, joint.tokens_per_step
    tokens = sum(len(trace.ranks) for trace in traces)
    about = {"conversations": len(conversations), "answers": len(traces), "tokens": tokens}
    accepted = node_acceptance(traces, joint.tree)
    return CalibrationResult(trees, curves, latency, nodes, candidates, head_accuracy(traces), accepted, about)


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


def table(result: CalibrationResult) -> Table:
    """Return every search's best tree as a table for the terminal."""
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for index, title in enumerate(("tree", "nodes", "tokens per step", "ms per step", "tokens/s")):
        shown.add_column(title, justify="left" if index == 0 else "right")
    for one in result.candidates:
        figures = (f"{one.tokens_per_step:.3f}", f"{one.step_ms:.2f}", f"{one.tokens_per_s:.1f}")
        shown.add_row(one.name, str(one.tree.size), *figures, style="bold" if one.name == "joint" else "")
    return shown


def save(result: CalibrationResult, tree: Path, directory: Path, title: str) -> list[Path]:
    """Write tree.json to `tree`, and calibration.json and calibration.html to `directory`; returns their paths."""
    data, page = directory / "calibration.json", directory / "calibration.html"
    replace_text(data, json.dumps(result.as_json(), indent=1) + "\n")
    replace_text(page, calibration_page(result.as_json(), title))
    result.best.save(tree, **result.tree_record())
    return [tree, data, page]
