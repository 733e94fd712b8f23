"""Which draft is better, trained on the same tokens of the same model?

    make smollm2-model                                           # once: the model
    python benchmarks/drafts.py --dry-run                        # the plan of all six drafts on SmolLM2, with hours
    python benchmarks/drafts.py                                  # trains and measures them; run again, it continues
    python benchmarks/drafts.py --compare embeddings --name embeddings
    python benchmarks/drafts.py --compare losses --name losses   # head_loss x head_weights on Medusa-1 and Hydra++
    python benchmarks/drafts.py --compare losses --name losses --counts-only    # tokens per step alone, without a clock
    python benchmarks/drafts.py --compare recipes --name recipes --gsm8k gsm8k.jsonl
    python benchmarks/drafts.py --compare medusa1 --draft-vocab 1024 4096 --name draft_vocab
    python benchmarks/drafts.py --quick                          # tiny backbone, a minute or two: does it run here?

Trains each draft with `medusa-train CONFIG key=value` (Medusa-2: its first epochs as Medusa-1) for the same number of
epochs, one after the other. Both stages of Medusa-2 draw an order of their own: where both are shorter than an epoch,
it is trained on as many tokens, but not on the whole text. A process of its own then measures each one, in the dtype
that is fastest for plain decoding and with compiled passes, greedily and by lossless sampling: the run's own tree
beside plain decoding, `generate` and prompt lookup of transformers; and equal trees and the chain of three guesses,
whose greedy counts are simulated along the answers. Trained runs and results are kept under `--out`, one file per
draft, bench and temperature, and not repeated; an interrupted one continues. Writes NAME-BENCH.md and NAME-BENCH.json
after every draft. Never run on a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]

from draft_measurement import Measurement, cell_name, cells_of, trained_tokens  # noqa: E402
from draft_tables import write_pages  # noqa: E402
from rich.console import Console  # noqa: E402
from shared import cached, machine_facts, table, warn_if_busy  # noqa: E402

from medusa_train.checkpoint.resolve import resolve_model  # noqa: E402
from medusa_train.cli.common import quiet_libraries, split_arguments  # noqa: E402
from medusa_train.config.load import load_config  # noqa: E402
from medusa_train.config.schema import TrainConfig  # noqa: E402
from medusa_train.data.conversation import Message  # noqa: E402
from medusa_train.data.dataset import BatchLoader  # noqa: E402
from medusa_train.data.tokenize import ChatEncoder  # noqa: E402
from medusa_train.errors import MedusaError  # noqa: E402
from medusa_train.evaluation.choose_dtype import choose_dtype  # noqa: E402
from medusa_train.evaluation.questions import Bench, load_bench  # noqa: E402
from medusa_train.io import replace_text  # noqa: E402
from medusa_train.progress import RunProgress  # noqa: E402

LK, DPACE, DECAY = "head_loss=lk", "head_weights=dpace", "head_weights=decay"
HYDRA = ("hydra.prefix_layer=false", "hydra.num_layers=1", "hydra.soft_targets=0.0")

#: name: title, configuration, overrides. Hydra is Hydra++ without its prefix layer, deeper heads and soft targets.
VARIANTS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "medusa1": ("Medusa-1", "m1", ()),
    "medusa2": ("Medusa-2", "m2", ()),
    "hydra++": ("Hydra++", "hydra", ()),
    "amphista": ("Amphista", "amphista", ()),
    "kangaroo-published": ("Kangaroo as published", "kangaroo", ("kangaroo.mlp_size=0",)),
    "kangaroo": ("Kangaroo with our MLP", "kangaroo", ()),
    "hydra": ("Hydra", "hydra", HYDRA),
    "hydra-plain": ("Hydra, embeddings as published", "hydra", (*HYDRA, "hydra.normalize_embeddings=false")),
    "hydra++-plain": ("Hydra++, embeddings as published", "hydra", ("hydra.normalize_embeddings=false",)),
    "amphista-plain": ("Amphista, embeddings as published", "amphista", ("amphista.normalize_embeddings=false",)),
    "medusa2-ce": ("Medusa-2, cross-entropy for KL", "m2", ("medusa_self_distillation=false",)),
    "medusa2-lambda0": ("Medusa-2, lambda0 0.05", "m2", ("medusa_heads_coefficient=0.05",)),
    "medusa1-lk": ("Medusa-1, LK", "m1", (LK,)),
    "medusa1-dpace": ("Medusa-1, D-PACE", "m1", (DPACE,)),
    "medusa1-lk-dpace": ("Medusa-1, LK and D-PACE", "m1", (LK, DPACE)),
    "medusa1-markov": ("Medusa-1, Markov bias", "m1", ("medusa_markov_rank=64",)),
    "hydra++-lk": ("Hydra++, LK", "hydra", (LK,)),
    "hydra++-dpace": ("Hydra++, D-PACE", "hydra", (DPACE,)),
    "hydra++-lk-dpace": ("Hydra++, LK and D-PACE", "hydra", (LK, DPACE)),
    "hydra++-decay": ("Hydra++, weights 0.8^k", "hydra", (DECAY,)),
    "amphista-alpha": ("Amphista alpha", "amphista", ("amphista.auto_blocks=2",)),
    "amphista-no-auto": ("Amphista, no auto-embedding", "amphista", ("amphista.auto_blocks=0",)),
    "amphista-no-staged": ("Amphista, no staged adaptation", "amphista", ("amphista.adaptation_layers=0",)),
    "amphista-no-token": ("Amphista, no sampled token", "amphista", ("amphista.sampled_token=false",)),
}
#: Comparisons that `--compare` takes by one name; the first draft of each is its reference.
GROUPS = {
    "drafts": tuple(VARIANTS)[:6],
    "embeddings": ("hydra", "hydra-plain", "hydra++", "hydra++-plain", "amphista", "amphista-plain"),
    "markov": ("medusa1", "medusa1-markov"),
    "recipes": ("medusa1", "medusa2", "medusa2-ce", "medusa2-lambda0"),
    "losses": tuple(
        f"{draft}{loss}" for draft in ("medusa1", "hydra++") for loss in ("", "-lk", "-dpace", "-lk-dpace")
    ),
}
MODEL_CONFIGS, QUICK_CONFIGS = "configs/smollm2", "configs/tiny"
QUICK_STEPS = 8  # optimizer steps of every training with --quick
TRIAL_STEPS = 4  # of the training that tells how fast this machine trains
SHORT = ("warmup_steps=1", "logging_steps=1")

Record = dict[str, Any]


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
    parser.add_argument("--gsm8k", type=Path, metavar="FILE", help="a text and questions for Medusa-2's backbone")
    parser.add_argument("--problems", type=int, default=200, help="of GSM8K at most (200)")
    parser.add_argument(
        "--bench", nargs="+", metavar="B[:N]", help="of medusa-eval, N questions per category (mtbench specbench:16)"
    )
    parser.add_argument("--limit", type=int, help="questions of a bench at most")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 0.7], help="0: greedy (0 0.7)")
    parser.add_argument("--max-new-tokens", type=int, help="of an answer (256)")
    parser.add_argument("--dtype", default="auto", help="auto: the fastest here for plain decoding")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="compiled decoding passes (yes)")
    parser.add_argument("--nodes", nargs="+", type=int, default=[16, 32], help="of the equal trees (16 32)")
    parser.add_argument("--tree-tokens", type=int, help="greedy tokens that equal trees are fitted to (6000)")
    parser.add_argument("--counts-only", action="store_true", help="tokens per step of equal trees alone, in batches")
    parser.add_argument("--dry-run", action="store_true", help="print what is left to do and its hours, and stop")
    parser.add_argument("--quick", action="store_true", help="tiny backbone, a few steps and questions: no results")
    parser.add_argument("--measure", help=argparse.SUPPRESS)  # one trained draft: what the process of its own does
    args = parser.parse_args(arguments)
    defaults = {
        "out": (Path("runs/benchmarks/drafts"), Path("runs/benchmarks/drafts-quick")),
        "configs": (MODEL_CONFIGS, QUICK_CONFIGS),
        "bench": (["mtbench", "specbench:16"], ["tiny:1"]),
        "limit": (None, 2),
        "max_new_tokens": (256, 16),
        "tree_tokens": (6000, 200),
        "compile": (True, False),
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
        # without stored hidden states, so that all drafts are trained in the same way and their speeds compare
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


# --- Training ---------------------------------------------------------------------------------------------------------


def is_trained(stage: Stage, out: Path) -> bool:
    """Return whether a stage's run is finished.

    Raises:
        SystemExit: it was trained with other settings.
    """
    done = out / "runs" / f"{stage.name}.json"
    if not done.is_file():
        return False
    before = json.loads(done.read_text(encoding="utf-8"))
    if before != _settings(stage):
        raise SystemExit(f"{done}: trained with other settings; choose another --out or delete it\n  {before}")
    return True


def train(stage: Stage, out: Path) -> None:
    """Run a stage or resume it, unless it is finished; exits if it fails."""
    if is_trained(stage, out):
        return
    words = [sys.executable, "-m", "medusa_train.cli.train", stage.config, f"output_dir={out / 'runs' / stage.name}"]
    call([*words, *stage.overrides, "resume_from_checkpoint=auto"])
    replace_text(out / "runs" / f"{stage.name}.json", json.dumps(_settings(stage)))


def _settings(stage: Stage) -> Record:
    return {"config": stage.config, "overrides": list(stage.overrides)}


def call(words: Sequence[str]) -> None:
    """Run a command of the package; exits with its code if it fails."""
    print("$", shlex.join(words[1:]), flush=True)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    if code := subprocess.run(words, check=False, env={**os.environ, "PYTHONPATH": path}).returncode:
        raise SystemExit(code)


# --- The plan ---------------------------------------------------------------------------------------------------------


class Work(NamedTuple):
    """A piece of the plan and the hours that it takes."""

    name: str
    hours: float


class Plan:
    """What is left to do, and for how long: operations at a measured rate, and decoding steps of a measured length.

    The rate is that of the trainings that are finished, or of a trial of `TRIAL_STEPS` steps. Answers of full length
    are assumed, and that every decoder takes plain decoding's time: evaluations take less.
    """

    def __init__(self, args: argparse.Namespace, cases: Sequence[Case], benches: Sequence[Bench]) -> None:
        self._args, self._cases, self._benches = args, cases, benches
        self._stages = list(dict.fromkeys(stage for case in cases for stage in case.stages))

    def work(self) -> list[Work]:
        """List the trainings and evaluations that are not finished."""
        out = self._args.out
        left = [stage for stage in self._stages if not is_trained(stage, out)]
        work = [Work(f"train {one.name}", self._operations(one) / self._operations_per_hour) for one in left]
        for case in self._cases:
            for bench, temperature in cells_of(self._args, self._benches):
                if not (out / "cells" / case.name / cell_name(self._args, bench, temperature)).is_file():
                    # plain, generate, prompt lookup and the tree; or plain, generate, three and more trees
                    decoders = 4 if not temperature else 4 + len(self._args.nodes)
                    turns = sum(len(question.turns) for question in bench.questions)
                    seconds = decoders * turns * self._args.max_new_tokens * self._step_seconds
                    work.append(Work(f"measure {case.name}, {bench.name} at {temperature:g}", seconds / 3600))
        return work

    @cached_property
    def _data(self) -> tuple[Any, Any]:
        """The training conversations, the same for all drafts, and the backbone's config."""
        from medusa_train.models.loading import resolve_backbone
        from medusa_train.training.load_data import load_data

        cfg = self._stages[0].load()
        return load_data(cfg, Console(stderr=True)).train, resolve_backbone(cfg.base_model)[1]

    def _operations(self, stage: Stage) -> float:
        from medusa_train.training.inspect import count_operations

        train, model_config = self._data
        cfg = stage.load()
        return count_operations(cfg, train, BatchLoader(train, cfg.micro_batch_size, seed=cfg.seed), model_config)

    @cached_property
    def _operations_per_hour(self) -> float:
        runs = {stage: self._args.out / "runs" / stage.name for stage in self._stages}
        done = [(stage, run) for stage, run in runs.items() if is_trained(stage, self._args.out)]
        if not done:
            stage = self._stages[0]
            name = f"trial-{stage.name}"
            keys = (f"max_steps={TRIAL_STEPS}", *SHORT, "calibration_tokens=0", "val_set_size=0")
            done = [(replace(stage, name=name, overrides=(*stage.overrides, *keys)), self._args.out / "runs" / name)]
            train(done[0][0], self._args.out)
        rates = []
        for stage, run in done:
            tokens, per_second = trained_tokens(run)
            rates.append(self._operations(stage) / tokens * per_second * 3600)
        return statistics.median(rates)

    @cached_property
    def _step_seconds(self) -> float:
        """Seconds of a plain step, in the dtype of the evaluations; not compiled."""
        from medusa_train.checkpoint.load_model import load_base_model
        from medusa_train.inference.batch import plain_step_seconds

        dtype = dtype_of(self._args, self._cases[0], self._benches[0])
        paths = resolve_model(None, self._stages[0].load().base_model, None)

        def compute() -> Record:
            backbone = load_base_model(paths, dtype)
            backbone.prepack_weights()
            chat = ChatEncoder(backbone.tokenizer, paths.chat_template, paths.chat_template_kwargs)
            prompt = chat.prompt([Message("user", self._benches[0].questions[0].turns[0])])
            return {"seconds": plain_step_seconds(backbone, prompt, 1)}

        return float(cached(self._args.out / "step.json", {"dtype": dtype}, compute)["seconds"])

    def __str__(self) -> str:
        work = self.work()
        rows = [[one.name, f"{one.hours:.2f}"] for one in work]
        total = f"{sum(one.hours for one in work):.2f}"
        return table(["to do", "hours, at most for measurements"], [*rows, ["**all**", f"**{total}**"]])


