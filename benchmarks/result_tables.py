"""Answer, table and short answer of each result page, from its JSON; tables.py writes them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
Json = dict[str, Any]
Cells = list[object]


def results(name: str) -> Json:
    """Read the JSON of a result page."""
    content: Json = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return content


# How figures are written


def times(value: float, interval: Sequence[float] | None = None) -> str:
    """Write a ratio of speeds: 1.36x, or with its interval 1.36x [1.31, 1.41]."""
    return f"{value:.2f}x{between(interval)}"


def ratio(value: float, interval: Sequence[float] | None = None, digits: int = 3) -> str:
    """Write a ratio of tokens per step: 1.085, or with its interval 1.085 [1.073, 1.098]."""
    return f"{value:.{digits}f}{between(interval, digits)}"


def over(values: Sequence[Any] | None) -> str:
    """Write a ratio that stands as [value, low, high] or [value, [low, high]]; a dash for none."""
    if values is None:
        return "-"
    interval = values[1] if isinstance(values[1], list) else values[1:]
    return ratio(values[0], interval)


def between(interval: Sequence[float] | None, digits: int = 2) -> str:
    """Write an interval, with a space before it; nothing without one."""
    if interval is None:
        return ""
    low, high = interval
    return f" [{low:.{digits}f}, {high:.{digits}f}]"


def speed(value: float) -> str:
    """Write tokens per second: whole numbers from 100 on, else one digit."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def millions(count: int) -> str:
    """Write a number of parameters: 20.2M."""
    return f"{count / 1e6:.1f}M"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Write a table; columns whose title ends with `:` are aligned to the right, without it."""
    marks = ["---:" if title.endswith(":") else "---" for title in head]
    titles = [title.removesuffix(":") for title in head]
    lines = [f"| {' | '.join(titles)} |", f"| {' | '.join(marks)} |"]
    for row in rows:
        lines.append(f"| {' | '.join(str(cell) for cell in row)} |")
    return "\n".join(lines)


# demo


def demo_answer() -> str:
    """EPYC and Xeon, each beside its own plain decoding."""
    epyc, xeon = (run["overall"] for run in results("demo")["runs"])
    return (
        f"On two cores of an AMD EPYC, in bfloat16, the demo makes {speed(epyc['tokens_per_s'])}"
        f" tokens/s with heads and {speed(epyc['plain_tokens_per_s'])} without:"
        f" {times(epyc['speedup'], epyc['speedup_interval'])}. On an Intel Xeon, in float32, it is"
        f" {times(xeon['speedup'], xeon['speedup_interval'])}."
    )


def demo_short() -> str:
    """The same for the list of results."""
    epyc, xeon = (run["overall"] for run in results("demo")["runs"])
    return (
        f"AMD EPYC: {speed(epyc['plain_tokens_per_s'])} to {speed(epyc['tokens_per_s'])} tokens/s,"
        f" {times(epyc['speedup'])}. Intel Xeon: {times(xeon['speedup'])}. Nothing is compiled."
    )


def demo_table() -> str:
    """Both machines, then the categories of each."""
    rows: list[Cells] = []
    for run in results("demo")["runs"]:
        overall = run["overall"]
        machine = "AMD EPYC" if "EPYC" in run["machine"]["device"] else "Intel Xeon"
        place = f"{machine}, {overall['dtype']}, {run['date'][:10]}"
        bfloat16 = overall.get("equal_answers_bf16")
        equal = f"{overall['equal_answers']}/{overall['answers']}"
        equal_bfloat16 = "-" if bfloat16 is None else f"{bfloat16}/{overall['answers']}"
        rows.append([f"**{place}**", "all", *_demo_figures(overall), equal, equal_bfloat16])
        for category, figures in run["categories"].items():
            rows.append(["", category, *_demo_figures(figures), "", ""])
    head = ("machine, dtype, date", "category", "tokens per step:", "overhead:", "without:")
    return table((*head, "with heads:", "ratio:", "equal fp32:", "equal bf16:"), rows)


def _demo_figures(figures: Json) -> Cells:
    plain = figures.get("plain_tokens_per_s") or figures["tokens_per_s"] / figures["speedup"]
    return [
        f"{figures['tokens_per_step']:.2f}",
        f"{figures['overhead']:.2f}",
        speed(plain),
        speed(figures["tokens_per_s"]),
        times(figures["speedup"]),
    ]


# smollm2


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
    head += ("with heads:", "ratio:", "without loops:", "equal fp32:", "equal bf16:")
    return table((*head, "`generate`, bf16:", "loops:"), rows)


def _smollm2_row(text: str, place: str, bench: str, run: Json) -> Cells:
    overall = run["overall"]
    answers = overall["answers"]
    interval = run["intervals"]["speedup"] if "intervals" in run else run["speedup"][1:]
    equal = overall["equal_answers"]
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


# compiled_smollm2


def compiled_rows() -> list[tuple[str, str, str, Json]]:
    """Return draft and text, machine and date, questions, and the run, all in one form."""
    content = results("compiled_smollm2")
    four = content["four_epochs_of_both_texts"]
    runs = []
    for name, key in (("Medusa-1, Markov bias", "medusa1_markov"), ("EAGLE-3", "eagle3")):
        run = four[key]
        plain = run["baselines"]["plain"]["tokens_per_s"]
        parts = {}
        for part in ("heads_alone", "lookup_alone"):
            baseline = run["baselines"][part]
            parts[part] = baseline | {
                "over_plain": baseline["tokens_per_s"] / plain,
                "interval": baseline["speedup_interval"],
            }
        same = {"plain_tokens_per_s": plain, "speedup_interval": run["interval"], "over": parts}
        place = f"AMD EPYC, {four['date']}"
        runs.append((f"{name}, four epochs of both texts", place, "16", run | same))
    for name, run in content["both_texts"].items():
        if isinstance(run, dict):
            text = name if "epochs" in name else f"{name}, one epoch"
            place = f"AMD EPYC, {run['date']}"
            runs.append((f"{text} of both texts", place, "8", run))
    for name, run in content["text_without_loops"].items():
        if isinstance(run, dict):
            place = f"Intel Xeon, {run['date'][:10]}"
            runs.append((f"{name}, text without loops", place, "8", run))
    for run in content["rows"]:
        if run["bench"] == "MT-Bench" and "min_probability" not in run["draft"]:
            place = f"AMD EPYC, {run['date'][:10]}"
            runs.append((f"{run['draft']}, older text", place, "16", run))
    named = []
    for name, place, questions, run in runs:
        for other in ("Medusa-1 with a Markov bias", "Markov bias"):
            if name.startswith(other):
                name = name.replace(other, "Medusa-1, Markov bias", 1)
                break
        named.append((name, place, questions, run))
    return named


def compiled_answer() -> str:
    """The run of most questions and text."""
    _, place, _, run = compiled_rows()[0]
    lookup = run["over"]["lookup_alone"]["over_plain"]
    heads = run["over"]["heads_alone"]["over_plain"]
    return (
        "Both in one tree. Medusa-1 with a Markov bias after four epochs and lookup together make"
        f" {times(run['speedup'], run['speedup_interval'])} compiled plain decoding ({place})."
        f" Lookup alone makes {times(lookup)} and heads alone {times(heads)}."
    )


def compiled_short() -> str:
    """The same for the list of results."""
    _, place, _, run = compiled_rows()[0]
    lookup = run["over"]["lookup_alone"]["over_plain"]
    heads = run["over"]["heads_alone"]["over_plain"]
    return (
        f"Both in one tree, where the text repeats itself ({place}): together"
        f" {times(run['speedup'])}, lookup alone {times(lookup)}, heads alone {times(heads)}."
    )


def compiled_table() -> str:
    """Every run beside its own plain decoding."""
    rows = []
    for name, place, questions, run in compiled_rows():
        plain = run["plain_tokens_per_s"]
        heads = run["over"]["heads_alone"]
        lookup = run["over"]["lookup_alone"]
        rows.append(
            [
                name,
                f"{place}, {questions} questions",
                speed(plain),
                f"{heads['tokens_per_step']:.2f}",
                f"{speed(plain * heads['over_plain'])}, {times(heads['over_plain'])}",
                f"{speed(plain * lookup['over_plain'])}, {times(lookup['over_plain'])}",
                f"{run['tokens_per_step']:.2f}",
                f"{speed(plain * run['speedup'])}, {times(run['speedup'], run['speedup_interval'])}",
                times(run["speedup_without_loops"]),
            ]
        )
    head = ("draft, text", "machine, date, MT-Bench", "plain tokens/s:", "heads: per step:")
    head += ("heads: tokens/s, ratio:", "lookup: tokens/s, ratio:", "both: per step:")
    return table((*head, "both: tokens/s, ratio:", "without loops:"), rows)


# drafts (tiny)


def drafts_run() -> Json:
    """Return the run of the page: bench tiny, 2.5 epochs."""
    run: Json = results("drafts")["runs"][0]
    return run


def drafts_answer() -> str:
    """Hydra++ by tokens, Medusa-1 by the clock."""
    drafts = drafts_run()["drafts"]
    return (
        f"Hydra++, with {drafts['hydra++']['tiny']['equal']['ratio'][0]:.2f} of Medusa-1's tokens"
        f" per step at equal trees. By the clock, not compiled, Medusa-1, Medusa-2 and Hydra cannot be"
        f" told apart ({times(drafts['medusa1']['tiny']['own']['speedup'][0])} to"
        f" {times(drafts['medusa2']['tiny']['own']['speedup'][0])}). Larger drafts cost too much beside"
        " so small a backbone."
    )


def drafts_short() -> str:
    """The same for the list of results."""
    drafts = drafts_run()["drafts"]
    return (
        f"Hydra++, with {drafts['hydra++']['tiny']['equal']['ratio'][0]:.2f} of Medusa-1's tokens"
        " per step. By the clock Medusa-1, Medusa-2 and Hydra lead together."
    )


def drafts_table() -> str:
    """Equal trees and each draft's own."""
    run = drafts_run()
    plain = run["benches"]["tiny"]["tokens_per_s"]["plain"]
    rows = []
    for draft in run["drafts"].values():
        equal = draft["tiny"]["equal"]
        own = draft["tiny"]["own"]
        value, low, high = own["speedup"]
        rows.append(
            [
                draft["title"].replace("Kangaroo", "Kangaroo with our MLP"),
                f"{equal['tokens_per_step']:.2f}",
                over(equal.get("ratio")),
                own["nodes"],
                f"{own['tokens_per_step']:.2f}",
                f"{own['overhead']:.2f}",
                speed(plain),
                times(value, (low, high)),
            ]
        )
    head = ("draft", "16 nodes: tokens per step:", "over Medusa-1:", "own tree: nodes:")
    return table((*head, "tokens per step:", "overhead:", "plain tokens/s:", "ratio:"), rows)


