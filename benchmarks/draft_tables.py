"""Tables of `drafts.py`: decoding by bench and temperature, speedups by category, training and backbones."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from draft_measurement import CHAIN, OWN, cell_name
from shared import backbone_note, machine_line, rounded, table, with_interval, write_result

from medusa_train.errors import DataError
from medusa_train.evaluation.metrics import Counts, compare_rates
from medusa_train.evaluation.questions import Bench

if TYPE_CHECKING:
    from drafts import Case

Record = dict[str, Any]

STAGES_NOTE = (
    "Medusa-2 is trained on as many tokens as the other drafts, but not on the same text: each of its stages draws an "
    "order of its own, and less than an epoch each reads a part of the text twice and another part never."
)


def write_pages(args: argparse.Namespace, machine: Record, cases: Sequence[Case], benches: Sequence[Bench]) -> str:
    """Write NAME-BENCH.md and NAME-BENCH.json for the measured drafts, the reference first; returns the pages."""
    titles = {case.name: case.title for case in cases}
    training = {case.name: _read(args, case, "training.json") for case in cases}
    about = [f"# {args.name}: drafts side by side", machine_line(machine)]
    if args.quick:
        about.append("**Made with --quick: the drafts are not trained. It shows that everything runs, and no more.**")
    about.append(_explanation(args, str(training[cases[0].name]["base_model"]), cases[0].title))
    about.append(_training_table(titles, training))
    if any(len(case.stages) > 1 for case in cases) and max(args.stage_one, args.epochs - args.stage_one) < 1:
        about.append(STAGES_NOTE)
    kept = [key for key in training[cases[0].name] if key not in ("settings", "base_model")]
    pages = []
    for bench in benches:
        record: Record = {"machine": machine, "quick": args.quick, "configs": args.configs, "epochs": args.epochs}
        record["training"] = {
            name: {"title": titles[name], **{key: one[key] for key in kept}} for name, one in training.items()
        }
        parts = list(about)
        for temperature in args.temperatures:
            cells = {case.name: _read(args, case, cell_name(args, bench, temperature)) for case in cases}
            first = cells[cases[0].name]
            parts.append(f"## {bench.name}, {f'sampling at {temperature:g}' if temperature else 'greedy'}")
            if args.counts_only:
                counts = {name: _counts(cell, first) for name, cell in cells.items()}
                for name, cell in cells.items():
                    counts[name]["categories"] = _rates_by_category(cell, bench, str(args.nodes[-1]))
                record[f"t{temperature:g}"] = counts
                parts.append(_counts_table(titles, counts, args.nodes))
                parts.append(_category_table(titles, counts, f"{args.nodes[-1]} nodes: tokens per step"))
                continue
            rows = {name: _row(cell, first) for name, cell in cells.items()}
            record[f"t{temperature:g}"] = rows
            parts.append(_decoding_table(titles, rows, args.nodes))
            if not temperature:
                parts.append(_category_table(titles, rows, "own tree: tokens per step / speedup / over prompt lookup"))
            parts += [
                f"Note: {note}." for note in dict.fromkeys(one for cell in cells.values() for one in cell["notes"])
            ]
        pages.append("\n\n".join(parts) + "\n")
        write_result(args.out, f"{args.name}-{bench.name}", rounded(record), pages[-1])
    return "\n".join(pages)


def _read(args: argparse.Namespace, case: Case, name: str) -> Record:
    cell: Record = json.loads((args.out / "cells" / case.name / name).read_text(encoding="utf-8"))
    return cell


def _counts(cell: Record, reference: Record) -> Record:
    """Reduce a cell to the counts of its trees, each with its ratio to the reference's."""
    trees = {}
    for name, one in cell["trees"].items():
        ratio = None if cell is reference else _ratio(reference["trees"][name]["questions"], one["questions"])
        trees[name] = {"rate": one["rate"], "without_loops": one["rate_without_loops"], "over": ratio}
    counts = {key: cell[key] for key in ("answers", "loops") if key in cell}
    return {**counts, "trees": trees, "ctar": cell["trees"][CHAIN]["ctar"]}


def _rates_by_category(cell: Record, bench: Bench, tree: str) -> dict[str, list[float | None]]:
    """Return a tree's tokens per step by category, None without a counted step."""
    totals: dict[str, list[int]] = {}
    questions = cell["trees"][tree]["questions"]
    for question in bench.questions:
        tokens, steps = questions.get(str(question.question_id), (0, 0))
        sums = totals.setdefault(question.category, [0, 0])
        sums[0] += tokens
        sums[1] += steps
    return {name: [tokens / steps if steps else None] for name, (tokens, steps) in totals.items()}


def _row(cell: Record, reference: Record) -> Record:
    """Reduce a cell to the figures of the page."""
    return {
        **_counts(cell, reference),
        **{key: cell[key] for key in ("nodes", "answers", "skipped", "equal")},
        **cell["own"],
        "categories": {
            name: [one[key][0] for key in ("rate", "speedup", "over_lookup") if key in one]
            for name, one in cell["categories"].items()
        },
    }


def _ratio(first: Mapping[str, Sequence[int]], second: Mapping[str, Sequence[int]]) -> list[Any] | None:
    """Return how many times more tokens per step the second draft takes, with its paired bootstrap interval."""
    counts = [{name: Counts(*pair) for name, pair in part.items()} for part in (first, second)]
    try:
        return list(compare_rates(counts[0], counts[1]))
    except DataError:
        return None  # too few questions


