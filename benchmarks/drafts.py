"""Which draft is better, trained on the same tokens of the same backbone?

    python benchmarks/drafts.py                                              # all seven on the tiny bench; hours
    python benchmarks/drafts.py --compare medusa1 medusa2 medusa2-ce --gsm8k test.jsonl
    python benchmarks/drafts.py --compare medusa1 --draft-vocab 512 1024
    python benchmarks/drafts.py --quick --compare medusa1 kangaroo           # minutes: does it run here?

Trains each draft with `medusa-train CONFIG key=value` (Medusa-2: its first epochs as Medusa-1) for the same number of
epochs. Then all answer the same questions: once in float32, where tokens per step are counted, and once in the dtype
that is fastest for plain decoding, where they are timed in turns with plain decoding and `generate` of transformers.
Each decodes with its run's own tree, with an equal tree of `--nodes` nodes, and as a chain. Trained runs, counts and
times are kept under `--out` and not repeated. Writes drafts.md and drafts.json after every piece. Never run on a GPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]

from rich.console import Console  # noqa: E402
from shared import (  # noqa: E402
    backbone_note,
    machine_facts,
    machine_line,
    rounded,
    table,
    warn_if_busy,
    with_interval,
    write_result,
)

from medusa_train.checkpoint.heads import load_draft, read_heads  # noqa: E402
from medusa_train.checkpoint.load_model import LoadedModel, load_tree, load_with_draft  # noqa: E402
from medusa_train.checkpoint.resolve import ModelPaths, heads_files, resolve_model  # noqa: E402
from medusa_train.cli.common import quiet_libraries  # noqa: E402
from medusa_train.config.load import load_config  # noqa: E402
from medusa_train.config.schema import DatasetConfig, TrainConfig  # noqa: E402
from medusa_train.data.dataset import BatchLoader, load_datasets  # noqa: E402
from medusa_train.data.draft_vocabulary import coverage, token_counts  # noqa: E402
from medusa_train.data.tokenize import ChatEncoder  # noqa: E402
from medusa_train.errors import CheckpointError, DataError, MedusaError  # noqa: E402
from medusa_train.evaluation.backbone_quality import compare_backbones, load_versions  # noqa: E402
from medusa_train.evaluation.bootstrap import Counts, compare_rates  # noqa: E402
from medusa_train.evaluation.calibrate import trace_conversations, validation_prompts  # noqa: E402
from medusa_train.evaluation.choose_dtype import choose_dtype  # noqa: E402
from medusa_train.evaluation.metrics import accepted_lengths, summarize  # noqa: E402
from medusa_train.evaluation.output_equality import compare_timed_answers  # noqa: E402
from medusa_train.evaluation.questions import Bench, load_bench  # noqa: E402
from medusa_train.evaluation.records import SkippedTurn, TimedAnswer, TurnLog, TurnRecord  # noqa: E402
from medusa_train.evaluation.run_metadata import short_path  # noqa: E402
from medusa_train.evaluation.speed import Answerer, LoopAnswerer, SpeedTest  # noqa: E402
from medusa_train.inference.generate import Decoder  # noqa: E402
from medusa_train.inference.traces import trace_answer  # noqa: E402
from medusa_train.inference.tree_fit import joint_trees  # noqa: E402
from medusa_train.io import replace_text  # noqa: E402
from medusa_train.models.backbone import Backbone  # noqa: E402
from medusa_train.models.drafts import draft_name  # noqa: E402
from medusa_train.models.drafts.base import Draft  # noqa: E402
from medusa_train.progress import RunProgress  # noqa: E402
from medusa_train.trees.tree import Tree  # noqa: E402

#: name: title, configuration, overrides. Hydra is Hydra++ without its prefix layer, deeper heads and soft targets.
VARIANTS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "medusa1": ("Medusa-1", "m1", ()),
    "medusa2": ("Medusa-2", "m2", ()),
    "hydra": ("Hydra", "hydra", ("hydra.prefix_layer=false", "hydra.num_layers=1", "hydra.soft_targets=0.0")),
    "hydra++": ("Hydra++", "hydra", ()),
    "amphista": ("Amphista", "amphista", ()),
    "amphista-alpha": ("Amphista alpha", "amphista", ("amphista.auto_blocks=2",)),
    "kangaroo": ("Kangaroo", "kangaroo", ()),
    "kangaroo-published": ("Kangaroo without MLP", "kangaroo", ("kangaroo.mlp_size=0",)),
    "medusa2-ce": ("Medusa-2, cross-entropy for KL", "m2", ("medusa_self_distillation=false",)),
    "amphista-no-auto": ("Amphista, no auto-embedding", "amphista", ("amphista.auto_blocks=0",)),
    "amphista-no-staged": ("Amphista, no staged adaptation", "amphista", ("amphista.adaptation_layers=0",)),
    "amphista-no-token": ("Amphista, no sampled token", "amphista", ("amphista.sampled_token=false",)),
}
DEFAULT = tuple(VARIANTS)[:7]
OWN, EQUAL, CHAIN, EARLY = "own", "equal", "chain", "chain, early stop"  # EARLY: as published, Kangaroo only
FILLED = (EQUAL, CHAIN)  # without an early stop, which would leave nodes out
COUNTS, TIMES, PLAIN = "counts", "times", "plain"
QUICK_STEPS = 8  # optimizer steps of every training with --quick
WARM_UP = 2  # questions that every decoder answers before it is timed
TREE_ANSWER = 256  # longest answer that an equal tree is fitted to
TREE_SEED = 20  # order in which held-out conversations are answered
WINDOWS = (2, 3, 4)  # w of CTAR(w) in the table

Record = dict[str, Any]


# --- Training ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """One run of `medusa-train`: directory name, configuration, overrides."""

    name: str
    config: str
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Case:
    """A draft and the stages of its training; the last stage's run is measured."""

    name: str
    title: str
    stages: tuple[Stage, ...]


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/drafts"), metavar="DIR")
    parser.add_argument(
        "--compare", nargs="+", choices=VARIANTS, default=list(DEFAULT), metavar="NAME", help=", ".join(VARIANTS)
    )
    parser.add_argument("--draft-vocab", nargs="+", type=int, default=[], metavar="N", help="Medusa-1 over N tokens")
    parser.add_argument(
        "--configs", default="configs/tiny", metavar="PREFIX", help="PREFIX_m1.yaml, ... (configs/tiny)"
    )
    parser.add_argument("--epochs", type=float, help="of every training (those of PREFIX_m1.yaml)")
    parser.add_argument("--stage-one", type=float, help="of these, Medusa-2's as Medusa-1 (half)")
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value", help="in every training")
    parser.add_argument("--joint", nargs="*", default=[], metavar="key=value", help="in Medusa-2's joint stage")
    parser.add_argument("--gsm8k", type=Path, metavar="FILE", help="its test.jsonl: a text for Medusa-2's backbone")
    parser.add_argument("--problems", type=int, default=200, help="of GSM8K at most (200)")
    parser.add_argument("--bench", nargs="+", default=["tiny"], help="of medusa-eval, or question files (tiny)")
    parser.add_argument("--limit", type=int, nargs="+", help="questions at most; of every bench, or one for each")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="of an answer (256)")
    parser.add_argument("--dtype", default="auto", help="for timing; auto: the fastest here for plain decoding")
    parser.add_argument("--nodes", type=int, default=16, help="of the equal trees (16)")
    parser.add_argument("--tree-tokens", type=int, default=6000, help="greedy tokens that equal trees are fitted to")
    parser.add_argument("--quick", action="store_true", help="a few steps and questions: no results")
    args = parser.parse_args(arguments)
    args.epochs = args.epochs or load_config(TrainConfig, Path(f"{args.configs}_m1.yaml")).num_epochs
    args.stage_one = args.epochs / 2 if args.stage_one is None else args.stage_one
    if not 0 < args.stage_one < args.epochs:
        parser.error(f"--stage-one {args.stage_one:g}: must be between 0 and the {args.epochs:g} epochs")
    limits = args.limit or [None]
    args.limit = limits * len(args.bench) if len(limits) == 1 else limits
    if len(args.limit) != len(args.bench):
        parser.error(f"--limit: {len(limits)} values for {len(args.bench)} benches; give one, or one for each")
    if args.quick:
        args.limit = [min(limit or 6, 6) for limit in args.limit]
        args.max_new_tokens = min(args.max_new_tokens, 32)
        args.tree_tokens = min(args.tree_tokens, 400)
    return args


