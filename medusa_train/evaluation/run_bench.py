"""Run an evaluation: load the model, time it on the benchmark, compare the outputs, write the
report.
"""

from __future__ import annotations

import dataclasses
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from medusa_train.checkpoint.load_model import LoadedModel, auto_dtype_of, compile_or_report
from medusa_train.checkpoint.resolve import (
    FIXED,
    NO_TREE,
    ModelPaths,
    names_tree_file,
)
from medusa_train.checkpoint.run_directory import only_writer
from medusa_train.config.draft_sections import LookupChoice
from medusa_train.config.paths import expand_user
from medusa_train.config.schema import EvalConfig
from medusa_train.data.tokenize import ChatEncoder
from medusa_train.errors import DataError, MedusaError, TargetModelError
from medusa_train.evaluation.answer_scores import (
    answered_turns,
    code_samples,
    require_code_execution,
    rouge_means,
    rouge_scorer,
    score_answers,
)
from medusa_train.evaluation.judge import Judge, grade
from medusa_train.evaluation.machine_load import OtherProcesses, machine_load
from medusa_train.evaluation.output_equality import (
    EQUALITY_DTYPES,
    compare_regenerated_answers,
    compare_timed_answers,
)
from medusa_train.evaluation.questions import Benchmark, Question
from medusa_train.evaluation.refit_tree import (
    describe_misfit,
    is_compiled,
    load_with_progress,
)
from medusa_train.evaluation.report import build_report, model_id, terminal_report, write_report
from medusa_train.evaluation.run_metadata import collect_metadata, measurement_settings
from medusa_train.evaluation.target_model_quality import (
    QUALITY_TOKENS,
    measure_target_model_quality,
)
from medusa_train.evaluation.timed_decoders import build_decoders
from medusa_train.evaluation.timing import SpeedTest
from medusa_train.evaluation.turns import TREE, TURN, TimedAnswer, Turn, completed_turns
from medusa_train.inference.batch_decoder import BatchDecoder
from medusa_train.inference.decoding_mode import DecodingMode
from medusa_train.inference.detokenize import token_pieces
from medusa_train.io import parse_json, warn_once
from medusa_train.json_lines import MeasurementLog
from medusa_train.models.precision import (
    WeightMemory,
    catch_out_of_memory,
    emulates,
    release_memory,
)
from medusa_train.models.target_model import TargetModel
from medusa_train.pages.page import number, write_files
from medusa_train.progress import RunProgress
from medusa_train.tree_search.traces import trace_answer
from medusa_train.trees.tree import Tree

# Outcomes of comparing the answers in a dtype, for `exactness` in the report's meta
COMPARED = "compared"
NO_MEMORY = "not enough memory"
EMULATED = "this device emulates it, which takes too long"

#: The same answer is generated several times, to see how much its plain steps vary on this machine:
#: number of answers, and tokens of each.
SPREAD_ROUNDS = 3
SPREAD_TOKENS = 9

JUDGE_TIMEOUT = 120.0  # seconds for one request to the judge
JUDGE_RETRY_SECONDS = 300.0  # a failed request is retried for this long


def evaluate(
    cfg: EvalConfig, benchmark: Benchmark, paths: ModelPaths, command: str, progress: RunProgress
) -> list[Path]:
    """Measure speed and output equality of a model on a benchmark, and write the report; return the
    paths of its files.

    The files are written three times: when the benchmark is timed, before other models are loaded,
    and at the end. The measurements in between may take as long as the benchmark. The same command
    resumes an interrupted benchmark.

    Args:
        paths: target model and draft heads; without heads only the baselines are measured.
        command: what the user typed, for the report.

    Raises:
        CheckpointError: another process evaluates into the same directory.
    """
    if cfg.score:
        unsupported_reason = require_code_execution(cfg.allow_code_execution, benchmark.questions)
        if unsupported_reason is not None:
            progress.print(unsupported_reason)
    mode = DecodingMode.from_config(cfg)
    name = mode.directory_name(benchmark.name, *_drafting(cfg, paths))
    directory = expand_user(cfg.output_dir) if cfg.output_dir else paths.home / "eval" / name
    evaluation = Evaluation(cfg, benchmark, paths, mode, directory, progress)
    # two evaluations would slow down each other's timing, and delete each other's log
    with only_writer(directory):
        return evaluation.run(command)