def _explanation(args: argparse.Namespace, base_model: str, reference: str) -> str:
    epochs = "1 epoch" if args.epochs == 1 else f"{args.epochs:g} epochs"
    if args.counts_only:
        return (
            f"{backbone_note(base_model)} {epochs} for every draft, answers of at most {args.max_new_tokens} tokens, "
            "generated in batches: tokens per step, which do not depend on the clock. *chain*: three first guesses. *N "
            "nodes*: as many nodes for all, fitted to held-out answers, always filled; greedy counts are simulated "
            f"along plain answers, sampled ones decoded. *over*: those of {reference}. CTAR(w): share of the chain's "
            "steps that accept w guesses or more. *loops*: answers that repeat eight tokens three times (chain, or all "
            "of greedy decoding), and the largest tree's count without them. Brackets: 95 % bootstrap over questions, "
            "paired."
        ).strip()
    return (
        f"{backbone_note(base_model)} {epochs} for every draft, answers of at most "
        f"{args.max_new_tokens} tokens{', compiled passes' if args.compile else ''}. *chain*: three first guesses. *N "
        "nodes*: as many nodes for all, fitted to held-out answers, always filled; greedy counts of chain and N nodes "
        "are simulated along the tree's answers. *own*: the run's tree, sized by measured latency, in brackets its "
        f"nodes. *over*: tokens per step over those of {reference}. *speedup*: tokens per second of the own tree over "
        "plain decoding of the same loop, `generate` and prompt lookup of transformers. CTAR(w): share of the chain's "
        "steps that accept w guesses or more. *loops*: answers that repeat eight tokens three times, and figures "
        "without them. Brackets: 95 % bootstrap over questions, paired for ratios."
    ).strip()


def _decoding_table(titles: Mapping[str, str], rows: Mapping[str, Record], nodes: Sequence[int]) -> str:
    heads = ["draft", "chain"]
    for count in nodes:
        heads += [f"{count} nodes", "over"]
    heads += ["own", "overhead", "speedup", "over generate", "over prompt lookup", "CTAR(1) (2) (3)", "loops"]
    heads += ["without: own", f"{nodes[-1]} nodes", "speedup", "equal to plain"]
    lines = []
    for name, row in rows.items():
        trees = row["trees"]
        line = [titles[name], f"{trees[CHAIN]['rate']:.2f}"]
        for count in nodes:
            line += [f"{trees[str(count)]['rate']:.2f}", with_interval(trees[str(count)]["over"], ".3f")]
        line += [f"{with_interval(row['rate'])} ({row['nodes']})", with_interval([row["overhead"], None])]
        line += [with_interval(row[key]) for key in ("speedup", "over_generate")]
        line += [with_interval(row.get("over_lookup")), " ".join(f"{share:.2f}" for share in row["ctar"])]
        line += [f"{row['loops']}/{row['answers']}"]
        line += [with_interval([trees[tree]["without_loops"], None]) for tree in (OWN, str(nodes[-1]))]
        line += [with_interval([row["speedup_without_loops"], None])]
        line += ["-" if row["equal"] is None else f"{row['equal']}/{row['answers']}"]
        lines.append(line)
    return table(heads, lines)


def _counts_table(titles: Mapping[str, str], rows: Mapping[str, Record], nodes: Sequence[int]) -> str:
    heads = ["draft", "chain", "over"]
    for count in nodes:
        heads += [f"{count} nodes", "over"]
    heads += ["CTAR(1) (2) (3)", "loops", f"without: {nodes[-1]} nodes"]
    lines = []
    for name, row in rows.items():
        trees = row["trees"]
        line = [titles[name]]
        for tree in (CHAIN, *map(str, nodes)):
            line += [f"{trees[tree]['rate']:.3f}", with_interval(trees[tree]["over"], ".3f")]
        line += [" ".join(f"{share:.3f}" for share in row["ctar"])]
        line += [f"{row['loops'][CHAIN]}/{row['answers'][CHAIN]}"]
        line += [with_interval([trees[str(nodes[-1])]["without_loops"], None], ".3f")]
        lines.append(line)
    return table(heads, lines)


def _category_table(titles: Mapping[str, str], rows: Mapping[str, Record], head: str) -> str:
    """Format the figures of each category; `head` says which these are."""
    categories = next(iter(rows.values()))["categories"]
    lines = [
        [titles[name], *(" / ".join(with_interval([one, None]) for one in row["categories"][c]) for c in categories)]
        for name, row in rows.items()
    ]
    return table([head, *categories], lines)


def _training_table(titles: Mapping[str, str], training: Mapping[str, Record]) -> str:
    """Format size and training, with coverage of reduced vocabularies and quality of changed backbones."""
    covered = any(one["coverage"] for one in training.values())
    texts = list(dict.fromkeys(text for one in training.values() for text in one["quality"] or {}))
    heads = ["draft", "heads", "extra parameters", "tokens trained on", "tokens/s", "hours"]
    heads += ["training and held-out tokens covered"] if covered else []
    for text in texts:
        heads += [f"{text}: perplexity", "KL"]
    scored = any("correct" in text for one in training.values() for text in (one["quality"] or {}).values())
    heads += ["GSM8K correct: before", "after"] if scored else []
    lines = []
    for name, one in training.items():
        line = [titles[name], str(one["depth"]), f"{one['parameters']:,}"]
        line += [" + ".join(f"{number:,.0f}" for number in one[key]) for key in ("tokens", "tokens_per_s")]
        line.append(f"{one['hours']:.2f}")
        if covered:
            line.append(" ".join(f"{share:.2%}" for share in one["coverage"] or ()))
        for text in texts:
            quality = (one["quality"] or {}).get(text)
            line += [f"{quality['change']:+.2%}", f"{quality['kl']:.4f}"] if quality else ["", ""]
        if scored:
            quality = (one["quality"] or {}).get("GSM8K", {})
            line += [with_interval(quality.get(key), ".3f") for key in ("correct_before", "correct")]
        lines.append(line)
    return table(heads, lines)
