"""How much faster is a coder?"""

from __future__ import annotations

from result_tables.writing import (
    Cells,
    Json,
    equal_in_bfloat16,
    ratio,
    results,
    shares,
    speed,
    table,
    times,
)


def coder_answer() -> str:
    """The fastest draft of the first machine, beside no draft, with what both solve."""
    content = results("qwen_coder")
    run = _fastest_coder(content)
    overall = run["overall"]
    text = (
        f"On {run['place']}, {run['draft']} is the fastest of {len(_coder_places(content)[run['place']])}"
        f" drafts: {content['model']} makes {speed(overall['tokens_per_s'])} tokens/s with it and"
        f" {speed(overall['baseline_tokens_per_s'])} without,"
        f" {times(overall['speedup'], overall['intervals']['speedup'])}."
    )
    if overall["scores"] is not None:
        text += f" It solves {_solved(overall, 'tree')} problems, and {_solved(overall, 'plain')} without."
    counts = content["float32"]
    exact = [f"{draft} {count['equal']}/{count['answers']}" for draft, count in counts.items()]
    return f"{text} Answers equal in float32: {', '.join(exact)}."


def coder_short() -> str:
    """The same for the list of results."""
    content = results("qwen_coder")
    run = _fastest_coder(content)
    overall = run["overall"]
    return (
        f"{run['place']}, {content['bench']}: {speed(overall['baseline_tokens_per_s'])} to"
        f" {speed(overall['tokens_per_s'])} tokens/s, {times(overall['speedup'])}, with"
        f" {run['draft']}, the fastest."
    )


def coder_table() -> str:
    """Each draft beside plain decoding of its own run, after a row for no draft on each machine."""
    rows: list[Cells] = []
    for place, runs in _coder_places(results("qwen_coder")).items():
        first = runs[0]
        plain = first["overall"]["baseline_tokens_per_s"]
        scored = [run["overall"] for run in runs if run["overall"]["scores"] is not None]
        solved = _solved(scored[0], "plain") if scored else "-"
        where = f"**{place}, {first['date']}**"
        rows.append([where, "none", "1.00", "-", speed(plain), "-", "-", solved])
        for run in runs:
            overall = run["overall"]
            rows.append(
                [
                    "",
                    run["draft"],
                    f"{overall['acceleration_rate']:.2f}",
                    speed(overall["tokens_per_s"]),
                    speed(overall["baseline_tokens_per_s"]),
                    times(overall["speedup"], overall["intervals"]["speedup"]),
                    equal_in_bfloat16(overall),
                    _solved(overall, "tree"),
                ]
            )
    head = ("machine, date", "draft", "tokens per step:", "tokens/s:", "plain tokens/s:", "ratio:")
    return table((*head, "equal bf16:", "pass@1:"), rows)


def coder_nodes_table() -> str:
    """Tokens per step by the number of nodes, of each draft's best tree of any depth; and what was
    counted on the bench.
    """
    content = results("qwen_coder")
    trees = content["nodes"]
    by_size = {
        draft: {size["nodes"]: size["tokens_per_step"] for size in sizes}
        for draft, sizes in trees.items()
    }
    rows: list[Cells] = []
    for nodes in (4, 8, 16, 63):
        rates = [by_size[draft].get(nodes) for draft in by_size]
        rows.append([nodes, *("-" if rate is None else f"{rate:.2f}" for rate in rates)])
    for draft, on_bench in content["counted"].items():
        cells = ["-"] * len(by_size)
        rate = ratio(on_bench["tokens_per_step"], on_bench["interval"], 2)
        cells[list(by_size).index(draft)] = rate
        rows.append([f"{on_bench['nodes']}, HumanEval", *cells])
    return table(("nodes:", *(f"{draft}:" for draft in by_size)), rows)


def coder_served_table() -> str:
    """Each draft in vLLM with one request and with four, beside vLLM without one; and its acceptance
    there and here (vLLM's own lookup: there alone).
    """
    by_draft: dict[str, list[Json]] = {}
    for row in results("qwen_coder")["served"]:
        by_draft.setdefault(row["draft"], []).append(row)
    rows: list[Cells] = []
    for draft, served in by_draft.items():
        first = served[0]  # the acceptance does not depend on the number of requests
        cells: Cells = [f"{draft}, {first['num_speculative_tokens']} draft tokens"]
        for row in served:
            cells.append(f"{speed(row['plain_tokens_per_s'])} to {speed(row['tokens_per_s'])}")
            cells.append(times(row["ratio"], row["ratio_interval"]))
        own = first["own_acceptance"]
        cells += [shares(first["acceptance"]), "-" if own is None else shares(own)]
        rows.append(cells)
    head = ("draft", "1 request, tokens/s:", "ratio:", "4 at once, tokens/s:", "ratio:")
    return table((*head, "accepted in vLLM:", "accepted here:"), rows)


def _coder_places(content: Json) -> dict[str, list[Json]]:
    """Return the runs by machine, in the order of the file."""
    places: dict[str, list[Json]] = {}
    for run in content["runs"]:
        places.setdefault(run["place"], []).append(run)
    return places


def _fastest_coder(content: Json) -> Json:
    """Return the run of the first machine with the largest ratio to its own plain decoding."""
    runs = next(iter(_coder_places(content).values()))
    return max(runs, key=lambda run: float(run["overall"]["speedup"]))


def _solved(overall: Json, decoder: str) -> str:
    """Return how many problems the answers of the tree, or plain ones, solve; "-" if not scored."""
    scores = overall["scores"]
    if scores is None:
        return "-"
    return f"{scores[decoder]['correct']}/{scores['answers']}"