@dataclasses.dataclass
class Evaluation:
    """One evaluation, and its report so far.

    Attributes:
        paths: files of the model.
        mode: how tokens are chosen, and the batch size.
        directory: directory of the report.
        baselines: descriptions of the decoders that the draft is compared with, by name.
        turns: all turns of the benchmark, once they are timed. Turns that did not fit the context
            have no answers.
        tree: the tree to draw; None if each step has its own tree.
        meta: the report's `meta`: what was run.
        parts: the report's further entries: what was measured in addition to the times.
    """

    cfg: EvalConfig
    benchmark: Benchmark
    paths: ModelPaths
    mode: DecodingMode
    directory: Path
    progress: RunProgress
    baselines: dict[str, str] = dataclasses.field(default_factory=dict)
    turns: list[Turn] = dataclasses.field(default_factory=list)
    tree: Tree | None = None
    meta: dict[str, Any] = dataclasses.field(default_factory=dict)
    parts: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def answered(self) -> list[Turn]:
        """The turns that have answers."""
        return [turn for turn in self.turns if not turn.skipped]

    def run(self, command: str) -> list[Path]:
        """Evaluate; `command` is what the user typed."""
        cfg, progress = self.cfg, self.progress
        # 1. first the steps that may fail without a model
        scorer = rouge_scorer(self.benchmark.questions) if cfg.rouge else None
        judge = _judge(cfg, progress)
        torch.manual_seed(cfg.seed)

        # 2. load the model, time the benchmark, and describe both
        settings = measurement_settings(cfg, self.benchmark, self.paths)
        log = MeasurementLog(self.directory / "turns.jsonl", settings, TURN)
        resumption = log.resumption("evaluation", "turns", len(log.entries))
        if resumption is not None:
            progress.print(resumption)
        model, dtype, load = self._load_and_time(log)
        trace_turns(self.answered, model, progress)
        if model.dynamic is None:
            self.tree = model.tree
        self.meta = collect_metadata(
            cfg, self.benchmark, model, self.paths, dtype, self.baselines, self.turns, command
        )
        self.meta["machine_load"] = load
        resumed = completed_turns(log.entries, self.benchmark.questions)
        self.meta["resumed_turns"] = sum(map(len, resumed.values()))
        self.parts |= _calibration(self.paths)
        try:
            # 3. measurements that need the tokenizer or the timed model
            self._score(model.target_model.tokenizer, scorer)
            compares = model.proposer is not None and self.mode.acceptance == "greedy"
            memory = WeightMemory.of(model.target_model.model, model.target_model.device)
            if compares and dtype in EQUALITY_DTYPES:
                with self._comparison(dtype):
                    compare_timed_answers(self.answered, model.target_model, dtype)

            # 4. measurements that need other models. Memory may hold only one large target model,
            # so the timed model is deleted first. Write before, because a process that runs out of
            # memory may be killed
            self.write()
            del model
            if compares and cfg.exactness:
                for other in EQUALITY_DTYPES:
                    if other != dtype:
                        self._compare_again(other, memory)
            if self.paths.trained_target_model:
                self.parts["joint"] = _target_model_quality(self.paths, progress)
            if judge is not None:
                self.parts["judge"] = self._grade(judge)
            report, written = self.write()
        except BaseException:
            interrupted, _ = self.write()
            progress.console.print(terminal_report(interrupted))
            progress.print(f"interrupted after the timed part; its results are in {self.directory}")
            raise

        # 5. the report is complete
        log.remove()
        progress.console.print(terminal_report(report))
        for dtype, outcome in (self.meta["exactness"] or {}).items():
            if outcome in (NO_MEMORY, EMULATED):
                progress.print(f"answers were not compared in {dtype}: {outcome}")
        if skipped := self.meta["skipped_turns"]:
            progress.print(
                f"{skipped} turns were skipped: prompt and answer do not fit the model's context"
            )
        progress.console.print(progress.table())
        return written

    def write(self) -> tuple[dict[str, Any], list[Path]]:
        """Write the files with everything measured so far; return the report and their paths."""
        self.meta["seconds"] = round(self.progress.total_seconds, 1)
        phases = self.progress.seconds.items()
        self.meta["phases"] = {name: round(spent, 1) for name, spent in phases}
        report = build_report(self.turns, self.meta, self.tree, self.parts)
        return report, write_report(report, self.turns, self.directory)

    # Timing

    def _load_and_time(
        self, log: MeasurementLog[Turn]
    ) -> tuple[LoadedModel, str, dict[str, float | None]]:
        """Load the model and time the benchmark; return the model, its dtype, and the machine's
        load during the timing.
        """
        # a resumed evaluation keeps its dtype
        dtype = log.header.get("dtype", self.cfg.dtype)
        if dtype == "auto":
            dtype = auto_dtype_of(self.paths, self.progress.print)
        with catch_out_of_memory() as caught:
            model = self._load(dtype)
            chat = ChatEncoder(
                model.target_model.tokenizer,
                self.paths.chat_template,
                self.paths.chat_template_kwargs,
            )
            prompt = self._leave_out_rejected(chat)
            others = OtherProcesses()
            steps = plain_step_rounds(model.target_model, prompt, self.cfg.batch_size)
            self._time_benchmark(model, chat, dtype, log)
            steps += plain_step_rounds(model.target_model, prompt, self.cfg.batch_size)
            load = machine_load(others, steps)
        if caught:
            raise TargetModelError(
                f"base_model {self.paths.target_model}: not enough memory to decode with it in"
                f" {dtype}.\nSet another dtype, a lower --max-new-tokens or a smaller --tree, or"
                " measure on a larger device."
            )
        return model, dtype, load

    def _load(self, dtype: str) -> LoadedModel:
        """Load the model, and compile its passes if the configuration or the tree asks for it."""
        cfg, paths, progress = self.cfg, self.paths, self.progress
        model = load_with_progress(
            paths, dtype, progress, compiled=cfg.compile, rows=cfg.batch_size
        )
        ends = model.target_model.stop_tokens.describe(model.target_model.tokenizer)
        if ends is not None:
            progress.print(ends)
        # if only the tree asks for compilation, a failure is no error: the model decodes uncompiled
        if is_compiled(cfg, paths) and not cfg.compile:
            with progress.phase("compiling the decoding passes", ticking=True):
                compile_or_report(
                    model.target_model,
                    progress.print,
                    rows=cfg.batch_size,
                    trees=model.proposer is not None,
                )
        misfit = describe_misfit(cfg, model, paths)
        if misfit is not None:
            progress.print(misfit)
        if model.can_compile_tree:
            with progress.phase("compiling passes over the tree", ticking=True):
                model.compile_tree(progress.print)
        return model

    def _leave_out_rejected(self, chat: ChatEncoder) -> list[int]:
        """Remove questions from chats with tools that the chat template cannot render; return the
        prompt of the first remaining question.
        """
        prompts: dict[Question, list[int]] = {}
        reasons: list[str] = []
        for question in self.benchmark.questions:
            try:
                prompts[question] = chat.prompt(question.opening, question.variables)
            except DataError as error:
                if not question.messages:
                    raise
                reasons.append(str(error))
        if not prompts:
            raise DataError(f"bench {self.benchmark.name}: no question can be asked: {reasons[0]}")
        if reasons:
            self.progress.print(f"{len(reasons)} questions are left out; the first: {reasons[0]}")
        self.benchmark = dataclasses.replace(self.benchmark, questions=tuple(prompts))
        return next(iter(prompts.values()))

    def _time_benchmark(
        self, model: LoadedModel, chat: ChatEncoder, dtype: str, log: MeasurementLog[Turn]
    ) -> None:
        """Time every decoder on every turn of the benchmark, and log each turn."""
        cfg, questions, progress = self.cfg, self.benchmark.questions, self.progress
        # 1. the decoders
        keys = {"generate": False, "prompt_lookup": False, "assistant_model": None}
        compared = cfg if self.paths.tree_mode != NO_TREE else cfg.model_copy(update=keys)
        decoders = build_decoders(model, self.mode, compared, progress.print)
        self.baselines = {name: one.description for name, one in decoders.items() if name != TREE}
        note = chat.template.describe_unused_kwargs()
        if note:
            progress.print(f"note: {note}", style="yellow")
        rows = self.mode.batch_size
        test = SpeedTest(model.target_model, chat, decoders, cfg.max_new_tokens, rows)

        # 2. warm-up
        with progress.phase("warm-up", ticking=True):
            test.warm_up(questions[: cfg.warmup])
        if model.target_model.step_runner is not None:
            with progress.phase("capturing steps of all lengths", ticking=True):
                with catch_out_of_memory() as full:
                    test.capture(questions)
                if full:  # no error, since most answers are shorter than the longest possible one
                    progress.print(
                        "not enough memory to capture the longest answers' steps beforehand: they"
                        " are captured when needed"
                    )

        # 3. time the questions that an interrupted evaluation did not finish
        done = completed_turns(log.entries, questions)
        completed = [turn for turns in done.values() for turn in turns]
        log.start(completed, dtype=dtype)
        left = [question for question in questions if question.question_id not in done]
        count = sum(len(question.turns) for question in left) * len(decoders)
        timed_before = sum(not turn.skipped for turn in completed)
        try:
            # not ticking: no other thread may run while the decoders are timed
            with progress.phase(f"timing in {dtype}", count, "answers") as timing:

                def on_answer(answer: TimedAnswer) -> None:
                    timing.advance(tokens=len(answer.tokens))

                for turn in test.run(left, timed_before, on_answer):
                    done.setdefault(turn.question_id, []).append(turn)
                    log.append(turn)
                    if turn.skipped:
                        timing.advance(len(decoders))
        except KeyboardInterrupt:
            progress.print(f"the turns measured so far are in {log.path}; the same command resumes")
            raise
        finally:
            log.close()
        self.turns = [turn for question in questions for turn in done[question.question_id]]
        if not self.answered:
            shortest = min(len(turn.prompt_ids) for turn in self.turns)
            raise DataError(
                f"no question fits the context of {model.target_model.max_context} tokens:"
                f" {cfg.max_new_tokens} are reserved for the answer, and the shortest prompt has"
                f" {shortest}.\nSet --max-new-tokens lower, or use shorter questions."
            )

    # Quality and equality of the answers

    def _score(self, tokenizer: Any, scorer: Any) -> None:
        """Score the answers as the benchmark defines, and by ROUGE if there is a `scorer`."""
        questions = self.benchmark.questions
        answered = answered_turns(self.answered, questions, tokenizer)
        for name, samples in code_samples(answered).items():
            file = "samples.jsonl" if name == TREE else f"samples_{name}.jsonl"
            write_files(self.directory, {file: samples})
        if self.cfg.score and any(question.expected is not None for question in questions):
            title = "scoring the answers"
            with self.progress.phase(title, len(answered), "turns", ticking=True) as phase:
                score_answers(answered, phase.advance)
        if scorer is not None:
            self.parts["rouge"] = rouge_means(answered, scorer)

    @contextmanager
    def _comparison(self, dtype: str) -> Iterator[None]:
        """Run a comparison in `dtype`, which fills in `exact` of the turns; record its outcome in
        the report.
        """
        outcome = NO_MEMORY
        try:
            with catch_out_of_memory():
                yield
                outcome = COMPARED
        finally:
            # out of memory or interrupted: discard the verdicts, because a count over some of the
            # answers would look like a count over all
            if outcome != COMPARED:
                for turn in self.turns:
                    turn.exact.pop(dtype, None)
        self.meta["exactness"][dtype] = outcome

    def _compare_again(self, dtype: str, memory: WeightMemory) -> None:
        """Generate the answers again in `dtype`, with the tree and without, and compare them."""
        cfg, turns, progress = self.cfg, self.answered, self.progress
        release_memory()
        if emulates(memory.device, getattr(torch, dtype)):
            self.meta["exactness"][dtype] = EMULATED
            return
        if not memory.fit(dtype):
            self.meta["exactness"][dtype] = NO_MEMORY
            return
        budget = None
        if cfg.equality == "auto":
            budget = sum(one.seconds for turn in turns for one in turn.answers.values()) / 2
        with self._comparison(dtype):
            model = load_with_progress(self.paths, dtype, progress)
            name = f"output equality in {dtype}"
            with progress.phase(name, len(turns), "turns", ticking=True) as phase:
                compare_regenerated_answers(
                    turns,
                    model,
                    dtype,
                    cfg.max_new_tokens,
                    lambda tokens: phase.advance(tokens=tokens),
                    batch_size=cfg.batch_size,
                    seconds=budget,
                )
        compared = sum(dtype in turn.exact for turn in turns)
        if 0 < compared < len(turns):
            progress.print(
                f"{compared} of {len(turns)} answers were compared in {dtype}, drawn at random;"
                " equality=all compares all"
            )

    def _grade(self, judge: Judge) -> dict[str, Any]:
        """Let the judge grade the answers."""
        turns, title = self.answered, f"grading by {judge.model}"
        name = re.sub(r"[^\w.-]+", "_", judge.model)
        path = self.directory / "model_judgment" / f"{name}_single.jsonl"
        with self.progress.phase(title, len(turns), "turns", ticking=True) as phase:
            model = model_id(self.meta)
            return grade(turns, self.benchmark.questions, model, judge, path, phase.advance)