def cases_of(args: argparse.Namespace) -> list[Case]:
    """List the drafts to train, the reference first."""

    def length(epochs: float) -> tuple[str, ...]:
        short = ("warmup_steps=1", "logging_steps=1", "calibration_tokens=200")
        steps = max(1, round(QUICK_STEPS * epochs / args.epochs))
        return (f"num_epochs={epochs:g}", *((f"max_steps={steps}", *short) if args.quick else ()))

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


def train(stage: Stage, out: Path) -> None:
    """Run a stage or resume it, unless it is finished.

    Raises:
        SystemExit: it was trained with other settings, or failed.
    """
    done, settings = out / "runs" / f"{stage.name}.json", {"config": stage.config, "overrides": list(stage.overrides)}
    if done.is_file():
        before = json.loads(done.read_text(encoding="utf-8"))
        if before != settings:
            raise SystemExit(f"{done}: trained with other settings; choose another --out or delete it\n  {before}")
        return
    words = [sys.executable, "-m", "medusa_train.cli.train", stage.config, f"output_dir={out / 'runs' / stage.name}"]
    call([*words, *stage.overrides, "resume_from_checkpoint=auto"])
    replace_text(done, json.dumps(settings))


def call(words: Sequence[str]) -> None:
    """Run a command of the package; exits with its code if it fails."""
    print("$", " ".join(words[1:]), flush=True)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    if code := subprocess.run(words, check=False, env={**os.environ, "PYTHONPATH": path}).returncode:
        raise SystemExit(code)


