"""Run everything that needs a GPU, and write one page and one JSON file. Start it as `bash
benchmarks/gpu.sh`.

    bash benchmarks/gpu.sh --dry-run          # list and check all steps and wheels; needs no GPU
    WHEELS=wheels bash benchmarks/gpu.sh      # 31 minutes at most
    WHEELS=wheels bash benchmarks/gpu.sh --part 2   # one part of 8 minutes at most
    WHEELS=wheels bash benchmarks/gpu.sh --minutes 15   # or 8: only the most useful steps

Finished steps are recorded in gpu.json and not run again. So the same command continues an
interrupted run, also on another machine that has the directory `--out`. Logs, runs and raw
measurements go to `--work`.

Exit codes: 0 if every step succeeded (with `--dry-run`: can run), 1 if one did not, 2 for a usage
error, 130 if interrupted (Ctrl-C), 143 if terminated.
"""

from __future__ import annotations

import argparse
import json
import math
import operator
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from checkout import ROOT
from coder_plan import CODERS, coder_plan
from decode_steps import GRAPHS
from gpu_plan import (
    ALL_SECONDS,
    BUILT,
    PART_SECONDS,
    Step,
    plan,
    problems_of,
    short_plan,
    wheels,
)
from shared import machine_facts, machine_line, rounded, table, write_result

from medusa_train.cli.common import quiet_libraries
from medusa_train.errors import (
    CheckpointError,
    ConfigError,
    MedusaError,
    signal_exit_code,
)
from medusa_train.io import existing_parent
from medusa_train.training.stop_signals import signals_as_interrupts

MINUTES = (15, 8)
GRACE = 10  # seconds between SIGINT and SIGKILL
DONE, FAILED, STOPPED, SKIPPED = "done", "failed", "stopped at its limit", "skipped"
#: Metrics that are copied from a report of medusa-eval.
OVERALL = (
    "answers",
    "acceleration_rate",
    "overhead",
    "speedup",
    "speedup_over_generate",
    "tokens_per_s",
)
OVERALL += (
    "baseline_tokens_per_s",
    "generate_tokens_per_s",
    "equal_answers",
    "tie_answers",
    "compared_answers",
    "equal_answers_bf16",
    "compared_answers_bf16",
)
GOALS_NOTE = "Goals are those of one H200: 7B shape, bfloat16, random weights."

Record = dict[str, Any]
OPERATORS = {"<=": operator.le, ">=": operator.ge}


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/gpu"), metavar="DIR", help="of gpu.md, gpu.json"
    )
    parser.add_argument(
        "--work", default="runs/gpu", metavar="DIR", help="logs, trained models (runs/gpu)"
    )
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument(
        "--part", type=int, choices=sorted({step.part for step in plan()}), help="default: all"
    )
    chosen.add_argument(
        "--minutes",
        type=int,
        choices=MINUTES,
        help="another plan, of what so many minutes are worth most for; no step begins after them",
    )
    chosen.add_argument(
        "--coder",
        choices=CODERS,
        help="another plan: a model that people run, from its pieces to HumanEval; tiny: the same"
        " with the embedded model, on a CPU",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="list and check steps; exit code 1 if one cannot run"
    )
    return parser.parse_args(arguments)


# --- Running ----------------------------------------------------------------------------------------------------------


def pending(steps: Sequence[Step], part: int | None, record: Record) -> list[Step]:
    """Return the steps to run: the unfinished steps of this part, and finished steps whose missing
    files a later step needs.

    For example, a later step may need a model that was trained on another machine.
    """
    chosen: list[Step] = []
    for step in reversed(steps):
        gone = step.makes is not None and not (ROOT / step.makes).exists()
        if (part in (None, step.part) and not is_done(step, record)) or (
            gone and any(step.makes in later.needs for later in chosen)
        ):
            chosen.append(step)
    return chosen[::-1]


def is_done(step: Step, record: Record) -> bool:
    """Return whether a step is finished with the same arguments. Plans may use the same step name
    with other arguments.
    """
    finished = record["steps"].get(step.name, {})
    return finished.get("status") == DONE and finished.get("words") == list(step.words)


