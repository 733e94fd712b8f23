"""Train, measure and tabulate an experiment of a paper on any target model, with the published
figures next to ours.

    make smollm2-model                                   # once: the default target model
    python benchmarks/papers.py medusa_table2            # or a YAML file; run again to continue
    python benchmarks/papers.py kangaroo_table1 --configs configs/vicuna7b --inspect
    python benchmarks/papers.py drafts --runs medusa1 kangaroo --eval 'bench=mtbench:5' --set seed=7
    python benchmarks/papers.py amphista_table4 --quick  # a test with the tiny target model, minutes

The files in benchmarks/papers/ list runs (a configuration of the family `--configs`, and
overrides), evaluations (keys of `medusa-eval`, some of them swept), columns and published figures.
benchmarks/README.md describes the format. `medusa-train` trains the runs and `medusa-eval` measures
them, unless they are finished; both resume.

With `count: true` one evaluation in batches is enough. The steps of all trees are simulated along
plain greedy answers, so nothing depends on time. Runs and reports stay in `--out`. All experiments
share them, and their names contain a digest of their settings. NAME.md, NAME.json and NAME.svg are
written after every run. Not yet run on a GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import os
import random
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from checkout import ROOT
from paper_tables import (
    Experiment,
    Point,
    Record,
    Run,
    keys_of_columns,
    write_experiment,
)
from pydantic import ValidationError
from safetensors import safe_open
from shapes import SHAPES, default_dtypes, llama_config
from shared import machine_facts

from medusa_train.checkpoint.resolve import find_heads
from medusa_train.checkpoint.run_directory import TREE_TRACES
from medusa_train.cli.common import quiet_libraries, split_arguments
from medusa_train.config.load import load_config
from medusa_train.config.paths import resolve_path
from medusa_train.config.schema import TrainConfig
from medusa_train.data.sources import open_source
from medusa_train.errors import CheckpointError, ConfigError, MedusaError
from medusa_train.evaluation.questions import Benchmark, load_benchmark
from medusa_train.io import replace_text
from medusa_train.models.loading import resolve_target_model
from medusa_train.tree_search.fit import AcceptedLength, Trace, fit_trees
from medusa_train.trees.tree import Tree

EXPERIMENTS = ROOT / "benchmarks" / "papers"
QUICK_STEPS = 4  # optimizer steps of a whole training with --quick
COUNTED_ROWS = 16  # batch size of evaluations with `count: true`
QUICK_EVAL = {
    "bench": "tiny:1",
    "limit": 2,
    "max_new_tokens": 16,
    "warmup": 0,
    "exactness": False,
    "dtype": "float32",
}
QUICK_EVAL |= {"rouge": False}  # the tiny bench has no references
MOST_NODES = 256  # most nodes of a random tree (Medusa, Configuration of Tree Attention)
WIDEST = 10  # most guesses of a head in a random tree


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ", ".join(sorted(path.stem for path in EXPERIMENTS.glob("*.yaml")))
    parser.add_argument("experiments", nargs="+", metavar="NAME|FILE.yaml", help=names)
    parser.add_argument("--configs", metavar="PREFIX", help="PREFIX_m1.yaml, ... (configs/smollm2)")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="runs/papers, with --quick runs/papers-quick"
    )
    parser.add_argument("--name", help="of the page and its JSON; default: that of the experiment")
    parser.add_argument(
        "--runs", nargs="+", metavar="RUN", help="these only; the first is the reference"
    )
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="key=value", help="in every training"
    )
    parser.add_argument(
        "--eval", nargs="*", default=[], metavar="key=value", help="in every evaluation"
    )
    parser.add_argument(
        "--epochs", type=float, help="of every whole training; default: its configuration's"
    )
    parser.add_argument(
        "--counted", action="store_true", help="leave out what depends on the clock"
    )
    parser.add_argument("--inspect", action="store_true", help="print the plan; train nothing")
    parser.add_argument(
        "--quick", action="store_true", help="a few steps, questions and values: no results"
    )
    args = parser.parse_args(arguments)
    args.out = args.out or Path("runs/papers-quick" if args.quick else "runs/papers")
    args.configs = args.configs or ("configs/tiny" if args.quick else "configs/smollm2")
    return args


def read_experiment(name: str) -> Experiment:
    """Read an experiment by its name in benchmarks/papers/ or by its path; ConfigError if it is
    invalid.
    """
    path = EXPERIMENTS / f"{name}.yaml" if (EXPERIMENTS / f"{name}.yaml").is_file() else Path(name)
    if not path.is_file():
        raise ConfigError(f"{name}: no such file, and none in {EXPERIMENTS}")
    try:
        written = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        return Experiment.model_validate({"name": path.stem, **written})
    except (ValidationError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {error}") from None


def digest(*settings: object) -> str:
    """Return a short checksum of settings, for names."""
    return hashlib.sha256(json.dumps(settings, default=str).encode()).hexdigest()[:8]


@dataclass(frozen=True)
class Stage:
    """One run of `medusa-train`: its directory, configuration and overrides."""

    directory: Path
    config: str
    overrides: tuple[str, ...]

    def load(self) -> TrainConfig:
        """Return the run's configuration."""
        return load_config(TrainConfig, *split_arguments([self.config, *self.overrides]))

    @property
    def command(self) -> list[str]:
        """Arguments of `medusa-train`."""
        return [self.config, f"output_dir={self.directory}", *self.overrides]

    @property
    def finished(self) -> Path:
        """The file that is written when the training is finished."""
        return self.directory.with_name(f"{self.directory.name}.json")

    def train(self) -> None:
        """Train the run, or resume it, unless it is finished."""
        if not self.finished.is_file():
            call("train", [*self.command, "resume_from_checkpoint=auto"])
            replace_text(
                self.finished, json.dumps({"config": self.config, "overrides": self.overrides})
            )


