"""Run a measurement of servers: from the configuration to the report (`medusa-eval --server-url`,
`--serve`).
"""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from medusa_train.checkpoint.digest import digest_files
from medusa_train.checkpoint.load_model import read_stop_tokens
from medusa_train.checkpoint.resolve import ModelPaths, find_heads, runs_directory
from medusa_train.checkpoint.run_directory import only_writer
from medusa_train.config.paths import expand_user, public_name
from medusa_train.config.schema import EvalConfig
from medusa_train.errors import ConfigError, MedusaError, ServerError
from medusa_train.evaluation.measured_answers import MeasurementLog
from medusa_train.evaluation.questions import Bench
from medusa_train.evaluation.run_metadata import bench_settings, model_settings
from medusa_train.inference.decoding_mode import DecodingMode
from medusa_train.progress import Phase, RunProgress
from medusa_train.selfdistill.openai_engine import ServerSampling
from medusa_train.server_bench.request_blocks import (
    ALONE,
    BLOCK_ENTRY,
    HEADS,
    PLAIN,
    Block,
    BlockEntry,
    BlockFault,
    Measurement,
    RequestOptions,
    ServerBench,
    Target,
    open_server,
    plan_blocks,
)
from medusa_train.server_bench.serve import ServedModel, ServerPool, prepare_model
from medusa_train.server_bench.served_figures import Cell, collect_cells, summarize
from medusa_train.server_bench.served_report import terminal_report, write_report

ATTEMPTS = 3  # at a block in which requests fail
FOREIGN_TRAFFIC = 1.2  # generated tokens by the server's counter, relative to those of the answers
REMOTE = "running servers"  # name of the session of servers that are not started here


def measure_servers(
    cfg: EvalConfig, bench: Bench, paths: ModelPaths | None, command: str, progress: RunProgress
) -> list[Path]:
    """Measure servers on a bench, and write the report; returns the paths of its files.

    Finished blocks are logged, so the same command resumes after an error or an interruption; the
    report of an interrupted measurement has what is complete.

    Args:
        paths: backbone and heads to serve; for servers that run already, only the directory of the
            report, or None.
        command: what the user typed, for the report.
    """
    mode = DecodingMode.from_config(cfg.model_copy(update={"batch_size": 1}))
    options = request_options(cfg, mode, paths)
    remote = [] if cfg.serve else find_targets(cfg, options)
    directory = output_directory(cfg, mode.directory_name(bench.name), paths, remote)
    with only_writer(directory, "working"):
        return _measure_into(directory, cfg, bench, paths, options, remote, command, progress)


def _measure_into(
    directory: Path,
    cfg: EvalConfig,
    bench: Bench,
    paths: ModelPaths | None,
    options: RequestOptions,
    remote: list[Target],
    command: str,
    progress: RunProgress,
) -> list[Path]:
    mode = DecodingMode.from_config(cfg.model_copy(update={"batch_size": 1}))
    served = (
        prepare_model(cfg, paths, directory, progress) if cfg.serve and paths is not None else None
    )
    log = MeasurementLog(
        directory / "blocks.jsonl",
        settings(cfg, bench, mode, paths, served, remote),
        BLOCK_ENTRY.validate_python,
        partial(BLOCK_ENTRY.dump_python, mode="json"),
    )
    run = BenchRun(cfg, bench, options, log, progress)
    if (line := log.resumption("measurement", "blocks", len(run.measured))) is not None:
        progress.print(line)
    log.start(log.entries)
    for note in () if served is None else served.notes:
        run.note(note)
    if served is not None and paths is not None:
        stop_tokens, tokenizer = read_stop_tokens(paths)
        if (ends := stop_tokens.describe(tokenizer)) is not None:
            progress.print(f"{ends}; sent to the servers as stop_token_ids")
    meta = {**metadata(cfg, bench, mode, paths, served, remote), "command": command}
    try:
        if served is None:
            run.measure(REMOTE, remote)
        else:
            _measure_served(cfg, served, run, directory)
    except (MedusaError, KeyboardInterrupt):
        log.close()
        run.notes.append("incomplete: the measurement was interrupted")
        if run.cells():
            _report(run, meta, directory)
        if run.measured:
            progress.print(f"finished measurements are in {log.path}; the same command resumes")
        raise
    log.close()
    if not run.cells():
        raise ServerError(
            "nothing could be measured:\n" + "\n".join(f"  {note}" for note in run.notes)
        )
    written = _report(run, meta, directory)
    log.remove()
    return written


