"""Decodes a bench with all drafts of `drafts.py`: counted in float32, then timed. Trains nothing, writes no report.

Counts are those of float32 with weights as they were loaded, and of trees that are given: nothing in them depends on
a clock, and a run that is repeated repeats them. Times are those of the dtype that is fastest here, weights laid out
for the machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from drafts_case import EQUAL, FILLED, OWN, TREES, Contender, Field, common_backbone, load_field
from m2_vs_m1 import keep
from rich.console import Console

from medusa_train.checkpoint.load import LoadedModel
from medusa_train.evaluation.choose_dtype import choose_dtype
from medusa_train.evaluation.metrics import accepted_lengths, by_category, summarize
from medusa_train.evaluation.output_equality import judge_timed
from medusa_train.evaluation.progress import TurnProgress
from medusa_train.evaluation.questions import Bench, load_bench
from medusa_train.evaluation.records import SkippedTurn, TimedAnswer, TurnLog, TurnRecord
from medusa_train.evaluation.speed import Answerer, LoopAnswerer, SpeedTest
from medusa_train.inference.generate import Decoder
from medusa_train.inference.traces import trace_answer

COUNTS, TIMES = "counts", "times"
WARM_UP = 2  # questions that every decoder answers before it is timed
AS_PLAIN = "plain"  # in place of a tree: a backbone of its own without the draft
FIGURES = ("tokens_per_s", "overhead", "speedup", "speedup_over_generate", "speedup_over_fastest")

Result = dict[str, Any]


def measure(
    asked: argparse.Namespace, cases: Sequence[Mapping[str, Any]], machine: Mapping[str, Any]
) -> Iterator[tuple[str, str, Result]]:
    """Phase, bench and result, as each is done: first all counts, then all times. Finished ones are read.

    Raises:
        MedusaError: a bench or a run can't be found or loaded.
    """
    wanted = zip(asked.bench, asked.limit, strict=True)
    benches = [load_bench(name, print).limited(limit) for name, limit in wanted]
    session = _Session(asked, cases)
    for phase in (COUNTS, TIMES):
        for bench in benches:
            path = asked.out / phase / f"{bench.name}.json"
            settings = session.identity(phase, bench)
            result = _finished(path, settings)
            if result is None:
                result = {"settings": settings, "machine": dict(machine)}
                result |= session.counted(bench, settings) if phase == COUNTS else session.timed(bench, settings)
                keep(path, result)
            if phase == TIMES:
                session.dtype = result["dtype"]  # one for all benches
            yield phase, bench.name, result


def _finished(path: Path, settings: Mapping[str, Any]) -> Result | None:
    """What was measured before; None, with a line, where it was measured otherwise: decoders take turns or don't."""
    if not path.is_file():
        return None
    found: Result = json.loads(path.read_text(encoding="utf-8"))
    if differing := [key for key in settings if settings[key] != found["settings"].get(key)]:
        print(f"{path}: was measured with another {', '.join(differing)}: measuring anew", flush=True)
        return None
    return found


