"""Searches for a tree compared on paper and in decoding, for one run's heads.

    python benchmarks/trees.py runs/demo
    python data/seeds/make_tiny.py --count 1500 --seed 7 --output fresh.jsonl     # more text than a run holds out
    python benchmarks/trees.py runs/demo --prompts fresh.jsonl --without data/seeds/tiny.jsonl --tokens 80000

On paper: expected tokens per step of joint, independent, dense trees and the top-1 chain, of 4 to 63 nodes, each judged
on conversations that it was not fitted to. In decoding: the joint trees of 8, 16, 32 and 63 nodes, fitted to one half
of the conversations (those that the run held out, or `--prompts`), answer the prompts of the other half; a 95 %
bootstrap interval over conversations stands beside what was expected. Writes benchmarks/results/trees.{json,md,html};
times nothing (`medusa-eval --calibrate` does).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import torch
from machine import facts, sentence

from medusa_train.checkpoint.subject import Subject, load_subject, locate
from medusa_train.data.chat import ChatEncoder
from medusa_train.data.conversation import Message
from medusa_train.evaluation.calibration import Prompts, collect, talks_of_run
from medusa_train.evaluation.intervals import interval, resample
from medusa_train.evaluation.page.charts import Curve, curves
from medusa_train.evaluation.page.page import document, figure, figures_table
from medusa_train.inference.generate import Decoder
from medusa_train.inference.search import Simulated, compare_searches, joint_trees
from medusa_train.selfdistill.seeds import read_seeds
from medusa_train.trees.tree import Tree

Machine = dict[str, Any]
MEASURED = (8, 16, 32, 63)
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Row:
    """Tokens per step of the joint tree of so many nodes: as expected, and as decoded."""

    nodes: int
    expected: float
    measured: float
    low: float
    high: float


def talks_of_files(prompts: Path, without: Path | None, chat: ChatEncoder) -> list[Prompts]:
    """The first prompt of every conversation in a file, but for those that begin as one in another file does."""
    known = set() if without is None else {seed.turns[0] for seed in read_seeds(without)}
    seeds = [seed for seed in read_seeds(prompts) if seed.turns[0] not in known]
    return [[chat.prompt([Message("user", seed.turns[0])])] for seed in seeds]


def decode(subject: Subject, tree: Tree, talks: Sequence[Prompts], limit: int) -> list[tuple[int, int]]:
    """Tokens behind the prefill's, and steps, of every talk."""
    decoder = Decoder(subject.backbone, subject.draft, tree)
    found = []
    for prompts in talks:
        fitting = [prompt for prompt in prompts if len(prompt) < subject.backbone.max_context]
        answers = [decoder.generate(prompt, limit) for prompt in fitting]
        found.append((sum(len(answer.tokens) - 1 for answer in answers), sum(answer.steps for answer in answers)))
    return found


def measure(subject: Subject, talks: Sequence[Prompts], budget: int, limit: int) -> tuple[list[Simulated], list[Row]]:
    """Both comparisons; the second half of the talks is decoded with trees fitted to the first."""
    first, second = talks[::2], talks[1::2]
    traced = collect(subject, first, budget, limit, lambda tokens: None)
    simulated = compare_searches(traced, range(4, 64))
    trees = joint_trees([trace for talk in traced for trace in talk], MEASURED)
    expected = next(one.by_size for one in simulated if one.search == "joint")
    rows = []
    for nodes in MEASURED:
        counts = decode(subject, trees[nodes], second[: len(traced)], limit)
        sums = resample(torch.tensor(counts, dtype=torch.float64))
        between = interval(sums[:, 0] / sums[:, 1]) or (float("nan"), float("nan"))
        rate = sum(tokens for tokens, _ in counts) / max(sum(steps for _, steps in counts), 1)
        rows.append(Row(nodes, expected[nodes], rate, *between))
        print(rows[-1], flush=True)
    return simulated, rows


def write(simulated: Sequence[Simulated], rows: Sequence[Row], machine: Machine, title: str, directory: Path) -> str:
    """Write all three files; returns the Markdown."""
    directory.mkdir(parents=True, exist_ok=True)
    by_name = {one.search: one.by_size for one in simulated}
    worse = [n for n in range(4, 64) if by_name["joint"][n] < by_name["independent"][n]]
    record: dict[str, Any] = {
        "title": title,
        "machine": machine,
        "expected": {name: {str(n): round(rate, 4) for n, rate in found.items()} for name, found in by_name.items()},
        "joint_below_independent_at": worse,
        "measured": [row.__dict__ for row in rows],
    }
    (directory / "trees.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    titles = ["nodes", "expected", "decoded", "95 % interval", "expected within"]
    cells = [
        [
            str(row.nodes),
            f"{row.expected:.3f}",
            f"{row.measured:.3f}",
            f"{row.low:.3f}-{row.high:.3f}",
            "yes" if row.low <= row.expected <= row.high else "no",
        ]
        for row in rows
    ]
    others = [[str(n), *(f"{found[n]:.3f}" for found in by_name.values())] for n in (4, 6, 8, 12, 16, 24, 32, 48, 63)]
    verdict = f"Joint below independent at {len(worse)} of 60 sizes" + (f": {worse}" if worse else "") + "."
    blocks = [
        f"# {title}",
        sentence(machine),
        verdict,
        _markdown(["nodes", *by_name], others),
        _markdown(titles, cells),
    ]
    text = "\n\n".join(blocks) + "\n"
    (directory / "trees.md").write_text(text, encoding="utf-8")
    drawn = [Curve(name, sorted(found.items())) for name, found in by_name.items()]
    drawing = curves(drawn, title, "nodes", from_zero=False, width=760, height=400)
    parts = [f"<h1>{escape(title)}</h1>", figure("Expected tokens per step", drawing, verdict)]
    page = document(title, [*parts, figures_table(titles, cells, overall=False)])
    (directory / "trees.html").write_text(page, encoding="utf-8")
    return text


def _markdown(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(titles) + " |", "|" + "---:|" * len(titles)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="run directory")
    parser.add_argument("--tokens", type=int, default=20000, help="greedy tokens that trees are fitted to")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="of conversations, in place of the held-out ones")
    parser.add_argument("--without", type=Path, metavar="FILE", help="leave out those that begin as one in FILE does")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--output-dir", type=Path, default=RESULTS)
    args = parser.parse_args()
    machine = facts(__file__, None)
    paths = locate(args.run, None, None)
    subject = load_subject(paths, args.dtype)
    chat = ChatEncoder(subject.backbone.tokenizer, paths.chat_template)
    if args.prompts is None:
        talks = talks_of_run(paths, chat, seed=42)
    else:
        talks = talks_of_files(args.prompts, args.without, chat)
    if subject.draft is None or talks is None or len(talks) < 8:
        parser.error(f"{args.run}: needs heads and a config.yaml whose data hold out eight conversations or more")
    simulated, rows = measure(subject, talks, args.tokens, args.max_new_tokens)
    print(write(simulated, rows, machine, f"Trees for the heads of {Path(args.run).name}", args.output_dir))


if __name__ == "__main__":
    main()