def cached(path: Path, settings: Mapping[str, Any], compute: Callable[[], Record]) -> Record:
    """Return what `compute` gave before with the same settings, or compute it and keep it in `path`."""
    plain: Record = json.loads(json.dumps(settings))
    if path.is_file():
        stored: Record = json.loads(path.read_text(encoding="utf-8"))
        if stored["settings"] == plain:
            return stored
        print(f"{path}: made with other settings, measuring again", flush=True)
    result = {"settings": plain, **compute()}
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps(result) + "\n")
    return result


# --- A trained draft --------------------------------------------------------------------------------------------------


def describe(case: Case, args: argparse.Namespace) -> Record:
    """Train a draft if necessary; return its size, training, equal tree and, where they apply, coverage and quality."""
    for stage in case.stages:
        train(stage, args.out)
    runs = [args.out / "runs" / stage.name for stage in case.stages]
    settings = {
        "stages": [[stage.config, *stage.overrides] for stage in case.stages],
        "files": run_files(runs[-1]),
        "nodes": args.nodes,
        "tree_tokens": args.tree_tokens,
        "gsm8k": str(args.gsm8k),
        "problems": args.problems,
    }

    def compute() -> Record:
        print(f"{case.title}: fitting a tree of {args.nodes} nodes", flush=True)
        paths = resolve_model(str(runs[-1]), None, None)
        loaded = load_with_draft(paths, "float32", prepack=False)
        draft, backbone = loaded.draft, loaded.backbone
        assert draft is not None
        logged = [(run / "metrics.jsonl").read_text(encoding="utf-8").splitlines() for run in runs]
        stages = [[line for line in map(json.loads, lines) if line["kind"] == "train"] for lines in logged]
        return {
            "name": case.name,
            "title": case.title,
            "base_model": paths.base_model,
            "kind": draft_name(draft),
            "depth": draft.num_heads,
            "parameters": sum(parameter.numel() for parameter in draft.parameters()),
            "backbone_parameters": sum(parameter.numel() for parameter in backbone.model.parameters()),
            "tokens": [lines[-1]["tokens"] for lines in stages],
            "training_tokens_per_s": [statistics.median(line["tokens_per_s"] for line in lines) for lines in stages],
            EQUAL: [list(path) for path in equal_tree(paths, loaded, args).paths],
            "coverage": vocabulary_coverage(runs[-1]) if case.name.startswith("vocab") else None,
            "quality": backbone_quality(runs[-1], paths, args) if paths.adapter is not None else None,
        }

    return cached(args.out / "cases" / f"{case.name}.json", settings, compute)