class Plan:
    """The runs that an experiment trains and measures with a family of configurations."""

    def __init__(self, args: argparse.Namespace, experiment: Experiment) -> None:
        self.args, self.experiment = args, experiment
        configs = {
            name: f"{args.configs}_{run.config}.yaml"
            for name, run in experiment.runs.items()
            if run.shown
        }
        lacking = [
            name
            for name, path in configs.items()
            if experiment.runs[name].config and not resolve_path(path)
        ]
        self.names: list[str] = args.runs or [name for name in configs if name not in lacking]
        if lacking and not args.runs:
            print(
                f"{experiment.name}: without {', '.join(lacking)}, for which there is no"
                f" {args.configs}_*.yaml"
            )
        if unknown := set(self.names) - set(experiment.runs):
            raise ConfigError(
                f"--runs {' '.join(sorted(unknown))}: not in {', '.join(experiment.runs)}"
            )
        self.names = [name for name in self.names if any(self.points(name))]
        if not self.names:
            clock = f"--counted: everything that {experiment.name} measures depends on the clock"
            raise ConfigError(
                clock
                if args.counted
                else f"--eval: no column of {experiment.name} has these values"
            )
        for name in self.names:
            self.stages(name)  # raises ConfigError before anything is trained

    def stages(self, name: str) -> list[Stage]:
        """List the stages of a run's training. The last stage is the one that is measured. The list
        is empty for the target model alone.
        """
        run, args = self.experiment.runs[name], self.args
        if run.config is None:
            return []
        config = f"{args.configs}_{run.config}.yaml"
        before = [] if run.after is None else self.stages(run.after)
        words = [*self.experiment.set, *self._length(run, config), *args.set, *run.set]
        if "{" in str(run.set):
            shape = target_model_config(self.family)
            # {last}: the layers whose hidden states the draft reads
            last = [shape.num_hidden_layers - n for n in (3, 2, 1)]
            # {linears}: MLP size for as many weights as two square matrices
            linears = 2 * shape.hidden_size // 3
            for part, value in {
                "mlp": shape.intermediate_size,
                "linears": linears,
                "last": last,
            }.items():
                words = [word.replace(f"{{{part}}}", str(value)) for word in words]
        words += [f"lora_model_dir={before[-1].directory}"] if before else []
        stage = Stage(Path(), config, tuple(words))
        settings = stage.load().model_dump(mode="json", exclude_unset=True)
        return [*before, replace(stage, directory=args.out / "runs" / f"{name}-{digest(settings)}")]

    def _length(self, run: Run, config: str) -> list[str]:
        if self.args.quick:
            cfg, steps = (
                load_config(TrainConfig, Path(config)),
                max(1, round(QUICK_STEPS * run.share)),
            )
            words = [
                f"max_steps={steps}",
                "warmup_steps=1",
                f"calibration_tokens={100 * self.fits_trees}",
            ]
            words.append(f"datasets={json.dumps([cfg.datasets[0].model_dump(exclude_unset=True)])}")
            words.append(f"dataset_prepared_path={self.args.out / 'prepared'}")
            return words if cfg.test_datasets else [*words, "val_set_size=0.01"]
        if self.args.epochs is None and self.experiment.epochs_of is None and run.share == 1:
            return []
        like = (
            f"{self.args.configs}_{self.experiment.epochs_of}.yaml"
            if self.experiment.epochs_of
            else config
        )
        epochs = self.args.epochs or load_config(TrainConfig, Path(like)).num_epochs
        return [f"num_epochs={run.share * epochs:g}"]

    @cached_property
    def family(self) -> TrainConfig:
        """The configuration from which untrained runs take their target model and data."""
        return load_config(TrainConfig, Path(f"{self.args.configs}_m1.yaml"))

    @property
    def fits_trees(self) -> bool:
        """Whether the experiment asks for sparse trees."""
        return "sparse:" in self.experiment.model_dump_json()

    def points(self, name: str) -> Iterator[Point]:
        """Yield the points to measure of a run. The lists in one entry of `sweep` are zipped, and
        the entries are combined with each other.
        """
        given = {
            key: yaml.safe_load(text)
            for key, _, text in (word.partition("=") for word in self.args.eval)
        }
        common = {**(QUICK_EVAL if self.args.quick else {}), **given}
        replaced = common.keys() - keys_of_columns(self.experiment)
        for number, one in enumerate(self.experiment.evaluations):
            if self.args.counted and not one.count:
                continue
            parts: list[list[Any]] = []
            for entry in one.sweep:
                values = [
                    [common[key]] * len(part) if key in replaced else part
                    for key, part in entry.items()
                ]
                parts.append(list(dict.fromkeys(zip(*values, strict=True))))
            if self.args.quick:
                parts = [list(dict.fromkeys([part[0], part[-1]])) for part in parts]
            names = [key for entry in one.sweep for key in entry]
            for chosen in itertools.product(*parts) if name in (one.runs or [name]) else ():
                swept = dict(zip(names, itertools.chain(*chosen), strict=True))
                named = given.keys() & swept.keys() - replaced
                # skip the point if `--eval` sets another value of a key that distinguishes columns
                if all(str(given[key]).startswith(str(swept[key])) for key in named):
                    yield Point(
                        name,
                        number,
                        swept,
                        {**one.keys, **swept, **self.experiment.runs[name].eval, **common},
                    )


