"""Pages of `drafts.py`: training and backbones, tokens per step by bench and temperature, and by category."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from draft_counts import CHAIN, DYNAMIC, cell_name
from shared import backbone_note, rounded, table, with_interval, write_page

from medusa_train.errors import DataError
from medusa_train.evaluation.metrics import Counts, compare_rates
from medusa_train.evaluation.questions import Bench

Record = dict[str, Any]

STAGES_NOTE = (
    "Medusa-2 is trained on as many tokens as the other drafts, but not on the same text: each of its stages draws an "
    "order of its own, and less than an epoch each reads a part of the text twice and another part never."
)


def write_pages(args: argparse.Namespace, machine: Record, titles: Mapping[str, str], benches: Sequence[Bench]) -> None:
    """Write NAME-BENCH.md and NAME-BENCH.json for the counted drafts: name to title, the reference first."""
    first = next(iter(titles))

    def read(name: str, file: str) -> Record:
        cell: Record = json.loads((args.out / "cells" / name / file).read_text(encoding="utf-8"))
        return cell

    training = {name: read(name, "training.json") for name in titles}
    about = ["**Made with --quick: the drafts are not trained. It shows that everything runs.**"] if args.quick else []
    about.append(explanation(args, str(training[first]["base_model"]), titles[first]))
    about.append(training_table(titles, training))
    if (
        any(len(one["tokens"]) > 1 for one in training.values())
        and max(args.stage_one, args.epochs - args.stage_one) < 1
    ):
        about.append(STAGES_NOTE)
    record: Record = {"machine": machine, "quick": args.quick, "configs": args.configs, "epochs": args.epochs}
    kept = [key for key in training[first] if key not in ("settings", "base_model")]
    record["training"] = {
        name: {"title": titles[name], **{key: one[key] for key in kept}} for name, one in training.items()
    }
    largest = str(args.nodes[-1])
    for bench in benches:
        parts, rows_of = list(about), {}
        for temperature in args.temperatures:
            cells = {name: read(name, cell_name(bench, temperature)) for name in titles}
            rows = {name: counts(cell, cells[first]) for name, cell in cells.items()}
            for name, cell in cells.items():
                rows[name]["categories"] = rates_by_category(cell, bench, largest)
            rows_of[f"t{temperature:g}"] = rows
            parts.append(f"## {bench.name}, {f'sampling at {temperature:g}' if temperature else 'greedy'}")
            parts.append(counts_table(titles, rows, args.nodes))
            parts += dynamic_table(titles, rows)
            parts.append(category_table(titles, rows, f"{largest} nodes: tokens per step"))
        title = f"{args.name}: drafts side by side"
        write_page(args.out, f"{args.name}-{bench.name}", title, rounded({**record, **rows_of}), parts)


def counts(cell: Record, reference: Record) -> Record:
    """Reduce a cell to the counts of its trees: ratios to the reference's, of dynamic trees to the fixed ones."""
    trees = {}
    for name, one in cell["trees"].items():
        other = (cell if name.startswith(DYNAMIC) else reference)["trees"][name.removeprefix(DYNAMIC)]
        ratio = None if other is one else _ratio(other["questions"], one["questions"])
        trees[name] = {"rate": one["rate"], "without_loops": one["rate_without_loops"], "over": ratio}
    return {"answers": cell["answers"], "loops": cell["loops"], "trees": trees, "ctar": cell["trees"][CHAIN]["ctar"]}


def rates_by_category(cell: Record, bench: Bench, tree: str) -> dict[str, float | None]:
    """Return a tree's tokens per step by category, None without a counted step."""
    totals: dict[str, list[int]] = {}
    questions = cell["trees"][tree]["questions"]
    for question in bench.questions:
        tokens, steps = questions.get(str(question.question_id), (0, 0))
        sums = totals.setdefault(question.category, [0, 0])
        sums[0] += tokens
        sums[1] += steps
    return {name: tokens / steps if steps else None for name, (tokens, steps) in totals.items()}