def run_step(step: Step, log: Path, left: float = math.inf) -> Record:
    """Run one step with its output in `log`; stop it and its children at its time limit.

    Args:
        left: seconds that are left for all steps together.
    """
    if left < step.expected / 2:
        return {"status": SKIPPED, "seconds": 0, "reason": f"{max(0, left):.0f} s were left"}
    limit = min(step.limit, left)
    absent = [
        f"{path} is missing: {how}"
        for path, how in step.needs.items()
        if not (ROOT / path).exists()
    ]
    if absent:
        return {"status": SKIPPED, "seconds": 0, "reason": "; ".join(absent)}
    log.parent.mkdir(parents=True, exist_ok=True)
    for path in filter(None, (step.page, step.figures)):
        (ROOT / path).unlink(missing_ok=True)  # results of an earlier run
    started = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            step.command, cwd=ROOT, stdout=file, stderr=file, start_new_session=True
        )
        try:
            code = process.wait(limit)
            status = DONE if code == 0 else FAILED
        except subprocess.TimeoutExpired:
            code, status = None, STOPPED
        finally:
            end_group(process)
    record: Record = {"status": status, "seconds": round(time.monotonic() - started)}
    if status != DONE:
        record["reason"] = f"exit code {code}" if code is not None else f"after {limit:.0f} s"
        last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        record["output"] = [line[:200] for line in last[-12:]]
    return record


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and all of its children, including those that outlive it. SIGINT lets pytest
    write its report before it ends.
    """
    try:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
    finally:  # also if another Ctrl-C ends the wait
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def results_of(step: Step) -> Record:
    """Read the page and the figures that a step wrote. Title and machine are left out, because the
    report contains them once.
    """
    found: Record = {}
    if step.page is not None and (ROOT / step.page).exists():
        lines = (ROOT / step.page).read_text(encoding="utf-8").splitlines()
        lines = [line for line in lines if not line.startswith("# ") and "Python 3." not in line]
        last = max(
            (number for number, line in enumerate(lines) if line.startswith("|")),
            default=len(lines),
        )
        found["page"] = "\n".join(lines[: last + 1]).strip().splitlines()  # up to its last table
    if (
        step.figures is not None
        and step.figures.endswith(".xml")
        and (ROOT / step.figures).exists()
    ):
        found["figures"] = test_results(ROOT / step.figures)
    elif step.figures is not None and (ROOT / step.figures).exists():
        figures = json.loads((ROOT / step.figures).read_text(encoding="utf-8"))
        if "overall" in figures:
            figures = {"overall": {key: figures["overall"].get(key) for key in OVERALL}}
        found["figures"] = rounded(
            {key: value for key, value in figures.items() if key != "machine"}
        )
    return found


def test_results(path: Path) -> Record:
    """Count the tests in a JUnit report, and list each failed test with the first line of its
    error.
    """
    root = ET.parse(path)
    suite = next(root.iter("testsuite"))  # its counts include only tests that ended
    count = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    failed = [
        f"{case.get('name')}: {part.get('message', '').partition(chr(10))[0][:160]}"
        for case in root.iter("testcase")
        for part in case
        if part.tag in ("failure", "error")
    ]
    passed = count["tests"] - count["failures"] - count["errors"] - count["skipped"]
    return {"passed": passed, "skipped": count["skipped"], "failed": failed}


test_results.__test__ = False  # type: ignore[attr-defined]  # not a pytest test


def run(
    steps: Sequence[Step], args: argparse.Namespace, arguments: Sequence[str] | None = None
) -> bool:
    """Run the pending steps and write the report after every step; return whether all of them
    succeeded.
    """
    record = load_record(args.out)
    todo = pending(steps, args.part, record)
    words = sys.argv[1:] if arguments is None else arguments
    record["machine"] = {
        **machine_facts(__file__, words),
        "command": " ".join(["bash benchmarks/gpu.sh", *words]),
    }
    expected, limit = (sum(getattr(step, name) for step in todo) for name in ("expected", "limit"))
    print(
        f"{len(todo)} steps to run, about {expected / 60:.0f} minutes, at most {limit / 60:.0f}",
        flush=True,
    )
    succeeded = True
    end = math.inf if args.minutes is None else time.monotonic() + 60 * args.minutes
    for step in todo:
        print(
            f"{step.name}: about {step.expected} s, at most {step.limit} s ...", end=" ", flush=True
        )
        one = {"part": step.part, "device": record["machine"]["device"], "words": list(step.words)}
        left = end - time.monotonic()
        ran = run_step(step, ROOT / args.work / f"{step.name}.log", left)
        one |= ran | ({} if ran["status"] == SKIPPED else results_of(step))
        print(
            f"{one['status']} after {one['seconds']} s {one.get('reason', '')}".rstrip(), flush=True
        )
        record["steps"][step.name] = better_of(record["steps"].get(step.name, {}), one)
        record["goals"] = goals(record["steps"])
        # a later run continues from this file
        write_result(args.out, "gpu", record, markdown(steps, record))
        succeeded = succeeded and one["status"] == DONE
    print(f"{args.out}/gpu.md, gpu.json: {progress(steps, record)}")
    return succeeded


def better_of(earlier: Record, one: Record) -> Record:
    """Return which record of a step to keep: the new one, unless it failed and the earlier one is a
    finished result.
    """
    if one["status"] == DONE or earlier.get("status") != DONE:
        return one
    return {**earlier, "reason": f"run again: {one['status']}, {one['reason']}"}


def load_record(out: Path) -> Record:
    """Read the record of earlier runs; CheckpointError if it is damaged."""
    path = out / "gpu.json"
    record: Record = {}
    if path.is_file():
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise CheckpointError(
                f"{path} is not JSON ({error}); move it away, or choose another --out"
            ) from error
    if not isinstance(record, dict) or not isinstance(record.get("steps", {}), dict):
        raise CheckpointError(
            f"{path} has no record of steps; move it away, or choose another --out"
        )
    return {"machine": {}, "goals": [], **record, "steps": record.get("steps", {})}


def check_writable(args: argparse.Namespace) -> None:
    """Raise ConfigError before the first step if logs or results cannot be written."""
    for option, directory in (("--out", args.out), ("--work", ROOT / args.work)):
        existing = existing_parent(directory)
        try:
            with tempfile.TemporaryFile(dir=existing):
                pass
        except OSError as error:
            raise ConfigError(
                f"{option}: {existing} cannot be written ({error.strerror}); choose another directory"
            ) from error


def progress(steps: Sequence[Step], record: Record) -> str:
    """Count the finished steps."""
    done = sum(is_done(step, record) for step in steps)
    return f"{done} of {len(steps)} steps are done"


# --- The report -------------------------------------------------------------------------------------------------------


def goals(steps: Mapping[str, Record]) -> list[Record]:
    """Compare the figures with the goals. Goals whose figure was not measured are left out."""
    found: list[tuple[str, float, str, float]] = []
    rows = [row for one in steps.values() for row in one.get("figures", {}).get("rows", [])]
    seven = [row for row in rows if row["shape"] == "7B" and "plain" in row.get("ms_and_floor", {})]
    if seven:
        graphs = [row for row in seven if row["steps"] == GRAPHS]
        best = min(graphs or seven, key=lambda row: row["ms_and_floor"]["plain"][0])["ms_and_floor"]
        plain, floor = best["plain"]
        found.append(
            (
                "plain and tree steps replayed as CUDA graphs (1: both)",
                float(bool(graphs)),
                ">=",
                1.0,
            )
        )
        found.append(("plain step over its byte floor", plain / floor, "<=", 1.25))
        if "tree 63" in best:
            found.append(
                (
                    "step of 63 nodes without heads over plain step",
                    best["tree 63"][0] / plain,
                    "<=",
                    1.08,
                )
            )
        if "heads" in best:
            found.append(
                (
                    "five heads over their byte floor",
                    best["heads"][0] / best["heads"][1],
                    "<=",
                    1.25,
                )
            )
    cases = [case for one in steps.values() for case in one.get("figures", {}).get("cases", [])]
    for what, name in (("shape1", "Medusa-1"), ("shape2", "Medusa-2")):
        if rates := [case["mfu"] for case in cases if case["what"] == what and "mfu" in case]:
            found.append((f"{name} training over the measured matrix rate", max(rates), ">=", 0.45))
    return [
        {
            "goal": name,
            "wanted": f"{sign} {limit}",
            "measured": round(value, 3),
            "met": OPERATORS[sign](value, limit),
        }
        for name, value, sign, limit in found
    ]


def markdown(steps: Sequence[Step], record: Record) -> str:
    """Format the page: the steps, the goals, and the tables of every finished step."""
    parts = [
        "# On a GPU",
        machine_line(record["machine"]),
        f"`bash benchmarks/gpu.sh`: {progress(steps, record)}.",
    ]
    rows = []
    for step in steps:
        one = record["steps"].get(step.name, {"status": "not run", "seconds": 0})
        said = one.get("reason", "")
        if "passed" in (figures := one.get("figures", {})):
            said = (
                f"{figures['passed']} passed, {len(figures['failed'])} failed, {figures['skipped']}"
                f" skipped {said}"
            )
        if one.get("device") not in (None, record["machine"]["device"]):
            said += f" on {one['device']}"
        if one.get("words", list(step.words)) != list(step.words):
            said += " (other arguments)"
        rows.append(
            [step.name, str(step.part), one["status"], f"{one['seconds']}", f"{step.limit}", said]
        )
    parts.append(table(["step", "part", "result", "seconds", "limit", ""], rows, 3))
    if record["goals"]:
        lines = [
            [
                one["goal"],
                one["wanted"],
                f"{one['measured']:.2f}",
                "yes" if one["met"] else "**no**",
            ]
            for one in record["goals"]
        ]
        parts += ["## Goals", GOALS_NOTE, table(["figure", "goal", "measured", "met"], lines)]
    for step in steps:
        one = record["steps"].get(step.name, {})
        if page := one.get("page"):
            parts += [f"## {step.name}", f"`{' '.join(one['words'])}`", "\n".join(page)]
        if failed := one.get("figures", {}).get("failed"):
            parts += [f"## {step.name}: failed tests", "\n".join(f"- {line}" for line in failed)]
        if output := one.get("output"):
            parts += [f"## {step.name}: {one['status']}", "```\n" + "\n".join(output) + "\n```"]
    return "\n\n".join(parts) + "\n"


# --- Without running --------------------------------------------------------------------------------------------------


def dry_run(steps: Sequence[Step], args: argparse.Namespace) -> bool:
    """Print and check every step that would run, and the wheels; return whether all can run."""
    todo = pending(steps, args.part, load_record(args.out))
    most = ALL_SECONDS if args.minutes is None else 60 * args.minutes
    most_of_part = PART_SECONDS if args.minutes is None and args.coder is None else most
    total = sum(step.limit for step in steps)
    print(f"all parts: at most {total} s of {most} s")
    problems = int(total > most)
    for part in sorted({step.part for step in steps}):
        chosen = [step for step in steps if step.part == part]
        expected, limit = (
            sum(getattr(step, name) for step in chosen) for name in ("expected", "limit")
        )
        print(f"part {part}: about {expected} s, at most {limit} s")
        if limit > most_of_part:
            problems += 1
            print(f"  problem: a part may take {most_of_part} s")
        for step in chosen:
            state = "" if step in todo else " (not run: finished before, or of another part)"
            print(f"  {step.name}: about {step.expected} s, at most {step.limit} s{state}")
            print(f"    {' '.join(step.command)}")
            for problem in problems_of(step, steps):
                problems += step in todo
                print(f"    PROBLEM: {problem}")
    problems += print_wheels()
    print(f"problems: {problems}" if problems else "every step can run, on a machine with a GPU")
    return not problems


def print_wheels() -> int:
    """Print the wheels that the steps need, and how to get them; return the number of problems."""
    needed = wheels()
    names = " ".join(f"{name}=={pin}" for name, pin in needed.items() if name not in BUILT)
    print(
        "wheels beyond PyTorch's image, for WHEELS=DIR, with the GPU machine's version of Python:"
    )
    print(f"  python -m pip download --no-deps --only-binary=:all: --dest DIR {names}")
    for name in BUILT:
        print(
            "  DS_BUILD_OPS=0 python -m pip wheel --no-deps --no-build-isolation -w DIR"
            f" {name}=={needed[name]}"
        )
    problems = [f"{name} is not in constraints.txt" for name, pin in needed.items() if pin is None]
    for problem in problems:
        print(f"  PROBLEM: {problem}")
    return len(problems)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run or check the steps; return exit code 0 if every step succeeded, or can run."""
    args = parse_arguments(arguments)
    quiet_libraries()
    if args.coder is not None:
        steps = coder_plan(args.coder, args.work)
    elif args.minutes is not None:
        steps = short_plan(args.minutes, args.work)
    else:
        steps = plan(args.work)
    try:
        check_writable(args)
        if args.dry_run:
            return 0 if dry_run(steps, args) else 1
        with signals_as_interrupts():  # so that SIGTERM also ends the running step
            return 0 if run(steps, args, arguments) else 1
    except MedusaError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as error:
        print(
            "\nerror: interrupted; the same command continues with what is not done",
            file=sys.stderr,
        )
        return signal_exit_code(error)


if __name__ == "__main__":
    sys.exit(main())