class _Session:
    """What phases and benches share: the drafts, loaded once for each phase that has anything to do."""

    def __init__(self, asked: argparse.Namespace, cases: Sequence[Mapping[str, Any]]) -> None:
        self._asked = asked
        self._cases = cases
        self._runs: Path = asked.out / "runs"
        self._console = Console(soft_wrap=True)
        self.dtype: str = asked.dtype

    @cached_property
    def _counting(self) -> Field:
        return load_field(self._runs, self._cases, "float32", pack=False)

    @cached_property
    def _timing(self) -> Field:
        return load_field(self._runs, self._cases, self.dtype, pack=True)

    def identity(self, phase: str, bench: Bench) -> dict[str, Any]:
        """Everything that a result depends on."""
        questions = json.dumps([[question.question_id, *question.turns] for question in bench.questions])
        timed = {"dtype": self._asked.dtype, "threads": torch.get_num_threads()} if phase == TIMES else {}
        return {
            "questions": hashlib.sha256(questions.encode()).hexdigest(),
            "max_new_tokens": self._asked.max_new_tokens,
            "drafts": [[case["name"], case["settings"]["stages"]] for case in self._cases],
            "weights": [_stamp(self._runs / case["name"]) for case in self._cases],
            "trees": [[case[OWN], case[EQUAL]] for case in self._cases],
            **timed,
        }

    def counted(self, bench: Bench, settings: Mapping[str, Any]) -> Result:
        """Tokens, steps and guesses of every draft with every tree."""
        records, skipped = self._decode(COUNTS, self._counting, bench, self._log(COUNTS, bench, settings), "float32")
        print(f"{bench.name}: looking at what every draft guesses", flush=True)
        return {
            **_about(bench, records, skipped, "float32"),
            "drafts": {one.name: _counts(one, records) for one in self._counting.contenders},
        }

    def timed(self, bench: Bench, settings: Mapping[str, Any]) -> Result:
        """Speed of every draft with every tree that is timed."""
        log = self._log(TIMES, bench, settings)
        if self.dtype == "auto":
            paths = common_backbone(self._runs / self._cases[0]["name"])
            self.dtype = log.dtype or choose_dtype(bench, paths, self._console)
        records, skipped = self._decode(TIMES, self._timing, bench, log, self.dtype)
        drafts = {
            one.name: {tree: _times(records, f"{one.name}/{tree}") for tree in timed_trees(one)}
            for one in self._timing.contenders
        }
        whole = summarize(records)
        plain = {"plain": whole["baseline_tokens_per_s"], "generate": whole["generate_tokens_per_s"]}
        return {**_about(bench, records, skipped, self.dtype), "tokens_per_s": plain, "drafts": drafts}

    def _log(self, phase: str, bench: Bench, settings: Mapping[str, Any]) -> TurnLog:
        """Every answer of a phase, kept when it is done too."""
        return TurnLog(self._asked.out / phase / f"{bench.name}.turns.jsonl", settings)

    def _decode(
        self, phase: str, field: Field, bench: Bench, log: TurnLog, dtype: str
    ) -> tuple[list[TurnRecord], list[SkippedTurn]]:
        """Every turn by every decoder, gone on with where it was stopped."""
        test = SpeedTest(
            LoadedModel(field.backbone, None, None), field.chat, self._asked.max_new_tokens, answerers(field, phase)
        )
        measured = log.measured(bench.questions)
        if phase == TIMES:
            test.warm_up(bench.questions[:WARM_UP])
        log.start(dtype, measured)
        todo = sum(len(question.turns) for question in bench.questions if question.question_id not in measured)
        print(f"{bench.name}: {todo} turns, {phase} in {dtype}", flush=True)

        def on_turn(turn: TurnRecord | SkippedTurn) -> None:
            log.append(turn)
            progress.advance(0 if isinstance(turn, SkippedTurn) else sum(map(_tokens, turn.baselines.values())))

        try:
            with TurnProgress(self._console, f"{phase} in {dtype}", todo) as progress:
                found = test.run(bench.questions, on_turn, measured)
        finally:
            log.close()
        return found


class FilledTrees:
    """Decodes with a draft that fills every tree, however doubtful its guesses."""

    def __init__(self, one: Contender, tree: str) -> None:
        self._draft = one.draft
        self._loop = LoopAnswerer(Decoder(one.backbone, one.draft, one.trees[tree]))

    def answer(self, prompt_ids: Sequence[int], max_new_tokens: int) -> TimedAnswer:
        """See `Answerer`."""
        with self._draft.no_early_exit():
            return self._loop.answer(prompt_ids, max_new_tokens)


def answerers(field: Field, phase: str) -> dict[str, Answerer]:
    """The decoders of a phase beside plain decoding and `generate`, as DRAFT/TREE."""
    found: dict[str, Answerer] = {}
    for one in field.contenders:
        for tree in one.trees if phase == COUNTS else timed_trees(one):
            filled = FilledTrees(one, tree) if tree in FILLED else None
            loop = filled or LoopAnswerer(Decoder(one.backbone, one.draft, one.trees[tree]))
            found[f"{one.name}/{tree}"] = loop
        if one.own and phase == COUNTS:  # what its answers have to equal
            found[f"{one.name}/{AS_PLAIN}"] = LoopAnswerer(Decoder(one.backbone))
    return found


