"""Tables, bars and a plot of what `m2_vs_m1.py` measured: a pure function of its cases. Measures nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from machine import sentence

from medusa_train.evaluation.bootstrap import Counts, RateComparison, compare_rates

Result = Mapping[str, Any]

MOST_PERPLEXITY, MOST_KL = 0.01, 0.02  # what Medusa-2 may cost the backbone
PAPER = 1.30  # Medusa-2's speedup over Medusa-1's, Vicuna-7B on MT-Bench (Medusa, table 1)
TREES = {"own": "own tree", "equal": "equal trees"}


def write_report(out: Path, results: Sequence[Result]) -> None:
    """Write m2_vs_m1.json, .md and, where matplotlib is installed, .png into `out`."""
    compared = comparisons(results)
    content = {"cases": results, "comparisons": {name: asdict(found) for name, found in compared.items()}}
    (out / "m2_vs_m1.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    (out / "m2_vs_m1.md").write_text(markdown(results, compared), encoding="utf-8")
    with suppress(ImportError):
        plot(out / "m2_vs_m1.png", results, compared)


def comparisons(results: Sequence[Result]) -> dict[str, RateComparison]:
    """`CASE/TREE`: the case's acceleration rate against its Medusa-1's, by question, for both kinds of tree."""
    by_name = {result["name"]: result for result in results}
    return {
        f"{result['name']}/{tree}": compare_rates(_answers(by_name[result["against"]], tree), _answers(result, tree))
        for result in results
        for tree in TREES
        if result["against"] in by_name
    }


def _answers(result: Result, tree: str) -> dict[str, Counts]:
    found = result["answers"] if tree == "own" else result["equal_tree"]["answers"]
    return {question: Counts(*counts) for question, counts in found.items()}


def rate(result: Result, tree: str) -> float:
    """Tokens per step of a case."""
    answers = _answers(result, tree).values()
    return sum(one.tokens for one in answers) / sum(one.steps for one in answers)


def markdown(results: Sequence[Result], compared: Mapping[str, RateComparison]) -> str:
    """The whole page."""
    first = results[0]["decoding"]
    where = f"{first['device']}, {first['threads']} threads, decoding in {first['dtype']}, torch {first['torch']}"
    parts = [
        "# Medusa-2 against Medusa-1",
        f"Heads of all cases of the same number of epochs learnt from the same tokens. {where}.",
        "## Bars",
        bars(results, compared),
        "## Decoding, with the tree that is fastest for each run here",
        decoding_table(results),
        "*speedup*: tokens per second over the same loop without a tree; after Medusa-2 that is the adapted backbone, "
        "and *equal fp32* counts answers that equal its own plain greedy ones.",
        "## Tokens per step against Medusa-1",
        rate_table(results, compared),
        "Intervals: 95 %, paired bootstrap over questions. Equal trees were fitted to held-out text and decode in "
        "float32; a run's own tree has the size that was fastest for it, so its rate tells less.",
        "## The backbone",
        quality_table(results),
        "KL from the original backbone, nats per token, and perplexity per token, on assistant tokens in float32.",
        "## Heads on held-out text",
        heads_table(results),
        "## Where and when",
        "\n".join(f"- {result['title']}: {sentence(result['machine'])}" for result in results),
    ]
    return "\n\n".join(parts) + "\n"


def bars(results: Sequence[Result], compared: Mapping[str, RateComparison]) -> str:
    """What Medusa-2 has to reach, and whether it does."""
    by_name = {result["name"]: result for result in results}
    lines = []
    for result in results:
        if result["name"] == "m1" or not result["name"].startswith("m2"):
            continue
        title = result["title"]
        for tree, what in TREES.items():
            if (found := compared.get(f"{result['name']}/{tree}")) is None:
                continue
            low, high = found.ratio_interval
            text = f"{title}, {what}: {found.ratio:.3f} of Medusa-1's tokens per step [{low:.3f}, {high:.3f}], above 1"
            lines.append(_bar(text, low > 1.0))
        for text, quality in result["quality"].items():
            change = math.expm1(quality["loss_after"] - quality["loss_before"])
            worse = f"{title}, {text}: perplexity {change:+.2%}, at most {MOST_PERPLEXITY:+.0%}"
            lines.append(_bar(worse, change <= MOST_PERPLEXITY))
            lines.append(_bar(f"{title}, {text}: KL {quality['kl']:.4f}, below {MOST_KL}", quality["kl"] < MOST_KL))
        if (base := by_name.get(result["against"])) is not None:
            speedups = result["decoding"]["speedup"] / base["decoding"]["speedup"]
            lines.append(f"- {title}: {speedups:.2f} times Medusa-1's speedup (the paper's ratio is {PAPER:.2f})")
    return "\n".join(lines) or "- nothing to compare yet"


def _bar(text: str, kept: bool) -> str:
    return f"- {'kept' if kept else '**missed**'}: {text}"


def decoding_table(results: Sequence[Result]) -> str:
    """Speed of every case."""
    rows = []
    for result in results:
        found, learnt = result["decoding"], result["training"]
        ties = f"+{found['tie_answers']}" if found["tie_answers"] else ""
        rows.append(
            [
                result["title"],
                " + ".join(f"{stage['tokens']:,}" for stage in learnt),
                f"{sum(stage['seconds'] for stage in learnt) / 60:.1f}",
                str(found["tree_nodes"]),
                f"{found['acceleration_rate']:.2f}",
                f"{found['overhead']:.2f}",
                f"{found['speedup']:.2f}x",
                f"{found['speedup_over_generate']:.2f}x",
                "-" if found["equal_answers"] is None else f"{found['equal_answers']}{ties}/{found['answers']}",
                str(found["looping_answers"]),
            ]
        )
    head = ["case", "tokens trained on", "minutes", "nodes", "tokens per step", "overhead", "speedup"]
    return _table([*head, "over generate", "equal fp32", "loops"], rows)


def rate_table(results: Sequence[Result], compared: Mapping[str, RateComparison]) -> str:
    """Acceleration rates, and how they differ from Medusa-1's."""
    rows = []
    for result in results:
        for tree, what in TREES.items():
            found = compared.get(f"{result['name']}/{tree}")
            differing = ["", "", ""]
            if found is not None:
                difference = f"{found.difference:+.3f} [{found.difference_interval[0]:+.3f}, "
                difference += f"{found.difference_interval[1]:+.3f}]"
                ratio = f"{found.ratio:.3f} [{found.ratio_interval[0]:.3f}, {found.ratio_interval[1]:.3f}]"
                differing = [difference, ratio, str(found.questions)]
            nodes = result["decoding"]["tree_nodes"] if tree == "own" else result["equal_tree"]["nodes"]
            rows.append([result["title"], f"{what}, {nodes} nodes", f"{rate(result, tree):.3f}", *differing])
    return _table(["case", "decoded with", "tokens per step", "difference", "ratio", "questions"], rows)


