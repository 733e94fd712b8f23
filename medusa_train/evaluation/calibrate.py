"""The journey of `medusa-eval --calibrate`: prompts and model in, tree.json and a page out. Holds no arithmetic."""

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
from rich.console import Console
from rich.table import Table

from medusa_train.checkpoint.load import LoadedModel, load_with_draft
from medusa_train.checkpoint.resolve import ModelPaths
from medusa_train.config.schema import EvalConfig
from medusa_train.data.conversation import Message
from medusa_train.data.tokenize import ChatEncoder
from medusa_train.errors import CheckpointError
from medusa_train.evaluation.choose_dtype import choose_dtype
from medusa_train.evaluation.html_report.calibration import calibration_page
from medusa_train.evaluation.metrics import node_acceptance
from medusa_train.evaluation.questions import Bench, Question
from medusa_train.evaluation.validation_data import run_config, validation_conversations
from medusa_train.inference.traces import Trace, head_accuracy, tokens_per_step, trace_answers
from medusa_train.inference.tree_fit import SEARCHES, compare_searches, joint_trees, shallower_trees
from medusa_train.inference.tree_search import SIZES, measure_step_latency, median_prompt
from medusa_train.io import replace_text
from medusa_train.progress import RunProgress
from medusa_train.trees.tree import Tree

TREE = "tree.json"


def calibrate(cfg: EvalConfig, bench: Bench, paths: ModelPaths, console: Console) -> list[Path]:
    """Choose the tree anew on this machine; returns the files that were written.

    tree.json goes to the run (or `output_dir`), the page and all figures to eval/calibration beside it.

    Raises:
        CheckpointError: there are no heads, or too few prompts. BackboneError: the backbone can't be used.
    """
    if paths.heads is None:
        raise CheckpointError("--calibrate chooses a tree for heads; name them with --model")
    dtype = cfg.dtype if cfg.dtype != "auto" else choose_dtype(bench, paths, console)
    with RunProgress(console).phase(f"loading in {dtype}", ticking=True):
        subject = load_with_draft(paths, dtype, compiled=cfg.compile)
    chat = ChatEncoder(subject.backbone.tokenizer, paths.chat_template)
    talks = validation_prompts(paths, chat, cfg.seed)
    kind = "prompts that the run held out"
    if talks is None:
        talks = bench_prompts(bench.questions, chat)
        kind = f"questions of bench {bench.name}: measure on another one"
    console.print(f"calibrating on {cfg.calibration_tokens:,} greedy tokens, {kind}", highlight=False, soft_wrap=True)
    with RunProgress(console).phase(
        f"answering in {dtype}", sum(len(prompts) for prompts in talks), "turns"
    ) as progress:
        traced = trace_conversations(
            subject, talks, cfg.calibration_tokens, cfg.max_new_tokens, lambda tokens: progress.advance(tokens=tokens)
        )
    console.print("comparing trees of 0 to 63 nodes, then timing steps", highlight=False)
    own = None if cfg.tree is None or paths.tree is None else Tree.load(paths.tree)
    found = search(subject, traced, [prompt for prompts in talks for prompt in prompts], own)
    console.print(table(found))
    console.print(
        f"{found.nodes} nodes: {found.curves['joint'][found.nodes]:.2f} tokens per step expected, "
        f"{found.step_ms(found.nodes):.2f} ms per step in {dtype}",
        highlight=False,
    )
    home = Path(cfg.output_dir) if cfg.output_dir else paths.home
    return save(found, home / TREE, home / "eval" / "calibration", f"Calibration of {paths.home.name}")


LARGEST = 63  # TensorRT-LLM takes no more
Prompts = list[list[int]]


@dataclass(frozen=True)
class Candidate:
    """A tree that was measured head to head: `tokens_per_step` expected on new text, `step_ms` its own latency."""

    name: str
    tree: Tree
    tokens_per_step: float
    step_ms: float

    @property
    def tokens_per_s(self) -> float:
        """What decoding would reach, prefill left out."""
        return 1000 * self.tokens_per_step / self.step_ms