def target_model_config(cfg: TrainConfig) -> Any:
    """Return the target model's configuration. If the model is not on this machine, return the
    configuration of a Llama of the size in the model's name.
    """
    try:
        return resolve_target_model(cfg.base_model)[1].get_text_config()
    except MedusaError:
        size = re.search(r"\d+b", Path(cfg.base_model).name.lower())
        if size is None or size[0].upper() not in SHAPES:
            raise
        return llama_config(*SHAPES[size[0].upper()])


def load_questions(text: str) -> Benchmark:
    """Load BENCH[@CATEGORY+...][:N]: the benchmark with only these categories and at most N
    questions of each category.
    """
    name, colon, count = text.rpartition(":")
    name, each = (name, int(count)) if colon and count.isdigit() else (text, sys.maxsize)
    name, _, categories = name.partition("@")
    bench, seen = load_benchmark(name, print), Counter[str]()
    kept = []
    for question in bench.questions:
        if (not categories or question.category in categories.split("+")) and seen[
            question.category
        ] < each:
            seen[question.category] += 1
            kept.append(question)
    if not kept:
        raise ConfigError(
            f"bench {text}: no questions; categories:"
            f" {', '.join({q.category for q in bench.questions})}"
        )
    return replace(bench, questions=tuple(kept))