# drafts_smollm2, eagle3_smollm2


def drafts_smollm2_answer() -> str:
    """After equal text, and after four epochs."""
    content = results("drafts_smollm2")
    equal = content["equal_text"]
    longest = _four_epochs(content)
    return (
        f"EAGLE-3 and Hydra++. After equal text they make {equal['eagle3']['32']['over'][0]:.2f} and"
        f" {equal['hydra++']['32']['over'][0]:.2f} times Medusa-1's tokens per step. After four"
        f" epochs of twice the text EAGLE-3 makes {longest['EAGLE-3']['32 nodes']:.2f} tokens per"
        f" step, and {longest['EAGLE-3']['without loops']:.2f} without the answers that loop."
    )


def drafts_smollm2_short() -> str:
    """The same for the list of results."""
    equal = results("drafts_smollm2")["equal_text"]
    return (
        f"From equal text EAGLE-3 makes {equal['eagle3']['32']['over'][0]:.2f} times Medusa-1's"
        f" tokens per step, Hydra++ {equal['hydra++']['32']['over'][0]:.2f}."
    )


def _four_epochs(content: Json) -> dict[str, Json]:
    """Return the drafts of four epochs of both texts by their short name."""
    return {
        name.split(", mtbench")[0]: row
        for name, row in content["four_epochs_of_both_texts"].items()
    }


def drafts_smollm2_table() -> str:
    """Two epochs of the first file, then four of both."""
    content = results("drafts_smollm2")
    rows: list[Cells] = []
    for name in ("medusa1", "markov", "amphista", "hydra++", "eagle3"):
        draft = content["equal_text"][name]
        figures = [f"{draft[tree]['rate']:.3f}" for tree in ("chain", "16", "32")]
        without = f"{draft['32']['without_loops']:.3f}"
        rows.append(
            [
                draft["title"],
                "two epochs of the first file",
                millions(draft["parameters"]),
                *figures,
                over(draft["32"]["over"]),
                without,
                " ".join(f"{share:.2f}" for share in draft["ctar"]),
            ]
        )
    for name, draft in _four_epochs(content).items():
        shares = [draft[f"ctar{number}"] for number in (1, 2, 3)]
        rows.append(
            [
                name,
                "four epochs of both files",
                millions(draft["parameters"]),
                *(f"{draft[tree]:.3f}" for tree in ("chain", "16 nodes", "32 nodes")),
                over(draft["over (32)"]),
                f"{draft['without loops']:.3f}",
                " ".join(f"{share:.2f}" for share in shares),
            ]
        )
    head = ("draft", "training", "parameters:", "chain:", "16 nodes:", "32 nodes:")
    return table((*head, "over Medusa-1:", "without loops:", "CTAR(1) (2) (3):"), rows)


def eagle3_answer() -> str:
    """By counts yes, by the clock not distinguishable."""
    draft = _four_epochs(results("drafts_smollm2"))["EAGLE-3"]
    value, *interval = draft["over (32)"]
    return (
        "By tokens per step yes: after four epochs EAGLE-3 makes"
        f" {ratio(value, interval, 2)} times those of Medusa-1 with a Markov bias. By the clock, in"
        " this project on a CPU, the two cannot be told apart."
    )


def eagle3_short() -> str:
    """The same for the list of results."""
    value = _four_epochs(results("drafts_smollm2"))["EAGLE-3"]["over (32)"][0]
    return (
        f"By tokens per step yes, {value:.2f} times after four epochs. By the clock on a CPU they"
        " cannot be told apart, except in vLLM."
    )


def eagle3_pairs() -> list[tuple[str, Json, Json]]:
    """Return the runs of Medusa-1 and EAGLE-3 on one machine and day, by name of the text."""
    runs: dict[str, tuple[str, Json]] = {}
    for name, place, _, run in compiled_rows():
        runs.setdefault(name, (place, run))  # of two alike, that of more questions
    pairs = (
        ("Medusa-1, Markov bias, four epochs of both texts", "EAGLE-3, four epochs of both texts"),
        ("Medusa-1, one epoch of both texts", "EAGLE-3, one epoch of both texts"),
        ("Medusa-1, text without loops", "EAGLE-3, text without loops"),
    )
    found = []
    for medusa1, eagle3 in pairs:
        place, run = runs[medusa1]
        text = eagle3.split(", ", 1)[1]
        found.append((f"{text}, {place}", run, runs[eagle3][1]))
    return found


