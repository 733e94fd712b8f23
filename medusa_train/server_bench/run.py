"""Run a measurement of servers: from the configuration to the report (`medusa-eval --server-url`,
`--serve`).
"""

from __future__ import annotations

import asyncio
import platform
import re
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from medusa_train.checkpoint.load_model import read_stop_tokens
from medusa_train.checkpoint.resolve import ModelPaths, runs_directory
from medusa_train.checkpoint.run_directory import only_writer
from medusa_train.config.paths import expand_user, public_name
from medusa_train.config.schema import EvalConfig
from medusa_train.errors import ConfigError, MedusaError, ServerError
from medusa_train.evaluation.questions import Bench
from medusa_train.evaluation.run_metadata import bench_settings
from medusa_train.inference.decoding_mode import DecodingMode
from medusa_train.inference.sampling import Sampling
from medusa_train.json_lines import MeasurementLog
from medusa_train.progress import Phase, RunProgress
from medusa_train.selfdistill.server_answers import request_parameters
from medusa_train.server_bench.metrics import Cell, collect_cells, summarize
from medusa_train.server_bench.pairs import (
    ALONE,
    BLOCK_ENTRY,
    HEADS,
    PLAIN,
    Block,
    BlockEntry,
    BlockFault,
    Conversation,
    Measurement,
    RequestOptions,
    ServerBench,
    Target,
    plan_blocks,
)
from medusa_train.server_bench.report import terminal_report, write_report
from medusa_train.server_bench.serve import KEY_VARIABLE, StartedServers
from medusa_train.servers.responses import Fault

ATTEMPTS = 3  # at a block in which requests fail
FOREIGN_TRAFFIC = 1.2  # generated tokens by the server's counter, relative to those of the answers


def measure_servers(
    cfg: EvalConfig, bench: Bench, paths: ModelPaths | None, command: str, progress: RunProgress
) -> list[Path]:
    """Measure servers on a bench, and write the report; returns the paths of its files.

    Finished blocks are logged, so the same command resumes after an error or an interruption; the
    report of an interrupted measurement has what is complete.

    Args:
        paths: target model and heads to serve; for servers that run already, only the directory of
            the report, or None.
        command: what the user typed, for the report.
    """
    mode = DecodingMode.from_config(cfg.model_copy(update={"batch_size": 1}))
    options = request_options(cfg, mode, paths)
    running: list[Target] = []
    if not cfg.serve:
        running = find_targets(cfg, options)
    directory = output_directory(cfg, mode.directory_name(bench.name), paths, running)
    with only_writer(directory):
        servers: RunningServers | StartedServers = RunningServers(running)
        if cfg.serve:
            assert paths is not None  # `serve` names a model
            servers = StartedServers(cfg, paths, directory, progress)
        # What answers and times depend on; not which concurrencies and numbers of tokens are
        # measured.
        settings = {
            **bench_settings(bench),
            "decoding": mode.as_json,
            "seed": cfg.seed,
            "max_new_tokens": cfg.max_new_tokens,
            "chat_template_kwargs": _template_kwargs(cfg, paths),
            "warmup": cfg.warmup,
            "machine": platform.node(),
            **servers.settings(),
        }
        log = MeasurementLog(directory / "blocks.jsonl", settings, BLOCK_ENTRY)
        run = BenchRun(cfg, bench, options, log, progress)
        meta = {
            "model": None,
            "base_model": None,
            "bench": bench.name,
            "bench_file": public_name(str(bench.path)),
            "questions": len(bench.questions),
            "max_new_tokens": cfg.max_new_tokens,
            "decoding": mode.as_json,
            "concurrency": list(dict.fromkeys(cfg.concurrency)),
            **servers.metadata(),
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "command": command,
        }
        return _measure_into(directory, run, servers, meta)