def named_tree(name: str, num_heads: int, fitted: Mapping[int, Tree]) -> Tree:
    """Return the tree named chain:N, dense:AxBx..., random:SEED or sparse:N, at most as deep as the
    draft.

    A random tree is the Cartesian product of the first heads' guesses. The number of heads and of
    each head's guesses are drawn until the tree has at most 256 nodes (Medusa, Configuration of
    Tree Attention). A sparse tree is the best tree of N nodes on held-out prompts.
    """
    kind, _, value = name.partition(":")
    if kind == "chain":
        return Tree.chain(min(int(value), num_heads))
    if kind == "sparse":
        return fitted[int(value)]
    if kind == "dense":
        return Tree.cartesian([int(width) for width in value.split("x")][:num_heads])
    draw = random.Random(int(value))
    while True:
        widths = [draw.randint(1, WIDEST) for _ in range(draw.randint(1, num_heads))]
        if sum(itertools.accumulate(widths, lambda a, b: a * b)) <= MOST_NODES:
            return Tree.cartesian(widths)


TREE_NAME = re.compile(r"(chain|dense|random|sparse):[\dx]+")


class Measurement:
    """Measures the points of one run, and keeps the reports in `--out`."""

    def __init__(self, plan: Plan, name: str) -> None:
        self.plan, self.args = plan, plan.args
        self.stages, self.points = plan.stages(name), list(plan.points(name))
        self.folder = (
            self.args.out / "reports" / (self.stages[-1].directory.name if self.stages else name)
        )

    def run(self) -> Iterator[tuple[Point, Record]]:
        """Yield the figures of every point."""
        trained = trained_figures([stage.directory for stage in self.stages]) if self.stages else {}
        for point in self.points:
            keys, tree, threshold = dict(point.keys), None, 0.0
            if TREE_NAME.fullmatch(str(keys.get("tree"))):
                tree = self._tree(str(keys["tree"]))
                keys["tree"] = str(self.folder / f"{keys['tree'].replace(':', '')}.json")
            if self.plan.experiment.evaluations[point.evaluation].count:
                if tree is None:
                    raise ConfigError(
                        f"count: true counts the steps of named trees, got tree: {keys.get('tree')}"
                    )
                threshold = keys.pop("threshold", 0.0)
                if threshold and not str(point.keys["tree"]).startswith("chain"):
                    raise ConfigError(
                        "count: true has a threshold in chains alone, got tree:"
                        f" {point.keys['tree']}"
                    )
                counted = {"batch_size": COUNTED_ROWS, "dtype": default_dtypes()[-1]}
                keys = {**counted, **keys, "tree": "none"}
            elif tree is not None:
                self.folder.mkdir(parents=True, exist_ok=True)
                tree.save(Path(keys["tree"]))
                tree = None
            yield point, {**trained, **read_report(self._evaluate(keys), tree, threshold)}

    def _tree(self, name: str) -> Tree:
        directory = self.stages[-1].directory
        heads = load_config(TrainConfig, directory / "config.yaml").draft_config.settings[
            "num_heads"
        ]
        return named_tree(name, int(heads), self._sparse if name.startswith("sparse") else {})

    @cached_property
    def _sparse(self) -> dict[int, Tree]:
        """The best trees of all required sizes, by size. They are fitted to the answers that the
        run's own tree was fitted to.
        """
        path = self.stages[-1].directory / TREE_TRACES
        if not path.is_file():
            raise CheckpointError(
                f"{path.parent}: no traces for sparse trees; train with calibration_tokens above 0"
            )
        names = {str(point.keys.get("tree")) for point in self.points}
        sizes = [int(name[7:]) for name in names if name.startswith("sparse:")]
        return fit_trees(read_traces(path), sizes)

    def _evaluate(self, keys: Record) -> Path:
        """Run `medusa-eval` unless its report is complete; return the directory of the report."""
        bench = load_questions(keys["bench"])
        if "{data}" in str(keys):
            source = open_source(self.plan.family.datasets[0])
            keys = json.loads(json.dumps(keys).replace("{data}", source.name))
        if re.search(r"@|:\d+$", keys["bench"]):
            rows = [{**asdict(question), "expected": None} for question in bench.questions]
            path = (
                self.args.out / "benches" / f"{re.sub(r'[^A-Za-z0-9_-]', '-', keys['bench'])}.jsonl"
            )
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(path, "".join(json.dumps(row) + "\n" for row in rows))
            keys = {**keys, "bench": str(path)}
        if self.stages:
            keys = {**keys, "model": str(self.stages[-1].directory)}
        else:
            family = self.plan.family
            keys = {**keys, "base_model": family.base_model, "chat_template": family.chat_template}
        out = self.folder / f"{bench.name}-{digest(keys, [one.turns for one in bench.questions])}"
        if not (out / "report.json").is_file() or (out / "turns.jsonl").is_file():
            call(
                "evaluate",
                [
                    *(f"{key}={json.dumps(value)}" for key, value in keys.items()),
                    f"output_dir={out}",
                ],
            )
        return out


