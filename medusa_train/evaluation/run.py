"""The journey of an evaluation: bench and model in, timed answers, exactness, report out. Holds no arithmetic."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from medusa_train.checkpoint.load import LoadedModel, load_with_draft
from medusa_train.checkpoint.resolve import ModelPaths
from medusa_train.config.schema import EvalConfig
from medusa_train.data.tokenize import ChatEncoder
from medusa_train.errors import BackboneError, ConfigError
from medusa_train.evaluation.backbone_quality import has_trained_backbone, measure_backbone_quality
from medusa_train.evaluation.choose_dtype import WeightMemory, choose_dtype, is_out_of_memory, release_memory
from medusa_train.evaluation.output_equality import EQUALITY_DTYPES, compare_regenerated_answers, compare_timed_answers
from medusa_train.evaluation.questions import Bench
from medusa_train.evaluation.records import SkippedTurn, TurnLog, TurnRecord
from medusa_train.evaluation.report import Report, model_id, terminal_table, write_report
from medusa_train.evaluation.run_metadata import collect_metadata, measurement_settings
from medusa_train.evaluation.speed import SpeedTest, extra_baselines
from medusa_train.inference.detokenize import token_pieces
from medusa_train.inference.traces import trace_answer
from medusa_train.progress import RunProgress

# How the comparison of the answers in a dtype ended, in the report.
COMPARED = "compared"
NO_MEMORY = "not enough memory"

JUDGE_SECONDS = 120.0  # that one judgement may take
JUDGE_RETRY_SECONDS = 300.0  # that a judgement is asked for again and again


def evaluate(
    cfg: EvalConfig, bench: Bench, paths: ModelPaths, command: str, console: Console
) -> tuple[Report, list[Path]]:
    """Measure and report; returns the report and the files that were written.

    `bench` holds the questions to ask (already limited); `command` is what the user typed, kept in the report. The
    files are written as soon as the timed pass is done, and once more after the comparison of the answers, which may
    take as long and may not fit into memory.

    Raises BackboneError, CheckpointError and DataError, each saying what to do, and KeyboardInterrupt.
    """
    started = time.perf_counter()
    if (cfg.judge_base_url is None) != (cfg.judge_model is None):
        raise ConfigError("judge_base_url and judge_model belong together: set both, or neither")
    torch.manual_seed(cfg.seed)
    directory = Path(cfg.output_dir) if cfg.output_dir else paths.home / "eval" / bench.name
    log = _open_log(directory / "turns.jsonl", measurement_settings(cfg, bench, paths), console)
    dtype = cfg.dtype if cfg.dtype != "auto" else log.dtype or choose_dtype(bench, paths, console)
    subject, records, skipped = _load_and_time(cfg, bench, paths, dtype, log, console)
    trace_records(records, subject)
    meta = collect_metadata(cfg, bench, subject, paths, dtype, records, skipped, command)
    meta["resumed_turns"] = sum(len(turns) for turns in log.measured(bench.questions).values())
    tree = subject.tree
    extra: dict[str, Any] = {}
    if (calibration := _calibration(paths)) is not None:
        extra["calibration"] = calibration

    def save() -> tuple[Report, list[Path]]:
        meta["seconds"] = round(time.perf_counter() - started, 1)
        report = Report.from_records(records, meta, tree, extra)
        return report, write_report(report, records, skipped, directory)

    report, written = save()
    if subject.draft is not None:
        weights = WeightMemory.of(subject.backbone.model, subject.backbone.device)
        try:
            if dtype in EQUALITY_DTYPES:
                meta["exactness"][dtype] = _attempt(
                    records, dtype, partial(compare_timed_answers, records, subject.backbone, dtype)
                )
                report, written = save()
            del subject  # a large backbone fits once, not once for each dtype
            if cfg.exactness:
                _judge_elsewhere(cfg, records, paths, dtype, weights, meta["exactness"], console)
            if has_trained_backbone(paths):
                extra["joint"] = _joint(paths, console)
        except KeyboardInterrupt:
            console.print(terminal_table(report))
            console.print(f"interrupted while comparing answers; the timed figures are kept in {directory}")
            raise
    extra["judge"] = _judge(cfg, bench, records, model_id(meta), directory, console)
    report, written = save()
    log.remove()
    console.print(terminal_table(report))
    for judged, outcome in (meta["exactness"] or {}).items():
        if outcome == NO_MEMORY:
            console.print(f"answers were not compared in {judged}: {NO_MEMORY}")
    if skipped:
        console.print(f"{len(skipped)} turns were skipped: prompt and answer do not fit the model's context")
    return report, written


def _joint(paths: ModelPaths, console: Console) -> dict[str, Any] | None:
    """`measure_backbone_quality`, or None where memory does not suffice."""
    release_memory()
    console.print("measuring the backbone before and after joint training", highlight=False)
    try:
        return measure_backbone_quality(paths)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        console.print(f"perplexity was not measured: {NO_MEMORY}")
        return None


def _judge(
    cfg: EvalConfig, bench: Bench, records: Sequence[TurnRecord], model: str, directory: Path, console: Console
) -> dict[str, Any] | None:
    """Have the answers graded where a judge is named; None says that they were not judged."""
    if cfg.judge_base_url is None or cfg.judge_model is None:
        return None
    from medusa_train.evaluation.judge import Judge, grade
    from medusa_train.openai_client import OpenAIClient

    server = OpenAIClient(cfg.judge_base_url, timeout=JUDGE_SECONDS, retry_seconds=JUDGE_RETRY_SECONDS)
    name = re.sub(r"[^\w.-]+", "_", cfg.judge_model)
    path = directory / "model_judgment" / f"{name}_single.jsonl"
    try:
        with RunProgress(console).phase(f"graded by {cfg.judge_model}", len(records), "turns") as progress:
            grades = grade(
                records,
                bench.questions,
                model,
                Judge(server, cfg.judge_model),
                path,
                cfg.judge_concurrency,
                progress.advance,
            )
    finally:
        server.close()
    return grades.summary()


def _open_log(path: Path, settings: Mapping[str, Any], console: Console) -> TurnLog:
    log = TurnLog(path, settings)
    if log.differing:
        console.print(
            f"an evaluation that was stopped here had another {', '.join(log.differing)}: starting anew",
            highlight=False,
            soft_wrap=True,
        )
    elif log.turns:
        console.print(
            f"going on with an evaluation that was stopped: {len(log.turns)} turns are measured (delete {path} to "
            "start anew)",
            highlight=False,
            soft_wrap=True,
        )
    return log


def _calibration(paths: ModelPaths) -> dict[str, Any] | None:
    """How tree.json says that the tree was chosen, where it says so."""
    if paths.tree is None:
        return None
    record = json.loads(paths.tree.read_text(encoding="utf-8"))
    if not isinstance(record, dict) or "sizes" not in record:
        return None
    return {key: value for key, value in record.items() if key not in ("medusa_choices", "head_accuracy")}


def _load_and_time(
    cfg: EvalConfig, bench: Bench, paths: ModelPaths, dtype: str, log: TurnLog, console: Console
) -> tuple[LoadedModel, list[TurnRecord], list[SkippedTurn]]:
    try:
        with RunProgress(console).phase(f"loading in {dtype}", ticking=True):
            subject = load_with_draft(paths, dtype, compiled=cfg.compile)
        if subject.tree is not None and paths.tree is None:
            console.print(
                "no tree.json beside the heads: taking the chain of their first guesses (--tree names another)"
            )
        return subject, *_time(cfg, bench, subject, paths, dtype, log, console)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise BackboneError(
            f"base_model {paths.base_model}: not enough memory to decode with it in {dtype}.\n"
            "Set another dtype, a lower --max-new-tokens or a smaller --tree, or measure on a larger device."
        ) from error


def _time(
    cfg: EvalConfig,
    bench: Bench,
    subject: LoadedModel,
    paths: ModelPaths,
    dtype: str,
    log: TurnLog,
    console: Console,
) -> tuple[list[TurnRecord], list[SkippedTurn]]:
    def note(line: str) -> None:
        console.print(line, highlight=False, soft_wrap=True)

    measured = log.measured(bench.questions)
    further = extra_baselines(subject.backbone, cfg.assistant_model, prompt_lookup=cfg.prompt_lookup, note=note)
    test = SpeedTest(subject, ChatEncoder(subject.backbone.tokenizer, paths.chat_template), cfg.max_new_tokens, further)
    test.warm_up(bench.questions[: cfg.warmup])
    log.start(dtype, measured)
    todo = sum(len(question.turns) for question in bench.questions if question.question_id not in measured)
    done = 0

    def on_turn(turn: TurnRecord | SkippedTurn) -> None:
        nonlocal done
        done += 1
        log.append(turn)
        answers = [] if isinstance(turn, SkippedTurn) else [turn.tree, *turn.baselines.values()]
        progress.advance(tokens=sum(len(answer.tokens) for answer in answers if answer is not None))

    try:
        with RunProgress(console).phase(f"timing in {dtype}", todo, "turns") as progress:
            return test.run(bench.questions, on_turn, measured)
    except KeyboardInterrupt:
        note(f"{done} of {todo} turns are kept in {log.path}; the same command goes on from there")
        raise
    finally:
        log.close()


def _judge_elsewhere(
    cfg: EvalConfig,
    records: list[TurnRecord],
    paths: ModelPaths,
    timed_dtype: str,
    weights: WeightMemory,
    outcomes: dict[str, str],
    console: Console,
) -> None:
    """Compare tree and plain answers in the dtypes that were not timed, by decoding every prompt once more."""
    for dtype in EQUALITY_DTYPES:
        if dtype == timed_dtype:
            continue
        release_memory()
        if weights.fit(dtype):
            outcomes[dtype] = _attempt(records, dtype, partial(_load_and_judge, cfg, records, paths, dtype, console))
        else:
            outcomes[dtype] = NO_MEMORY


def _load_and_judge(
    cfg: EvalConfig, records: list[TurnRecord], paths: ModelPaths, dtype: str, console: Console
) -> None:
    subject = load_with_draft(paths, dtype)
    with RunProgress(console).phase(f"exactness in {dtype}", len(records), "turns") as progress:
        compare_regenerated_answers(
            records, subject, dtype, cfg.max_new_tokens, lambda tokens: progress.advance(tokens=tokens)
        )


def _attempt(records: Sequence[TurnRecord], dtype: str, judge: Callable[[], None]) -> str:
    """Compare the answers in `dtype`, or leave that out where memory does not suffice; returns how it ended."""
    try:
        judge()
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        for record in records:
            record.exact.pop(dtype, None)  # a count over some of the answers would pass for one over all
        return NO_MEMORY
    return COMPARED


def trace_records(records: Sequence[TurnRecord], subject: LoadedModel) -> None:
    """Fill in `pieces` and, with a draft, `trace` of every record.

    The trace takes one more pass over prompt and answer, with the logits of a whole answer in memory; where they do
    not fit, no answer is traced.
    """
    for record in records:
        record.pieces = token_pieces(subject.backbone.tokenizer, record.answer.tokens)
    if subject.draft is None:
        return
    try:
        for record in records:
            prompt, answer = list(record.prompt_ids), list(record.answer.tokens)
            record.trace = trace_answer(subject.backbone, subject.draft, prompt, answer)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        for record in records:
            record.trace = None