@dataclass
class BenchRun:
    """The blocks of one measurement: those in the log, and those to do.

    Attributes:
        measured: the finished blocks by the name of their servers. notes: remarks on them for the
            report.
    """

    cfg: EvalConfig
    bench: Bench
    options: RequestOptions
    log: MeasurementLog[BlockEntry]
    progress: RunProgress

    def __post_init__(self) -> None:
        self.notes = [entry for entry in self.log.entries if isinstance(entry, str)]
        self.measured = dict(entry for entry in self.log.entries if not isinstance(entry, str))
        self._blocks = {
            concurrency: plan_blocks(self.bench.questions, concurrency)
            for concurrency in dict.fromkeys(self.cfg.concurrency)
        }

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
        return collect_cells(self.measured, {c: len(blocks) for c, blocks in self._blocks.items()})

    def remaining(self, session: str) -> dict[int, list[int]]:
        """Return the numbers of the blocks of a session that are not measured yet, by concurrency."""
        todo = {
            concurrency: [
                n for n in range(len(blocks)) if Block(session, concurrency, n) not in self.measured
            ]
            for concurrency, blocks in self._blocks.items()
        }
        return {concurrency: numbers for concurrency, numbers in todo.items() if numbers}

    def measure(self, session: str, targets: Sequence[Target]) -> None:
        """Measure the remaining blocks of a session, whose servers answer each block in turn, in
        alternating order.

        A concurrency at which requests keep failing is left out with a note.
        """
        remaining = self.remaining(session)
        count = sum(len(self._blocks[c][n]) for c, numbers in remaining.items() for n in numbers)
        if not count:
            return
        names = " and ".join(target.name for target in targets)
        with self.progress.phase(
            f"measuring {names}", count * len(targets), "conversations"
        ) as phase:
            for concurrency, numbers in remaining.items():
                phase.update(phase.completed, f"concurrency {concurrency}")
                try:
                    self._measure_concurrency(session, targets, concurrency, numbers, phase)
                except BlockFault as fault:
                    text = (
                        f"concurrency {concurrency} was not measured, since requests kept failing:"
                        f" {fault}"
                    )
                    self.note(text, logged=False)  # a resumed measurement tries it again

    def _measure_concurrency(
        self,
        session: str,
        targets: Sequence[Target],
        concurrency: int,
        numbers: Sequence[int],
        phase: Phase,
    ) -> None:
        with ExitStack() as stack:
            benches = [ServerBench(target, self.options, concurrency) for target in targets]
            for one in benches:
                stack.callback(one.close)
            if self.cfg.warmup:
                for one in benches:
                    one.warm_up(self.bench.questions, max(self.cfg.warmup, concurrency))
            for number in numbers:
                measured = {}
                for one in benches if number % 2 == 0 else reversed(benches):
                    measured[one.target.name] = self._measure_block(one, number, phase)
                block = Block(session, concurrency, number)
                self.measured[block] = measured
                self.log.append((block, measured))

    def _measure_block(self, one: ServerBench, number: int, phase: Phase) -> Measurement:
        """Measure a block, again if requests fail in it."""
        conversations, completed = self._blocks[one.concurrency][number], phase.completed
        for attempt in range(ATTEMPTS):
            phase.update(completed)
            try:
                measurement = one.measure(
                    conversations, lambda tokens: phase.advance(tokens=tokens)
                )
                break
            except BlockFault as fault:
                if attempt + 1 == ATTEMPTS:
                    raise BlockFault(f"{one.target.name}: {fault}") from None
                self.note(
                    f"{one.target.name} at concurrency {one.concurrency}: {fault}; measured again"
                )
        self._check(one.target, measurement)
        return measurement

    def _check(self, target: Target, measurement: Measurement) -> None:
        """Check a server's counters, and note what is unexpected; a server without heads must not
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
        known = [
            measured[target.name].drafts
            for measured in self.measured.values()
            if target.name in measured
        ]
        if {one.speculative_tokens for one in known if one is not None} - {
            drafts.speculative_tokens,
            None,
        }:
            self.note(
                f"{target.name}: num_speculative_tokens changed; delete {self.log.path} and measure"
                " again"
            )
        if target.has_heads and not drafts.drafts:
            self.note(f"{target.name}: /metrics count no drafts; is it served with heads?")
        if (
            drafts.generated
            > FOREIGN_TRAFFIC * sum(answer.tokens for answer in measurement.answers) + 100
        ):
            self.note(
                f"{target.name}: others use it too, as its counter of tokens shows: its figures are"
                " too low"
            )


def _measure_served(cfg: EvalConfig, served: ServedModel, run: BenchRun, directory: Path) -> None:
    """Start the servers of every session with blocks to do, and measure them."""
    with ServerPool(served, directory, cfg.serve_start_seconds, run.progress) as pool:
        for session in served.sessions:
            if not run.remaining(session.name):
                continue
            targets = pool.targets(session)
            try:
                run.measure(session.name, targets)
            except ServerError as error:
                raise pool.explain(error) from error


def _report(run: BenchRun, meta: dict[str, Any], directory: Path) -> list[Path]:
    """Write the report, and print its tables."""
    cells = run.cells()
    summary = summarize(cells, greedy=run.options.sampling.temperature == 0)
    notes = [*run.notes, *summary.pop("notes")]
    report = {
        "meta": {**meta, "seconds": round(run.progress.total_seconds, 1), "notes": notes},
        **summary,
    }
    written = write_report(report, cells, directory)
    run.progress.console.print(terminal_report(report))
    return written


def find_targets(cfg: EvalConfig, options: RequestOptions) -> list[Target]:
    """Check the servers and find their models' names, the plain one first; ConfigError or
    ServerError without one.
    """
    assert cfg.server_url is not None
    if cfg.against is None:
        return [_target(ALONE, cfg.server_url, cfg.base_model, options, has_heads=False)]
    return [
        _target(PLAIN, cfg.against, cfg.base_model, options, has_heads=False),
        _target(HEADS, cfg.server_url, cfg.base_model, options, has_heads=True),
    ]


def _target(
    name: str, url: str, model: str | None, options: RequestOptions, *, has_heads: bool
) -> Target:
    server = open_server(url, options)
    try:
        models = server.list_models()
    finally:
        server.close()
    listed = ", ".join(models)
    if model is None and len(models) != 1:
        problem = (
            f"lists several models ({listed})"
            if models
            else "lists no models (does the URL end with /v1?)"
        )
        raise ConfigError(
            f"server {server.url}: {problem}; set base_model to the name of the one to measure"
        )
    if model is not None and models and model not in models:
        raise ConfigError(
            f"server {server.url}: does not serve {model}; its models: {listed} (set base_model)"
        )
    chosen = model or next(iter(models))
    return Target(
        name, server.url, chosen, has_heads, models.get(chosen, {}).get("owned_by") == "vllm"
    )


def request_options(
    cfg: EvalConfig, mode: DecodingMode, paths: ModelPaths | None
) -> RequestOptions:
    """Return what all requests have in common.

    A server of `--serve` that does not answer has ended.
    """
    kwargs = cfg.chat_template_kwargs if paths is None else paths.chat_template_kwargs
    rule = mode.baseline_rule
    sampling = ServerSampling(
        0.0 if rule is None else rule.temperature,
        cfg.max_new_tokens,
        1.0 if rule is None else rule.top_p,
        None if rule is None else rule.top_k or None,
        kwargs or None,
    )
    retry_seconds = min(cfg.retry_seconds, 5.0) if cfg.serve else cfg.retry_seconds
    return RequestOptions(
        sampling,
        cfg.seed,
        cfg.request_timeout,
        retry_seconds,
        cfg.api_key_env,
        # of a model that is served from here; that of a running server is known to it alone
        stop_tokens=read_stop_tokens(paths)[0].ids if cfg.serve and paths is not None else (),
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
        kind = "" if paths.lookup is None else f"{paths.lookup.kind}-"  # model cards quote served-*
        return paths.home / "eval" / f"{kind}served-{name}"
    return (
        runs_directory() / "served" / re.sub(r"[^\w.-]+", "_", targets[-1].model).strip("_") / name
    )


def settings(
    cfg: EvalConfig,
    bench: Bench,
    mode: DecodingMode,
    paths: ModelPaths | None,
    served: ServedModel | None,
    targets: Sequence[Target],
) -> dict[str, Any]:
    """Return what answers and times depend on; not which concurrencies and numbers of tokens are
    measured.
    """
    values = {
        **bench_settings(bench),
        "decoding": mode.as_json,
        "seed": cfg.seed,
        "max_new_tokens": cfg.max_new_tokens,
        "chat_template_kwargs": (
            cfg.chat_template_kwargs if paths is None else dict(paths.chat_template_kwargs)
        ),
        "warmup": cfg.warmup,
        "machine": platform.node(),
    }
    if served is None or paths is None:
        return {
            **values,
            "servers": [[target.name, target.url, target.model] for target in targets],
        }
    started = {"vllm": served.version, "arguments": list(served.options), "draft": served.draft}
    return {**values, **model_settings(paths), **started}


def metadata(
    cfg: EvalConfig,
    bench: Bench,
    mode: DecodingMode,
    paths: ModelPaths | None,
    served: ServedModel | None,
    targets: Sequence[Target],
) -> dict[str, Any]:
    """Return `meta` of served.json: plain JSON values."""
    meta: dict[str, Any] = {
        "model": targets[-1].model if targets else None,
        "base_model": None,
        "bench": bench.name,
        "bench_file": public_name(str(bench.path)),
        "questions": len(bench.questions),
        "max_new_tokens": cfg.max_new_tokens,
        "decoding": mode.as_json,
        "concurrency": list(dict.fromkeys(cfg.concurrency)),
    }
    if served is None or paths is None:
        meta["servers"] = {target.name: f"{target.model} at {target.url}" for target in targets}
        meta["turns"] = "in turns, block by block" if len(targets) > 1 else "one server alone"
    else:
        meta |= {"model": public_name(str(paths.home)), "base_model": public_name(served.backbone)}
        draft = {
            key: public_name(value) if key == "model" else value
            for key, value in served.draft.items()
        }
        if paths.heads is not None:
            meta["weights"] = digest_files(find_heads(paths.heads).files)[:16]
        meta |= {"draft": draft, "server": served.version, "arguments": list(served.options)}
        together = all(len(session.speculative_tokens) > 1 for session in served.sessions)
        meta["turns"] = (
            "the server without heads beside each one with heads, in turns, block by block"
            if together
            else (
                "one server at a time; the one without heads first and last, of which the faster"
                " counts"
            )
        )
    return {**meta, "date": datetime.now(timezone.utc).isoformat(timespec="seconds")}
