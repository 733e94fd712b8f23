"""The Spec-Bench table: all 480 questions, MT-Bench's 80 among them, 128 new tokens a turn.

    MEDUSA_BENCH_DIR=... python benchmarks/spec_bench.py runs/demo

Runs `medusa-eval` and keeps report.md and report.json of it under benchmarks/results/ (the answers and the page, which
hold the questions, stay in the run). A run that was stopped goes on where it stopped. Further arguments are handed on.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--bench", default="specbench")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    args, further = parser.parse_known_args()
    command = [sys.executable, "-m", "medusa_train.cli.evaluate", "--model", str(args.run), "--bench", args.bench]
    command += ["--max-new-tokens", str(args.max_new_tokens), *further]
    code = subprocess.run(command, check=False).returncode
    if code:
        return code
    RESULTS.mkdir(parents=True, exist_ok=True)
    for suffix in ("md", "json"):
        target = RESULTS / f"{args.bench}.{suffix}"
        shutil.copyfile(args.run / "eval" / args.bench / f"report.{suffix}", target)
        print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
