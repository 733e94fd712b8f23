"""Write tables and headline figures from the committed JSON into README, docs/ and result pages.

python benchmarks/tables.py            # writes them
python benchmarks/tables.py --check    # names the pages that differ and exits with 1

In README and docs/ a block stands between `<!-- NAME:start -->` and `<!-- NAME:end -->`. A result
page has two blocks without marks: its third line, the answer, and its first table.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]

from estimates import ROWS, estimate_row  # noqa: E402
from result_tables import (  # noqa: E402
    ANSWERS,
    RESULTS,
    SHORT,
    TABLES,
    Json,
    acceptance_table,
    coder_nodes_table,
    compiled_rows,
    eagle3_served_table,
    epsilon_table,
    estimate_7b,
    estimate_range_7b,
    gpu_clock_table,
    gpu_training_table,
    nodes_table,
    results,
    specbench_table,
    speed,
    table,
    table6_table,
    times,
    trees_table,
)

from medusa_train.io import replace_text  # noqa: E402
from medusa_train.training.estimate import GPUS  # noqa: E402

# README


def readme_speed() -> str:
    """Runs of three models, each beside its own plain decoding, and what other machines gave."""
    demo, slower_demo = results("demo")["runs"]
    coder = {run["draft"]: run for run in results("qwen_coder")["runs"]}
    gpu = results("gpu")
    h100 = gpu["after"]["smollm2_by_the_clock"]["eagle3"]
    h100_date = gpu["steps"]["tests"]["date"]
    rows = [
        _beside(
            "test model, 11M: its own questions",
            "Medusa-1",
            f"AMD EPYC, not compiled, {demo['date'][:10]}",
            demo["overall"],
        )
    ]
    name = "Qwen2.5-Coder, 0.5B: HumanEval"
    place = f"{coder['Medusa-1']['place']}, {coder['Medusa-1']['date']}"
    for draft in ("Medusa-1", "prompt lookup", "Medusa-1 + lookup"):
        rows.append(_beside(name, draft, place, coder[draft]["overall"]))
        name = place = ""  # the same run
    rows.append(
        _beside(
            "SmolLM2, 135M: MT-Bench",
            "EAGLE-3",
            f"NVIDIA H100, CUDA graphs, {h100_date[:10]}",
            h100,
        )
    )
    head = ("model: questions", "draft", "hardware, date", "tokens/s without:", "with:", "ratio:")
    scores = coder["Medusa-1 + lookup"]["overall"]["scores"]
    note = (
        "One answer at a time, greedy, bfloat16, two CPU cores or one GPU. Compare within a row only."
        " *Same*: answers equal to those without a draft. The coder solves"
        f" {scores['tree']['correct']} of {scores['answers']} problems with both, and"
        f" {scores['plain']['correct']} without. On another machine the test model gained"
        f" {times(slower_demo['overall']['speedup'])}. [All results](docs/results.md)."
    )
    return f"{table((*head, 'same:'), rows)}\n\n{note}"


def _beside(model: str, draft: str, hardware: str, overall: Json) -> list[str]:
    """Return a row: tokens per second without and with a draft, their ratio, the equal answers."""
    plain = overall.get("plain_tokens_per_s") or overall["baseline_tokens_per_s"]
    interval = overall.get("speedup_interval") or overall["intervals"]["speedup"]
    return [
        model,
        draft,
        hardware,
        speed(plain),
        speed(overall["tokens_per_s"]),
        times(overall["speedup"], interval),
        f"{overall['equal_answers_bf16']} of {overall['answers']}",
    ]


def readme_served() -> str:
    """EAGLE-3 and Medusa-1 of equal text in vLLM, one and eight requests at a time."""
    content = results("eagle3_smollm2")
    eagle3 = {cell["concurrency"]: cell for cell in content["served_both_texts"]["cells"]}
    medusa1 = {cell["concurrency"]: cell for cell in content["served_medusa1_both_texts"]["cells"]}
    rows = [
        _served_row("EAGLE-3, 2 draft tokens", eagle3),
        _served_row("Medusa-1, 1 draft token", medusa1),
    ]
    head = ("SmolLM2, vLLM on 2 CPU cores", "1 request: without:", "with:", "ratio:")
    head += ("8 requests: without:", "with:", "ratio:")
    return table(head, rows)


def readme_lookup() -> str:
    """Prompt lookup, heads, and both in one tree."""
    _, place, _, run = compiled_rows()[0]
    return (
        "Lookup gains where answers repeat. On MT-Bench lookup alone made"
        f" {times(run['over']['lookup_alone']['over_plain'])}, heads alone"
        f" {times(run['over']['heads_alone']['over_plain'])}, and both in one tree"
        f" {times(run['speedup'])} (SmolLM2, {place}, [all runs]"
        "(benchmarks/results/compiled_smollm2.md))."
    )


def readme_expect() -> str:
    """The estimate for 7B models, and what it is not."""
    low, high = estimate_range_7b()
    return (
        f"**What to expect of a 7B model?** We estimate [{low:.1f}x to {high:.1f}x on an H100]"
        "(docs/results.md#a-7b-model), in this project's decoder, one answer at a time."
    )


def readme_equal() -> str:
    """What bfloat16 alone does to answers."""
    xeon = results("smollm2")["loop_free_text"]
    equal = xeon["baselines"]["generate"]["equal_to_plain"]
    return (
        "bfloat16 alone does that: two loops without a draft, ours and transformers' `generate`, agree on"
        f" {equal} of {xeon['overall']['answers']} answers (SmolLM2, Intel Xeon)."
    )


def readme_card() -> str:
    """Training EAGLE-3 for an 8B model on the smallest and on the largest GPU."""
    small = next(iter(GPUS))
    large = "H100, 80 GB"
    settings = {name: (shape, keys) for name, shape, keys in ROWS}
    shape, overrides = settings["llama31_8b_eagle3"]
    on_small = estimate_row("llama31_8b_eagle3", shape, overrides[0], small)
    on_large = estimate_row("llama31_8b_eagle3", shape, [], large)
    return (
        f"**An 8B model, by estimate:** with `{' '.join(overrides[0])}` EAGLE-3 takes {on_small[3]} and"
        f" {on_small[6]} hours on a 24 GB card ({small.split(',')[0]}); as it is, {on_large[3]} and"
        f" {on_large[6]} hours on an H100. Writing the text comes on top:"
        " [all estimates](docs/large_models.md)."
    )


def _served_row(name: str, cells: Mapping[int, Json]) -> list[str]:
    row = [name]
    for concurrency in (1, 8):
        cell = cells[concurrency]
        interval = cell.get("interval") or cell["ratio_interval"]
        row.append(speed(cell["plain_tokens_per_s"]))
        row.append(speed(cell["tokens_per_s"]))
        row.append(times(cell["ratio"], interval))
    return row


# docs/results.md


def results_list() -> str:
    """Every result page with its question and a short answer."""
    rows = []
    for name, answer in SHORT.items():
        title = (RESULTS / f"{name}.md").read_text(encoding="utf-8").split("\n", 1)[0]
        rows.append(
            [title.removeprefix("# "), answer(), f"[{name}](../benchmarks/results/{name}.md)"]
        )
    return table(("question", "answer", "page"), rows)


# Writing and checking


Block = Callable[[], str]
#: Blocks of pages with marks, by page and name.
MARKED: dict[str, dict[str, Block]] = {
    "README.md": {
        "speed": readme_speed,
        "served": readme_served,
        "lookup": readme_lookup,
        "expect": readme_expect,
        "card": readme_card,
        "equal": readme_equal,
    },
    "docs/results.md": {"answers": results_list, "estimate": estimate_7b},
    "docs/evaluation.md": {"acceptance": acceptance_table},
    "docs/large_models.md": {"trees": trees_table},
    "benchmarks/results/compiled_smollm2.md": {"specbench": specbench_table},
    "benchmarks/results/eagle3_smollm2.md": {"sessions": eagle3_served_table},
    "benchmarks/results/qwen_coder.md": {"nodes": coder_nodes_table},
    "benchmarks/results/gpu.md": {"clock": gpu_clock_table, "training": gpu_training_table},
    "benchmarks/results/papers_smollm2.md": {"nodes": nodes_table},
    "benchmarks/results/papers_speed_smollm2.md": {
        "table6": table6_table,
        "epsilon": epsilon_table,
    },
}

MARKS = re.compile(r"<!-- (\w+):start -->")
_FIRST_TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)


def with_blocks(text: str, blocks: Mapping[str, Block]) -> str:
    """Return a page with its marked blocks written again."""
    for name, block in blocks.items():
        start = f"<!-- {name}:start -->"
        end = f"<!-- {name}:end -->"
        before, rest = text.split(start)
        after = rest.split(end)[1]
        text = f"{before}{start}\n{block()}\n{end}{after}"
    return text


def result_page(name: str, text: str) -> str:
    """Return a result page with its answer and its table written again."""
    if name in ANSWERS:
        lines = text.split("\n")
        lines[2] = f"**{ANSWERS[name]()}**"
        text = "\n".join(lines)
    if name in TABLES:
        content = TABLES[name]() + "\n"
        text = _FIRST_TABLE.sub(lambda match: content, text, count=1)
    return text


def pages() -> dict[Path, str]:
    """Return every page that has generated parts, and what it should say."""
    written = {}
    for name in sorted({*ANSWERS, *TABLES}):
        path = RESULTS / f"{name}.md"
        written[path] = result_page(name, path.read_text(encoding="utf-8"))
    for name, blocks in MARKED.items():
        path = ROOT / name
        text = written.get(path) or path.read_text(encoding="utf-8")
        written[path] = with_blocks(text, blocks)
    return written


def main(arguments: Sequence[str]) -> int:
    """Write the pages, or with `--check` name those that differ."""
    is_check = "--check" in arguments
    differing = 0
    for path, text in pages().items():
        if path.read_text(encoding="utf-8") == text:
            continue
        differing += 1
        print(f"{path.relative_to(ROOT)}: {'differs from its JSON' if is_check else 'written'}")
        if not is_check:
            replace_text(path, text)
    return 1 if is_check and differing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