def eagle3_table() -> str:
    """Three pairs by the clock: plain rates, then heads alone."""
    rows = []
    for name, medusa1, eagle3 in eagle3_pairs():
        cells: Cells = [name]
        for run in (medusa1, eagle3):
            plain = run["plain_tokens_per_s"]
            heads = run["over"]["heads_alone"]
            cells += [
                f"{heads['tokens_per_step']:.2f}",
                speed(plain),
                speed(plain * heads["over_plain"]),
                times(heads["over_plain"]),
            ]
        rows.append(cells)
    head = ["text, machine, date"]
    for draft in ("Medusa-1", "EAGLE-3"):
        head += [f"{draft}: per step:", "plain tokens/s:", "alone tokens/s:", "ratio:"]
    return table(head, rows)


def eagle3_served_table() -> str:
    """Every session of EAGLE-3 in vLLM, with Medusa-1 of the same text."""
    content = results("eagle3_smollm2")
    four = content["served_four_epochs"]
    xeon = content["served"]
    sessions: list[tuple[str, dict[int, Json]]] = [
        ("EAGLE-3, text without loops, 2 tokens, Xeon", served_cells(xeon["cells"], "k=2")),
        ("EAGLE-3, one epoch, 2 tokens", _by_concurrency(content["served_both_texts"])),
        ("EAGLE-3, four epochs, 2 tokens", served_cells(four["cells"], "k=2")),
        ("EAGLE-3, four epochs, 3 tokens", served_cells(four["cells"], "k=3")),
        ("Medusa-1, one epoch, 1 token", _by_concurrency(content["served_medusa1_both_texts"])),
    ]
    rows = []
    for name, cells in sessions:
        row: Cells = [name, f"{cells[1]['tokens_per_step']:.2f}"]
        for concurrency in (1, 2, 4, 8):
            cell = cells.get(concurrency)
            if cell is None:
                row.append("-")
                continue
            row.append(f"{speed(cell['plain_tokens_per_s'])}, {served_ratio(cell)}")
        rows.append(row)
    head = ("draft", "per step:", "1 request: plain tokens/s, ratio:", "2:", "4:", "8:")
    return table(head, rows)


def served_cells(cells: Sequence[Json], server: str) -> dict[int, Json]:
    """Return the cells of `server` by concurrency, each with the speed of the plain one before it."""
    chosen = {}
    for before, cell in pairwise(cells):
        if cell["server"] == server:
            chosen[cell["concurrency"]] = cell | {"plain_tokens_per_s": before["tokens_per_s"]}
    return chosen


def _by_concurrency(session: Json) -> dict[int, Json]:
    return {cell["concurrency"]: cell for cell in session["cells"]}


def served_ratio(cell: Mapping[str, Any]) -> str:
    """Write the ratio of a served cell with its interval."""
    return times(cell["ratio"], cell.get("interval") or cell["ratio_interval"])


def specbench_table() -> str:
    """Heads alone on Spec-Bench, those that lose included."""
    rows = []
    for run in results("compiled_smollm2")["rows"]:
        if run["bench"] != "Spec-Bench":
            continue
        plain = run["plain_tokens_per_s"]
        heads = run["over"]["heads_alone"]["over_plain"]
        rows.append(
            [
                run["draft"],
                f"AMD EPYC, {run['date'][:10]}",
                speed(plain),
                f"{speed(plain * heads)}, {heads:.3f}x",
                times(run["over"]["lookup_alone"]["over_plain"]),
                times(run["speedup"], run["speedup_interval"]),
            ]
        )
    head = ("draft, older text", "machine, date", "plain tokens/s:", "alone: tokens/s, ratio:")
    return table((*head, "lookup:", "both:"), rows)


# decode


def decode_answer() -> str:
    """Tree steps in compiled bfloat16."""
    shares = [_over_plain(row, "tree 16") for row in _compiled_bfloat16()]
    single = [_over_plain(row, "tree 1") for row in _compiled_bfloat16()]
    return (
        f"On a CPU, compiled in bfloat16, a tree of 16 nodes costs {min(shares):.1f} to"
        f" {max(shares):.1f} plain steps, and a tree of one node {min(single):.1f} to"
        f" {max(single):.1f}."
    )


def decode_short() -> str:
    """The same for the list of results."""
    shares = [_over_plain(row, "tree 16") for row in _compiled_bfloat16()]
    return f"16 nodes: {min(shares):.1f} to {max(shares):.1f} plain steps, compiled, on a CPU."


def _compiled_bfloat16() -> list[Json]:
    rows = results("decode")["rows"]
    return [row for row in rows if (row["dtype"], row["setting"]) == ("bfloat16", "compiled")]


def _over_plain(row: Json, step: str, plain: str = "plain") -> float:
    """Return the time of a step over the plain one of its row."""
    share: float = row["ms_and_floor"][step][0] / row["ms_and_floor"][plain][0]
    return share


def decode_table() -> str:
    """The rows of the page: all at 128 positions, compiled bfloat16 at 1,024."""
    rows = []
    for row in results("decode")["rows"]:
        is_long = row["context"] == 1024
        if is_long and row not in _compiled_bfloat16():
            continue
        rows.append(
            [
                row["shape"],
                f"{row['context']:,}",
                row["dtype"],
                row["setting"],
                f"{row['ms_and_floor']['plain'][0]:.2f}",
                *(f"{_over_plain(row, step):.2f}" for step in ("tree 1", "tree 16", "tree 64")),
                f"{row['ms_and_floor']['heads'][0]:.2f}",
                f"{_over_plain(row, 'loop, tree 16', 'loop, plain'):.2f}",
                f"{_over_plain(row, 'loop, tree 64', 'loop, plain'):.2f}",
            ]
        )
    head = ("shape", "context:", "dtype", "setting", "plain ms:", "tree 1:", "tree 16:", "tree 64:")
    return table((*head, "5 heads ms:", "loop, tree 16:", "loop, tree 64:"), rows)


# gpu


def gpu_rows() -> list[tuple[str, int, Json]]:
    """Return setting, context and the times of the steps at 7B shape."""
    content = results("gpu")
    after = content["after"]["attention_by_products"]
    rows = []
    for number in (0, 1):
        for name, key in (("torch's kernel", "torch_kernel"), ("products", "products")):
            row = after[key][number]
            rows.append((f"CUDA graphs, {name}", row["context"], row))
    compiled = content["steps"]["decode-compiled"]["figures"]["rows"][0]
    eager = content["steps"]["decode-7b"]["figures"]["rows"][0]
    rows.append(("compiled, torch's kernel", compiled["context"], compiled))
    rows.append(("eager, torch's kernels", eager["context"], eager))
    return rows


def gpu_answer() -> str:
    """SmolLM2 by the clock, and the cost of a tree at 7B shape."""
    clock = results("gpu")["after"]["smollm2_by_the_clock"]["medusa1"]
    shares = [_over_plain(row, "loop, tree 64", "loop, plain") for _, _, row in gpu_rows()[:-1]]
    return (
        "Yes. On one H100 SmolLM2 makes"
        f" {speed(clock['tokens_per_s'])} tokens/s with Medusa-1 heads that have a Markov bias, and"
        f" {speed(clock['baseline_tokens_per_s'])} without heads: {times(clock['speedup'])}. At 7B"
        f" shape a step over 64 nodes costs {min(shares):.2f} to {max(shares):.2f} plain steps,"
        " depending on context and compilation."
    )