def _measure_into(
    directory: Path,
    run: BenchRun,
    servers: RunningServers | StartedServers,
    meta: dict[str, Any],
) -> list[Path]:
    """Measure what the log does not have, and write the report; returns the paths of its files."""
    log = run.log
    progress = run.progress
    # 1. what is known before the first request
    resumption = log.resumption("measurement", "blocks", len(run.measured))
    if resumption is not None:
        progress.print(resumption)
    log.start(log.entries)
    for note in servers.notes:
        run.note(note)

    # 2. measure
    try:
        with servers:
            for session in servers.sessions:
                if not run.remaining(session):
                    continue
                targets = servers.targets(session)
                try:
                    run.measure(session, targets)
                except ServerError as error:
                    raise servers.explain(error) from error
    except (MedusaError, KeyboardInterrupt):
        log.close()
        run.notes.append("incomplete: the measurement was interrupted")
        if run.cells():
            _report(run, meta, directory)
        if run.measured:
            progress.print(f"finished measurements are in {log.path}; the same command resumes")
        raise
    log.close()

    # 3. report
    if not run.cells():
        notes = "\n".join(f"  {note}" for note in run.notes)
        raise ServerError(f"nothing could be measured:\n{notes}")
    written = _report(run, meta, directory)
    log.remove()
    return written


class RunningServers:
    """Servers that run already, as one session: nothing is known of their models but the names."""

    notes: Sequence[str] = ()
    sessions = ("running servers",)

    def __init__(self, targets: list[Target]) -> None:
        self._targets = targets

    def __enter__(self) -> RunningServers:
        return self

    def __exit__(self, *error: object) -> None:
        """Leave them running."""

    def settings(self) -> dict[str, Any]:
        """Return what answers and times depend on."""
        return {"servers": [[target.name, target.url, target.model] for target in self._targets]}

    def metadata(self) -> dict[str, Any]:
        """Return their part of `meta` of served.json."""
        turns = "one server alone"
        if len(self._targets) > 1:
            turns = "in turns, block by block"
        return {
            "model": self._targets[-1].model,
            "servers": {target.name: f"{target.model} at {target.url}" for target in self._targets},
            "turns": turns,
        }

    def targets(self, session: str) -> list[Target]:
        """Return the servers."""
        return self._targets

    def explain(self, error: ServerError) -> ServerError:
        """Return the error: nothing else is known."""
        return error