def quality_table(results: Sequence[Result]) -> str:
    """What training did to the backbone."""
    rows = []
    for result in results:
        for text, found in result["quality"].items():
            before, after = math.exp(found["loss_before"]), math.exp(found["loss_after"])
            change = math.expm1(found["loss_after"] - found["loss_before"])
            rows.append(
                [
                    result["title"],
                    text,
                    f"{found['tokens']:,}",
                    f"{before:.4f}",
                    f"{after:.4f}",
                    f"{change:+.2%}",
                    f"{found['kl']:.4f}",
                ]
            )
    return _table(["case", "text", "tokens", "perplexity before", "after", "change", "KL"], rows)


def heads_table(results: Sequence[Result]) -> str:
    """The last held-out evaluation of every run."""
    rows = []
    for result in results:
        found = result["held_out"]
        top = [" ".join(f"{shares[place]:.3f}" for shares in found["head_top"]) for place in (0, 4)]
        rows.append([result["title"], f"{found['loss']:.4f}", *top, f"{found['acceptance_length']:.3f}"])
    return _table(["case", "heads' loss", "top-1 by head", "top-5 by head", "acceptance length"], rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def plot(path: Path, results: Sequence[Result], compared: Mapping[str, RateComparison]) -> None:
    """Tokens per step of every case, and ratios to Medusa-1's with their intervals."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (rates, ratios) = plt.subplots(1, 2, figsize=(11, 1.5 + 0.5 * len(results)), layout="constrained")
    titles = [result["title"] for result in results]
    for shift, (tree, what) in zip((-0.2, 0.2), TREES.items(), strict=True):
        places = [place + shift for place in range(len(results))]
        rates.barh(places, [rate(result, tree) for result in results], height=0.38, label=what)
        found = [(p, compared[f"{r['name']}/{tree}"]) for p, r in zip(places, results, strict=True) if r["against"]]
        middle = [one.ratio for _, one in found]
        spread = [
            [one.ratio - one.ratio_interval[0] for _, one in found],
            [one.ratio_interval[1] - one.ratio for _, one in found],
        ]
        ratios.errorbar(middle, [place for place, _ in found], xerr=spread, fmt="o", capsize=4)
    for axes in (rates, ratios):
        axes.set_yticks(range(len(results)), titles)
        axes.set_ylim(len(results) - 0.5, -0.5)
    rates.set_xlabel("tokens per step")
    rates.axvline(1.0, color="grey", linewidth=0.8)
    rates.legend(loc="lower right")
    ratios.set_xlabel("ratio to Medusa-1 at equal tokens, 95 % interval")
    ratios.axvline(1.0, color="grey", linewidth=0.8)
    figure.savefig(path, dpi=120)
    plt.close(figure)