def gpu_short() -> str:
    """The same for the list of results."""
    clock = results("gpu")["after"]["smollm2_by_the_clock"]["medusa1"]
    return (
        f"One H100: SmolLM2 {speed(clock['baseline_tokens_per_s'])} to"
        f" {speed(clock['tokens_per_s'])} tokens/s, {times(clock['speedup'])}, with CUDA graphs and"
        " Medusa-1 with a Markov bias."
    )


def gpu_table() -> str:
    """Milliseconds of steps at 7B shape."""
    rows = []
    for name, context, row in gpu_rows():
        times_ms = row["ms_and_floor"]
        plain, floor = times_ms["plain"]
        steps = ("tree 64", "loop, plain", "loop, tree 16", "loop, tree 64")
        rows.append(
            [
                name,
                f"{context:,}",
                f"{plain:.1f} ms",
                f"{plain / floor:.2f}x",
                *(f"{times_ms[step][0]:.1f} ms" for step in steps),
                f"{_over_plain(row, 'loop, tree 64', 'loop, plain'):.2f}",
            ]
        )
    head = ("setting, attention", "context:", "plain pass:", "over byte floor:", "pass, 64 nodes:")
    head += ("plain loop:", "loop, 16 nodes:", "loop, 64 nodes:", "64 nodes over plain loop:")
    return table(head, rows)


def gpu_clock_table() -> str:
    """SmolLM2 on the H100 by the clock."""
    rows = []
    clock = results("gpu")["after"]["smollm2_by_the_clock"]
    for name, key in (("Medusa-1, Markov bias", "medusa1"), ("EAGLE-3", "eagle3")):
        run = clock[key]
        rows.append(
            [
                name,
                f"{run['acceleration_rate']:.2f}",
                f"{run['overhead']:.2f}",
                speed(run["baseline_tokens_per_s"]),
                speed(run["tokens_per_s"]),
                times(run["speedup"], run["intervals"]["speedup"]),
                times(run["speedup_without_loops"]),
                f"{run['equal_answers_bf16']}/{run['answers']}",
                f"{run['looping_answers']}/{run['answers']}",
            ]
        )
    head = ("draft", "tokens per step:", "overhead:", "plain tokens/s:", "tokens/s:", "ratio:")
    return table((*head, "without loops:", "equal bf16:", "loops:"), rows)


def gpu_training_table() -> str:
    """Training steps at 7B shape on the H100."""
    content = results("gpu")
    one, two = content["steps"]["train-7b"]["figures"]["cases"]
    many = content["after"]["medusa2_8_rows"]
    rows = []
    for title, case, tokens in (
        ("Medusa-1, backbone in bfloat16", one, one["tokens_counted"]),
        ("Medusa-2, QLoRA with gradient checkpointing", two, two["tokens_counted"]),
        ("the same with 8 rows", many, many["tokens"]),
    ):
        rows.append(
            [
                title,
                f"{tokens / case['seconds']:,.0f}",
                f"{case['mfu']:.2f}",
                f"{case['total_mb'] / 1000:.1f} GB",
                f"{case['estimate_mb'] / 1000:.1f} GB",
            ]
        )
    head = ("what", "tokens/s:", "of the measured matrix rate:", "memory:", "by `--inspect`:")
    return table(head, rows)


def trees_table() -> str:
    """What trees of growing size bring and cost: guesses of SmolLM2, steps on a CPU and on an H100."""
    guesses = results("drafts_smollm2")["both_texts"]["medusa1"]
    decode_rows = results("decode")["rows"]
    wanted = ("160M", 128, "bfloat16", "compiled")
    cpu = next(
        row
        for row in decode_rows
        if (row["shape"], row["context"], row["dtype"], row["setting"]) == wanted
    )
    h100 = next(row for name, _, row in gpu_rows() if name == "CUDA graphs, products")
    rows = []
    for title, key, step in (
        ("none: plain decoding", None, None),
        ("chain of 3", "chain", None),
        ("16 nodes", "16", "loop, tree 16"),
        ("32 nodes", "32", None),
        ("64 nodes", None, "loop, tree 64"),
    ):
        cells: Cells = [title, f"{guesses[key]:.2f}" if key else "-"]
        for row in (cpu, h100):
            cells.append(f"{_over_plain(row, step, 'loop, plain'):.2f}" if step else "-")
        if title.startswith("none"):
            cells = [title, "1.00", "1.00", "1.00"]
        rows.append(cells)
    head = ("tree", "tokens per step, Medusa-1 of SmolLM2:")
    head += ("overhead, 160M on a CPU, compiled:", "overhead, 7B on an H100, CUDA graphs:")
    return table(head, rows)


def _tokens_per_step_on_gpu() -> float:
    rate: float = results("gpu")["after"]["smollm2_by_the_clock"]["medusa1"]["acceleration_rate"]
    return rate


def _costs_7b() -> list[float]:
    """Return what steps over 64 nodes cost at 7B shape, over plain ones, if they are not eager."""
    measured = [row for name, _, row in gpu_rows() if not name.startswith("eager")]
    return [_over_plain(row, "loop, tree 64", "loop, plain") for row in measured]


def estimate_range_7b() -> tuple[float, float]:
    """Return the least and the largest speedup of the estimate at 7B shape."""
    costs = _costs_7b()
    return _tokens_per_step_on_gpu() / max(costs), _tokens_per_step_on_gpu() / min(costs)


def estimate_7b() -> str:
    """What heads would give at 7B shape if they guessed as well as SmolLM2's."""
    per_step = _tokens_per_step_on_gpu()
    costs = _costs_7b()
    low, high = estimate_range_7b()
    return (
        f"**An estimate, not a measurement: {low:.1f}x to {high:.1f}x, one answer at a time on an"
        " H100.** It has three conditions:\n\n"
        f"1. The heads make {per_step:.2f} tokens per step, as SmolLM2's made on that GPU with 63 nodes."
        " Those had a Markov bias, which is off by default. Yours may make more or fewer.\n"
        f"2. A step over 64 nodes costs {min(costs):.2f} to {max(costs):.2f} plain steps, as measured"
        " with random weights of Llama 2 7B's shape: the least at 1,024 positions, compiled, the most at"
        " 4,096 positions, not compiled.\n"
        "3. The vocabulary has 32,000 tokens. Heads over the 128,256 tokens of Llama 3 cost more,"
        " unless `medusa_vocab_size` restricts them."
    )


# losses_smollm2


_LOSSES = (
    ("Medusa-1, LK", "losses", "medusa1-lk"),
    ("Medusa-1, D-PACE", "losses", "medusa1-dpace"),
    ("Medusa-1, both", "losses", "medusa1-lk-dpace"),
    ("Hydra++, LK", "losses_hydra", "hydra++-lk"),
    ("Hydra++, D-PACE", "losses_hydra", "hydra++-dpace"),
    ("Hydra++, both", "losses_hydra", "hydra++-lk-dpace"),
    ("Hydra++, plain embeddings", "embeddings_hydra", "hydra++-plain"),
    ("Amphista, plain embeddings", "embeddings_amphista", "amphista-plain"),
)