def run_files(run: Path) -> list[Any]:
    """Identify a run's weights and tree by name, size and time."""
    files = [*sorted((run / "heads").glob("*.safetensors")), *run.glob("tree.json")]
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]


def equal_tree(paths: ModelPaths, loaded: LoadedModel, args: argparse.Namespace) -> Tree:
    """Fit the best tree of `--nodes` nodes to greedy float32 answers to the run's held-out prompts.

    Raises:
        CheckpointError: the run's data are not available.
    """
    chat = ChatEncoder(loaded.backbone.tokenizer, paths.chat_template)
    prompts = validation_prompts(paths, chat, TREE_SEED)
    if not prompts:
        raise CheckpointError(f"{paths.home}: its training data are missing, needed to fit a tree")
    traces = trace_conversations(loaded, prompts, args.tree_tokens, TREE_ANSWER, lambda tokens: None)
    return joint_trees([trace for chat_traces in traces for trace in chat_traces], [args.nodes])[args.nodes]


def vocabulary_coverage(run: Path) -> dict[str, float]:
    """Return the shares of training and held-out tokens that the heads can predict, and the heads' megabytes."""
    cfg = load_config(TrainConfig, run / "config.yaml")
    token_map = read_heads(run / "heads").token_map
    assert token_map is not None
    texts = dict(zip(("training", "held-out"), datasets_of(cfg), strict=True))
    tokens = (one.tokens for text in texts.values() for one in text.examples)
    size = max(int(token_map.max()), *(int(ids.max()) for ids in tokens)) + 1
    shares = {name: coverage(token_counts(text, size), token_map) for name, text in texts.items()}
    return {**shares, "megabytes": sum(path.stat().st_size for path in heads_files(run / "heads")) / 1e6}


def datasets_of(cfg: TrainConfig) -> tuple[Any, Any]:
    """Load a run's training and held-out conversations, unpacked."""
    from transformers import AutoTokenizer

    encoder = ChatEncoder(AutoTokenizer.from_pretrained(cfg.base_model), cfg.chat_template)
    return load_datasets(cfg.model_copy(update={"sample_packing": False, "dataset_prepared_path": None}), encoder)


def backbone_quality(run: Path, paths: ModelPaths, args: argparse.Namespace) -> dict[str, Record]:
    """Compare a changed backbone with the original on held-out answers and GSM8K, float32: perplexities and KL."""
    cfg = load_config(TrainConfig, run / "config.yaml")
    before, after = load_versions(paths, cfg.base_model)
    texts = {"held-out answers": datasets_of(cfg)[1]}
    if args.gsm8k:
        path = args.out / "gsm8k.jsonl"
        replace_text(path, "".join(json.dumps(chat) + "\n" for chat in gsm8k_chats(args.gsm8k, args.problems)))
        entry = DatasetConfig(path=str(path), type="messages")
        texts["GSM8K"] = datasets_of(cfg.model_copy(update={"datasets": [entry], "val_set_size": 0.0}))[0]
    quality = {}
    for name, text in texts.items():
        loader = BatchLoader(text, micro_batch_size=8, seed=0, shuffle=False)
        one = compare_backbones(
            before, after, (batch for _, batch in zip(range(loader.steps_per_epoch), loader, strict=False))
        )
        quality[name] = {
            "tokens": one.tokens,
            "perplexity_before": one.perplexity_before,
            "perplexity_change": one.perplexity_change,
            "kl": one.kl,
        }
    return quality


