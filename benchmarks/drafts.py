"""Medusa, Hydra, Amphista and Kangaroo from the same tokens of the same backbone, in one command.

    python benchmarks/drafts.py                                           # all seven on the tiny bench
    python benchmarks/drafts.py --bench tiny specbench --limit 96 48      # Spec-Bench: MEDUSA_BENCH_DIR, as medusa-eval
    python benchmarks/drafts.py --together 2                              # train two at a time, with half the threads
    python benchmarks/drafts.py --ablations                               # also what Amphista is without its parts
    python benchmarks/drafts.py --quick --only medusa1 amphista           # minutes: does it run here?

Trains Medusa-1, Medusa-2 (its first epochs as Medusa-1), Hydra, Hydra++, Amphista, its alpha variant and Kangaroo, each
by `medusa-train CONFIG key=value`. Then all of them decode the same prompts, each with its own calibrated tree, with a
tree of a size that is the same for all, and as a chain: once in float32, where tokens and steps are counted, and once
in the dtype that is fastest here for plain decoding, where they are timed, taking turns on every prompt with plain
decoding and with `generate` of transformers. Writes drafts.json, .md and .png (with matplotlib) to `--out` after every
case and bench: what is finished is not done again, and what was stopped goes on. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(HERE), str(ROOT)]  # the sibling modules, and the package where it is not installed

from m2_vs_m1 import Stage, call, command, finished, keep, train  # noqa: E402

from medusa_train.cli.common import quiet_libraries  # noqa: E402
from medusa_train.config.load import load_config  # noqa: E402
from medusa_train.config.schema import TrainConfig  # noqa: E402
from medusa_train.errors import MedusaError  # noqa: E402

M1 = "configs/tiny_m1.yaml"
QUICK_STEPS = 8  # optimizer steps of every training with --quick


@dataclass(frozen=True)
class Case:
    """A draft: the stages of its training, the last one's run being measured."""

    name: str
    title: str
    stages: tuple[Stage, ...]
    ablation: bool = False


#: What is set in the configuration of its kind: name, title, kind, overrides. Medusa-2 has stages and stands apart.
PLAIN_CASES: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("medusa1", "Medusa-1", "m1", ()),
    # without what Hydra++ adds (SPEC 3): prefix layer, deeper heads, the teacher's distribution as the target
    ("hydra", "Hydra", "hydra", ("hydra.prefix_layer=false", "hydra.num_layers=1", "hydra.soft_targets=0.0")),
    ("hydra++", "Hydra++", "hydra", ()),
    ("amphista", "Amphista", "amphista", ()),
    ("amphista-alpha", "Amphista alpha", "amphista", ("amphista.auto_blocks=2",)),
    ("kangaroo", "Kangaroo", "kangaroo", ()),
)
ABLATIONS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("amphista-no-auto", "Amphista, no auto-embedding", "amphista", ("amphista.auto_blocks=0",)),
    ("amphista-no-staged", "Amphista, no staged adaptation", "amphista", ("amphista.adaptation_layers=0",)),
    ("amphista-no-token", "Amphista, no sampled token", "amphista", ("amphista.sampled_token=false",)),
)
NAMES = ("medusa1", "medusa2", *(case[0] for case in PLAIN_CASES[1:] + ABLATIONS))


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/drafts"), metavar="DIR", help="results")
    parser.add_argument("--only", nargs="+", choices=NAMES, metavar="NAME", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--ablations", action="store_true", help="also Amphista without each of its three parts")
    parser.add_argument(
        "--epochs", type=float, help="passes over the data, of all alike (those of configs/tiny_m1.yaml)"
    )
    parser.add_argument("--stage-one", type=float, help="of these, Medusa-2's as Medusa-1 (half)")
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value", help="set in every training")
    parser.add_argument("--bench", nargs="+", default=["tiny"], help="of medusa-eval, or question files (tiny)")
    parser.add_argument("--limit", type=int, nargs="+", help="questions of a bench at most; or of each, in their order")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="of an answer (256)")
    parser.add_argument("--dtype", default="auto", help="to be timed in; auto: the fastest here for plain decoding")
    parser.add_argument("--together", type=int, default=1, metavar="N", help="train so many at a time (1)")
    parser.add_argument("--nodes", type=int, default=16, help="of the equal trees (16)")
    parser.add_argument("--tree-tokens", type=int, default=6000, help="greedy tokens that trees are fitted to (6000)")
    parser.add_argument("--quick", action="store_true", help="a few steps of training, a few questions: no results")
    asked = parser.parse_args(arguments)
    asked.epochs = asked.epochs or load_config(TrainConfig, Path(M1)).num_epochs
    asked.stage_one = asked.epochs / 2 if asked.stage_one is None else asked.stage_one
    if not 0 < asked.stage_one < asked.epochs:
        parser.error(f"--stage-one {asked.stage_one:g} has to leave some of the {asked.epochs:g} epochs to Medusa-2")
    if asked.nodes < 1 or asked.together < 1:
        parser.error("--nodes and --together have to be 1 or more")
    limits = asked.limit or [None]
    asked.limit = limits * len(asked.bench) if len(limits) == 1 else limits
    if len(asked.limit) != len(asked.bench):
        parser.error(f"--limit has {len(limits)} numbers for {len(asked.bench)} benches; give one, or one for each")
    if asked.quick:
        asked.limit = [min(limit or 6, 6) for limit in asked.limit]
        asked.max_new_tokens = min(asked.max_new_tokens, 32)
        asked.tree_tokens = min(asked.tree_tokens, 400)
    return asked