@dataclass
class BenchRun:
    """The blocks of one measurement: those in the log, and those to do.

    Attributes:
        measured: the finished blocks by the name of their servers.
        notes: remarks on them for the report.
    """

    cfg: EvalConfig
    bench: Bench
    options: RequestOptions
    log: MeasurementLog[BlockEntry]
    progress: RunProgress

    def __post_init__(self) -> None:
        self.notes = [entry for entry in self.log.entries if isinstance(entry, str)]
        self.measured = dict(entry for entry in self.log.entries if not isinstance(entry, str))
        self._blocks: dict[int, list[list[Conversation]]] = {}
        for concurrency in self.cfg.concurrency:
            self._blocks[concurrency] = plan_blocks(self.bench.questions, concurrency)

    def note(self, text: str, *, logged: bool = True) -> None:
        """Print a remark, and keep it for the report, once; `logged` ones also for that of a
        resumed measurement.
        """
        if text not in self.notes:
            self.notes.append(text)
            if logged:
                self.log.append(text)
            self.progress.print(f"note: {text}", style="yellow")

    def cells(self) -> list[Cell]:
        """Return the cells that are complete."""
        planned = {concurrency: len(blocks) for concurrency, blocks in self._blocks.items()}
        return collect_cells(self.measured, planned)

    def remaining(self, session: str) -> dict[int, list[int]]:
        """Return the numbers of the blocks of a session that are not measured yet, by concurrency."""
        remaining: dict[int, list[int]] = {}
        for concurrency, blocks in self._blocks.items():
            for number in range(len(blocks)):
                if Block(session, concurrency, number) not in self.measured:
                    remaining.setdefault(concurrency, []).append(number)
        return remaining

    def measure(self, session: str, targets: Sequence[Target]) -> None:
        """Measure the remaining blocks of a session, whose servers answer each block in turn, in
        alternating order.

        A concurrency at which requests keep failing is left out with a note.
        """
        remaining = self.remaining(session)
        count = sum(
            len(self._blocks[concurrency][number])
            for concurrency, numbers in remaining.items()
            for number in numbers
        )
        names = " and ".join(target.name for target in targets)
        with self.progress.phase(
            f"measuring {names}", count * len(targets), "conversations"
        ) as phase:
            for concurrency, numbers in remaining.items():
                phase.update(phase.completed, f"concurrency {concurrency}")
                try:
                    asyncio.run(
                        self._measure_concurrency(session, targets, concurrency, numbers, phase)
                    )
                except BlockFault as fault:
                    text = (
                        f"concurrency {concurrency} was not measured, since requests kept failing:"
                        f" {fault}"
                    )
                    self.note(text, logged=False)  # a resumed measurement tries it again

    async def _measure_concurrency(
        self,
        session: str,
        targets: Sequence[Target],
        concurrency: int,
        numbers: Sequence[int],
        phase: Phase,
    ) -> None:
        async with AsyncExitStack() as stack:
            # 1. connect, and warm up
            servers = [ServerBench(target, self.options, concurrency) for target in targets]
            for server in servers:
                await stack.enter_async_context(server.servers)
            if self.cfg.warmup:
                for server in servers:
                    await server.warm_up(self.bench.questions, max(self.cfg.warmup, concurrency))
            # 2. each block, by the servers in one order and then in the other
            for number in numbers:
                in_order = servers
                if number % 2 == 1:
                    in_order = servers[::-1]
                measured = {}
                for server in in_order:
                    measured[server.target.name] = await self._measure_block(server, number, phase)
                block = Block(session, concurrency, number)
                self.measured[block] = measured
                self.log.append((block, measured))

    async def _measure_block(self, server: ServerBench, number: int, phase: Phase) -> Measurement:
        """Measure a block, again if requests fail in it."""
        conversations = self._blocks[server.concurrency][number]
        completed = phase.completed
        for attempt in range(ATTEMPTS):
            phase.update(completed)
            try:
                measurement = await server.measure(
                    conversations, lambda tokens: phase.advance(tokens=tokens)
                )
                break
            except BlockFault as fault:
                if attempt + 1 == ATTEMPTS:
                    raise BlockFault(f"{server.target.name}: {fault}") from None
                self.note(
                    f"{server.target.name} at concurrency {server.concurrency}: {fault}; measured"
                    " again"
                )
        if server.rejected_tools:
            self.note(
                f"{server.target.name}: chats with tools that it rejects are left out:"
                f" {server.rejected_tools}"
            )
        self._check(server.target, measurement)
        return measurement

    def _check(self, target: Target, measurement: Measurement) -> None:
        """Check a server's counters, and note what is unexpected; a server without a draft must not
        draft.
        """
        drafts = measurement.drafts
        if drafts is None:
            self.note(
                f"{target.name}: no counters of vLLM at /metrics, so its acceptance is unknown"
            )
            return
        if target.name == PLAIN and drafts.drafts:
            raise ServerError(
                f"server {target.url}: is to be measured without heads, but its /metrics count"
                " drafts; start it without --speculative-config"
            )
        if target.has_heads and not drafts.drafts:
            self.note(f"{target.name}: /metrics count no drafts; is it served with heads?")
        for measured in self.measured.values():
            earlier = measured[target.name].drafts if target.name in measured else None
            if earlier and earlier.speculative_tokens not in (None, drafts.speculative_tokens):
                self.note(
                    f"{target.name}: num_speculative_tokens changed; delete {self.log.path} and"
                    " measure again"
                )
        expected_tokens = sum(answer.tokens for answer in measurement.answers)
        if drafts.generated > FOREIGN_TRAFFIC * expected_tokens + 100:
            self.note(
                f"{target.name}: others use it too, as its counter of tokens shows: its figures are"
                " too low"
            )