def losses_answer() -> str:
    """Losses change little, the scale of the embeddings more."""
    content = results("losses_smollm2")
    hydra = content["embeddings_hydra"]["t0"]["hydra++-plain"]["trees"]["16"]["over"][0]
    amphista = content["embeddings_amphista"]["t0"]["amphista-plain"]["trees"]["16"]["over"][0]
    low, high = _losses_range(content)
    return (
        f"No. LK, D-PACE and both make {low:.2f} to {high:.2f} of the tokens per step, so they were"
        f" removed. Scaled embeddings help: without them, as published, Hydra++ makes"
        f" {hydra:.2f} and Amphista {amphista:.2f} of its tokens per step."
    )


def losses_short() -> str:
    """The same for the list of results."""
    low, high = _losses_range(results("losses_smollm2"))
    return f"No: LK and D-PACE make {low:.2f} to {high:.2f} of the tokens per step. Removed."


def _losses_range(content: Json) -> tuple[float, float]:
    """Return the least and the greatest ratio of the acceptance-aware losses."""
    values = []
    for _, part, run in _LOSSES[:6]:
        for temperature in ("t0", "t0.7"):
            trees = content[part][temperature][run]["trees"]
            values += [tree["over"][0] for tree in trees.values()]
    return min(values), max(values)


def losses_table() -> str:
    """Ratios to the same draft with its default loss."""
    content = results("losses_smollm2")
    rows = []
    for title, part, run in _LOSSES:
        trees = content[part]["t0"][run]["trees"]
        cells: Cells = [title, *(over(trees[tree]["over"]) for tree in ("chain", "16", "32"))]
        sampled = content[part].get("t0.7", {}).get(run)
        for tree in ("16", "32"):
            cells.append("-" if sampled is None else over(sampled["trees"][tree]["over"]))
        rows.append(cells)
    head = ("draft", "greedy: chain:", "16 nodes:", "32 nodes:", "at 0.7: 16 nodes:", "32 nodes:")
    return table(head, rows)


# medusa2_smollm2


def medusa2_answer() -> str:
    """Finished heads, then heads of half an epoch."""
    rows = results("medusa2_smollm2")["finished_heads"]["rows"]
    values = [row["over (32)"][0] for row in rows.values() if row["over (32)"]]
    return (
        f"Little on SmolLM2. After heads of two epochs a joint stage makes {min(values):.2f} to"
        f" {max(values):.2f} of their tokens per step, and the most with cross-entropy, which changes"
        " the model. On equal tokens of looping text, after half an epoch, it brings more."
    )


def medusa2_short() -> str:
    """The same for the list of results."""
    rows = results("medusa2_smollm2")["finished_heads"]["rows"]
    values = [row["over (32)"][0] for row in rows.values() if row["over (32)"]]
    return (
        f"Little on SmolLM2: {min(values):.2f} to {max(values):.2f} of finished heads' tokens per"
        " step, and the most with cross-entropy, which changes answers."
    )


def medusa2_table() -> str:
    """Three settings on finished heads, three on heads of half an epoch, two on the tiny backbone."""
    content = results("medusa2_smollm2")
    finished = content["finished_heads"]["rows"]
    base = finished["Medusa-1, mtbench:5"]["without loops"]
    rows = []
    for name, loss, weight in (
        ("KL, lambda0 0.015 along a sine, mtbench:5", "KL", "0.015, sine"),
        ("KL, lambda0 0.15, mtbench:5", "KL", "0.15"),
        ("cross-entropy, lambda0 0.2, mtbench:5", "cross-entropy", "0.2"),
    ):
        row = finished[name]
        change = row["perplexity after"] / row["perplexity before"] - 1
        without = f"{row['without loops'] / base:.2f}"
        cells = [over(row["over (32)"]), without, f"{row['loops']}/80", f"{change:+.1%}"]
        rows.append(["SmolLM2, heads of two epochs, 2026-11-25", loss, weight, *cells])
    counts = content["smollm2_counts_40_questions"]
    base = counts["medusa1"]["trees"]["32"]["without_loops"]
    for name, loss, weight in (
        ("medusa2-lambda0", "KL", "0.05"),
        ("medusa2", "KL", "0.15"),
        ("medusa2-ce", "cross-entropy", "0.15"),
    ):
        tree = counts[name]["trees"]["32"]
        change = content["smollm2_training"][name]["quality"]["held-out answers"]["change"]
        without = f"{tree['without_loops'] / base:.2f}"
        cells = [over(tree["over"]), without, f"{counts[name]['loops']['32']}/80", f"{change:+.1%}"]
        rows.append(["SmolLM2, heads of half an epoch, 2026-11-23", loss, weight, *cells])
    for name, loss in (("m2", "KL"), ("m2-ce", "cross-entropy")):
        compared = content["tiny"]["comparisons"][f"{name}/equal"]
        case = next(case for case in content["tiny"]["cases"] if case["name"] == name)
        held_out = case["quality"]["held-out answers"]
        change = held_out["perplexity_after"] / held_out["perplexity_before"] - 1
        shown = ratio(compared["ratio"], compared["ratio_interval"])
        rows.append(["tiny, 2026-11-20", loss, "0.15", shown, "-", "-", f"{change:+.1%}"])
    head = (
        "model, heads, date",
        "LM loss",
        "lambda0:",
        "over Medusa-1:",
        "without loops:",
        "loops:",
    )
    return table((*head, "held-out perplexity:"), rows)


# papers_smollm2, papers_speed_smollm2


def papers_answer() -> str:
    """Amphista's and Kangaroo's ablations."""
    rows = results("papers_smollm2")["experiments"]["amphista_table4"]["rows"]
    token = rows["w/o Sampled-Token"]["over Amphista"][0]
    return (
        f"In part, after short training. Amphista needs its sampled token, as published: without it,"
        f" {token:.2f} of its tokens per step. Its staged adaptation brings little here and its"
        " auto-embedding nothing. Kangaroo's variants differ by a few percent."
    )


def papers_short() -> str:
    """The same for the list of results."""
    return (
        "In part, after short training: Amphista's sampled token helps, its adaptation little, its"
        " auto-embedding not."
    )


#: Row of the JSON, its title, and the published speedup over the full draft (Vicuna-7B).
_AMPHISTA = (
    ("w/o Auto-embedding", "without auto-embedding", "0.94"),
    ("w/o Position-Encoding", "without position encoding", "0.99"),
    ("w/o Staged-Adaptation", "without staged adaptation", "0.88"),
    ("w/ One-Adaptation-Layer", "with one adaptation layer", "0.95"),
    ("w/o Sampled-Token", "without sampled token", "0.92"),
    ("Medusa", "Medusa", "0.76"),
    ("Hydra++", "Hydra++", "0.97"),
)
_KANGAROO = (
    ("Kangaroo + Head", "with its own head", "0.96"),
    ("1-Layer Transformer", "1-layer transformer", "0.91"),
    ("MLP Only", "MLP only", "0.81"),
)