def _drafting(cfg: EvalConfig, paths: ModelPaths) -> Iterator[str]:
    """Yield names of the draft settings that differ from the run's own, for the name of the
    report's directory.
    """
    if cfg.draft is not None:
        yield cfg.draft
    choice = cfg.lookup_choice
    if choice is not None and (
        choice.datastore or choice != LookupChoice.from_keys(choice.name, None)
    ):
        yield f"{zlib.crc32(repr(choice.settings).encode()):08x}"
    if paths.tree_mode != FIXED:
        yield paths.tree_mode.replace(":", "-")
    elif names_tree_file(cfg.tree) and paths.tree is not None:
        yield f"{paths.tree.stem}-{zlib.crc32(paths.tree.read_bytes()):08x}"
    if paths.threshold is not None:
        yield f"threshold{paths.threshold:g}"


def plain_step_rounds(target_model: TargetModel, prompt: list[int], rows: int) -> list[float]:
    """Generate the same answer `SPREAD_ROUNDS` times in `rows` equal rows; return the mean seconds
    of a plain step in each round. On a quiet machine they hardly differ.
    """
    decoder = BatchDecoder(target_model)
    tokens = min(SPREAD_TOKENS, target_model.max_context)
    prompts = [prompt[-max(1, target_model.max_context - tokens) :]] * rows
    decoder.generate_batch(prompts, tokens, ())  # a warm-up
    rounds = []
    for _ in range(SPREAD_ROUNDS):
        last = max(decoder.generate_batch(prompts, tokens, ()), key=lambda out: out.seconds)
        rounds.append((last.seconds - last.prefill_seconds) / max(last.steps, 1))
    return rounds


