"""Count the tokens per step of one trained draft of `drafts.py`, and describe its training: no clock has a part in it.

Answers are generated in batches. Greedy answers are those of plain decoding, along which trees are simulated; with
sampling each tree decodes its own, and so do EAGLE-3's dynamic trees, as large and deep as the fitted ones.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from shared import cached

from medusa_train.checkpoint.load_model import LoadedModel, load_with_draft
from medusa_train.checkpoint.resolve import resolve_model
from medusa_train.config.load import load_config
from medusa_train.config.schema import DatasetConfig, TrainConfig
from medusa_train.data.conversation import Message, is_looping
from medusa_train.data.dataset import BatchLoader, EncodedDataset, load_datasets
from medusa_train.data.tokenize import ChatEncoder
from medusa_train.errors import CheckpointError
from medusa_train.evaluation.backbone_quality import compare_backbones, has_trained_backbone, load_versions
from medusa_train.evaluation.calibrate import validation_prompts
from medusa_train.evaluation.questions import Bench
from medusa_train.evaluation.run_metadata import model_settings
from medusa_train.inference.batch import BatchDecoder
from medusa_train.inference.decoding_settings import DecodingMode
from medusa_train.inference.generate import Generation
from medusa_train.io import replace_text
from medusa_train.models.drafts.base import Limits
from medusa_train.models.drafts.eagle3 import Eagle3Draft
from medusa_train.progress import RunProgress
from medusa_train.tree_search.fit import joint_trees
from medusa_train.tree_search.traces import AcceptedLength, Trace, trace_answer, trace_conversations
from medusa_train.trees.tree import Tree

CHAIN = "chain"
DYNAMIC = "dynamic "  # and the number of nodes
CHAIN_LENGTH = 3  # tokens; every draft has so many heads
ROWS = 16  # answers that are generated at once
TREE_ANSWER = 256  # longest answer that an equal tree is fitted to
TREE_SEED = 20  # order in which held-out conversations are answered
GSM8K_PROBLEMS = 200
TEXT_BATCHES = 64  # batches of 8 conversations that perplexities are measured on, at most

Record = dict[str, Any]


def cell_name(bench: Bench, temperature: float) -> str:
    """Return the file name of a counted bench."""
    return f"{bench.name}-t{temperature:g}.json"


class DraftCounts:
    """All that is counted of a trained draft, each part kept in a file below `--out`/cells.

    Args:
        args: of `drafts.py`. name: of the draft. runs: of its stages; the last one's is counted. benches: with the
            questions to ask.
    """

    def __init__(self, args: argparse.Namespace, name: str, runs: Sequence[Path], benches: Sequence[Bench]) -> None:
        self._args, self._runs, self._benches = args, runs, benches
        self._cells: Path = args.out / "cells" / name
        self._paths = resolve_model(str(runs[-1]), None, None)
        self._progress = RunProgress(Console())

    def run(self) -> None:
        """Count what is not counted."""
        args = self._args
        model: Record = {**model_settings(self._paths), "dtype": args.dtype}
        fitted = {**model, "nodes": args.nodes, "tokens": args.tree_tokens}
        trees = cached(self._cells / "trees.json", fitted, self._fit_trees)["trees"]
        shapes = {name: Tree.from_paths([tuple(path) for path in paths]) for name, paths in trees.items()}
        about = {**fitted, "gsm8k": str(args.gsm8k)}
        cached(self._cells / "training.json", about, self._describe)
        for bench in self._benches:
            asked = [question.turns for question in bench.questions]
            settings = {**model, "asked": asked, "tokens": args.max_new_tokens, "trees": trees}
            for temperature in args.temperatures:
                self._count(bench, temperature, shapes, settings)

    def _count(self, bench: Bench, temperature: float, trees: Mapping[str, Tree], settings: Record) -> None:
        mode = DecodingMode("sampling", temperature) if temperature else DecodingMode()
        limit, progress = self._args.max_new_tokens, self._progress
        cached(
            self._cells / cell_name(bench, temperature),
            settings,
            lambda: count_answers(self._model, self._chat, bench, mode, limit, trees, progress),
        )

    @cached_property
    def _model(self) -> LoadedModel:
        return load_with_draft(self._paths, self._args.dtype)

    @cached_property
    def _chat(self) -> ChatEncoder:
        paths = self._paths
        return ChatEncoder(self._model.backbone.tokenizer, paths.chat_template, paths.chat_template_kwargs)

    def _fit_trees(self) -> Record:
        """Fit the best trees of given sizes to answers to the run's held-out prompts."""
        prompts = validation_prompts(self._paths, self._chat, TREE_SEED, self._args.tree_tokens)
        if not prompts:
            raise CheckpointError(f"{self._runs[-1]}: its training data are missing, needed to fit trees")
        assert self._model.draft is not None
        with self._progress.phase("fitting equal trees", self._args.tree_tokens, "tokens", ticking=True) as phase:
            traced = trace_conversations(
                self._model.backbone,
                self._model.draft,
                prompts,
                token_budget=self._args.tree_tokens,
                max_new_tokens=TREE_ANSWER,
                on_answer=phase.advance,
            )
        fitted = joint_trees(traced.traces, self._args.nodes)
        trees = {CHAIN: Tree.chain(min(CHAIN_LENGTH, self._model.draft.num_heads))}
        trees |= {str(nodes): fitted[nodes] for nodes in self._args.nodes}
        return {"trees": {name: [list(path) for path in tree.paths] for name, tree in trees.items()}}

    # Training, and what it did to the backbone

    def _describe(self) -> Record:
        draft = self._model.draft
        assert draft is not None
        paths = self._paths
        return {
            "base_model": paths.base_model,
            "depth": draft.num_heads,
            "parameters": sum(parameter.numel() for parameter in draft.parameters()),
            "tokens": [trained_tokens(run) for run in self._runs],
            "quality": self._backbone_quality() if has_trained_backbone(paths) else None,
        }

    @cached_property
    def _run_config(self) -> TrainConfig:
        return load_config(TrainConfig, self._runs[-1] / "config.yaml")

    def _datasets(self, **keys: Any) -> tuple[EncodedDataset, EncodedDataset]:
        """Load the run's training and held-out conversations, unpacked."""
        update = {"sample_packing": False, "dataset_prepared_path": None, **keys}
        return load_datasets(self._run_config.model_copy(update=update), self._chat)

    def _backbone_quality(self) -> Record:
        """Compare a trained backbone with the original: perplexity and KL in float32."""
        before, after = load_versions(self._paths, self._run_config.base_model)
        texts = {"held-out answers": self._datasets()[1]}
        quality: Record = {}
        if self._args.gsm8k:
            path = self._args.out / "gsm8k.jsonl"
            chats = gsm8k_chats(self._args.gsm8k)
            replace_text(path, "".join(json.dumps(chat) + "\n" for chat in chats))
            entry = DatasetConfig(path=str(path), type="messages")
            texts["GSM8K"] = self._datasets(datasets=[entry], test_datasets=None, val_set_size=0.0)[0]
        for name, text in texts.items():
            loader = BatchLoader(text, micro_batch_size=8, seed=0, shuffle=False)
            batches = zip(range(min(loader.steps_per_epoch, TEXT_BATCHES)), loader, strict=False)
            one = compare_backbones(before, after, (batch for _, batch in batches))
            quality[name] = {
                "tokens": one.tokens,
                "perplexity": math.exp(one.loss_before),
                "change": one.perplexity_change,
                "kl": one.kl,
            }
        return quality


