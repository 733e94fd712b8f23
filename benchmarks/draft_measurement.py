"""Measure one trained draft of `drafts.py`: trees, decoding by bench and temperature, training and backbone."""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draft_counts import Counted, count, count_answers, simulate
from rich.console import Console
from shared import cached

from medusa_train.checkpoint.load_model import LoadedModel, load_base_model
from medusa_train.checkpoint.resolve import resolve_model
from medusa_train.config.load import load_config
from medusa_train.config.schema import DatasetConfig, EvalConfig, TrainConfig
from medusa_train.data.conversation import Message
from medusa_train.data.dataset import BatchLoader, EncodedDataset, load_datasets
from medusa_train.data.draft_vocabulary import coverage, token_counts
from medusa_train.data.tokenize import ChatEncoder
from medusa_train.errors import CheckpointError
from medusa_train.evaluation.answer_scores import score_text, wilson_interval
from medusa_train.evaluation.answerers import Answerer, LoopAnswerer
from medusa_train.evaluation.backbone_quality import compare_backbones, has_trained_backbone, load_versions
from medusa_train.evaluation.calibrate import load_model, refit_tree, trace_conversations, validation_prompts
from medusa_train.evaluation.decoding_mode import DecodingMode
from medusa_train.evaluation.metrics import by_category, summarize
from medusa_train.evaluation.questions import Bench, load_bench
from medusa_train.evaluation.records import TimedAnswer, TurnLog, TurnRecord
from medusa_train.evaluation.run import time_bench, trace_records
from medusa_train.evaluation.run_metadata import measurement_settings, model_settings
from medusa_train.inference.generate import Decoder
from medusa_train.inference.traces import AcceptedLength, greedy_answers
from medusa_train.inference.tree_fit import joint_trees
from medusa_train.io import replace_text
from medusa_train.models.backbone import Backbone
from medusa_train.models.drafts.base import Draft
from medusa_train.progress import RunProgress
from medusa_train.trees.tree import Tree

if TYPE_CHECKING:
    from drafts import Case

OWN, CHAIN = "own", "chain"
CHAIN_LENGTH = 3  # tokens; every draft has so many heads
TREE_ANSWER = 256  # longest answer that an equal tree is fitted to
TREE_SEED = 20  # order in which held-out conversations are answered
TEXT_BATCHES = 64  # batches of 8 conversations that perplexities are measured on, at most

Record = dict[str, Any]


def cells_of(args: argparse.Namespace, benches: Sequence[Bench]) -> list[tuple[Bench, float]]:
    """List what each draft is measured on: bench and temperature."""
    return [(bench, temperature) for bench in benches for temperature in args.temperatures]


def cell_name(args: argparse.Namespace, bench: Bench, temperature: float) -> str:
    """Return the file name of a measured bench."""
    return f"{'counts-' if args.counts_only else ''}{bench.name}-t{temperature:g}.json"


def trained_tokens(run: Path) -> tuple[int, float]:
    """Return how many tokens a run was trained on, and its median tokens per second."""
    logged = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    lines = [line for line in logged if line["kind"] == "train"]
    return lines[-1]["tokens"], statistics.median(line["tokens_per_s"] for line in lines)


class FilledTree:
    """Decodes with a tree that is always filled: without the early stop that Kangaroo has."""

    def __init__(self, model: LoadedModel, tree: Tree, mode: DecodingMode) -> None:
        assert model.draft is not None
        self._draft = model.draft
        self._loop = LoopAnswerer(Decoder(model.backbone, model.draft, tree), mode, mode.rule)

    def answer(self, prompt_ids: Sequence[int], max_new_tokens: int) -> TimedAnswer:
        """Decode, see `Answerer`."""
        with self._draft.no_early_exit():
            return self._loop.answer(prompt_ids, max_new_tokens)


