"""Where does the time of a decoding step or a training step go, by class of kernel?

    python benchmarks/gpu_profile.py decode --contexts 1024 4096 --nodes 0 63 --settings static compiled
    python benchmarks/gpu_profile.py train --parts medusa1_7b

Runs steps at the shape of a 7B model under torch's profiler. Reports the wall time of a step, the
time of all its kernels, and for each class of kernels the time and the number. The difference
between wall time and kernel time is gaps between kernels. Without a GPU a small model is profiled,
and its operators are classified by name. Writes gpu_profile.md and gpu_profile.json to `--out`
after every profile.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import checkout  # noqa: F401 (the clone's path)
import torch
from decode import Shape, Unsupported, likely_tree
from decode_steps import Context
from shared import (
    command_line,
    describe_failure,
    machine_facts,
    rounded,
    stand_in_note,
    table,
    write_page,
)
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from train import STEPS, Case, Step, device_and_precision, shape_setup

from medusa_train.cli.common import quiet_libraries
from medusa_train.models.precision import default_device, release_memory
from medusa_train.trees.tree import Tree

#: Classes of kernels, and a pattern for their names. The first class that matches counts.
CLASSES = {
    "attention": r"fmha|flash|attend|attention|_merge\b",
    "products": r"gemm|gemv|gemvx|cutlass|nvjet|xmma|cublas|splitk|dot_kernel|bmm|addmm|::mm|linear",
    "softmax": r"softmax|logsumexp",
    "optimizer": r"adam|optimizer|multi_tensor|foreach",
    "quantization": r"quant|nf4",
    "copies": r"memcpy|memset|copy|_to_copy|::cat|fill",
    "indexing": r"index|gather|scatter|sort|topk|argmax|embedding",
    "reductions": r"reduce|norm|mean|sum",
    "elementwise": r"triton|elementwise|vectorized|::mul|::add|::neg|silu|rsqrt|::pow|::cos|::sin",
}
LARGEST = 6  # the kernels that take longest are listed by name, this many
STEPS_PROFILED = 5


@dataclass(frozen=True)
class Profile:
    """The profile of one step.

    Attributes:
        what: name of the step.
        setting: setting of a decoding step; "micro-batch" or "optimizer" for training.
        context: positions before a decoding step; tokens of a row for training.
        nodes: nodes of a decoding step's tree.
        ms: wall time in milliseconds, measured without the profiler.
        kernel_ms: milliseconds of all kernels.
        kernels: number of kernels.
        classes: milliseconds and number of kernels by class.
        largest: name, milliseconds and number of the kernels that take longest.
    """

    what: str
    setting: str
    context: int
    nodes: int
    ms: float
    kernel_ms: float
    kernels: float
    classes: dict[str, list[float]]
    largest: list[list[Any]]


def class_of(name: str) -> str:
    """Return the class of a kernel, or "other"."""
    for kind, pattern in CLASSES.items():
        if re.search(pattern, name, re.IGNORECASE):
            return kind
    return "other"


def profiled(step: Callable[[], object], count: int = STEPS_PROFILED) -> dict[str, Any]:
    """Time a step `count` times, then run it `count` times under the profiler; return the figures
    of a single step.
    """
    cuda = torch.cuda.is_available()
    wait = torch.cuda.synchronize if cuda else (lambda: None)
    # 1. time the steps without the profiler
    step()
    wait()
    started = time.perf_counter()
    for _ in range(count):
        step()
    wait()
    milliseconds = 1000 * (time.perf_counter() - started) / count
    # 2. run them under the profiler
    activities = [ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]
    with profile(activities=activities) as run:
        for _ in range(count):
            step()
        wait()
    return {"ms": milliseconds, **summary(run.key_averages(), count, cuda)}


def summary(events: Iterable[Any], count: int, cuda: bool) -> dict[str, Any]:
    """Summarize the profiler's events of `count` steps as figures of a single step."""
    found: list[tuple[str, float, float]] = []  # kernel name; milliseconds and number per step
    for event in events:
        if cuda and event.device_type != DeviceType.CUDA:
            continue
        microseconds = event.self_device_time_total if cuda else event.self_cpu_time_total
        found.append((event.key, microseconds / 1000 / count, event.count / count))
    classes: dict[str, list[float]] = {}
    for name, milliseconds, number in found:
        total = classes.setdefault(class_of(name), [0.0, 0.0])
        total[0] += milliseconds
        total[1] += number
    found.sort(key=lambda one: -one[1])
    return {
        "kernel_ms": sum(one[1] for one in found),
        "kernels": sum(one[2] for one in found),
        "classes": dict(sorted(classes.items(), key=lambda one: -one[1][0])),
        "largest": [[name[:100], *rest] for name, *rest in found[:LARGEST]],
    }