def _report(run: BenchRun, meta: dict[str, Any], directory: Path) -> list[Path]:
    """Write the report, and print its tables."""
    cells = run.cells()
    summary = summarize(cells, greedy=run.options.parameters["temperature"] == 0)
    notes = [*run.notes, *summary.pop("notes")]
    seconds = round(run.progress.total_seconds, 1)
    report = {"meta": {**meta, "seconds": seconds, "notes": notes}, **summary}
    written = write_report(report, cells, directory)
    run.progress.console.print(terminal_report(report))
    return written


def find_targets(cfg: EvalConfig, options: RequestOptions) -> list[Target]:
    """Check the servers and find their models' names, the plain one first; ConfigError or
    ServerError without one.
    """
    assert cfg.server_url is not None
    if cfg.against is None:
        return [_target(ALONE, cfg.server_url, cfg.base_model, options)]
    return [
        _target(PLAIN, cfg.against, cfg.base_model, options),
        _target(HEADS, cfg.server_url, cfg.base_model, options),
    ]


def _target(name: str, url: str, model: str | None, options: RequestOptions) -> Target:
    (server,) = options.connect(url, concurrency=1).servers

    async def list_models() -> dict[str, dict[str, Any]]:
        async with server:
            return await server.list_models()

    try:
        models = asyncio.run(list_models())
    except Fault as fault:
        raise ServerError(
            f"server {server.url}: cannot be reached ({fault.reason}); is it running?"
        ) from None
    listed = ", ".join(models)
    if model is None and len(models) != 1:
        problem = "lists no models (does the URL end with /v1?)"
        if models:
            problem = f"lists several models ({listed})"
        raise ConfigError(
            f"server {server.url}: {problem}; set base_model to the name of the one to measure"
        )
    if model is not None and models and model not in models:
        raise ConfigError(
            f"server {server.url}: does not serve {model}; its models: {listed} (set base_model)"
        )
    if model is None:
        model = next(iter(models))
    is_vllm = models.get(model, {}).get("owned_by") == "vllm"
    return Target(name, server.url, model, is_vllm)


def request_options(
    cfg: EvalConfig, mode: DecodingMode, paths: ModelPaths | None
) -> RequestOptions:
    """Return what all requests have in common.

    A server of `--serve` that does not answer has ended.
    """
    # 1. how tokens are chosen
    parameters = request_parameters(
        temperature=0.0,
        max_new_tokens=cfg.max_new_tokens,
        chat_template_kwargs=_template_kwargs(cfg, paths),
    )
    rule = mode.baseline_rule
    if isinstance(rule, Sampling):
        parameters |= {"temperature": rule.temperature, "top_p": rule.top_p}
        if rule.top_k:  # 0: all tokens
            parameters["top_k"] = rule.top_k
    # 2. what is known of a model that is served from here
    retry_seconds = cfg.retry_seconds
    key_variable = cfg.api_key_env
    stop_tokens: tuple[int, ...] = ()
    if cfg.serve and paths is not None:
        retry_seconds = min(cfg.retry_seconds, 5.0)
        key_variable = KEY_VARIABLE
        # those of a running server's model are known to it alone
        stop_tokens = read_stop_tokens(paths)[0].ids
    return RequestOptions(
        parameters,
        cfg.seed,
        cfg.request_timeout,
        retry_seconds,
        key_variable,
        stop_tokens=stop_tokens,
    )


def output_directory(
    cfg: EvalConfig, name: str, paths: ModelPaths | None, targets: Sequence[Target]
) -> Path:
    """Return the directory of the report: in the run directory if there is one, else named after
    the server's model.
    """
    if cfg.output_dir:
        return expand_user(cfg.output_dir)
    if paths is not None:
        directory = f"served-{name}"
        if paths.lookup is not None:  # model cards quote served-*
            directory = f"{paths.lookup.kind}-{directory}"
        return paths.home / "eval" / directory
    model = re.sub(r"[^\w.-]+", "_", targets[-1].model).strip("_")
    return runs_directory() / "served" / model / name


def _template_kwargs(cfg: EvalConfig, paths: ModelPaths | None) -> dict[str, Any] | None:
    """Return the variables of the chat template: a run's are those that it was trained with."""
    if paths is None:
        return cfg.chat_template_kwargs
    return dict(paths.chat_template_kwargs)