def cases(asked: argparse.Namespace) -> list[Case]:
    """The drafts that are asked for, in the order of the table."""
    made = [_alone(asked, *case) for case in PLAIN_CASES]
    made.insert(1, _medusa2(asked))
    made += [_alone(asked, *case, ablation=True) for case in ABLATIONS]
    if asked.only:
        return [case for case in made if case.name in asked.only or (asked.ablations and case.ablation)]
    return [case for case in made if asked.ablations or not case.ablation]


def _alone(
    asked: argparse.Namespace, name: str, title: str, kind: str, overrides: tuple[str, ...], ablation: bool = False
) -> Case:
    stage = Stage(name, f"configs/tiny_{kind}.yaml", (*_length(asked, asked.epochs), *asked.set, *overrides))
    return Case(name, title, (stage,), ablation)


def _medusa2(asked: argparse.Namespace) -> Case:
    first = Stage("medusa2-stage-one", M1, (*_length(asked, asked.stage_one), *asked.set))
    start = f"lora_model_dir={asked.out / 'runs' / first.name}"
    joint = (*_length(asked, asked.epochs - asked.stage_one), start, *asked.set)
    return Case("medusa2", "Medusa-2", (first, Stage("medusa2", "configs/tiny_m2.yaml", joint)))


def _length(asked: argparse.Namespace, epochs: float) -> tuple[str, ...]:
    """How long a stage trains."""
    if not asked.quick:
        return (f"num_epochs={epochs:g}",)
    steps = max(1, round(QUICK_STEPS * epochs / asked.epochs))
    short = ("warmup_steps=1", "logging_steps=1", "calibration_tokens=200")
    return (f"num_epochs={epochs:g}", f"max_steps={steps}", *short)


def train_together(asked: argparse.Namespace) -> None:
    """Train what is not yet trained, `asked.together` at a time, and choose their trees when all is quiet."""
    threads = max(1, (os.cpu_count() or 1) // asked.together)

    def trained(case: Case) -> None:
        for stage in case.stages:
            train(stage, asked.out, threads)

    with ThreadPoolExecutor(asked.together) as pool:
        running = [pool.submit(trained, case) for case in cases(asked)]
        for one in running:
            one.result()
    for case in cases(asked):
        run = asked.out / "runs" / case.stages[-1].name
        chosen, trained_at = run.with_name(f"{run.name}.tree.json"), run.with_name(f"{run.name}.json")
        if not chosen.is_file() or chosen.stat().st_mtime_ns < trained_at.stat().st_mtime_ns:
            call(command("evaluate", "--calibrate", "--model", str(run), f"calibration_tokens={asked.tree_tokens}"))
            keep(chosen, {"settings": {}})


def settled(case: Case, asked: argparse.Namespace, machine: dict[str, Any]) -> dict[str, Any]:
    """Everything about a draft that no bench is needed for: trains and looks it up unless that is done."""
    home = asked.out / "cases" / f"{case.name}.json"
    settings = {
        "stages": [[stage.config, *stage.overrides] for stage in case.stages],
        "nodes": asked.nodes,
        "tree_tokens": asked.tree_tokens,
    }
    found = finished(home, settings)
    if found is None:
        for stage in case.stages:
            train(stage, asked.out)
        from drafts_case import describe  # torch comes with it

        print(f"{case.title}: fitting a tree of {asked.nodes} nodes", flush=True)
        found = {"settings": settings, "name": case.name, "title": case.title, "ablation": case.ablation}
        found["machine"] = machine
        runs = [asked.out / "runs" / stage.name for stage in case.stages]
        found |= describe(runs, asked.nodes, asked.tree_tokens)
        keep(home, found)
    return found


def run(asked: argparse.Namespace, machine: dict[str, Any]) -> None:
    """Train and measure what is not yet done, and write the report after every piece.

    Raises:
        MedusaError: a run, a bench or the backbone can't be found or loaded.
    """
    from drafts_decode import measure
    from drafts_report import write_report

    found: dict[str, Any] = {"machine": machine, "quick": asked.quick, "cases": [], "counts": {}, "times": {}}
    found["together"] = asked.together
    if asked.together > 1:
        train_together(asked)
    for case in cases(asked):
        found["cases"].append(settled(case, asked, machine))
        write_report(asked.out, found)
    for phase, bench, result in measure(asked, found["cases"], machine):
        found[phase][bench] = result
        write_report(asked.out, found)
    print((asked.out / "drafts.md").read_text(encoding="utf-8"))
    print(f"report: {asked.out / 'drafts.md'}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, or that of what is wrong."""
    quiet_libraries()  # works only before they are imported
    asked = parse_arguments(arguments)
    from machine import facts, warning

    machine = facts(__file__, arguments)
    if line := warning(machine):
        print(line, flush=True)
    try:
        run(asked, machine)
    except MedusaError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