@dataclass(frozen=True)
class CalibrationResult:
    """What a calibration found.

    Attributes:
        trees: per search and size the tree, of at most so many nodes, fitted to everything.
        curves: per search and size the expected tokens per step on new text.
        latency: measured milliseconds of a step at some sizes. nodes: the size with the most tokens per second.
        candidates: each search's best tree, measured side by side. accuracy: top-1 .. top-10 per head, [K][10].
        accepted: share of the steps that accept each node of the chosen tree. about: how much text this rests on.
    """

    trees: Mapping[str, Mapping[int, Tree]]
    curves: Mapping[str, Mapping[int, float]]
    latency: Mapping[int, float]
    nodes: int
    candidates: Sequence[Candidate]
    accuracy: Sequence[Sequence[float]]
    accepted: Sequence[float] | None
    about: Mapping[str, Any] = field(default_factory=dict)

    def step_ms(self, nodes: int) -> float:
        """Latency of a step with a tree of so many nodes, read off between the measured sizes."""
        return interpolate(self.latency, nodes)

    def sizes(self, search: str = "joint") -> list[dict[str, float]]:
        """The curve of a search as plain figures, at the sizes that it has a tree of."""
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

    @property
    def best(self) -> Tree:
        """The tree that was chosen."""
        return self.trees["joint"][self.nodes]

    def tree_record(self) -> dict[str, Any]:
        """The content of tree.json beside its paths."""
        return {
            "nodes": self.nodes,
            "tokens_per_step": round(self.curves["joint"][self.nodes], 4),
            "step_ms": round(self.step_ms(self.nodes), 4),
            "head_accuracy": [[round(share, 4) for share in row] for row in self.accuracy],
            "calibration": dict(self.about),
            "sizes": self.sizes(),
        }

    def as_json(self) -> dict[str, Any]:
        """The content of calibration.json: everything."""
        return {
            **self.tree_record(),
            "medusa_choices": [list(path) for path in self.best.paths],
            "accepted": None if self.accepted is None else [round(share, 4) for share in self.accepted],
            "searches": {name: self.sizes(name) for name in self.curves},
            "latency_ms": {str(nodes): round(ms, 4) for nodes, ms in sorted(self.latency.items())},
            "candidates": [
                {
                    "name": one.name,
                    "nodes": one.tree.size,
                    "tokens_per_step": round(one.tokens_per_step, 4),
                    "step_ms": round(one.step_ms, 4),
                    "tokens_per_s": round(one.tokens_per_s, 1),
                    "medusa_choices": [list(path) for path in one.tree.paths],
                }
                for one in self.candidates
            ],
        }


def interpolate(measured: Mapping[int, float], at: int) -> float:
    """The value at `at` on the line through the measured points; beyond them that of the nearest."""
    known = sorted(measured)
    place = bisect_left(known, at)
    if place == len(known):
        return measured[known[-1]]
    if place == 0 or known[place] == at:
        return measured[known[place]]
    low, high = known[place - 1], known[place]
    share = (at - low) / (high - low)
    return (1 - share) * measured[low] + share * measured[high]


def validation_prompts(paths: ModelPaths, chat: ChatEncoder, seed: int) -> list[Prompts] | None:
    """The prompts of the run's held-out conversations (of all, where none were held out), in random order.

    None where there is no run, or its data are not to be had any more.
    """
    cfg = run_config(paths)
    found = None if cfg is None else validation_conversations(cfg, chat)
    if found is None:
        return None
    examples = list(found[0])
    random.Random(seed).shuffle(examples)
    return [example.prompts() for example in examples]


def bench_prompts(questions: Sequence[Question], chat: ChatEncoder) -> list[Prompts]:
    """The first turns of a bench, which is of no use for measuring afterwards."""
    return [[chat.prompt([Message("user", question.turns[0])])] for question in questions]


def trace_conversations(
    subject: LoadedModel, talks: Sequence[Prompts], budget: int, max_new_tokens: int, on_tokens: Callable[[int], None]
) -> list[list[Trace]]:
    """Let the backbone answer the prompts of the talks greedily until `budget` tokens are written, and rank them."""
    assert subject.draft is not None
    found: list[list[Trace]] = []
    written = 0

    def count(tokens: int) -> None:
        nonlocal written
        written += tokens
        on_tokens(tokens)

    for prompts in talks:
        traces = trace_answers(
            subject.backbone,
            subject.draft,
            prompts,
            max_new_tokens=max_new_tokens,
            token_budget=budget - written,
            on_answer=count,
        )
        if traces:
            found.append(traces)
        if written >= budget:
            break
    return found