def trace_turns(turns: Sequence[Turn], model: LoadedModel, progress: RunProgress) -> None:
    """Fill in `pieces` and, with a draft, `trace` of every turn.

    A trace takes one pass over prompt and answer, with the logits of the whole answer in memory. If
    the memory is too small for one turn, no turn gets a trace.
    """
    for turn in turns:
        turn.pieces = token_pieces(model.target_model.tokenizer, turn.answer.tokens)
    if model.draft is None:
        return
    phase = progress.phase("tracing the heads' guesses", len(turns), "answers", ticking=True)
    with catch_out_of_memory() as caught, phase:
        for turn in turns:
            prompt, answer = list(turn.prompt_ids), list(turn.answer.tokens)
            turn.trace = trace_answer(model.target_model, model.draft, prompt, answer)
            phase.advance()
    if caught:
        for turn in turns:
            turn.trace = None


def _calibration(paths: ModelPaths) -> dict[str, Any]:
    """Return the report's entry about how the tree was chosen, from tree.json; no entry if this is
    missing or damaged.
    """
    if paths.tree is None:
        return {}
    record = parse_json(paths.tree.read_text(encoding="utf-8"))
    if not isinstance(record, dict) or "sizes" not in record:
        return {}
    # leave out trees: the report has the tree that was used in its own entry
    left_out = ("medusa_choices", "head_accuracy")
    try:
        sizes = [
            {key: size[key] for key in size if key not in left_out} for size in record["sizes"]
        ]
        for size in sizes:
            if size["nodes"] is None:
                raise ValueError("a size without its number of nodes")
            for key in ("nodes", "tokens_per_step", "tokens_per_s"):
                number(size[key])
    except (ValueError, LookupError, TypeError):
        warn_once(f"{paths.tree}: its sizes cannot be read: the report does not show them")
        return {}
    kept = {key: record[key] for key in record if key not in left_out}
    return {"calibration": {**kept, "sizes": sizes}}


