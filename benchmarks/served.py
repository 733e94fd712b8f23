"""Does a draft make a vLLM server faster, and does vLLM accept what this project accepts?

    VLLM_PYTHON=ENV/bin/python python benchmarks/served.py runs/qwen25_coder_05b_m1
    runs/qwen25_coder_05b_eagle3

Each run is exported and measured by `medusa-eval --serve`: vLLM without a draft beside vLLM with
chains of `--tokens` draft tokens, in turns, greedy, at each `--concurrency`. vLLM's counters give
its acceptance by position. Beside it stands ours: the same chains along this project's own greedy
answers to the same questions. They are counted in ranks.jsonl of RUN/eval/BENCH, if that
evaluation has these questions, dtype and length of answers; else the questions are answered here
first, by plain decoding.

Writes served_drafts.md and served_drafts.json to `--out`, and the reports of each run below it. The
same command continues after an interruption.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]

from shared import machine_facts, rounded, table, warn_if_busy, write_page  # noqa: E402

from medusa_train.evaluation.questions import load_bench  # noqa: E402
from medusa_train.tree_search.fit import Trace, node_acceptance  # noqa: E402
from medusa_train.trees.tree import Tree  # noqa: E402

Json = dict[str, Any]
TITLE = "Does a draft make a vLLM server faster, and does vLLM accept what is accepted here?"
NOTE = (
    "*over plain*: tokens per second over the server without a draft, which ran beside it, with a"
    " 95 % interval over blocks of questions. *accepted*: share of steps whose token at position 1,"
    " 2, ... was accepted; *here*: the same chain along this project's own greedy answers. *equal*:"
    " greedy answers that equal those of the server without a draft."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every run, and write the page; returns the exit status."""
    options = parse_arguments(arguments)
    machine = machine_facts(__file__, arguments)
    warn_if_busy()
    rows: list[Json] = []
    for run in options.runs:
        directory = options.out / "served_drafts" / run.resolve().name
        served = serve(run, options, directory / "served")
        report = own_report(run, served["meta"]["weights"], options, directory / "own")
        rows += rows_of(run.resolve().name, served, read_traces(report))
    settings = {
        "bench": options.bench,
        "questions": options.limit,
        "max_new_tokens": options.max_new_tokens,
        "dtype": options.dtype,
        "server": served["meta"]["server"],
        "arguments": served["meta"]["arguments"],
    }
    record = {"machine": machine, "settings": settings, "rows": rounded(rows)}
    print(write_page(options.out, "served_drafts", TITLE, record, [rows_table(rows), NOTE]))
    return 0


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="run directories")
    parser.add_argument("--bench", default="humaneval", help="name or question file")
    parser.add_argument("--limit", type=int, default=16, help="questions")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 3], help="draft tokens")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-model-len", type=int, default=2048, help="positions of the server")
    parser.add_argument(
        "--eager",
        action="store_true",
        help="compile nothing in vLLM: it starts sooner, but is slower",
    )
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "benchmarks")
    return parser.parse_args(arguments)


def serve(run: Path, options: argparse.Namespace, directory: Path) -> Json:
    """Measure vLLM without a draft and with the run's; returns its report."""
    words = [f"concurrency={options.concurrency}", f"serve_speculative_tokens={options.tokens}"]
    server = ["--max-model-len", str(options.max_model_len)]
    if options.eager:
        server.append("--enforce-eager")
    words.append(f"serve_args={json.dumps(server)}")
    evaluate(run, options, directory, "--serve", *words)
    report: Json = json.loads((directory / "served.json").read_text(encoding="utf-8"))
    return report


def own_report(run: Path, weights: str, options: argparse.Namespace, directory: Path) -> Path:
    """Return a directory with the ranks of the draft's guesses along our answers to the questions.

    That of the run's own evaluation, if it fits; else `directory`, where they are answered.
    `weights` is the digest of the draft that was served.
    """
    bench = load_bench(options.bench).limited(options.limit)
    asked = {question.question_id for question in bench.questions}
    evaluated = run / "eval" / bench.name
    for candidate in (evaluated, directory):
        if fits(candidate, asked, weights, options):
            return candidate
    keys = ("score=false", "generate=false", "prompt_lookup=false", "exactness=false")
    evaluate(run, options, directory, "--tree", "none", *keys)
    return directory


