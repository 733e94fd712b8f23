"""Time and memory of training: stacked [K + 1, T, V] logits, as the public trainer makes them, against ours.

    python benchmarks/train.py --quick          # some minutes on two CPU cores
    python benchmarks/train.py                  # everything; an hour or two
    python benchmarks/train.py --parts loss --tokens 2048 --vocab 32000      # the bars alone
    python benchmarks/train.py --parts shape7b       # on one GPU: Medusa-1 and QLoRA at the shape of a 7B model

Every case is measured in a process of its own, naive and ours in turn, on whatever device torch finds. Writes
train.json, train.md and train.png (with matplotlib) to `--out`; after every case, so that a run may be stopped. Run it
on an idle machine: two threads on busy cores are many times slower.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]  # the sibling modules, and the package where it is not installed

from machine import facts, warning  # noqa: E402
from train_case import Case, Result, limit_memory  # noqa: E402
from train_report import Measured, write_report  # noqa: E402

from medusa_train.cli.common import quiet_libraries  # noqa: E402

PARTS = ("loss", "heads", "step", "joint", "shape7b")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Compare the cost of training, naive against ours.")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/train"), metavar="DIR", help="results")
    parser.add_argument("--quick", action="store_true", help="512 tokens, 32,000 entries, one round")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure")
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--tokens", nargs="+", type=int, default=None, metavar="T", help="512 1024 2048 4096")
    parser.add_argument("--vocab", nargs="+", type=int, default=None, metavar="V", help="32000 128000")
    parser.add_argument(
        "--sequences", nargs="+", type=int, metavar="T", help="of shape7b: 2048 4096; few without a GPU"
    )
    parser.add_argument("--rows", type=int, default=2, help="of a micro-batch of shape7b (2)")
    parser.add_argument("--rounds", type=int, default=None, help="processes per case, naive and ours in turn (2)")
    parser.add_argument("--repeats", type=int, default=3, help="measurements per process, at most")
    parser.add_argument("--seconds", type=float, default=20.0, help="per process, after which no further one begins")
    parser.add_argument("--threads", type=int, default=None, help="of torch; default: all cores")
    parser.add_argument("--case", help=argparse.SUPPRESS)  # measure this one here: what the processes are started with
    asked = parser.parse_args(arguments)
    asked.tokens = asked.tokens or ([512] if asked.quick else [512, 1024, 2048, 4096])
    asked.vocab = asked.vocab or ([32000] if asked.quick else [32000, 128000])
    asked.rounds = asked.rounds or (1 if asked.quick else 2)
    return asked


def groups(asked: argparse.Namespace) -> Iterator[list[Case]]:
    """Cases that are compared with each other, to be measured in turn."""
    common = Case("", "", repeats=asked.repeats, seconds=asked.seconds)
    for dtype in asked.dtypes:
        case = replace(common, dtype=dtype)
        if "loss" in asked.parts:
            for vocab in asked.vocab:
                for tokens in asked.tokens:
                    for masked in (0.0, 0.5):
                        one = replace(case, what="loss", vocab=vocab, tokens=tokens, masked=masked)
                        yield [replace(one, method=method) for method in ("naive", "ours")]
        if "heads" in asked.parts:
            tokens = 512 if asked.quick else 2048
            yield [replace(case, what="loss", method="ours", tokens=tokens, heads=heads) for heads in (1, 3, 5)]
        if "step" in asked.parts:
            for recipe in ("medusa1", "medusa2"):
                yield [replace(case, what=recipe, method=method) for method in ("naive", "ours")]
        if "joint" in asked.parts:
            yield [replace(case, what="joint", method=method) for method in ("kept", "recomputed")]
    if "shape7b" in asked.parts:
        for what in ("shape1", "shape2") if has_quantization() else ("shape1",):
            for tokens in asked.sequences or ([2048, 4096] if has_gpu() else [64, 128]):
                one = replace(common, what=what, dtype="bfloat16", tokens=tokens, rows=asked.rows)
                yield [replace(one, method=method) for method in ("naive", "ours")]


def has_quantization() -> bool:
    """Whether bitsandbytes is installed, which QLoRA needs."""
    return find_spec("bitsandbytes") is not None


def has_gpu() -> bool:
    """Whether torch finds one."""
    import torch

    return torch.cuda.is_available()


def measure_here(case: Case) -> Result:
    """Measure `case` in this process."""
    limit_memory()
    from medusa_train.evaluation.choose_dtype import is_out_of_memory

    try:
        if case.what == "loss":
            from train_loss import measure_loss

            return measure_loss(case)
        if case.what.startswith("shape"):
            from train_shape import measure_shape

            return measure_shape(case)
        from train_step import measure_joint, measure_step

        return measure_joint(case) if case.what == "joint" else measure_step(case)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return Result(False, [])


def measure_apart(case: Case, threads: int | None) -> Result:
    """Measure `case` in a process of its own; one that was killed did not fit.

    Raises:
        RuntimeError: it failed for another reason, which it has printed.
    """
    environment = os.environ | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
    command = [sys.executable, __file__, "--case", json.dumps(asdict(case))]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode == -9:
        return Result(False, [])
    if done.returncode != 0:
        raise RuntimeError(f"this case ended with {done.returncode}: {case}")
    return Result(**json.loads(done.stdout.splitlines()[-1]))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure everything that was asked for, and write it down."""
    quiet_libraries()
    asked = parse_arguments(arguments)
    if asked.case:
        print(json.dumps(asdict(measure_here(Case(**json.loads(asked.case))))))
        return
    where = facts(__file__, arguments)
    where["threads"] = asked.threads or int(os.environ.get("OMP_NUM_THREADS", 0)) or where["cores"]
    if line := warning(where):
        print(line, flush=True)
    if "shape7b" in asked.parts and not has_quantization():
        print("QLoRA at the shape of a 7B model: skipped, bitsandbytes is not installed", flush=True)
    measured: list[Measured] = []
    for group in groups(asked):
        found: list[Measured] = []
        for turn in range(asked.rounds):
            for place, case in enumerate(group):
                result = measure_apart(case, asked.threads)
                if turn == 0:
                    found.append(Measured(case, result))
                elif found[place].result.fits:
                    found[place] = Measured(case, found[place].result.and_also(result))
        for one in found:
            print(one.line(), flush=True)
        measured += found
        write_report(asked.out, where, measured)
    print(f"wrote {asked.out}/train.md, train.json")


if __name__ == "__main__":
    main()