def _target_model_quality(paths: ModelPaths, progress: RunProgress) -> dict[str, Any] | None:
    """Return the result of `measure_target_model_quality`; None if memory runs out or the original
    target model is no longer available.
    """
    release_memory()
    reason = NO_MEMORY
    try:
        title = "perplexity before and after joint training"
        with (
            catch_out_of_memory(),
            progress.phase(title, QUALITY_TOKENS, "tokens", ticking=True) as phase,
        ):
            return measure_target_model_quality(paths, phase)
    except MedusaError as error:
        reason = str(error)
    progress.print(f"perplexity was not measured: {reason}")
    return None


def _judge(cfg: EvalConfig, progress: RunProgress) -> Judge | None:
    """Return the judge after it has answered a greeting; None if no judge is configured."""
    if cfg.judge_base_url is None or cfg.judge_model is None:
        return None
    from medusa_train.servers.client import Servers

    servers = Servers(
        [cfg.judge_base_url],
        key_variable=cfg.api_key_env,
        timeout=JUDGE_TIMEOUT,
        retry_seconds=JUDGE_RETRY_SECONDS,
        concurrency=cfg.judge_concurrency,
        optional=["temperature"],
        note=progress.print,
    )
    judge = Judge(servers, cfg.judge_model)
    with progress.phase(f"asking {cfg.judge_model} for a reply", ticking=True):
        judge.check()
    return judge