def timed_trees(one: Contender) -> tuple[str, ...]:
    """With a chain only what was published with one."""
    return TREES if one.kind == "kangaroo" else (OWN, EQUAL)


def _tokens(answer: TimedAnswer) -> int:
    return len(answer.tokens)


def _stamp(run: Path) -> list[Any]:
    files = sorted((run / "heads").glob("*.safetensors"))
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]


def _about(bench: Bench, records: Sequence[TurnRecord], skipped: Sequence[SkippedTurn], dtype: str) -> Result:
    counts = {"questions": len(bench.questions), "answers": len(records), "skipped": len(skipped)}
    return {"bench": bench.name, **counts, "dtype": dtype}


def views(records: Sequence[TurnRecord], key: str) -> list[TurnRecord]:
    """The records as an evaluation of the decoder `key` alone would have them."""
    plain = f"{key.partition('/')[0]}/{AS_PLAIN}"
    return [
        replace(record, tree=record.others[key], plain=record.others.get(plain, record.plain), others={}, exact={})
        for record in records
    ]


def _by_question(records: Sequence[TurnRecord]) -> dict[str, list[TurnRecord]]:
    found: dict[str, list[TurnRecord]] = {}
    for record in records:
        found.setdefault(str(record.question_id), []).append(record)
    return found


def _counts(one: Contender, records: Sequence[TurnRecord]) -> Result:
    """What a draft's answers took with each tree, and where its guesses were right along the plain ones."""
    trees: Result = {}
    for tree in one.trees:
        seen = views(records, f"{one.name}/{tree}")
        judge_timed(seen, one.backbone, "float32")
        figures = summarize(seen)
        trees[tree] = {
            "nodes": one.trees[tree].size,
            "tree_depth": one.trees[tree].max_depth,
            "acceleration_rate": figures["acceleration_rate"],
            "acceleration_interval": figures["intervals"].get("acceleration_rate"),
            "ctar": figures["ctar"],
            "equal": figures["equal_answers"],
            "ties": figures["tie_answers"],
            "questions": {name: _taken(turns) for name, turns in _by_question(seen).items()},
            "categories": {name: part["acceleration_rate"] for name, part in by_category(seen).items()},
        }
    seen = views(records, f"{one.name}/{OWN}")  # for its plain answers alone
    return {"trees": trees, "hits": {name: _hits(one, turns) for name, turns in _by_question(seen).items()}}


def _taken(turns: Sequence[TurnRecord]) -> dict[str, Any]:
    """Tokens that steps brought, and how many steps accepted 0, 1, 2, ... guesses."""
    answers = [turn.tree for turn in turns if turn.tree is not None]
    return {"tokens": sum(len(answer.tokens) - 1 for answer in answers), "accepted": accepted_lengths(answers)}


def _hits(one: Contender, turns: Sequence[TurnRecord]) -> list[list[int]]:
    """For every depth how often the first guess was right, and of how many, along the backbone's own answers."""
    found = [[0, 0] for _ in range(one.draft.num_heads)]
    for turn in turns:
        trace = trace_answer(one.backbone, one.draft, list(turn.prompt_ids), list(turn.plain.tokens))
        for ranks, known in zip(trace.ranks, trace.targets, strict=True):
            for depth in range(known):
                found[depth][0] += ranks[depth] == 0
                found[depth][1] += 1
    return found


def _times(records: Sequence[TurnRecord], key: str) -> Result:
    """Speed, and its intervals, over all questions; the speedup by category."""
    seen = views(records, key)
    figures = summarize(seen)
    parts = {name: part["speedup_over_fastest"] for name, part in by_category(seen).items()}
    intervals = {name: figures["intervals"].get(name) for name in FIGURES}
    return {**{name: figures[name] for name in FIGURES}, "intervals": intervals, "categories": parts}