def papers_table() -> str:
    """Amphista's Table 4 and Kangaroo's Table 2."""
    experiments = results("papers_smollm2")["experiments"]
    amphista = experiments["amphista_table4"]["rows"]
    rows: list[Cells] = [
        ["Amphista (Table 4)", f"{amphista['Amphista']['accepted length']:.2f}", "-", "-"]
    ]
    for name, title, published in _AMPHISTA:
        row = amphista[name]
        shown = _two_digits(row["over Amphista"])
        rows.append([title, f"{row['accepted length']:.2f}", shown, published])
    second = experiments["amphista_table4_seed_43"]["rows"]["w/o Staged-Adaptation, counted"]
    shown = _two_digits(second["over Amphista"])
    title = "without staged adaptation, another seed"
    rows.insert(4, [title, f"{second['accepted length']:.2f}", shown, "0.88"])
    kangaroo = experiments["kangaroo_table2"]["rows"]
    full = kangaroo["Kangaroo"]
    title = f"Kangaroo (Table 2), {millions(full['parameters'])} parameters"
    rows.append([title, f"{full['acceleration rate']:.2f}", "-", "-"])
    for name, title, published in _KANGAROO:
        row = kangaroo[name]
        title = f"{title}, {millions(row['parameters'])}"
        rows.append([title, f"{row['acceleration rate']:.2f}", _two_digits(row["over"]), published])
    head = ("draft", "tokens per step:", "over the full draft:", "published speedup over it:")
    return table(head, rows)


def _two_digits(values: Sequence[float]) -> str:
    value, *interval = values
    return ratio(value, interval, 2)


def papers_speed_answer() -> str:
    """The order of the paper is not that of a small model on a CPU."""
    rows = results("papers_speed_smollm2")["experiments"]["kangaroo_table1"]["rows"]
    return (
        f"Not on a CPU with 135M parameters. On Spec-Bench Lookahead makes"
        f" {times(rows['Lookahead']['average'])} plain decoding and Medusa"
        f" {times(rows['Medusa']['average'])}, while REST and Kangaroo are slower than plain decoding."
    )


def papers_speed_short() -> str:
    """The same for the list of results."""
    rows = results("papers_speed_smollm2")["experiments"]["kangaroo_table1"]["rows"]
    figures = ", ".join(
        f"{name} {times(rows[name]['average'])}"
        for name in ("Lookahead", "Medusa", "REST", "Kangaroo")
    )
    return f"Not on a CPU, nothing compiled: {figures}."


def papers_speed_table() -> str:
    """Kangaroo's Table 1, and what it published."""
    content = results("papers_speed_smollm2")
    rows = content["experiments"]["kangaroo_table1"]["rows"]
    published = {"Lookahead": "1.40x", "Medusa": "1.55x", "REST": "1.58x", "Kangaroo": "1.68x"}
    cells = []
    for name, shown in published.items():
        row = rows[name]
        count, *count_interval = row["MT-Bench CR"]
        value, *interval = row["MT-Bench"]
        cells.append(
            [
                name,
                ratio(count, count_interval, 2),
                times(value, interval),
                shown,
                times(row["average"]),
                times(content["chart"]["published"][name]),
            ]
        )
    head = ("draft", "tokens per step, MT-Bench:", "ratio, MT-Bench:", "published:")
    return table((*head, "ratio, average of Spec-Bench:", "published:"), cells)


def nodes_table() -> str:
    """Medusa, Figure 6: the sparse trees."""
    trees = results("papers_smollm2")["experiments"]["medusa_fig6"]["rows"]
    sparse = [row for name, row in trees.items() if name.startswith("sparse")]
    dense = trees["random dense trees, dense:10x8x2"]
    head = ["sparse nodes", *(f"{row['nodes']}:" for row in sparse), f"dense, {dense['nodes']}:"]
    values = [f"{row['acceleration rate']:.2f}" for row in [*sparse, dense]]
    return table(head, [["tokens per step", *values]])


def table6_table() -> str:
    """Amphista, Table 6."""
    experiments = results("papers_speed_smollm2")["experiments"]
    few = experiments["amphista_table6, 22 nodes"]["rows"]
    many = experiments["amphista_table6, 64 nodes"]["rows"]
    rows = []
    for name in ("Medusa", "Amphista", "Hydra++"):
        row: Cells = [name]
        for run, counted in ((few, "tokens per step of 22 nodes"), (many, "of 64 nodes")):
            value, *interval = run[name]["22 nodes" if run is few else "64 nodes"]
            row += [f"{run[name][counted][0]:.2f}", times(value, interval)]
        rows.append(row)
    head = ("draft", "22 nodes: per step:", "ratio:", "64 nodes: per step:", "ratio:")
    return table(head, rows)


def epsilon_table() -> str:
    """Medusa, Figure 7."""
    rows = results("papers_speed_smollm2")["experiments"]["medusa_fig7"]["rows"]
    head = ["rule"]
    cells: Cells = ["tokens per step"]
    for name, row in rows.items():
        head.append(f"{name.removeprefix('typical, ')}:")
        cells.append(f"{row['acceleration rate'][0]:.2f}")
    return table(head, [cells])


# prompts_smollm2


_PROMPTS = (
    ("MT-Bench", "MT-Bench, 40 questions"),
    ("templates", "templates, 40 questions"),
    ("the model's own", "the model's own, 54 questions"),
)


def prompts_answer() -> str:
    """Text of the model's own questions."""
    content = results("prompts_smollm2")
    own = content["the model's own, 54 questions"]["32 nodes"]["over"]
    return (
        "Yes, on questions of that kind. With half of the text from questions that the model wrote"
        f" itself, Medusa-1 makes {ratio(own[0], own[1], 2)} times the tokens per step on such"
        " questions, and on MT-Bench no more than before."
    )


def prompts_short() -> str:
    """The same for the list of results."""
    own = results("prompts_smollm2")["the model's own, 54 questions"]["32 nodes"]["over"][0]
    return f"Those that the model will be asked: {own:.2f} times the tokens per step on such ones."


def prompts_table() -> str:
    """Two texts of equal size on three kinds of questions."""
    content = results("prompts_smollm2")
    rows = []
    for title, key in _PROMPTS:
        part = content[key]
        cells: Cells = [title, part["answers"]]
        for tree in ("16 nodes", "32 nodes"):
            cells += [f"{part[tree][text]:.3f}" for text in ("templates", "half of each")]
        rows.append([*cells, over(part["32 nodes"]["over"]), f"{part['loops']}/{part['answers']}"])
    head = ("questions asked", "answers:", "16 nodes: templates:", "half of each:")
    return table((*head, "32 nodes: templates:", "half of each:", "over:", "loops:"), rows)


# selfdistill


def selfdistill_rates() -> dict[str, list[float]]:
    """Return tokens per second in batches of 1, 8 and 32, by engine."""
    machine = results("selfdistill")["forced_third_machine"]
    single = machine["batch_1"]["rates"]
    batches = machine["batches_32_8"]["rates"]
    names = {
        "medusa-train, not compiled": "not compiled, processes: 1",
        "medusa-train, compiled": "compiled, processes: 1",
        "vLLM": "vLLM",
    }
    rates = {}
    for title, key in names.items():
        rates[title] = [single[key]["1"], batches[key]["8"], batches[key]["32"]]
    return rates


def selfdistill_answer() -> str:
    """Compiled, beside vLLM."""
    one, eight, many = _over_vllm()
    return (
        f"Compiled, on a CPU, it makes {one:.2f} times vLLM's tokens per second one at a time,"
        f" {eight:.2f} times in batches of 8, and {many:.2f} times in batches of 32, where padding"
        " costs the rest."
    )


def selfdistill_short() -> str:
    """The same for the list of results."""
    one, _, many = _over_vllm()
    return (
        f"On a CPU, compiled, {one:.2f} times as fast as vLLM one at a time, {many:.2f} times in"
        " batches of 32."
    )


def _over_vllm() -> list[float]:
    rates = selfdistill_rates()
    pairs = zip(rates["medusa-train, compiled"], rates["vLLM"], strict=True)
    return [mine / vllm for mine, vllm in pairs]


