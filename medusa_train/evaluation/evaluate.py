"""The journey of an evaluation: bench and model in, timed answers, exactness, report out. Holds no arithmetic."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console

from medusa_train.checkpoint.subject import Subject, SubjectPaths, load_subject
from medusa_train.config.paths import PROJECT_ROOT
from medusa_train.config.schema import EvalConfig
from medusa_train.data.chat import ChatEncoder
from medusa_train.data.conversation import Message
from medusa_train.errors import BackboneError
from medusa_train.evaluation.benches import Bench
from medusa_train.evaluation.exactness import judge_again, judge_timed
from medusa_train.evaluation.fastest import fastest_dtype
from medusa_train.evaluation.memory import Weights, is_out_of_memory, release_memory
from medusa_train.evaluation.metrics import first_difference
from medusa_train.evaluation.progress import TurnProgress
from medusa_train.evaluation.records import SkippedTurn, TurnRecord
from medusa_train.evaluation.report import Report, terminal_table, write_report
from medusa_train.evaluation.speed import SpeedTest
from medusa_train.models.backbone import Backbone

EXACTNESS_DTYPES = ("float32", "bfloat16")

# How the comparison of the answers in a dtype ended, in the report.
COMPARED = "compared"
NO_MEMORY = "not enough memory"


def evaluate(
    cfg: EvalConfig, bench: Bench, paths: SubjectPaths, command: str, console: Console
) -> tuple[Report, list[Path]]:
    """Measure and report; returns the report and the files that were written.

    `bench` holds the questions to ask (already limited); `command` is what the user typed, kept in the report. The
    files are written as soon as the timed pass is done, and once more after the comparison of the answers, which may
    take as long and may not fit into memory.

    Raises BackboneError, CheckpointError and DataError, each saying what to do, and KeyboardInterrupt.
    """
    started = time.perf_counter()
    torch.manual_seed(cfg.seed)
    dtype = cfg.dtype if cfg.dtype != "auto" else _choose_dtype(bench, paths, console)
    subject, records, skipped = _load_and_time(cfg, bench, paths, dtype, console)
    meta = _meta(cfg, bench, subject, paths, dtype, records, skipped, command)
    directory = Path(cfg.output_dir) if cfg.output_dir else paths.home / "eval" / bench.name

    def save() -> tuple[Report, list[Path]]:
        meta["seconds"] = round(time.perf_counter() - started, 1)
        report = Report.from_records(records, meta)
        return report, write_report(report, records, skipped, directory)

    report, written = save()
    if subject.draft is not None:
        weights = Weights.of(subject.backbone.model, subject.backbone.device)
        try:
            if dtype in EXACTNESS_DTYPES:
                meta["exactness"][dtype] = _attempt(
                    records, dtype, partial(judge_timed, records, subject.backbone, dtype)
                )
                report, written = save()
            del subject  # a large backbone fits once, not once for each dtype
            if cfg.exactness:
                _judge_elsewhere(cfg, records, paths, dtype, weights, meta["exactness"], console)
        except KeyboardInterrupt:
            console.print(terminal_table(report))
            console.print(f"interrupted while comparing answers; the timed figures are kept in {directory}")
            raise
        report, written = save()
    console.print(terminal_table(report))
    for judged, outcome in (meta["exactness"] or {}).items():
        if outcome == NO_MEMORY:
            console.print(f"answers were not compared in {judged}: {NO_MEMORY}")
    if skipped:
        console.print(f"{len(skipped)} turns were skipped: prompt and answer do not fit the model's context")
    return report, written


def _choose_dtype(bench: Bench, paths: SubjectPaths, console: Console) -> str:
    def prompt_of(backbone: Backbone) -> list[int]:
        chat = ChatEncoder(backbone.tokenizer, paths.chat_template)
        return chat.prompt([Message("user", bench.questions[0].turns[0])])

    return fastest_dtype(paths, prompt_of, lambda line: console.print(line, highlight=False))


def _load_and_time(
    cfg: EvalConfig, bench: Bench, paths: SubjectPaths, dtype: str, console: Console
) -> tuple[Subject, list[TurnRecord], list[SkippedTurn]]:
    try:
        subject = load_subject(paths, dtype)
        if subject.tree is not None and paths.tree is None:
            console.print(
                "no tree.json beside the heads: taking the chain of their first guesses (--tree names another)"
            )
        return subject, *_time(cfg, bench, subject, paths, dtype, console)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise BackboneError(
            f"base_model {paths.base_model}: not enough memory to decode with it in {dtype}.\n"
            "Set another dtype, a lower --max-new-tokens or a smaller --tree, or measure on a larger device."
        ) from error


def _time(
    cfg: EvalConfig, bench: Bench, subject: Subject, paths: SubjectPaths, dtype: str, console: Console
) -> tuple[list[TurnRecord], list[SkippedTurn]]:
    chat = ChatEncoder(subject.backbone.tokenizer, paths.chat_template)
    test = SpeedTest(subject, chat, cfg.max_new_tokens)
    test.warm_up(bench.questions[: cfg.warmup])
    turns = sum(len(question.turns) for question in bench.questions)
    with TurnProgress(console, f"timing in {dtype}", turns) as progress:

        def done(turn: TurnRecord | SkippedTurn) -> None:
            if isinstance(turn, SkippedTurn):
                progress.advance(0)
            else:
                progress.advance(sum(len(a.tokens) for a in (turn.tree, turn.plain, turn.generate) if a is not None))

        return test.run(bench.questions, done)


def _judge_elsewhere(
    cfg: EvalConfig,
    records: list[TurnRecord],
    paths: SubjectPaths,
    timed_dtype: str,
    weights: Weights,
    outcomes: dict[str, str],
    console: Console,
) -> None:
    """Compare tree and plain answers in the dtypes that were not timed, by decoding every prompt once more."""
    for dtype in EXACTNESS_DTYPES:
        if dtype == timed_dtype:
            continue
        release_memory()
        if weights.fit(dtype):
            outcomes[dtype] = _attempt(records, dtype, partial(_load_and_judge, cfg, records, paths, dtype, console))
        else:
            outcomes[dtype] = NO_MEMORY


def _load_and_judge(
    cfg: EvalConfig, records: list[TurnRecord], paths: SubjectPaths, dtype: str, console: Console
) -> None:
    subject = load_subject(paths, dtype)
    with TurnProgress(console, f"exactness in {dtype}", len(records)) as progress:
        judge_again(records, subject, dtype, cfg.max_new_tokens, progress.advance)


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


def _meta(
    cfg: EvalConfig,
    bench: Bench,
    subject: Subject,
    paths: SubjectPaths,
    dtype: str,
    records: Sequence[TurnRecord],
    skipped: Sequence[SkippedTurn],
    command: str,
) -> dict[str, Any]:
    draft, tree = subject.draft, subject.tree
    same = sum(first_difference(record.plain.tokens, record.generate.tokens) is None for record in records)
    return {
        "model": None if paths.name is None else _short(paths.name),
        "base_model": _short(paths.base_model),
        "bench": bench.name,
        "bench_file": _short(str(bench.path)),
        "questions": len(bench.questions),
        "skipped_turns": len(skipped),
        "max_new_tokens": cfg.max_new_tokens,
        "backbone": paths.backbone_form,
        "dtype": dtype,
        "heads": None if draft is None else draft.num_heads,
        "tree_nodes": None if tree is None else tree.size,
        "tree_depth": None if tree is None else tree.max_depth,
        "tree_file": None if paths.tree is None else _short(str(paths.tree)),
        "baselines": {
            "baseline_tokens_per_s": "the same decoding loop with the empty tree",
            "generate_tokens_per_s": f"transformers {transformers.__version__} generate, greedy, with its own cache",
        },
        "plain_equal_generate": same,
        "exactness": None if draft is None else dict.fromkeys(EXACTNESS_DTYPES, "not compared"),
        "device": _device_name(subject.backbone),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "command": command,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _short(path: str) -> str:
    """A path below the current directory or the project, from there; others and hub names as they are."""
    for root in (Path.cwd(), PROJECT_ROOT):
        if Path(path).is_absolute() and Path(path).is_relative_to(root):
            return str(Path(path).relative_to(root))
    return path


def _device_name(backbone: Backbone) -> str:
    if backbone.device.type == "cuda":
        return str(torch.cuda.get_device_name(backbone.device))
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