def _ratio(first: Mapping[str, Sequence[int]], second: Mapping[str, Sequence[int]]) -> list[Any] | None:
    """Return how many times more tokens per step the second draft takes, with its paired bootstrap interval."""
    pair = [{name: Counts(*sums) for name, sums in part.items()} for part in (first, second)]
    try:
        return list(compare_rates(pair[0], pair[1]))
    except DataError:
        return None  # too few questions


def explanation(args: argparse.Namespace, base_model: str, reference: str) -> str:
    """Say how the figures of the page were counted."""
    epochs = "1 epoch" if args.epochs == 1 else f"{args.epochs:g} epochs"
    return (
        f"{backbone_note(base_model)} {epochs} for every draft, answers of at most {args.max_new_tokens} tokens, "
        "generated in batches: tokens per step, which do not depend on the clock. *chain*: three first guesses. *N "
        "nodes*: as many nodes for all, fitted to held-out answers, always filled; greedy counts are simulated "
        f"along plain answers, sampled ones decoded. *over*: those of {reference}. CTAR(w): share of the chain's "
        "steps that accept w guesses or more. *loops*: answers that repeat eight tokens three times (chain, or all "
        "of greedy decoding), and the largest tree's count without them. Brackets: 95 % bootstrap over questions, "
        "paired."
    ).strip()


def counts_table(titles: Mapping[str, str], rows: Mapping[str, Record], nodes: Sequence[int]) -> str:
    """Format tokens per step of all trees."""
    trees = {CHAIN: "chain", **{str(count): f"{count} nodes" for count in nodes}}
    heads = ["draft", *(cell for name in trees.values() for cell in (name, "over"))]
    lines = []
    for name, row in rows.items():
        line = [titles[name]]
        for tree in trees:
            one = row["trees"][tree]
            line += [f"{one['rate']:.3f}", with_interval(one["over"], ".3f")]
        line += [" ".join(f"{share:.3f}" for share in row["ctar"])]
        line += [f"{row['loops'][CHAIN]}/{row['answers'][CHAIN]}"]
        lines.append([*line, _number(row["trees"][str(nodes[-1])]["without_loops"], ".3f")])
    return table([*heads, "CTAR(1) (2) (3)", "loops", f"without: {nodes[-1]} nodes"], lines)


def dynamic_table(titles: Mapping[str, str], rows: Mapping[str, Record]) -> list[str]:
    """Format tokens per step of dynamic trees beside fixed ones of as many nodes and levels; empty without any."""
    lines = [
        [titles[name], tree, f"{one['rate']:.3f}", with_interval(one["over"], ".3f")]
        for name, row in rows.items()
        for tree, one in row["trees"].items()
        if tree.startswith(DYNAMIC)
    ]
    return [table(["draft", "tree", "tokens per step", "over the fixed tree"], lines)] if lines else []


def category_table(titles: Mapping[str, str], rows: Mapping[str, Record], head: str) -> str:
    """Format the tokens per step of each category; `head` says of which tree."""
    categories = next(iter(rows.values()))["categories"]
    return table(
        [head, *categories],
        [[titles[name], *map(_number, row["categories"].values())] for name, row in rows.items()],
    )


def training_table(titles: Mapping[str, str], training: Mapping[str, Record]) -> str:
    """Format size and training, with the quality of changed backbones."""
    texts = list(dict.fromkeys(text for one in training.values() for text in one["quality"] or {}))
    heads = ["draft", "heads", "extra parameters", "tokens trained on"]
    for text in texts:
        heads += [f"{text}: perplexity", "KL"]
    lines = []
    for name, one in training.items():
        line = [titles[name], str(one["depth"]), f"{one['parameters']:,}"]
        line.append(" + ".join(f"{number:,}" for number in one["tokens"]))
        for text in texts:
            quality = (one["quality"] or {}).get(text)
            line += [f"{quality['change']:+.2%}", f"{quality['kl']:.4f}"] if quality else ["", ""]
        lines.append(line)
    return table(heads, lines)


def _number(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else f"{value:{form}}"