def gsm8k_chats(path: Path, limit: int) -> Iterator[Record]:
    """Read GSM8K problems (`question`, `answer` per line) as chats, without calculator marks."""
    for line in path.read_text(encoding="utf-8").splitlines()[:limit]:
        row = json.loads(line)
        steps, _, result = re.sub(r"<<.*?>>", "", row["answer"]).strip().rpartition("####")
        answer = f"{steps.strip()}\nThe answer is {result.strip()}." if steps else result
        question = " ".join(row["question"].split())
        yield {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


# --- Decoding ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contender:
    """A draft ready to decode; `adapted`: on a backbone of its own."""

    name: str
    backbone: Backbone
    adapted: bool
    draft: Draft
    trees: Mapping[str, Tree]


class FilledTrees:
    """Decodes with a draft that fills every tree, without an early stop."""

    def __init__(self, one: Contender, tree: str) -> None:
        self._draft = one.draft
        self._loop = LoopAnswerer(Decoder(one.backbone, one.draft, one.trees[tree]))

    def answer(self, prompt_ids: Sequence[int], max_new_tokens: int) -> TimedAnswer:
        """Decode, see `Answerer`."""
        with self._draft.no_early_exit():
            return self._loop.answer(prompt_ids, max_new_tokens)


class Field:
    """All drafts in one dtype, on one common backbone where they did not change it.

    Args:
        runs: directory of the runs. drafts: of `describe`. pack: prepack weights, which changes rounding.
    """

    def __init__(self, runs: Path, drafts: Sequence[Record], dtype: str, *, pack: bool) -> None:
        common = common_backbone(runs / drafts[0]["name"])
        self.backbone = load_with_draft(common, dtype, prepack=pack).backbone
        self.chat = ChatEncoder(self.backbone.tokenizer, common.chat_template)
        self.contenders = [self._load(runs, draft, dtype, pack) for draft in drafts]

    def _load(self, runs: Path, described: Record, dtype: str, pack: bool) -> Contender:
        paths = resolve_model(str(runs / described["name"]), None, None)
        if paths.adapter is not None:
            loaded = load_with_draft(paths, dtype, prepack=pack)
            backbone, draft = loaded.backbone, loaded.draft
            assert draft is not None
        else:
            assert paths.heads is not None
            backbone, draft = self.backbone, load_draft(paths.heads, self.backbone, self.backbone.dtype)
            if pack:
                draft.prepack()
        chain = Tree.chain(draft.num_heads)
        trees = {OWN: load_tree(paths, draft.num_heads), EQUAL: Tree.from_paths(described[EQUAL]), CHAIN: chain}
        if described["kind"] == "kangaroo":
            trees[EARLY] = chain
        return Contender(described["name"], backbone, paths.adapter is not None, draft, trees)

    def answerers(self, phase: str) -> dict[str, Answerer]:
        """Create the decoders of a phase as DRAFT/TREE; DRAFT/plain: an adapted backbone without its draft."""
        decoders: dict[str, Answerer] = {}
        for one in self.contenders:
            for tree in one.trees:
                if phase == TIMES and tree == CHAIN:
                    continue
                loop = LoopAnswerer(Decoder(one.backbone, one.draft, one.trees[tree]))
                decoders[f"{one.name}/{tree}"] = FilledTrees(one, tree) if tree in FILLED else loop
            if one.adapted and phase == COUNTS:
                decoders[f"{one.name}/{PLAIN}"] = LoopAnswerer(Decoder(one.backbone))
        return decoders


def common_backbone(run: Path) -> ModelPaths:
    """Return the paths of the backbone that all drafts started from."""
    return replace(resolve_model(str(run), None, None), heads=None, tree=None, adapter=None)


class Session:
    """Counts and times all drafts on benches; models are loaded once for each phase that has work to do."""

    def __init__(self, args: argparse.Namespace, drafts: Sequence[Record]) -> None:
        self._args, self._drafts = args, drafts
        self._runs: Path = args.out / "runs"
        self.dtype: str = args.dtype

    @cached_property
    def _counting(self) -> Field:
        return Field(self._runs, self._drafts, "float32", pack=False)

    @cached_property
    def _timing(self) -> Field:
        return Field(self._runs, self._drafts, self.dtype, pack=True)

    def measure(self, phase: str, bench: Bench) -> Record:
        """Return the result of a phase on a bench, from disk where it was measured before."""
        import torch

        questions = json.dumps([[question.question_id, *question.turns] for question in bench.questions])
        settings = {
            "questions": hashlib.sha256(questions.encode()).hexdigest(),
            "max_new_tokens": self._args.max_new_tokens,
            "drafts": [[draft["name"], draft["settings"], draft[EQUAL]] for draft in self._drafts],
        }
        if phase == TIMES:
            settings |= {"dtype": self._args.dtype, "threads": torch.get_num_threads()}
        compute = self._count if phase == COUNTS else self._time
        result = cached(self._args.out / phase / f"{bench.name}.json", settings, lambda: compute(bench, settings))
        if phase == TIMES:
            self.dtype = result["dtype"]  # the same for all benches
        return result

    def _count(self, bench: Bench, settings: Mapping[str, Any]) -> Record:
        log = TurnLog(self._args.out / COUNTS / f"{bench.name}.turns.jsonl", settings)
        records = self._decode(COUNTS, self._counting, bench, log, "float32")
        print(f"{bench.name}: accuracy by depth", flush=True)
        drafts = {one.name: counts_of(one, records) for one in self._counting.contenders}
        return {"questions": len(bench.questions), "answers": len(records), "drafts": drafts}

    def _time(self, bench: Bench, settings: Mapping[str, Any]) -> Record:
        log = TurnLog(self._args.out / TIMES / f"{bench.name}.turns.jsonl", settings)
        if self.dtype == "auto":
            paths = common_backbone(self._runs / self._drafts[0]["name"])
            self.dtype = log.dtype or choose_dtype(bench, paths, RunProgress(Console()))
        records = self._decode(TIMES, self._timing, bench, log, self.dtype)
        drafts: Record = {}
        for key in self._timing.answerers(TIMES):
            name, _, tree = key.partition("/")
            figures = summarize(as_tree(records, key))
            speed = [figures["speedup_over_fastest"], figures["intervals"].get("speedup_over_fastest")]
            drafts.setdefault(name, {})[tree] = {"overhead": figures["overhead"], "speedup": speed}
        plain = summarize(records)
        rates = {"plain": plain["baseline_tokens_per_s"], "generate": plain["generate_tokens_per_s"]}
        return {"dtype": self.dtype, "tokens_per_s": rates, "drafts": drafts}

    def _decode(self, phase: str, field: Field, bench: Bench, log: TurnLog, dtype: str) -> list[TurnRecord]:
        """Answer every turn with every decoder, continuing a stopped run."""
        model = LoadedModel(field.backbone, None, None)
        test = SpeedTest(model, field.chat, self._args.max_new_tokens, field.answerers(phase))
        measured = log.completed(bench.questions)
        if phase == TIMES:
            test.warm_up(bench.questions[:WARM_UP])
        log.start(dtype, measured)
        print(f"{bench.name}: {phase} in {dtype}, {len(bench.questions) - len(measured)} questions left", flush=True)

        def on_turn(turn: TurnRecord | SkippedTurn) -> None:
            log.append(turn)
            print(f"{bench.name}: {phase}, question {turn.question_id}, turn {turn.turn}", flush=True)

        try:
            return test.run(bench.questions, on_turn, measured)[0]
        finally:
            log.close()


def as_tree(records: Sequence[TurnRecord], key: str) -> list[TurnRecord]:
    """Return the records as an evaluation of decoder `key` alone, against its own backbone's plain answers."""
    plain = f"{key.partition('/')[0]}/{PLAIN}"
    return [
        replace(record, tree=record.others[key], plain=record.others.get(plain, record.plain), others={}, exact={})
        for record in records
    ]


def counts_of(one: Contender, records: Sequence[TurnRecord]) -> Record:
    """Count a draft's tokens and steps with each tree, and how often its first guess was right at each depth."""
    result: Record = {"trees": {}}
    for tree, shape in one.trees.items():
        turns = as_tree(records, f"{one.name}/{tree}")
        compare_timed_answers(turns, one.backbone, "float32")
        figures = summarize(turns)
        questions: dict[str, list[int]] = {}
        for turn in turns:
            assert turn.tree is not None
            before = questions.setdefault(str(turn.question_id), [0, 0])
            before[0] += len(turn.tree.tokens) - 1
            before[1] += sum(accepted_lengths([turn.tree]))
        result["trees"][tree] = {
            "nodes": shape.size,
            "tokens_per_step": figures["acceleration_rate"],
            "ctar": figures["ctar"],
            "equal": figures["equal_answers"] + figures["tie_answers"],
            "questions": questions,
        }
    hits = [[0, 0] for _ in range(one.draft.num_heads)]
    for turn in as_tree(records, f"{one.name}/{OWN}"):
        trace = trace_answer(one.backbone, one.draft, list(turn.prompt_ids), list(turn.plain.tokens))
        for ranks, known in zip(trace.ranks, trace.targets, strict=True):
            for depth in range(known):
                hits[depth][0] += ranks[depth] == 0
                hits[depth][1] += 1
    result["accuracy"] = [right / max(total, 1) for right, total in hits]
    return result


# --- The result -------------------------------------------------------------------------------------------------------


def summary(drafts: Sequence[Record], results: Mapping[str, Mapping[str, Record]]) -> dict[str, Record]:
    """Reduce descriptions, counts and times to the figures of the page, by draft.

    Args:
        drafts: of `describe`, the reference first. results: by bench, `counts` and, when measured, `times`.
    """
    rows: dict[str, Record] = {}
    kept = ("title", "depth", "parameters", "tokens", "training_tokens_per_s", "coverage", "quality")
    for draft in drafts:
        row: Record = {key: draft[key] for key in kept if draft.get(key) is not None}
        for bench, phases in results.items():
            counted = phases[COUNTS]["drafts"].get(draft["name"])
            if counted is None:
                continue
            base = phases[COUNTS]["drafts"][drafts[0]["name"]]["trees"]
            row[bench] = {"accuracy": counted["accuracy"]}
            for tree, one in counted["trees"].items():
                figures = {key: one[key] for key in ("nodes", "tokens_per_step")} | {"ctar": one["ctar"][: WINDOWS[-1]]}
                if draft is not drafts[0] and tree in (OWN, EQUAL):
                    figures["ratio"] = ratio(base[tree]["questions"], one["questions"])
                figures |= phases.get(TIMES, {}).get("drafts", {}).get(draft["name"], {}).get(tree, {})
                row[bench][tree] = figures
        rows[draft["name"]] = row
    return rows


def ratio(first: Mapping[str, Sequence[int]], second: Mapping[str, Sequence[int]]) -> list[Any] | None:
    """Return how many times more tokens per step the second draft takes, with its paired bootstrap interval."""
    counts = [{name: Counts(*pair) for name, pair in part.items()} for part in (first, second)]
    try:
        one = compare_rates(counts[0], counts[1])
    except DataError:
        return None  # too few questions
    return [one.ratio, one.ratio_interval]


def decoding_table(rows: Mapping[str, Record], benches: Sequence[str], reference: str) -> str:
    """Format tokens per step, ratios, latency and acceptance; benches after the first with their main figures only."""
    titles = ["draft"]
    for bench in benches:
        titles += [f"{bench}, equal tree: tokens/step", f"over {reference}", "own tree: nodes", "tokens/step"]
        titles += ["overhead", "speedup"]
        if bench == benches[0]:
            titles += ["chain: tokens/step", f"CTAR({'), ('.join(map(str, WINDOWS))})", "first guess right, by depth"]
    lines = []
    for row in rows.values():
        line = [row["title"]]
        for bench in benches:
            one = row[bench]
            own, equal, chain = one[OWN], one[EQUAL], one[CHAIN]
            line += [f"{equal['tokens_per_step']:.2f}", with_interval(equal.get("ratio"), ".3f"), str(own["nodes"])]
            line += [f"{own['tokens_per_step']:.2f}", with_interval([own.get("overhead"), None])]
            line.append(with_interval(own.get("speedup")))
            if bench == benches[0]:
                shares = [*chain["ctar"], *[0.0] * WINDOWS[-1]]
                line += [f"{chain['tokens_per_step']:.2f}", " ".join(f"{shares[w - 1]:.2f}" for w in WINDOWS)]
                line.append(" ".join(f"{share:.2f}" for share in one["accuracy"]))
        lines.append(line)
    return table(titles, lines)


def training_table(rows: Mapping[str, Record]) -> str:
    """Format size and training, with coverage of reduced vocabularies and quality of changed backbones."""
    titles = ["draft", "extra parameters", "tokens trained on", "training tokens/s"]
    covered = any("coverage" in row for row in rows.values())
    texts = list(dict.fromkeys(text for row in rows.values() for text in row.get("quality", {})))
    titles += ["training tokens covered", "held-out tokens covered", "heads MB"] if covered else []
    titles += [title for text in texts for title in (f"{text}: perplexity", "KL")]
    lines = []
    for row in rows.values():
        line = [row["title"], f"{row['parameters']:,}", " + ".join(f"{tokens:,}" for tokens in row["tokens"])]
        line.append(" + ".join(f"{rate:,.0f}" for rate in row["training_tokens_per_s"]))
        if covered:
            shares = row.get("coverage", {})
            line += [f"{shares[key]:.2%}" if shares else "" for key in ("training", "held-out")]
            line.append(f"{shares['megabytes']:.2f}" if shares else "")
        for text in texts:
            one = row.get("quality", {}).get(text)
            line += [f"{one['perplexity_change']:+.2%}", f"{one['kl']:.4f}"] if one else ["", ""]
        lines.append(line)
    return table(titles, lines)


def markdown(record: Mapping[str, Any]) -> str:
    """Format the page of a `write_report` record."""
    rows, benches = record["drafts"], record["benches"]
    parts = ["# Drafts side by side", machine_line(record["machine"])]
    if record["quick"]:
        parts.append("**Made with --quick: the drafts are not trained. It shows that everything runs, and no more.**")
    parts.append(
        f"{backbone_note(record['base_model'])} Kangaroo's default has an MLP of ours (`kangaroo.mlp_size`), "
        "`kangaroo-published` has none. Tokens per step, CTAR and accuracy: counts in greedy float32. *equal tree*: as "
        "many nodes for all, always filled. *own tree*: sized by measured latency. *chain*: first guesses alone, never "
        "stopped early (with Kangaroo's early stop: drafts.json). *speedup*: over the faster of plain decoding and "
        "`generate`, own tree. Brackets: 95 % bootstrap."
    )
    for name, bench in benches.items():
        line = f"{name}: {bench['questions']} questions, {bench['answers']} answers, "
        line += f"{bench['different']} of the drafts' answers differ from plain decoding's."
        if "dtype" in bench:
            rates = bench["tokens_per_s"]
            line += (
                f" Timed in {bench['dtype']}: plain {rates['plain']:.1f}, `generate` {rates['generate']:.1f} tokens/s."
            )
        parts.append(line)
    if benches:
        parts.append(decoding_table(rows, list(benches), next(iter(rows.values()))["title"]))
    return "\n\n".join([*parts, training_table(rows)]) + "\n"


def write_report(
    args: argparse.Namespace, machine: Record, drafts: Sequence[Record], results: Mapping[str, Mapping[str, Record]]
) -> str:
    """Write drafts.md and drafts.json, as far as measured; returns the page."""
    benches = {}
    for name, phases in results.items():
        counted, timed = phases[COUNTS], phases.get(TIMES, {})
        trees = [tree for draft in counted["drafts"].values() for tree in draft["trees"].values()]
        benches[name] = {
            "questions": counted["questions"],
            "answers": counted["answers"],
            "different": sum(counted["answers"] - tree["equal"] for tree in trees),
            **{key: timed[key] for key in ("dtype", "tokens_per_s") if timed},
        }
    record = {
        "machine": machine,
        "quick": args.quick,
        "epochs": args.epochs,
        "base_model": short_path(drafts[0]["base_model"]),
        "backbone_parameters": drafts[0]["backbone_parameters"],
        "benches": benches,
        "drafts": summary(drafts, results),
    }
    page = markdown(record)
    write_result(args.out, "drafts", rounded(record), page)
    return page


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and measure what is not finished; returns exit code 0, or that of an error."""
    quiet_libraries()
    args = parse_arguments(arguments)
    machine = machine_facts(__file__, arguments)
    warn_if_busy(machine)
    try:
        drafts: list[Record] = []
        for case in cases_of(args):
            drafts.append(describe(case, args))
            page = write_report(args, machine, drafts, {})
        session = Session(args, drafts)
        results: dict[str, dict[str, Record]] = {}
        benches = [load_bench(name, print).limited(limit) for name, limit in zip(args.bench, args.limit, strict=True)]
        for phase in (COUNTS, TIMES):
            for bench in benches:
                results.setdefault(bench.name, {})[phase] = session.measure(phase, bench)
                page = write_report(args, machine, drafts, results)
    except MedusaError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"\n{page}\nwrote {args.out}/drafts.md, drafts.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
