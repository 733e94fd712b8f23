"""Which draft is better, trained on the same tokens of the same model?

    make smollm2-model                                           # once: the model
    python benchmarks/drafts.py                                  # trains and counts six drafts; run again, it continues
    python benchmarks/drafts.py --compare recipes --name recipes --gsm8k gsm8k.jsonl
    python benchmarks/drafts.py --compare medusa1 --draft-vocab 1024 4096 --name draft_vocab
    python benchmarks/drafts.py --quick                          # tiny backbone, a minute or two: does it run here?

Trains each draft with `medusa-train CONFIG key=value` (Medusa-2: its first epochs as Medusa-1) for the same number of
epochs, one after the other, and counts its tokens per step with equal trees and the chain of three guesses, greedily
and by lossless sampling: nothing depends on the clock. `medusa-eval --model OUT/runs/NAME` times a trained one. Both
stages of Medusa-2 draw an order of their own: where both are shorter than an epoch, it is trained on as many tokens,
but not on the whole text. Trained runs and counts are kept under `--out` and not repeated; an interrupted run
continues. Writes NAME-BENCH.md and NAME-BENCH.json after every draft. Never run on a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]

from draft_counts import DraftCounts  # noqa: E402
from draft_tables import write_pages  # noqa: E402
from shared import machine_facts  # noqa: E402

from medusa_train.cli.common import quiet_libraries, split_arguments  # noqa: E402
from medusa_train.config.load import load_config  # noqa: E402
from medusa_train.config.schema import TrainConfig  # noqa: E402
from medusa_train.errors import MedusaError  # noqa: E402
from medusa_train.evaluation.questions import Bench, load_bench  # noqa: E402
from medusa_train.io import replace_text  # noqa: E402

HYDRA = ("hydra.prefix_layer=false", "hydra.num_layers=1", "hydra.soft_targets=0.0")

#: name: title, configuration, overrides. Hydra is Hydra++ without its prefix layer, deeper heads and soft targets.
VARIANTS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "medusa1": ("Medusa-1", "m1", ()),
    "medusa2": ("Medusa-2", "m2", ()),
    "hydra++": ("Hydra++", "hydra", ()),
    "amphista": ("Amphista", "amphista", ()),
    "kangaroo-published": ("Kangaroo as published", "kangaroo", ("kangaroo.mlp_size=0",)),
    "kangaroo": ("Kangaroo with our MLP", "kangaroo", ()),
    "eagle3": ("EAGLE-3", "eagle3", ()),
    "hydra": ("Hydra", "hydra", HYDRA),
    "hydra-plain": ("Hydra, embeddings as published", "hydra", (*HYDRA, "hydra.normalize_embeddings=false")),
    "hydra++-plain": ("Hydra++, embeddings as published", "hydra", ("hydra.normalize_embeddings=false",)),
    "amphista-plain": ("Amphista, embeddings as published", "amphista", ("amphista.normalize_embeddings=false",)),
    "medusa2-ce": ("Medusa-2, cross-entropy for KL", "m2", ("medusa_self_distillation=false",)),
    "medusa2-lambda0": ("Medusa-2, lambda0 0.05", "m2", ("medusa_heads_coefficient=0.05",)),
    "medusa1-markov": ("Medusa-1, Markov bias", "m1", ("medusa_markov_rank=64",)),
    "amphista-alpha": ("Amphista alpha", "amphista", ("amphista.auto_blocks=2",)),
}
#: Comparisons that `--compare` takes by one name; the first draft of each is its reference.
GROUPS = {
    "drafts": tuple(VARIANTS)[:6],
    "embeddings": ("hydra", "hydra-plain", "hydra++", "hydra++-plain", "amphista", "amphista-plain"),
    "markov": ("medusa1", "medusa1-markov"),
    "recipes": ("medusa1", "medusa2", "medusa2-ce", "medusa2-lambda0"),
}
MODEL_CONFIGS, QUICK_CONFIGS = "configs/smollm2", "configs/tiny"
QUICK_STEPS = 8  # optimizer steps of every training with --quick
SHORT = ("warmup_steps=1", "logging_steps=1")


@dataclass(frozen=True)
class Stage:
    """One run of `medusa-train`: directory name, configuration, overrides."""

    name: str
    config: str
    overrides: tuple[str, ...]

    def load(self) -> TrainConfig:
        """Return its configuration."""
        return load_config(TrainConfig, *split_arguments([self.config, *self.overrides]))


@dataclass(frozen=True)
class Case:
    """A draft and the stages of its training; the last stage's run is measured."""

    name: str
    title: str
    stages: tuple[Stage, ...]


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*GROUPS, *VARIANTS]
    parser.add_argument("--out", type=Path, metavar="DIR", help="runs/benchmarks/drafts, with --quick drafts-quick")
    parser.add_argument("--name", default="drafts", help="of the pages and their JSON (drafts)")
    parser.add_argument("--compare", nargs="+", choices=names, default=["drafts"], metavar="X", help=", ".join(names))
    parser.add_argument("--draft-vocab", nargs="+", type=int, default=[], metavar="N", help="Medusa-1 over N tokens")
    parser.add_argument("--configs", metavar="PREFIX", help=f"PREFIX_m1.yaml, ... ({MODEL_CONFIGS})")
    parser.add_argument("--epochs", type=float, help="of every training (those of PREFIX_m1.yaml)")
    parser.add_argument("--stage-one", type=float, help="of these, Medusa-2's as Medusa-1 (half)")
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value", help="in every training")
    parser.add_argument("--joint", nargs="*", default=[], metavar="key=value", help="in Medusa-2's joint stage")
    parser.add_argument("--gsm8k", type=Path, metavar="FILE", help="perplexity of Medusa-2's backbone on GSM8K")
    parser.add_argument(
        "--bench", nargs="+", metavar="B[:N]", help="of medusa-eval, N questions per category (mtbench specbench:16)"
    )
    parser.add_argument("--limit", type=int, help="questions of a bench at most")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 0.7], help="0: greedy (0 0.7)")
    parser.add_argument("--max-new-tokens", type=int, help="of an answer (256)")
    parser.add_argument("--dtype", default="bfloat16", help="of decoding (bfloat16)")
    parser.add_argument("--nodes", nargs="+", type=int, default=[16, 32], help="of the equal trees (16 32)")
    parser.add_argument("--tree-tokens", type=int, help="greedy tokens that equal trees are fitted to (6000)")
    parser.add_argument("--quick", action="store_true", help="tiny backbone, a few steps and questions: no results")
    args = parser.parse_args(arguments)
    defaults = {
        "out": (Path("runs/benchmarks/drafts"), Path("runs/benchmarks/drafts-quick")),
        "configs": (MODEL_CONFIGS, QUICK_CONFIGS),
        "bench": (["mtbench", "specbench:16"], ["tiny:1"]),
        "limit": (None, 2),
        "max_new_tokens": (256, 16),
        "tree_tokens": (6000, 200),
    }
    for key, values in defaults.items():
        if getattr(args, key) is None:
            setattr(args, key, values[args.quick])
    args.compare = list(dict.fromkeys(name for one in args.compare for name in GROUPS.get(one, (one,))))
    args.epochs = args.epochs or load_config(TrainConfig, Path(f"{args.configs}_m1.yaml")).num_epochs
    args.stage_one = args.epochs / 2 if args.stage_one is None else args.stage_one
    if not 0 < args.stage_one < args.epochs:
        parser.error(f"--stage-one {args.stage_one:g}: must be between 0 and the {args.epochs:g} epochs")
    return args


