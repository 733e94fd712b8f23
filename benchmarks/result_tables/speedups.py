"""How much faster does SmolLM2 decode on a CPU?"""

from __future__ import annotations

from result_tables.writing import Cells, Json, results, speed, table, times


def smollm2_answer() -> str:
    """The newest heads, and those of older text on another machine."""
    content = results("smollm2")
    newest = content["loop_free_text"]["overall"]
    older = content["overall"]
    return (
        f"On two cores of an Intel Xeon, compiled, SmolLM2 makes {speed(newest['tokens_per_s'])}"
        f" tokens/s with heads and {speed(newest['baseline_tokens_per_s'])} without:"
        f" {times(newest['speedup'], content['loop_free_text']['speedup'][1:])}. Heads of older"
        f" text make {times(older['speedup'], content['intervals']['speedup'])} on an AMD EPYC."
    )


def smollm2_short() -> str:
    """The same for the list of results."""
    content = results("smollm2")
    newest = content["loop_free_text"]["overall"]
    return (
        f"SmolLM2 on a Xeon, compiled: {speed(newest['baseline_tokens_per_s'])} to"
        f" {speed(newest['tokens_per_s'])} tokens/s, {times(newest['speedup'])}. On an EPYC, with"
        f" heads of older text: {times(content['overall']['speedup'])}."
    )


def smollm2_table() -> str:
    """Three runs, with equality in bfloat16 of the tree and of `generate`."""
    content = results("smollm2")
    newest = content["loop_free_text"]
    mtbench = content["mtbench_16_questions"]
    rows = [
        _smollm2_row("without loops", f"Intel Xeon, {newest['date']}", "smollm2", newest),
        _smollm2_row("older", f"AMD EPYC, {content['date']}", "smollm2", content),
        _smollm2_row("older", f"AMD EPYC, {content['evaluation_date'][:10]}", "MT-Bench", mtbench),
    ]
    head = ("text", "machine, date", "bench", "tokens per step:", "overhead:", "without:")
    ratios = ("with heads:", "ratio:", "without loops:")
    counts = ("equal fp32:", "equal bf16:", "`generate`, bf16:", "loops:")
    return table((*head, *ratios, *counts), rows)


def _smollm2_row(text: str, place: str, bench: str, run: Json) -> Cells:
    """Write a run beside its plain decoding."""
    overall = run["overall"]
    answers = overall["answers"]
    equal = overall["equal_answers"]
    if "intervals" in run:
        interval = run["intervals"]["speedup"]
    else:
        interval = run["speedup"][1:]
    return [
        text,
        place,
        bench,
        f"{overall['acceleration_rate']:.2f}",
        f"{overall['overhead']:.2f}",
        speed(overall["baseline_tokens_per_s"]),
        speed(overall["tokens_per_s"]),
        times(overall["speedup"], interval),
        times(overall["speedup_without_loops"]),
        "-" if equal is None else f"{equal}/{answers}",
        f"{overall['equal_answers_bf16']}/{answers}",
        f"{run['baselines']['generate']['equal_to_plain']}/{answers}",
        f"{overall['looping_answers']}/{answers}",
    ]