def selfdistill_table() -> str:
    """Engines by batch."""
    rows: list[Cells] = []
    for name, rates in selfdistill_rates().items():
        rows.append([name, *(speed(rate) for rate in rates)])
    rows.append(["compiled / vLLM", *(f"{share:.2f}" for share in _over_vllm())])
    return table(("engine", "batch of 1:", "8:", "32:"), rows)


# served


def served_grid() -> dict[int, dict[str, Json]]:
    """Return the cells of greedy serving by concurrency and server."""
    content = results("served")
    grid: dict[int, dict[str, Json]] = {}
    for values in content["greedy"]:
        cell = dict(zip(content["columns"], values, strict=True))
        grid.setdefault(cell["concurrency"], {})[cell["server"]] = cell
    return grid


def served_answer() -> str:
    """One guess at a time, by concurrency."""
    grid = served_grid()
    late = [cells["k=1"]["ratio"] for concurrency, cells in grid.items() if concurrency >= 4]
    return (
        f"Not clearly. On two cores of an AMD EPYC Medusa-1 heads make a server"
        f" {served_ratio(grid[1]['k=1'])} as fast with one request at a time, and"
        f" {min(late):.2f}x to {max(late):.2f}x with four or more. vLLM verifies one chain instead of"
        " a tree."
    )


def served_short() -> str:
    """Medusa-1, lookup and all sessions of EAGLE-3 with one request at a time."""
    content = results("eagle3_smollm2")
    eagle3 = [
        served_cells(content["served"]["cells"], "k=2")[1],
        served_cells(content["served_four_epochs"]["cells"], "k=2")[1],
        _by_concurrency(content["served_both_texts"])[1],
    ]
    first, second, third = (times(cell["ratio"]) for cell in eagle3)
    return (
        f"One request at a time, on a CPU: Medusa-1 {times(served_grid()[1]['k=1']['ratio'])}. EAGLE-3"
        f" {first}, {second} and {third} in three sessions. With eight at a time neither helps."
    )


def served_table() -> str:
    """Ratios by concurrency and number of draft tokens."""
    rows = []
    for concurrency, cells in served_grid().items():
        row: Cells = [concurrency, speed(cells["plain"]["tokens_per_s"])]
        row += [served_ratio(cells[f"k={count}"]) for count in (1, 2, 3, 4)]
        wins = [count for count in (1, 2, 3, 4) if cells[f"k={count}"]["verdict"] == "wins"]
        row.append(f"N = {wins[0]}" if wins else "off")
        rows.append(row)
    head = (
        "requests at a time:",
        "plain tokens/s:",
        "N = 1:",
        "N = 2:",
        "N = 3:",
        "N = 4:",
        "serve:",
    )
    return table(head, rows)


# train


def train_pairs() -> list[tuple[str, str, Json, Json]]:
    """Return case, dtype, and stacked and own logits."""
    cases = results("train")["loss"]["cases"]
    pairs = []
    for stacked, own in zip(cases[::2], cases[1::2], strict=True):
        heads = stacked.get("heads", 5)
        title = f"loss, {heads} head{'s' if heads > 1 else ''}"
        title += ", half masked" if "masked" in stacked else ""
        pairs.append((title, stacked.get("dtype", "float32"), stacked, own))
    return pairs


def train_answer() -> str:
    """Memory and time with five heads."""
    five = [(stacked, own) for title, _, stacked, own in train_pairs() if title == "loss, 5 heads"]
    memory = [own["peak_mb"] / stacked["peak_mb"] for stacked, own in five]
    faster = [stacked["seconds"] / own["seconds"] for stacked, own in five]
    return (
        f"With five heads the loss takes {min(memory):.2f} to {max(memory):.2f} of the memory of"
        f" stacked logits, and no more with more heads. It is {min(faster):.1f} to {max(faster):.1f}"
        " times as fast."
    )


def train_short() -> str:
    """The same for the list of results."""
    five = [(stacked, own) for title, _, stacked, own in train_pairs() if title == "loss, 5 heads"]
    memory = [own["peak_mb"] / stacked["peak_mb"] for stacked, own in five]
    return (
        f"On a CPU the loss of five heads needs {min(memory):.0%} to {max(memory):.0%} of the memory"
        " that the logits of all heads would take."
    )


def train_table() -> str:
    """Time and peak of the loss."""
    rows = []
    for title, dtype, stacked, own in train_pairs():
        rows.append(
            [
                title,
                dtype,
                f"{stacked['seconds']:.2f} s",
                f"{own['seconds']:.2f} s",
                times(stacked["seconds"] / own["seconds"]),
                f"{stacked['peak_mb']:,}",
                f"{own['peak_mb']:,}",
            ]
        )
    head = ("case", "dtype", "stacked:", "here:", "faster:", "stacked MB:", "here MB:")
    return table(head, rows)


# untrained


def untrained_runs() -> dict[tuple[str, str], Json]:
    """Return the runs by draft and bench."""
    return {(run["draft"], run["bench"]): run for run in results("untrained")["rows"]}


_UNTRAINED = (
    ("Medusa-1 with Markov bias + prompt lookup", "Medusa-1, Markov bias, with lookup"),
    ("Hydra++ + prompt lookup", "Hydra++ with lookup"),
    ("Medusa-1 + prompt lookup", "Medusa-1 with lookup"),
    ("Medusa-1, one Markov bias (tree of 4 nodes)", "Medusa-1, Markov bias"),
    ("Medusa-1, dynamic trees", "Medusa-1, dynamic trees"),
    ("Lookahead", "Lookahead"),
    ("REST, the training text as datastore", "REST"),
)


def untrained_answer() -> str:
    """Lookup helps, the others little."""
    runs = untrained_runs()
    both = runs["Medusa-1 + prompt lookup", "MT-Bench"]
    alone = both["speedup"] / both["over"]["lookup_alone"]["speedup"]
    lookahead = runs["Lookahead", "MT-Bench"]["speedup"]
    return (
        f"Prompt lookup does: alone {times(alone)} plain decoding, not compiled, and"
        f" {times(both['speedup'], both['speedup_interval'])} with Medusa-1 heads. Lookahead"
        f" ({times(lookahead)}) and REST bring little here."
    )


def untrained_short() -> str:
    """The same for the list of results."""
    both = untrained_runs()["Medusa-1 + prompt lookup", "MT-Bench"]
    alone = both["speedup"] / both["over"]["lookup_alone"]["speedup"]
    return f"Prompt lookup does, {times(alone)} on a CPU, not compiled. Lookahead and REST little."


def untrained_table() -> str:
    """Both benches."""
    runs = untrained_runs()
    rows = []
    for name, title in _UNTRAINED:
        run = runs[name, "MT-Bench"]
        other = runs.get((name, "Spec-Bench"))
        rows.append(
            [
                title,
                run["date"][:10],
                f"{run['tokens_per_step']:.2f}",
                times(run["speedup"], run["speedup_interval"]),
                times(run["speedup_without_loops"]),
                "-" if other is None else f"{other['tokens_per_step']:.2f}",
                "-" if other is None else times(other["speedup"], other["speedup_interval"]),
            ]
        )
    head = ("draft", "date", "MT-Bench: per step:", "ratio:", "without loops:")
    return table((*head, "Spec-Bench: per step:", "ratio:"), rows)