def repeated_step(steps: Context, nodes: int) -> Callable[[], None]:
    """Return a function that runs a step over a tree, each time from the end of the context."""
    step = steps.step(likely_tree(nodes) if nodes else Tree.empty())

    def again() -> None:
        step.prepare()
        step()

    step.prepare()
    return again


def decoding(
    args: argparse.Namespace, device: torch.device, failed: list[str]
) -> Iterable[Profile]:
    """Profile steps of a random model at the shape of a 7B model.

    Args:
        failed: a list that receives a line for each failed profile; the others are still run.
    """
    shape = Shape.or_small("7B", device)
    shared = None
    for setting in args.settings:
        try:
            one = shape.load("bfloat16", setting, device, (), shared)
        except Unsupported as error:
            print(f"{setting}: {error}", flush=True)
            continue
        except Exception as error:
            failed.append(f"{setting}: {describe_failure(error)}")
            continue
        shared = shared or one
        for context in args.contexts:
            steps = Context(one.target_model, context, max(args.nodes))
            for nodes in args.nodes:
                what = f"tree {nodes}" if nodes else "plain"
                try:
                    figures = profiled(repeated_step(steps, nodes))
                except Exception as error:
                    failed.append(f"{what} {setting} {context}: {describe_failure(error)}")
                    continue
                yield Profile(what, setting, context, nodes, **figures)
            del steps
            release_memory()


def training(args: argparse.Namespace, failed: list[str]) -> Iterable[Profile]:
    """Profile a micro-batch, and the step of the optimizer after it, at the shape of a 7B model."""
    for part in args.parts:
        try:
            yield from profile_training(part)
        except Exception as error:
            failed.append(f"{part}: {describe_failure(error)}")
        release_memory()


def profile_training(part: str) -> Iterable[Profile]:
    """Profile a micro-batch and the optimizer of one part of train.py."""
    what, method = STEPS[part]
    tokens = 2048 if torch.cuda.is_available() else 32
    case = Case(what, method, dtype="bfloat16", tokens=tokens, rows=2)
    precision = device_and_precision(case)
    cfg, target_model, batch = shape_setup(case, precision)
    step = Step(cfg, target_model, precision)
    step(batch)
    yield Profile(part, "micro-batch", tokens, 0, **profiled(partial(step.micro_batch, batch)))
    step.micro_batch(batch)
    yield Profile(part, "optimizer", tokens, 0, **profiled(step.update, 2))


def write_report(out: Path, machine: dict[str, Any], profiles: Sequence[Profile]) -> str:
    """Write gpu_profile.md and gpu_profile.json; return the page."""
    kinds = [*CLASSES, "other"]
    lines = []
    for one in profiles:
        cells = [one.what, one.setting, f"{one.context:,}", f"{one.ms:.2f}", f"{one.kernel_ms:.2f}"]
        cells.append(f"{one.kernels:,.0f}")
        for kind in kinds:
            milliseconds, number = one.classes.get(kind, (0.0, 0.0))
            cells.append(f"{milliseconds:.2f} ({number:,.0f})" if number else "")
        lines.append(cells)
    titles = ["step", "setting", "positions", "ms", "kernels' ms", "kernels", *kinds]
    note = "Milliseconds of a step by class of kernel, and the number of kernels in parentheses."
    note += stand_in_note(machine)
    record = {"machine": machine, "profiles": [rounded(asdict(one)) for one in profiles]}
    return write_page(
        out, "gpu_profile", "Where a step's time goes", record, [note, table(titles, lines, 2)]
    )


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = command_line(__doc__, "runs/benchmarks/profile")
    parser.add_argument("what", choices=["decode", "train"])
    parser.add_argument("--contexts", nargs="+", type=int, default=[1024, 4096], metavar="N")
    parser.add_argument("--nodes", nargs="+", type=int, default=[0, 63], metavar="N", help="0 63")
    parser.add_argument(
        "--settings",
        nargs="+",
        default=["static"],
        choices=["stock", "static", "compiled"],
    )
    parser.add_argument("--parts", nargs="+", default=["medusa1_7b"], choices=STEPS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Profile everything that was asked for, and write the result."""
    quiet_libraries()
    args = parse_arguments(arguments)
    machine = machine_facts(__file__, arguments)
    device = default_device()
    profiles: list[Profile] = []
    page = ""
    failed: list[str] = []
    found = training(args, failed) if args.what == "train" else decoding(args, device, failed)
    for one in found:
        profiles.append(one)
        page = write_report(args.out, machine, profiles)
    print(page)
    for line in failed:
        print(line, file=sys.stderr)
    return 0 if profiles and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