def search(
    subject: LoadedModel, talks: Sequence[Sequence[Trace]], prompts: Sequence[list[int]], own: Tree | None = None
) -> CalibrationResult:
    """Compare all searches on paper, time steps, and choose the size with the most expected tokens per second.

    Args:
        talks: answers by conversation. prompts: to time steps behind. own: another tree to measure beside them.

    Raises:
        CheckpointError: too few conversations.
    """
    if len(talks) < 4:
        raise CheckpointError(f"only {len(talks)} conversations with an answer; a calibration takes four or more")
    assert subject.draft is not None
    sizes = range(LARGEST + 1)
    curves = {one.search: one.by_size for one in compare_searches(talks, sizes)}
    everything = [trace for talk in talks for trace in talk]
    trees = {name: find(everything, sizes) for name, find in SEARCHES.items()}
    prompt = median_prompt(subject.backbone, prompts)
    measured = {tree.size: tree for tree in (trees["joint"][size] for size in SIZES)}
    times = measure_step_latency(subject.backbone, subject.draft, list(measured.values()), prompt)
    latency = dict(zip(measured, times, strict=True))

    def best(name: str) -> int:
        """The size with the most tokens per second, among those that the search has a tree of."""
        exact = [nodes for nodes in sizes if trees[name][nodes].size == nodes]
        return max(exact, key=lambda nodes: curves[name][nodes] / interpolate(latency, nodes))

    nodes = best("joint")
    flat = _shallower(talks, trees["joint"][nodes])
    sides = [(name, trees[name][best(name)], curves[name][best(name)]) for name in SEARCHES]
    sides += [("joint", tree, rate) for tree, rate in flat]
    if own is not None:
        sides.append(("named", own, tokens_per_step(everything, own)))
    steps = measure_step_latency(subject.backbone, subject.draft, [tree for _, tree, _ in sides], prompt)
    candidates = [Candidate(name, tree, rate, ms) for (name, tree, rate), ms in zip(sides, steps, strict=True)]
    joint = max((one for one in candidates if one.name == "joint"), key=lambda one: one.tokens_per_s)
    candidates = [joint, *(one for one in candidates if one.name != "joint")]
    trees["joint"][nodes], curves["joint"][nodes] = joint.tree, joint.tokens_per_step
    about = {"conversations": len(talks), "answers": len(everything), "tokens": sum(len(t.ranks) for t in everything)}
    accepted = node_acceptance(everything, joint.tree)
    return CalibrationResult(trees, curves, latency, nodes, candidates, head_accuracy(everything), accepted, about)


def _shallower(talks: Sequence[Sequence[Trace]], tree: Tree) -> list[tuple[Tree, float]]:
    """Joint trees as large as `tree` and less deep, with tokens per step on new text: a level costs time of its own."""
    everything = [trace for talk in talks for trace in talk]
    found = shallower_trees(tree, lambda size, depth: joint_trees(everything, [size], depth)[size])
    limits = {str(flat.max_depth): partial(joint_trees, max_depth=flat.max_depth) for flat in found}
    rates = {one.search: one.by_size[tree.size] for one in compare_searches(talks, [tree.size], limits)}
    return [(flat, rates[str(flat.max_depth)]) for flat in found]


def table(found: CalibrationResult) -> Table:
    """Every search's best tree side by side."""
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for index, title in enumerate(("tree", "nodes", "tokens per step", "ms per step", "tokens/s")):
        shown.add_column(title, justify="left" if index == 0 else "right")
    for one in found.candidates:
        figures = (f"{one.tokens_per_step:.3f}", f"{one.step_ms:.2f}", f"{one.tokens_per_s:.1f}")
        shown.add_row(one.name, str(one.tree.size), *figures, style="bold" if one.name == "joint" else "")
    return shown


def save(found: CalibrationResult, tree: Path, directory: Path, title: str) -> list[Path]:
    """Write tree.json to `tree`, calibration.json and calibration.html into `directory`; returns their paths."""
    data, page = directory / "calibration.json", directory / "calibration.html"
    replace_text(data, json.dumps(found.as_json(), indent=1) + "\n")
    replace_text(page, calibration_page(found.as_json(), title))
    found.best.save(tree, **found.tree_record())
    return [tree, data, page]