def trained_tokens(run: Path) -> int:
    """Return how many tokens a run was trained on."""
    logged = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return int([line for line in logged if line["kind"] == "train"][-1]["tokens"])


def gsm8k_chats(path: Path) -> Iterator[Record]:
    """Read the first GSM8K problems (`question`, `answer` per line) as chats, without calculator marks."""
    for line in path.read_text(encoding="utf-8").splitlines()[:GSM8K_PROBLEMS]:
        row = json.loads(line)
        steps, _, result = re.sub(r"<<.*?>>", "", row["answer"]).strip().rpartition("####")
        answer = f"{steps.strip()}\nThe answer is {result.strip()}." if steps else result
        question = " ".join(row["question"].split())
        yield {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


class Counted(NamedTuple):
    """The steps of one answer.

    Attributes:
        answer: token ids. tokens: how many of them came from steps, that is all but the prefill's.
        accepted: guesses that each step accepted.
    """

    question_id: int | str
    answer: Sequence[int]
    tokens: int
    accepted: Sequence[int]


def count(answers: Sequence[Counted]) -> dict[str, Any]:
    """Count tokens and steps by question, in all answers and in those that do not loop, and CTAR."""
    totals: dict[bool, list[int]] = {True: [0, 0], False: [0, 0]}  # by whether the answer loops
    questions: dict[str, list[int]] = {}
    lengths: list[int] = []
    for one in answers:
        for sums in (questions.setdefault(str(one.question_id), [0, 0]), totals[is_looping(one.answer)]):
            sums[0] += one.tokens
            sums[1] += len(one.accepted)
        lengths += one.accepted
    (loop_tokens, loop_steps), (tokens, steps) = totals[True], totals[False]
    ctar = [
        sum(length >= w for length in lengths) / max(len(lengths), 1) for w in range(1, max(lengths, default=0) + 1)
    ]
    return {
        "rate": (tokens + loop_tokens) / max(steps + loop_steps, 1),
        "rate_without_loops": tokens / steps if steps else None,
        "ctar": ctar,
        "questions": questions,
    }


def simulate(question_id: int | str, answer: Sequence[int], trace: Trace, lengths: AcceptedLength) -> Counted:
    """Count the steps that a tree takes for a traced greedy answer."""
    accepted = [lengths[trace.path(start)] for start in trace.simulate(lengths)]
    return Counted(question_id, answer, len(trace.ranks) - 1, accepted)


def count_answers(
    model: LoadedModel,
    chat: ChatEncoder,
    bench: Bench,
    mode: DecodingMode,
    max_new_tokens: int,
    trees: Mapping[str, Tree],
    progress: RunProgress,
) -> dict[str, Any]:
    """Ask a bench turn by turn and count the steps of every tree, always filled.

    Returns:
        `trees`: name to `count`; `answers` and `loops`: their number and that of looping ones, by tree.
    """
    draft, backbone, sampled = model.draft, model.backbone, mode.rule is not None
    assert draft is not None
    decoders = {name: BatchDecoder(backbone, draft, tree) for name, tree in trees.items() if sampled}
    if isinstance(draft, Eagle3Draft):
        for name, tree in trees.items():
            if name != CHAIN:
                dynamic = draft.with_dynamic_trees(Limits(tree.size, tree.max_depth))
                decoders[DYNAMIC + name] = BatchDecoder(backbone, dynamic)
    turns = sum(len(question.turns) for question in bench.questions)
    counted: dict[str, list[Counted]] = {name: [] for name in [*trees, *decoders]}
    with progress.phase("counting steps", turns * (len(decoders) + (not sampled)), "answers", ticking=True) as phase:
        for name, decoder in decoders.items():
            with draft.no_early_exit():
                for question, _, out in _answers(decoder, chat, bench, mode, max_new_tokens):
                    counted[name].append(Counted(question, out.tokens, len(out.tokens) - 1, out.accepted))
                    phase.advance()
        if not sampled:
            lengths = {name: AcceptedLength(tree) for name, tree in trees.items()}
            for question, prompt, out in _answers(BatchDecoder(backbone), chat, bench, mode, max_new_tokens):
                trace = trace_answer(backbone, draft, prompt, out.tokens)
                for name, length in lengths.items():
                    counted[name].append(simulate(question, out.tokens, trace, length))
                phase.advance()
    return {
        "trees": {name: count(answers) for name, answers in counted.items()},
        "answers": {name: len(answers) for name, answers in counted.items()},
        "loops": {name: sum(is_looping(one.answer) for one in answers) for name, answers in counted.items()},
    }


def _answers(
    decoder: BatchDecoder, chat: ChatEncoder, bench: Bench, mode: DecodingMode, max_new_tokens: int
) -> Iterator[tuple[int | str, list[int], Generation]]:
    """Answer all turns; yields question id, prompt and answer. A conversation ends where it outgrows the context."""
    histories = {question.question_id: list[Message]() for question in bench.questions}
    for turn in range(max((len(question.turns) for question in bench.questions), default=0)):
        asked: list[tuple[int | str, list[int]]] = []
        for question in bench.questions:
            history = histories.get(question.question_id)
            if history is None or turn >= len(question.turns):
                continue
            history.append(Message("user", question.turns[turn]))
            prompt = chat.prompt(history)
            if len(prompt) + max_new_tokens <= decoder.backbone.max_context:
                asked.append((question.question_id, prompt))
            else:
                del histories[question.question_id]
        asked.sort(key=lambda one: len(one[1]))  # rows of similar length share passes
        for start in range(0, len(asked), ROWS):
            part = asked[start : start + ROWS]
            prompts = [prompt for _, prompt in part]
            generators = mode.generators(prompts, mode.rule)
            outputs = decoder.generate_batch(prompts, max_new_tokens, rule=mode.rule, generators=generators)
            for (question_id, prompt), out in zip(part, outputs, strict=True):
                text = decoder.backbone.tokenizer.decode(out.tokens, skip_special_tokens=True)
                histories[question_id].append(Message("assistant", text))
                yield question_id, prompt, out