def cases_of(args: argparse.Namespace) -> list[Case]:
    """List the drafts to train, the reference first."""

    def length(epochs: float) -> tuple[str, ...]:
        steps = max(1, round(QUICK_STEPS * epochs / args.epochs))
        short = (f"max_steps={steps}", *SHORT, "calibration_tokens=200") if args.quick else ()
        # without stored hidden states, so that all drafts are trained in the same way
        return (f"num_epochs={epochs:g}", "cache_hidden_states=false", *short)

    def case(name: str, title: str, kind: str, overrides: Sequence[str]) -> Case:
        if kind != "m2":
            stage = Stage(name, f"{args.configs}_{kind}.yaml", (*length(args.epochs), *args.set, *overrides))
            return Case(name, title, (stage,))
        first = Stage("stage-one", f"{args.configs}_m1.yaml", (*length(args.stage_one), *args.set))
        start = f"lora_model_dir={args.out / 'runs' / first.name}"
        joint = (*length(args.epochs - args.stage_one), start, *args.set, *args.joint, *overrides)
        return Case(name, title, (first, Stage(name, f"{args.configs}_m2.yaml", joint)))

    vocabularies = [
        (f"vocab{n}", f"Medusa-1 over {n:,} tokens", "m1", (f"medusa_vocab_size={n}",)) for n in args.draft_vocab
    ]
    return [case(name, *VARIANTS[name]) for name in args.compare] + [case(*one) for one in vocabularies]


def benches_of(args: argparse.Namespace) -> list[Bench]:
    """Load the benches with the questions to ask; what an earlier bench asks, a later one does not."""
    benches: list[Bench] = []
    for text in args.bench:
        name, colon, count = text.rpartition(":")
        name, each = (name, int(count)) if colon and count.isdigit() else (text, sys.maxsize)
        bench = load_bench(name, print)
        asked = {question.turns for other in benches for question in other.questions}
        seen: Counter[str] = Counter()
        kept = []
        for question in bench.questions:
            if question.turns not in asked and seen[question.category] < each:
                seen[question.category] += 1
                kept.append(question)
        benches.append(replace(bench, questions=tuple(kept)).limited(args.limit))
    return benches


def train(stage: Stage, out: Path) -> None:
    """Run a stage or resume it, unless it is finished.

    Raises:
        SystemExit: it failed, or was trained with other settings.
    """
    run, settings = out / "runs" / stage.name, {"config": stage.config, "overrides": list(stage.overrides)}
    done = run.with_name(f"{stage.name}.json")
    if not done.is_file():
        words = [sys.executable, "-m", "medusa_train.cli.train", stage.config, f"output_dir={run}", *stage.overrides]
        call([*words, "resume_from_checkpoint=auto"])
        replace_text(done, json.dumps(settings))
    elif (before := json.loads(done.read_text(encoding="utf-8"))) != settings:
        raise SystemExit(f"{done}: trained with other settings; choose another --out or delete it\n  {before}")


def call(words: Sequence[str]) -> None:
    """Run a command of the package; exits with its code if it fails."""
    print("$", shlex.join(words[1:]), flush=True)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    if code := subprocess.run(words, check=False, env={**os.environ, "PYTHONPATH": path}).returncode:
        raise SystemExit(code)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and count what is not finished; returns exit code 0, or that of an error."""
    quiet_libraries()
    args = parse_arguments(arguments)
    try:
        cases, benches = cases_of(args), benches_of(args)
        machine = machine_facts(__file__, arguments)
        for number, case in enumerate(cases, start=1):
            for stage in case.stages:
                train(stage, args.out)
            runs = [args.out / "runs" / stage.name for stage in case.stages]
            DraftCounts(args, case.name, runs, benches).run()
            write_pages(args, machine, {case.name: case.title for case in cases[:number]}, benches)
    except MedusaError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"wrote {args.out}/{args.name}-BENCH.md and .json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