def dtype_of(args: argparse.Namespace, case: Case, bench: Bench) -> str:
    """Return the dtype of all evaluations: the fastest for plain decoding, chosen once."""
    if args.dtype != "auto":
        return str(args.dtype)
    base_model = case.stages[0].load().base_model
    paths = resolve_model(None, base_model, None)

    def compute() -> Record:
        return {"dtype": choose_dtype(bench, paths, RunProgress(Console()))}

    return str(cached(args.out / "dtype.json", {"base_model": base_model}, compute)["dtype"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and measure what is not finished; returns exit code 0, or that of an error."""
    quiet_libraries()
    args = parse_arguments(arguments)
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        cases, benches = cases_of(args), benches_of(args)
        if args.measure:
            (case,) = [one for one in cases if one.name == args.measure]
            Measurement(args, case, benches, dtype_of(args, cases[0], benches[0])).run()
            return 0
        machine = machine_facts(__file__, arguments)
        warn_if_busy(machine)
        print(Plan(args, cases, benches), flush=True)
        if args.dry_run:
            return 0
        for number, case in enumerate(cases, start=1):
            for stage in case.stages:
                train(stage, args.out)
            # a process of its own, which compiles its passes and returns its memory
            call([sys.executable, str(Path(__file__).resolve()), *words, "--measure", case.name])
            page = write_pages(args, machine, cases[:number], benches)
    except MedusaError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"\n{page}\nwrote {args.out}/{args.name}-BENCH.md and .json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
