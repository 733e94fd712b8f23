"""How fast does a batch of many rows decode, how fast can it be, and where does the time go?

    python benchmarks/gpu_batches.py --shapes 1.5B 8B --rows 64 128

Measures the decoding of self-distillation, with random weights at the shapes of Qwen2.5 1.5B and
Llama 3.1 8B, in bfloat16, with CUDA graphs.

*Step*: plain steps of rows that all have `--context` positions. They are timed, and profiled by
torch's profiler by class of kernel. The floor is the larger of two times: the bytes of weights and
cache divided by the measured bandwidth, and the operations divided by the measured matrix rate.

*Answers*: a batch that is refilled as in medusa-selfdistill, with prompts and answers of different
lengths, prefill included, greedy and sampled.

Without a GPU, a small model is measured in place of the large ones. Writes gpu_batches.md and
gpu_batches.json to `--out` after every figure. The row of a failed measurement shows the error.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import checkout  # noqa: F401 (the clone's path)
import torch
from decode import Loaded, Shape, Unsupported
from decode_steps import Context, TargetModelStep, how_steps_run
from gpu_profile import CLASSES, profiled
from shapes import SHAPES, Rates, measure_rates, time_call
from shared import (
    command_line,
    describe_failure,
    machine_facts,
    rounded,
    stand_in_note,
    table,
    write_page,
)

from medusa_train.cli.common import quiet_libraries
from medusa_train.inference.accept import Greedy
from medusa_train.inference.batch_decoder import (
    REFILL_FRACTION,
    BatchDecoder,
    PendingRequest,
    RunningBatch,
)
from medusa_train.inference.sampling import Sampling
from medusa_train.models.precision import default_device, release_memory
from medusa_train.trees.tree import Tree

DTYPE = "bfloat16"
# numbers of steps: timed on a GPU or a CPU (with three that warm up), and profiled. Each step adds
# a position after the context, together fewer than 256
TIMED, TIMED_ON_CPU, PROFILED = 100, 6, 5
#: Least and greatest number of tokens of prompts, and of answers.
PROMPTS, ANSWERS = (32, 192), (32, 320)
#: The default temperature of medusa-selfdistill.
TEMPERATURE = 0.3
Row = dict[str, Any]


def measure_step(one: Loaded, shape: Shape, rows: int, context: int, rates: Rates) -> Row:
    """Time and profile plain steps of `rows` rows after `context` positions."""
    step = Context(one.target_model, context, TIMED + 4 * PROFILED, rows).step(Tree.empty())
    itemsize = one.target_model.dtype.itemsize
    size = itemsize * (shape.sizes.read + shape.sizes.cached(context, rows))
    floor = 1000 * rates.floor(size, shape.sizes.step_operations(1, context, rows), DTYPE)
    step.prepare()
    milliseconds = 1000 * median(step_seconds(step, one.target_model.device))
    step.prepare()
    profile = profiled(step, PROFILED)
    return {
        "steps": how_steps_run(one.target_model),
        "floor_ms": floor,
        "ms": milliseconds,
        "over_floor": milliseconds / floor,
        "tokens_per_s": 1000 * rows / milliseconds,
        "kernel_ms": profile["kernel_ms"],
        "kernels": profile["kernels"],
        "classes": profile["classes"],
        "largest": profile["largest"],
    }


def step_seconds(step: TargetModelStep, device: torch.device) -> list[float]:
    """Time steps in a row, after three untimed steps that warm up and capture graphs."""
    for _ in range(3):
        step()
    count = TIMED if device.type == "cuda" else TIMED_ON_CPU
    return [time_call(step, device) for _ in range(count - 3)]


def measure_answers(one: Loaded, rows: int, seconds: float, sampled: bool) -> Row:
    """Measure the tokens per second of a full batch that is refilled for `seconds`."""
    draw = random.Random(0)
    decoder = BatchDecoder(one.target_model, None, Tree.empty())
    rule = Sampling(TEMPERATURE, 0, 1.0) if sampled else Greedy()
    batch = decoder.begin(ANSWERS[1], (), rule)
    # 1. fill the batch, and run steps until its answers are at different stages
    refill(batch, rows, draw, one.target_model.vocab_size, sampled)
    for _ in range(ANSWERS[0] // 2):
        batch.step()
    # 2. time it; complete answers leave the batch in each step
    passes, tokens = decoder.passes, 0
    started = time.perf_counter()
    while time.perf_counter() - started < seconds:
        if (rows - len(batch.active)) * REFILL_FRACTION >= rows:
            refill(batch, rows - len(batch.active), draw, one.target_model.vocab_size, sampled)
        before = len(batch.active)
        batch.step()
        tokens += before
    spent = time.perf_counter() - started
    return {
        "answers": "sampled" if sampled else "greedy",
        "tokens_per_s": tokens / spent,
        "rows_per_step": tokens / (decoder.passes - passes),
    }


def refill(batch: RunningBatch, count: int, draw: random.Random, vocab: int, sampled: bool) -> None:
    """Add `count` requests with prompts and answers of different lengths."""
    requests = []
    for number in range(count):
        prompt = [draw.randrange(vocab) for _ in range(draw.randint(*PROMPTS))]
        generator = torch.Generator().manual_seed(number) if sampled else None
        requests.append(PendingRequest(number, prompt, generator))
    joined = len(batch.active)
    batch.add_requests(requests)
    for row in batch.active[joined:]:
        row.limit = draw.randint(*ANSWERS)


def measure(args: argparse.Namespace, device: torch.device, rates: Rates) -> Iterator[Row]:
    """Measure every shape, setting and number of rows; the row of a failed measurement has the
    error.
    """
    for name in args.shapes:
        shape = Shape.or_small(name, device)
        shared: Loaded | None = None
        for setting in args.settings:
            first = {"shape": shape.name, "setting": setting}
            try:
                one = shape.load(DTYPE, setting, device, (), shared)
            except Unsupported as error:
                yield {**first, "obstacle": str(error)}
                continue
            shared = shared or one
            for rows in args.rows:
                at = {**first, "rows": rows}
                yield attempt(at, measure_step, one, shape, rows, args.context, rates)
                release_memory()
                for sampled in (False, True) if args.seconds else ():
                    yield attempt(at, measure_answers, one, rows, args.seconds, sampled)
                    release_memory()
        del shared
        release_memory()


def attempt(at: Row, measure_one: Callable[..., Row], *given: Any) -> Row:
    """Return the measured figures, or the error if measuring failed: other figures do not depend on
    it.
    """
    try:
        return {**at, **measure_one(*given)}
    except Exception as error:
        return {**at, "obstacle": describe_failure(error)}


def write_report(out: Path, machine: Row, context: int, rates: Rates, rows: Sequence[Row]) -> str:
    """Write gpu_batches.md and gpu_batches.json; return the page."""
    kinds = [*CLASSES, "other"]
    steps, answers, failed = [], [], []
    for row in rows:
        first = [row["shape"], row["setting"], str(row.get("rows", ""))]
        if "obstacle" in row:
            failed.append(f"{' '.join(first)}: {row['obstacle']}")
        elif "answers" in row:
            cells = [f"{row['tokens_per_s']:,.0f}", f"{row['rows_per_step']:.1f}"]
            answers.append([*first, row["answers"], *cells])
        else:
            cells = [row["steps"], f"{row['floor_ms']:.2f}", f"{row['ms']:.2f}"]
            cells += [f"{row['over_floor']:.2f}", f"{row['tokens_per_s']:,.0f}"]
            cells += [f"{row['kernel_ms']:.2f}", f"{row['kernels']:,.0f}"]
            for kind in kinds:
                milliseconds, number = row["classes"].get(kind, (0.0, 0.0))
                cells.append(f"{milliseconds:.2f}" if number else "")
            steps.append([*first, *cells])
    note = f"Plain steps after {context:,} positions a row; milliseconds of kernels by their class."
    note += stand_in_note(machine)
    titles = ["shape", "setting", "rows", "steps", "floor ms", "ms", "over floor", "tokens/s"]
    titles += ["kernels' ms", "kernels", *kinds]
    parts = [note, table(titles, steps, 4)]
    if answers:
        parts.append(
            f"Answers of {ANSWERS[0]} to {ANSWERS[1]} tokens to prompts of {PROMPTS[0]} to"
            f" {PROMPTS[1]}, prefill included."
        )
        names = ["shape", "setting", "rows", "answers", "tokens/s", "rows a step"]
        parts.append(table(names, answers, 4))
    if failed:
        parts.append("\n".join(f"- {line}" for line in failed))
    record = {
        "machine": machine,
        "context": context,
        "bandwidth": rates.bandwidth,
        "matrix": rates.matrix[DTYPE],
        "rows": [rounded(row) for row in rows],
    }
    return write_page(out, "gpu_batches", "Batches of many rows", record, parts)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = command_line(__doc__, "runs/benchmarks/batches")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["1.5B", "8B"])
    parser.add_argument("--rows", nargs="+", type=int, default=[64, 128], metavar="B")
    parser.add_argument("--context", type=int, default=1024, metavar="N", help="1024")
    parser.add_argument(
        "--settings", nargs="+", default=["static"], choices=["stock", "static", "compiled"]
    )
    parser.add_argument(
        "--seconds", type=float, default=6.0, help="of answers, greedy and sampled; 0: none (6)"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure everything that was asked for; the exit code is 1 if something failed."""
    quiet_libraries()
    args = parse_arguments(arguments)
    machine = machine_facts(__file__, arguments)
    device = default_device()
    rates = measure_rates(device, [DTYPE], 1.0 if device.type == "cuda" else 0.05)
    rows: list[Row] = []
    page = ""
    for row in measure(args, device, rates):
        rows.append(row)
        page = write_report(args.out, machine, args.context, rates, rows)
        print(f"{row['shape']} {row['setting']} {row.get('rows', '')}", flush=True)
    print(page)
    return 1 if any("obstacle" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