class Measurement:
    """All that is measured of a trained draft, each part kept in a file below `--out`/cells.

    Args:
        args: of `drafts.py`. benches: with the questions to ask. dtype: of the evaluations.
    """

    def __init__(self, args: argparse.Namespace, case: Case, benches: Sequence[Bench], dtype: str) -> None:
        self._args, self._case, self._benches, self._dtype = args, case, benches, dtype
        self._runs = [args.out / "runs" / stage.name for stage in case.stages]
        self._cells: Path = args.out / "cells" / case.name
        self._progress = RunProgress(Console())

    def run(self) -> None:
        """Measure what is not measured."""
        paths = resolve_model(str(self._runs[-1]), None, None)
        form = {"dtype": self._dtype, "compile": self._args.compile}
        fitted = {**model_settings(paths), **form, "nodes": self._args.nodes, "tokens": self._args.tree_tokens}
        trees = cached(self._cells / "trees.json", fitted, self._fit_trees)["trees"]
        shapes = {name: Tree.from_paths([tuple(path) for path in paths]) for name, paths in trees.items()}
        about = {**fitted, "gsm8k": str(self._args.gsm8k), "problems": self._args.problems}
        cached(self._cells / "training.json", about, self._describe)
        for bench, temperature in cells_of(self._args, self._benches):
            if self._args.counts_only:
                self._count(bench, temperature, shapes)
                continue
            cfg = self._config(bench, temperature)
            # the run's tree may just have been fitted again: its file is part of these settings
            settings = {**measurement_settings(cfg, bench, self._paths), "trees": trees}
            path = self._cells / cell_name(self._args, bench, temperature)
            cached(path, settings, partial(self._time, bench, cfg, shapes, settings, path))

    def _config(self, bench: Bench, temperature: float) -> EvalConfig:
        sampling: Record = {"acceptance": "sampling", "temperature": temperature} if temperature else {}
        return EvalConfig(
            bench=str(bench.path),
            max_new_tokens=self._args.max_new_tokens,
            dtype=self._dtype,
            compile=self._args.compile,
            prompt_lookup=not temperature,
            calibration_tokens=max(100, self._args.tree_tokens),
            **sampling,
        )

    @property
    def _paths(self) -> Any:
        return resolve_model(str(self._runs[-1]), None, None)

    @cached_property
    def _model(self) -> LoadedModel:
        """The model with its own tree, fitted again if it was fitted to another form of decoding and is to be timed."""
        cfg = self._config(self._benches[0], 0.0)
        model = load_model(self._paths, self._dtype, self._progress, compiled=self._args.compile)
        refitted = None if self._args.counts_only else refit_tree(cfg, model, self._paths, self._progress)
        return model if refitted is None else refitted[0]

    @property
    def _chat(self) -> ChatEncoder:
        paths = self._paths
        return ChatEncoder(self._model.backbone.tokenizer, paths.chat_template, paths.chat_template_kwargs)

    def _fit_trees(self) -> Record:
        """Fit the best trees of given sizes to answers to the run's held-out prompts; the clock has no part in it."""
        prompts = validation_prompts(self._paths, self._chat, TREE_SEED)
        if not prompts:
            raise CheckpointError(f"{self._runs[-1]}: its training data are missing, needed to fit trees")
        with self._progress.phase("fitting equal trees", self._args.tree_tokens, "tokens", ticking=True) as phase:
            chats = trace_conversations(self._model, prompts, self._args.tree_tokens, TREE_ANSWER, phase.advance)
        fitted = joint_trees([trace for chat in chats for trace in chat], self._args.nodes)
        assert self._model.draft is not None
        trees = {CHAIN: Tree.chain(min(CHAIN_LENGTH, self._model.draft.num_heads))}
        trees |= {str(nodes): fitted[nodes] for nodes in self._args.nodes}
        return {"trees": {name: [list(path) for path in tree.paths] for name, tree in trees.items()}}

    def _count(self, bench: Bench, temperature: float, trees: Mapping[str, Tree]) -> None:
        """Count tokens per step of the equal trees in batches, without a clock; see `count_answers`."""
        asked = [question.turns for question in bench.questions]
        shapes = {name: [list(path) for path in tree.paths] for name, tree in trees.items()}
        limit = self._args.max_new_tokens
        settings = {
            **model_settings(self._paths),
            "dtype": self._dtype,
            "asked": asked,
            "tokens": limit,
            "trees": shapes,
        }
        mode = DecodingMode.from_config(self._config(bench, temperature))
        path = self._cells / cell_name(self._args, bench, temperature)
        cached(
            path, settings, lambda: count_answers(self._model, self._chat, bench, mode, limit, trees, self._progress)
        )

    def _time(
        self, bench: Bench, cfg: EvalConfig, trees: Mapping[str, Tree], settings: Mapping[str, Any], path: Path
    ) -> Record:
        """Ask a bench. Greedy counts of the equal trees are simulated, those of sampling need decoding."""
        mode, model = DecodingMode.from_config(cfg), self._model
        is_greedy = mode.acceptance == "greedy"
        more: dict[str, Answerer] = {}
        if not is_greedy:
            more = {name: FilledTree(model, tree, mode) for name, tree in trees.items()}
        log = TurnLog(path.with_suffix(".turns.jsonl"), settings)
        records, skipped, notes = time_bench(cfg, bench, model, self._paths, self._dtype, log, self._progress, more)
        if is_greedy:
            trace_records(records, model, self._progress)
        assert model.tree is not None
        counted = {OWN: count([_decoded(record, record.tree) for record in records])}
        for name, tree in trees.items():
            lengths = AcceptedLength(tree)
            counted[name] = count([
                _simulated(record, lengths) if is_greedy else _decoded(record, record.others[name])
                for record in records
            ])  # fmt: skip
        result = {
            "nodes": model.tree.size,
            "answers": len(records),
            "skipped": len(skipped),
            "equal": sum(record.answer.tokens == record.plain.tokens for record in records) if is_greedy else None,
            "notes": notes,
            "own": _brief(summarize(records)),
            "categories": {name: _brief(figures) for name, figures in by_category(records).items()},
            "trees": counted,
        }
        log.remove()
        return result

    # Training, and what it did to the backbone

    def _describe(self) -> Record:
        draft = self._model.draft
        assert draft is not None
        trained = [trained_tokens(run) for run in self._runs]
        paths = self._paths
        return {
            "base_model": paths.base_model,
            "depth": draft.num_heads,
            "parameters": sum(parameter.numel() for parameter in draft.parameters()),
            "backbone_parameters": sum(parameter.numel() for parameter in self._model.backbone.model.parameters()),
            "tokens": [tokens for tokens, _ in trained],
            "tokens_per_s": [rate for _, rate in trained],
            "hours": sum(tokens / rate for tokens, rate in trained) / 3600,
            "coverage": self._vocabulary_coverage(draft),
            "quality": self._backbone_quality() if has_trained_backbone(paths) else None,
        }

    @cached_property
    def _run_config(self) -> TrainConfig:
        return load_config(TrainConfig, self._runs[-1] / "config.yaml")

    def _datasets(self, **keys: Any) -> tuple[EncodedDataset, EncodedDataset]:
        """Load the run's training and held-out conversations, unpacked."""
        update = {"sample_packing": False, "dataset_prepared_path": None, **keys}
        return load_datasets(self._run_config.model_copy(update=update), self._chat)

    def _vocabulary_coverage(self, draft: Draft) -> list[float] | None:
        """Return the shares of training and held-out tokens that heads with a reduced vocabulary can predict."""
        token_map = getattr(draft, "token_map", None)  # Kangaroo never has one
        if token_map is None:
            return None
        size = self._model.backbone.vocab_size
        return [coverage(token_counts(text, size), token_map) for text in self._datasets() if len(text)]

    def _backbone_quality(self) -> Record:
        """Compare a trained backbone with the original: perplexity and KL in float32, and correct answers to GSM8K."""
        before, after = load_versions(self._paths, self._run_config.base_model)
        texts = {"held-out answers": self._datasets()[1]}
        quality: Record = {}
        if self._args.gsm8k:
            path = self._args.out / "gsm8k.jsonl"
            chats = gsm8k_chats(self._args.gsm8k, self._args.problems)
            replace_text(path, "".join(json.dumps(chat) + "\n" for chat in chats))
            entry = DatasetConfig(path=str(path), type="messages")
            texts["GSM8K"] = self._datasets(datasets=[entry], test_datasets=None, val_set_size=0.0)[0]
        for name, text in texts.items():
            loader = BatchLoader(text, micro_batch_size=8, seed=0, shuffle=False)
            batches = zip(range(min(loader.steps_per_epoch, TEXT_BATCHES)), loader, strict=False)
            one = compare_backbones(before, after, (batch for _, batch in batches))
            quality[name] = {
                "tokens": one.tokens,
                "perplexity": one.perplexity_before,
                "change": one.perplexity_change,
                "kl": one.kl,
            }
        if self._args.gsm8k:
            original = load_base_model(resolve_model(None, self._run_config.base_model, None), self._dtype)
            quality["GSM8K"]["correct_before"] = self._exact_match(original)
            quality["GSM8K"]["correct"] = self._exact_match(self._model.backbone)
        return quality

    def _exact_match(self, backbone: Backbone) -> list[Any]:
        """Return the share of GSM8K's problems that a backbone solves greedily, with its interval."""
        questions = load_bench(str(self._args.gsm8k)).limited(self._args.problems).questions
        prompts = [self._chat.prompt([Message("user", question.turns[0])]) for question in questions]
        answers = greedy_answers(backbone, prompts, self._args.max_new_tokens, 10**9)
        correct = 0
        for index, tokens in answers.items():
            expected = questions[index].expected
            assert expected is not None
            correct += score_text(expected, backbone.tokenizer.decode(tokens, skip_special_tokens=True)).correct
        return [correct / len(answers), list(wilson_interval(correct, len(answers)))]