def fits(report: Path, asked: set[int | str], weights: str, options: argparse.Namespace) -> bool:
    """Return whether a report has this draft's guesses along greedy answers to exactly these
    questions, in this dtype and length.
    """
    if not (report / "report.json").is_file() or not (report / "ranks.jsonl").is_file():
        return False
    meta = json.loads((report / "report.json").read_text(encoding="utf-8"))["meta"]
    lines = (report / "ranks.jsonl").read_text(encoding="utf-8").splitlines()
    answered = {json.loads(line)["question_id"] for line in lines}
    return (
        answered == asked
        and meta["weights"] == weights
        and meta["max_new_tokens"] == options.max_new_tokens
        and meta["dtype"] == options.dtype
        and meta["decoding"]["acceptance"] == "greedy"
    )


def evaluate(run: Path, options: argparse.Namespace, directory: Path, *words: str) -> None:
    """Run medusa-eval on the questions; its failure ends this script with its status."""
    command = [sys.executable, "-m", "medusa_train.cli.evaluate"]
    command += ["--bench", options.bench, "--model", str(run), "--limit", str(options.limit)]
    command += ["--max-new-tokens", str(options.max_new_tokens), "--dtype", options.dtype]
    command += ["--output-dir", str(directory.resolve()), *words]
    done = subprocess.run(command, check=False)
    if done.returncode:
        sys.exit(done.returncode)


def read_traces(report: Path) -> list[Trace]:
    """Read the ranks of a report, one trace for each answer."""
    lines = (report / "ranks.jsonl").read_text(encoding="utf-8").splitlines()
    return [Trace(json.loads(line)["ranks"], []) for line in lines]


def rows_of(name: str, served: Json, traces: Sequence[Trace]) -> list[Json]:
    """Return a row for each server with a draft and concurrency: speed, vLLM's acceptance, ours."""
    plain = {}
    for cell in served["cells"]:
        if cell["server"] == "plain":
            plain[cell["session"], cell["concurrency"]] = cell
    rows = []
    for cell in served["cells"]:
        beside = plain.get((cell["session"], cell["concurrency"]))
        if cell["server"] == "plain" or beside is None:
            continue
        own = node_acceptance(traces, Tree.chain(cell["num_speculative_tokens"] or 0)) or []
        rows.append(
            {
                "run": name,
                "method": served["meta"]["draft"]["method"],
                "plain_tokens_per_s": beside["tokens_per_s"],
                **{key: cell[key] for key in COPIED},
                "own_acceptance": own,
                # as vLLM counts them: an answer's last step may pass its end
                "own_tokens_per_step": 1 + sum(own),
            }
        )
    return rows


#: Figures of a cell of served.json that a row repeats.
COPIED = (
    "concurrency",
    "num_speculative_tokens",
    "answers",
    "tokens",
    "tokens_per_s",
    "ratio",
    "ratio_interval",
    "verdict",
    "tokens_per_step",
    "acceptance",
    "drafts",
    "equal_answers",
    "compared_answers",
)


def rows_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    titles = (
        "run",
        "requests",
        "draft tokens",
        "plain tokens/s",
        "tokens/s",
        "over plain",
        "accepted",
        "accepted here",
        "per step",
        "here",
        "equal",
    )
    lines = []
    for row in rows:
        bounds = row["ratio_interval"]
        ratio = f"{row['ratio']:.2f}x"
        if bounds is not None:
            ratio += f" [{bounds[0]:.2f}, {bounds[1]:.2f}]"
        per_step = row["tokens_per_step"]
        lines.append(
            [
                row["run"],
                str(row["concurrency"]),
                str(row["num_speculative_tokens"]),
                f"{row['plain_tokens_per_s']:.1f}",
                f"{row['tokens_per_s']:.1f}",
                ratio,
                shares(row["acceptance"]),
                shares(row["own_acceptance"]),
                "" if per_step is None else f"{per_step:.2f}",
                f"{row['own_tokens_per_step']:.2f}",
                f"{row['equal_answers']}/{row['compared_answers']}",
            ]
        )
    return table(titles, lines)


def shares(values: Sequence[float]) -> str:
    """Write the acceptance of each position."""
    return " ".join(f"{value:.2f}" for value in values)


if __name__ == "__main__":
    sys.exit(main())