def trained_figures(runs: Sequence[Path]) -> Record:
    """Return the number of tokens that all stages trained on, and the number of parameters of the
    last stage's draft.
    """
    logged = [map(json.loads, read_lines(run / "metrics.jsonl")) for run in runs]
    tokens = sum(
        [line for line in lines if line["kind"] == "train"][-1]["tokens"] for lines in logged
    )
    parameters = 0
    for file in find_heads(runs[-1] / "heads").files:
        with safe_open(str(file), framework="pt") as tensors:
            names = set(tensors.keys()) - {"token_map"}
            parameters += sum(math.prod(tensors.get_slice(name).get_shape()) for name in names)
    return {"tokens": tokens, "parameters": parameters}


def read_report(directory: Path, tree: Tree | None, threshold: float = 0.0) -> Record:
    """Return the figures of a report. With a tree, its steps are simulated along the answers, and
    timed figures are left out.

    Args:
        threshold: a draft that stops early ends its chain with the first token of at most this
            confidence.
    """
    report = json.loads((directory / "report.json").read_text(encoding="utf-8"))
    lines = [json.loads(line) for line in read_lines(directory / "answers.jsonl")]
    answers = {
        (line["question_id"], line["turn"]): line for line in lines if not line.get("skipped")
    }
    accepted = {key: line["accepted"] for key, line in answers.items()}
    parts = {name: report.get(name) for name in ("categories", "judge", "rouge", "joint", "meta")}
    figures = {**report["overall"], **parts, "nodes": report["meta"]["tree_nodes"]}
    if tree is not None:
        lengths = AcceptedLength(tree)
        for line in map(json.loads, read_lines(directory / "ranks.jsonl")):
            trace = stop_early(Trace(line["ranks"], line.get("confidence", [])), threshold)
            steps = [lengths[trace.path(start)] for start in trace.simulate(lengths)]
            accepted[line["question_id"], line["turn"]] = steps
        kept = ("answers", "looping_answers", "head_accuracy", "joint")
        rate = sum(line["tokens"] - 1 for line in answers.values()) / max(
            sum(map(len, accepted.values())), 1
        )
        figures = {
            **{name: figures[name] for name in kept},
            "nodes": tree.size,
            "acceleration_rate": rate,
        }
        figures["meta"] = {"early_stop": threshold}
    questions: dict[str, list[int]] = {}
    sums = {True: [0, 0], False: [0, 0]}  # tokens and steps, by whether the answer loops
    for key, steps in accepted.items():
        for part in (questions.setdefault(str(key[0]), [0, 0]), sums[answers[key]["loops"]]):
            part[0] += answers[key]["tokens"] - 1
            part[1] += len(steps)
    every = [length for steps in accepted.values() for length in steps]
    tokens, steps_without = sums[False]
    return {
        **figures,
        "ctar": [
            sum(length >= w for length in every) / len(every)
            for w in range(1, max(every, default=0) + 1)
        ],
        "without_loops": tokens / steps_without if steps_without else None,
        "questions": questions,
    }