def gsm8k_chats(path: Path, limit: int) -> Iterator[Record]:
    """Read GSM8K problems (`question`, `answer` per line) as chats, without calculator marks."""
    for line in path.read_text(encoding="utf-8").splitlines()[:limit]:
        row = json.loads(line)
        steps, _, result = re.sub(r"<<.*?>>", "", row["answer"]).strip().rpartition("####")
        answer = f"{steps.strip()}\nThe answer is {result.strip()}." if steps else result
        question = " ".join(row["question"].split())
        yield {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def _decoded(record: TurnRecord, answer: TimedAnswer | None) -> Counted:
    assert answer is not None
    steps_tokens = len(answer.tokens) - answer.prefill_tokens
    return Counted(record.question_id, answer.tokens, steps_tokens, answer.accepted)


def _simulated(record: TurnRecord, lengths: AcceptedLength) -> Counted:
    if record.trace is None:
        raise CheckpointError("the heads' guesses could not be traced: not enough memory")
    return simulate(record.question_id, record.answer.tokens, record.trace, lengths)


def _brief(figures: Mapping[str, Any]) -> Record:
    """Reduce `summarize` to the figures of the page, ratios with their intervals."""
    intervals = figures["intervals"]
    pairs = {"rate": "acceleration_rate", "speedup": "speedup", "over_generate": "speedup_over_generate"}
    result: Record = {name: [figures[key], intervals.get(key)] for name, key in pairs.items()}
    if lookup := figures["baselines"].get("prompt_lookup"):
        over = figures["tokens_per_s"] / lookup["tokens_per_s"]
        result["over_lookup"] = [over, lookup["speedup_interval"]]
    return {
        **result,
        "overhead": figures["overhead"],
        "plain_tokens_per_s": figures["baseline_tokens_per_s"],
        "loops": figures["looping_answers"],
        "speedup_without_loops": figures["speedup_without_loops"],
    }