# qwen_coder


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
                    _of_answers(overall, "equal_answers_bf16"),
                    _solved(overall, "tree"),
                ]
            )
    head = ("machine, date", "draft", "tokens per step:", "tokens/s:", "plain tokens/s:", "ratio:")
    return table((*head, "equal bf16:", "pass@1:"), rows)


def coder_nodes_table() -> str:
    """Tokens per step by the number of nodes, of each draft's best tree of that size."""
    trees = results("qwen_coder")["nodes"]
    by_size = {
        draft: {size["nodes"]: size["tokens_per_step"] for size in sizes}
        for draft, sizes in trees.items()
    }
    rows: list[Cells] = []
    for nodes in (4, 8, 16, 63):
        rates = [by_size[draft].get(nodes) for draft in by_size]
        rows.append([nodes, *("-" if rate is None else f"{rate:.2f}" for rate in rates)])
    return table(("nodes:", *(f"{draft}:" for draft in by_size)), rows)


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


def _of_answers(overall: Json, key: str) -> str:
    count = overall[key]
    return "-" if count is None else f"{count}/{overall['answers']}"


def _solved(overall: Json, decoder: str) -> str:
    """Return how many problems the answers of the tree, or plain ones, solve; "-" if not scored."""
    scores = overall["scores"]
    if scores is None:
        return "-"
    return f"{scores[decoder]['correct']}/{scores['answers']}"


# Acceptance by training text


def acceptance_table() -> str:
    """Top-1 per head and tokens per step of the models at hand, by tokens of text."""
    few = results("eagle3_smollm2")["ablation"]["rows"]
    few_heads = results("papers_smollm2")["experiments"]["amphista_fig1"]["rows"]["Medusa"]
    loops = results("losses_smollm2")["losses"]["t0"]["medusa1"]["trees"]
    content = results("drafts_smollm2")
    held_out = results("eagle3_smollm2")["held_out"]
    longest = _four_epochs(content)
    tiny = drafts_run()["drafts"]["medusa1"]["tiny"]
    answers = _shares([few_heads[f"head {number}, top 1"] for number in range(1, 5)])
    half = content["levers"]["medusa1"]
    printed = content["levers"]["held out, 16 nodes, two seeds"]["medusa1"][0]
    loop_trees = [f"{loops[tree]['rate']:.2f}" for tree in ("chain", "16", "32")]
    rows: list[Cells] = [
        [
            *("Medusa-1", "0.20M", f"{answers} (answers)", "-"),
            *(f"{few['Medusa-1']['chain of 3']:.2f}", "-", "-"),
        ],
        ["EAGLE-3", "0.20M", "-", "-", f"{few['EAGLE-3']['chain of 3']:.2f}", "-", "-"],
        ["Medusa-1", "0.49M", "-", f"{printed:.2f}", *(f"{rate:.2f}" for rate in half)],
        ["Medusa-1", "0.86M, half of it loops", "-", "-", *loop_trees],
    ]
    names = (("medusa1", "Medusa-1"), ("eagle3", "EAGLE-3"))
    for name, title in names:
        top1 = _shares(held_out[name]["top1"][1])
        equal = content["equal_text"][name]
        trees = [f"{equal[tree]['rate']:.2f}" for tree in ("chain", "16", "32")]
        shown = f"{held_out[name]['tokens_per_step'][1]:.2f}"
        rows.append([title, "1.94M, the same text twice", top1, shown, *trees])
    for name, title in names:
        draft = content["both_texts"][name]
        trees = [f"{draft[tree]:.2f}" for tree in ("chain", "16", "32")]
        shown = f"{draft['held_out_tokens_per_step']:.2f}"
        top1 = _shares(draft["held_out_top1"])
        rows.append([title, "1.94M, each text once", top1, shown, *trees])
    markov = content["medusa1_markov_four_epochs_of_both_texts"]["held_out_tokens_per_step"]
    eagle3 = results("eagle3_smollm2")["four_epochs_of_both_texts"]["held_out"]["eagle3"]
    printed_last = {"Medusa-1, Markov bias": markov[-1], "EAGLE-3": eagle3[-1]}
    for name in printed_last:
        trees = [f"{longest[name][tree]:.2f}" for tree in ("chain", "16 nodes", "32 nodes")]
        shown = f"{printed_last[name]:.2f}"
        rows.append([name, "7.77M, the same texts four times", "-", shown, *trees])
    shares = f"{_shares(tiny['accuracy'])} (answers)"
    chain = f"{tiny['chain']['tokens_per_step']:.2f}"
    equal_tiny = f"{tiny['equal']['tokens_per_step']:.2f}"
    name = "built-in 11M model, Medusa-1, its own questions"
    rows.append([name, "1.18M", shares, "-", chain, equal_tiny, "-"])
    for coder in results("qwen_coder")["held_out"]:
        name = f"Qwen2.5-Coder 0.5B, {coder['draft']}, on code"
        shown = f"{coder['tokens_per_step']:.2f}"
        rows.append([name, coder["text"], _shares(coder["top1"]), shown, "-", "-", "-"])
    head = ("draft (of SmolLM2)", "tokens read", "top-1 per head:", "printed by training:")
    return table((*head, "bench, chain:", "bench, 16 nodes:", "bench, 32 nodes:"), rows)


def _shares(values: Sequence[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values)


# Which functions belong to which page

ANSWERS = {
    "compiled_smollm2": compiled_answer,
    "decode": decode_answer,
    "demo": demo_answer,
    "drafts": drafts_answer,
    "drafts_smollm2": drafts_smollm2_answer,
    "eagle3_smollm2": eagle3_answer,
    "gpu": gpu_answer,
    "losses_smollm2": losses_answer,
    "medusa2_smollm2": medusa2_answer,
    "papers_smollm2": papers_answer,
    "papers_speed_smollm2": papers_speed_answer,
    "prompts_smollm2": prompts_answer,
    "qwen_coder": coder_answer,
    "selfdistill": selfdistill_answer,
    "served": served_answer,
    "smollm2": smollm2_answer,
    "train": train_answer,
    "untrained": untrained_answer,
}
TABLES = {
    "compiled_smollm2": compiled_table,
    "decode": decode_table,
    "demo": demo_table,
    "drafts": drafts_table,
    "drafts_smollm2": drafts_smollm2_table,
    "eagle3_smollm2": eagle3_table,
    "gpu": gpu_table,
    "losses_smollm2": losses_table,
    "medusa2_smollm2": medusa2_table,
    "papers_smollm2": papers_table,
    "papers_speed_smollm2": papers_speed_table,
    "prompts_smollm2": prompts_table,
    "qwen_coder": coder_table,
    "selfdistill": selfdistill_table,
    "served": served_table,
    "smollm2": smollm2_table,
    "train": train_table,
    "untrained": untrained_table,
}
#: Short answers of docs/results.md, in its order.
SHORT = {
    "demo": demo_short,
    "smollm2": smollm2_short,
    "qwen_coder": coder_short,
    "compiled_smollm2": compiled_short,
    "drafts_smollm2": drafts_smollm2_short,
    "eagle3_smollm2": eagle3_short,
    "served": served_short,
    "gpu": gpu_short,
    "medusa2_smollm2": medusa2_short,
    "untrained": untrained_short,
    "prompts_smollm2": prompts_short,
    "papers_smollm2": papers_short,
    "papers_speed_smollm2": papers_speed_short,
    "drafts": drafts_short,
    "losses_smollm2": losses_short,
    "selfdistill": selfdistill_short,
    "decode": decode_short,
    "train": train_short,
}