def read_traces(path: Path) -> list[Trace]:
    """Return the traces that a tree was fitted to, see `TracedAnswers.save`."""
    with np.load(path) as arrays:
        ranks = arrays["ranks"].tolist()
        ends = np.cumsum(arrays["tokens"]).tolist()
    return [Trace(ranks[start:end]) for start, end in itertools.pairwise([0, *ends])]


def stop_early(trace: Trace, threshold: float) -> Trace:
    """Return the trace for a draft that stops after a token of at most this confidence, see
    `KangarooDraft`. Only for chains.
    """
    stopped: list[list[int]] = []
    for position, ranks in enumerate(trace.ranks):
        heads = len(ranks)
        # a chain ends with its first token of too little confidence
        end = heads
        for k, confidence in enumerate(trace.confidence[position : position + heads], start=1):
            if confidence <= threshold:
                end = k
                break
        stopped.append(ranks[:end] + [-1] * (heads - end))
    return Trace(stopped, trace.confidence)


def read_lines(path: Path) -> list[str]:
    """Return the lines of a file, split only at newlines: text may contain other separators."""
    return path.read_text(encoding="utf-8").rstrip("\n").split("\n")


def environment() -> dict[str, str]:
    """Return an environment in which commands of this project run even if it is not installed."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }


def call(command: str, words: Sequence[str]) -> None:
    """Run a command of the package; if it fails, exit with its code."""
    words = [sys.executable, "-m", f"medusa_train.cli.{command}", *words]
    print("$", shlex.join(words), flush=True)
    process = subprocess.Popen(words, env=environment())
    while process.returncode is None:
        with suppress(KeyboardInterrupt):  # the command also gets it, and saves before it ends
            process.wait()
    if process.returncode:
        raise SystemExit(process.returncode)


def inspect(plan: Plan) -> None:
    """Print what will be trained and measured; `medusa-train ... --inspect` estimates each run."""
    print(f"{plan.experiment.name}: {plan.experiment.title}")
    for name in plan.names:
        for stage in plan.stages(name):
            state = "finished" if stage.finished.is_file() else "to train"
            print(f"\n{state}: medusa-train {shlex.join(stage.command)}")
        points = list(plan.points(name))
        evaluations = {json.dumps(point.keys) for point in points}
        print(f"\n{name}: {len(evaluations)} evaluations, {len(points)} points")


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and measure everything that is not finished; return exit code 0 or the error's code."""
    quiet_libraries()
    args = parse_arguments(arguments)
    machine = machine_facts(__file__, arguments)
    try:
        for plan in [Plan(args, read_experiment(name)) for name in args.experiments]:
            if args.inspect:
                inspect(plan)
                continue
            record = {"machine": machine, "quick": args.quick, "base_model": plan.family.base_model}
            figures: list[tuple[Point, Record]] = []
            stages: dict[Path, Stage] = {}
            for name in plan.names:
                for stage in plan.stages(name):
                    stage.train()
                    stages[stage.directory] = stage
                figures += Measurement(plan, name).run()
                commands = [stage.command for stage in stages.values()]
                write_experiment(args, plan.experiment, record, commands, figures)
            print(f"wrote {args.out}/{args.name or plan.experiment.name}.md, .json and .svg")
    except MedusaError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
