"""Do trained heads pay in a vLLM server, at which concurrency and with how many draft tokens?

    VLLM_PYTHON=.venv-vllm/bin/python python benchmarks/served.py runs/smollm2_m1

Runs `medusa-eval --serve` greedily and at temperature 0.7: vLLM without heads beside vLLM with 1 to 4 draft tokens, at
1 to 32 concurrent requests. It says how long that takes: by estimate 25 minutes for SmolLM2 on two cores. Interrupted,
the same command resumes block by block, and what is complete is not measured again. Writes served.md and served.json
to `--out`; the reports of both modes lie in the run, where `medusa-export` reads them for the model card.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]

from shared import machine_facts, machine_line, rounded, warn_if_busy, write_result  # noqa: E402

from medusa_train.config.paths import resolve_path  # noqa: E402
from medusa_train.evaluation.questions import load_bench  # noqa: E402
from medusa_train.export.card import speed_table  # noqa: E402
from medusa_train.server_bench.report import HOW, advice_note, figures_table, recommendation_lines, rows_of  # noqa: E402

CODE = "import sys; from medusa_train.cli.evaluate import main; sys.argv[0] = 'medusa-eval'; main()"
#: Figures of served.json that the result keeps, by their names there.
KEPT = ("concurrency", "server", "answers", "tokens", "tokens_per_s", "ratio", "ratio_interval", "verdict")
COUNTED = ("tokens_per_step", "acceptance", "drafts", "equal_answers", "compared_answers")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure both modes, and write the page; returns the exit code of the first command that fails."""
    args = _parse(arguments)
    machine = machine_facts(__file__, arguments)
    warn_if_busy(machine)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB of each server; ignored on a GPU
    home, name = resolve_path(args.run) or args.run, load_bench(args.bench).name
    modes = {"greedy": [], f"temperature {args.temperature:g}": _sampling(args.temperature)}
    reports: dict[str, dict[str, Any]] = {}
    for mode, flags in modes.items():
        words = [*_command(args), *flags]
        folder = home / "eval" / (f"served-{name}" + (f"-sampling-t{args.temperature:g}" if flags else ""))
        report = finished_report(folder, shlex.join(["medusa-eval", *words]))
        if report is None:
            code = subprocess.run([sys.executable, "-c", CODE, *words], env=_environment(), check=False).returncode
            if code:
                return code
            report = json.loads((folder / "served.json").read_text(encoding="utf-8"))
        else:
            print(f"{mode}: {folder} is complete")
        reports[mode] = report
    write_result(args.out, "served", {"machine": machine, **to_record(reports)}, to_page(machine, reports))
    print(f"written: {args.out / 'served.md'}")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="directory of a trained run")
    parser.add_argument("--bench", default="data/bench/smollm2/question.jsonl", help="bench, or a file of questions")
    parser.add_argument("--limit", type=int, default=16, help="number of questions")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 3, 4], help="numbers of draft tokens")
    parser.add_argument("--temperature", type=float, default=0.7, help="of the second mode")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--serve-args", default="--enforce-eager --max-model-len 1024", help="further arguments of vLLM's servers"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "benchmarks")
    return parser.parse_args(arguments)


def _command(args: argparse.Namespace) -> list[str]:
    """Return the arguments of `medusa-eval` that both modes have."""
    served_with = ", ".join(json.dumps(word) for word in shlex.split(args.serve_args))
    return [
        *("--serve", "--model", str(args.run), "--bench", args.bench, "--limit", str(args.limit)),
        *("--max-new-tokens", str(args.max_new_tokens), "--dtype", args.dtype),
        f"concurrency={args.concurrency}",
        f"serve_speculative_tokens={args.tokens}",
        *([f"serve_args=[{served_with}]"] if served_with else []),
    ]


def _sampling(temperature: float) -> list[str]:
    return ["--acceptance", "sampling", "--temperature", f"{temperature:g}"]


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}


def finished_report(folder: Path, command: str) -> dict[str, Any] | None:
    """Return the report in `folder` if this very command completed it; None if there is anything left to measure."""
    path = folder / "served.json"
    if not path.is_file() or (folder / "blocks.jsonl").exists():
        return None
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return report if report["meta"]["command"] == command else None


def to_record(reports: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return what served.json of the results keeps: a list of figures per row, and what was run."""
    columns = [*KEPT, "first_token_ms", "per_token_ms", *COUNTED]
    record: dict[str, Any] = {"columns": columns}
    for mode, report in reports.items():
        record[mode] = [rounded(_figures(row)) for row in rows_of(report)]
        record[f"{mode}: recommendation"] = [rounded(list(one.values())) for one in report["recommendation"]]
        record[f"{mode}: run"] = report["meta"]
    return record


def _figures(row: Mapping[str, Any]) -> list[Any]:
    times = [row[name] and 1000 * row[name]["median"] for name in ("time_to_first_token_s", "time_per_token_s")]
    return [*(row.get(name) for name in KEPT), *times, *(row.get(name) for name in COUNTED)]


def to_page(machine: Mapping[str, Any], reports: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page: how it was measured, a table per mode, and the recommendations at its end."""
    first = next(iter(reports.values()))["meta"]
    name = Path(str(first["model"])).name
    parts = [f"# {name} served by {first.get('server', 'vLLM')}", machine_line(machine)]
    parts.append(
        f"Bench {first['bench']}, {first['questions']} questions, at most {first['max_new_tokens']} new tokens; "
        f"servers: {first['turns']}."
    )
    for mode, report in reports.items():
        meta = report["meta"]
        parts += [f"## {mode[0].upper()}{mode[1:]}", f"`{meta['command']}`, {meta['seconds'] / 60:.0f} minutes."]
        parts.append(figures_table(report).markdown())
        parts += [f"Note: {note}." for note in meta["notes"]]
    parts += ["## How to read it", "\n".join(f"- {line}" for line in HOW), "## Recommendation"]
    for mode, report in reports.items():
        parts += [f"{mode[0].upper()}{mode[1:]}:", speed_table(report).markdown()]
        parts.append("\n".join(f"- {line}" for line in recommendation_lines(report)))
    parts.append(advice_note(next(iter(reports.values()))))
    return "\n\n".join(part for part in parts if part) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
