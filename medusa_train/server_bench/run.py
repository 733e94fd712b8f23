"""Run a measurement of servers: from the configuration to the report (`medusa-eval --server-url`,
`--serve`).
"""

from __future__ import annotations

import asyncio
import platform
import re
from collections.abc import Sequence
from contextlib import AsyncExitStack, nullcontext
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from medusa_train.checkpoint.load_model import read_stop_tokens
from medusa_train.checkpoint.resolve import ModelPaths, runs_directory
from medusa_train.checkpoint.run_directory import only_writer
from medusa_train.config.paths import expand_user, public_name
from medusa_train.config.schema import EvalConfig
from medusa_train.errors import ConfigError, MedusaError, ServerError
from medusa_train.evaluation.questions import Benchmark
from medusa_train.evaluation.run_metadata import benchmark_settings
from medusa_train.inference.decoding_mode import DecodingMode
from medusa_train.inference.sampling import Sampling
from medusa_train.json_lines import MeasurementLog
from medusa_train.progress import Phase, RunProgress
from medusa_train.selfdistill.server_answers import request_parameters
from medusa_train.server_bench.blocks import (
    ALONE,
    BLOCK_ENTRY,
    HEADS,
    PLAIN,
    BlockEntry,
    BlockFault,
    BlockKey,
    MeasuredServer,
    MeasuredServers,
    Measurement,
    ServerBenchmark,
    plan_blocks,
)
from medusa_train.server_bench.metrics import collect_cells, summarize
from medusa_train.server_bench.report import terminal_report, write_report
from medusa_train.server_bench.serve import KEY_VARIABLE, started_servers
from medusa_train.servers.client import Servers
from medusa_train.servers.responses import Fault

ATTEMPTS = 3  # a block in which requests fail is measured at most this often
# others use the server too if its counter of generated tokens exceeds the answers' tokens by this
# factor
FOREIGN_TRAFFIC = 1.2


def measure_servers(
    cfg: EvalConfig,
    benchmark: Benchmark,
    paths: ModelPaths | None,
    command: str,
    progress: RunProgress,
) -> list[Path]:
    """Measure servers on a benchmark, and write the report; return the paths of its files.

    Finished blocks are logged, so the same command resumes after an error or an interruption. The
    report of an interrupted measurement contains the complete cells.

    Args:
        paths: target model and heads to serve. For servers that already run, the run whose
            directory gets the report and whose template variables are sent; None: no run.
        command: what the user typed, for the report.
    """
    mode = DecodingMode.from_config(cfg.model_copy(update={"batch_size": 1}))
    targets = [] if cfg.serve else find_servers(cfg)
    directory = output_directory(cfg, mode.directory_name(benchmark.name), paths, targets)
    with only_writer(directory):
        if cfg.serve:
            assert paths is not None  # `serve` names a model
            servers = started_servers(cfg, paths, directory, progress)
        else:
            servers = running_servers(targets)
        # 1. settings and metadata, which are known before the first request
        parameters = request_settings(cfg, mode, paths)
        # what answers and times depend on. The concurrencies and numbers of draft tokens are left
        # out, so that a resumed measurement may add to them
        settings = {
            **benchmark_settings(benchmark),
            "decoding": mode.as_json,
            "seed": cfg.seed,
            "max_new_tokens": cfg.max_new_tokens,
            "chat_template_kwargs": parameters.get("chat_template_kwargs"),
            "warmup": cfg.warmup,
            "machine": platform.node(),
            **servers.settings,
        }
        meta = {
            "model": None,
            "base_model": None,
            "bench": benchmark.name,
            "bench_file": public_name(str(benchmark.path)),
            "questions": len(benchmark.questions),
            "max_new_tokens": cfg.max_new_tokens,
            "decoding": mode.as_json,
            "concurrency": list(dict.fromkeys(cfg.concurrency)),
            **servers.metadata,
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "command": command,
        }
        run = BenchmarkRun(cfg, benchmark, parameters, directory, settings, progress)
        for note in servers.notes:
            run.note(note)

        # 2. measure the blocks that are not in the log
        try:
            try:
                for name, session in servers.sessions.items():
                    if run.remaining(name):
                        with session() as started:
                            run.measure(name, started)
            finally:
                servers.stop()
        except (MedusaError, KeyboardInterrupt):
            run.notes.append("incomplete: the measurement was interrupted")
            run.report(meta)
            if run.measured:
                progress.print(
                    f"finished measurements are in {run.log.path}; the same command resumes"
                )
            raise
        finally:
            run.log.close()

        # 3. report
        written = run.report(meta)
        if not written:
            notes = "\n".join(f"  {note}" for note in run.notes)
            raise ServerError(f"nothing could be measured:\n{notes}")
        run.log.remove()
        return written


class BenchmarkRun:
    """The blocks of one measurement: blocks from the log in `directory`, and blocks to measure.

    Attributes:
        measured: for each finished block its measurements by server name.
        notes: remarks for the report.
    """

    def __init__(
        self,
        cfg: EvalConfig,
        benchmark: Benchmark,
        parameters: dict[str, Any],
        directory: Path,
        settings: dict[str, Any],
        progress: RunProgress,
    ) -> None:
        self.cfg = cfg
        self.directory = directory
        self.progress = progress
        self._questions = benchmark.questions
        self._parameters = parameters
        self._blocks = {count: plan_blocks(benchmark.questions, count) for count in cfg.concurrency}
        self.log: MeasurementLog[BlockEntry] = MeasurementLog(
            directory / "blocks.jsonl", settings, BLOCK_ENTRY
        )
        self.notes = [entry for entry in self.log.entries if isinstance(entry, str)]
        self.measured = dict(entry for entry in self.log.entries if not isinstance(entry, str))
        resumption = self.log.resumption("measurement", "blocks", len(self.measured))
        if resumption is not None:
            progress.print(resumption)
        self.log.start(self.log.entries)

    def note(self, text: str, *, logged: bool = True) -> None:
        """Print a remark and keep it for the report, unless it is known already.

        Args:
            logged: also keep it in the log, for the report of a resumed measurement.
        """
        if text not in self.notes:
            self.notes.append(text)
            if logged:
                self.log.append(text)
            self.progress.print(f"note: {text}", style="yellow")

    def remaining(self, session: str) -> list[BlockKey]:
        """Return the blocks of a session that are not measured yet, by concurrency."""
        blocks = []
        for concurrency, planned in self._blocks.items():
            blocks += [BlockKey(session, concurrency, number) for number in range(len(planned))]
        return [block for block in blocks if block not in self.measured]

    def measure(self, session: str, targets: Sequence[MeasuredServer]) -> None:
        """Measure the remaining blocks of a session. Its servers answer each block one after the
        other, in alternating order.

        A concurrency at which requests keep failing is left out with a note.
        """
        blocks = self.remaining(session)
        count = sum(len(self._blocks[block.concurrency][block.number]) for block in blocks)
        names = " and ".join(target.name for target in targets)
        with self.progress.phase(
            f"measuring {names}", count * len(targets), "conversations"
        ) as phase:
            for concurrency in dict.fromkeys(block.concurrency for block in blocks):
                phase.update(phase.completed, f"concurrency {concurrency}")
                chosen = [block for block in blocks if block.concurrency == concurrency]
                try:
                    asyncio.run(self._measure_concurrency(targets, chosen, phase))
                except BlockFault as fault:
                    text = (
                        f"concurrency {concurrency} was not measured, since requests kept failing:"
                        f" {fault}"
                    )
                    self.note(text, logged=False)  # a resumed measurement tries it again

    async def _measure_concurrency(
        self, targets: Sequence[MeasuredServer], blocks: Sequence[BlockKey], phase: Phase
    ) -> None:
        concurrency = blocks[0].concurrency
        async with AsyncExitStack() as stack:
            # 1. connect, and warm up
            servers = []
            for target in targets:
                client = await stack.enter_async_context(connect(self.cfg, target.url, concurrency))
                servers.append(ServerBenchmark(target, client, self._parameters, self.cfg.seed))
            if self.cfg.warmup:
                for server in servers:
                    await server.warm_up(self._questions, max(self.cfg.warmup, concurrency))
            # 2. measure each block on all servers; the order is reversed from block to block
            for block in blocks:
                measured = {}
                for server in servers[::-1] if block.number % 2 else servers:
                    measured[server.target.name] = await self._measure_block(server, block, phase)
                self.measured[block] = measured
                self.log.append((block, measured))

    async def _measure_block(
        self, server: ServerBenchmark, block: BlockKey, phase: Phase
    ) -> Measurement:
        """Measure a block on one server; measure it again if requests fail."""
        conversations = self._blocks[block.concurrency][block.number]
        completed = phase.completed
        name = server.target.name
        for attempt in range(ATTEMPTS):
            phase.update(completed)
            try:
                measurement = await server.measure(
                    conversations, lambda tokens: phase.advance(tokens=tokens)
                )
                break
            except BlockFault as fault:
                if attempt + 1 == ATTEMPTS:
                    raise BlockFault(f"{name}: {fault}") from None
                self.note(f"{name} at concurrency {block.concurrency}: {fault}; measured again")
        if server.rejected_tools:
            self.note(
                f"{name}: chats with tools that it rejects are left out: {server.rejected_tools}"
            )
        self._check(server.target, measurement)
        return measurement

    def _check(self, target: MeasuredServer, measurement: Measurement) -> None:
        """Check a server's counters, and note unexpected values.

        Raises:
            ServerError: the server without a draft counts drafts.
        """
        drafts = measurement.drafts
        if drafts is None:
            self.note(
                f"{target.name}: no counters of vLLM at /metrics, so its acceptance is unknown"
            )
            return
        if target.name == PLAIN and drafts.drafts:
            raise ServerError(
                f"server {target.url}: should be measured without heads, but its /metrics count"
                " drafts; start it without --speculative-config"
            )
        if target.name not in (PLAIN, ALONE) and not drafts.drafts:
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
                f"{target.name}: others use it too, as its counter of tokens shows: its results are"
                " too low"
            )

    def report(self, meta: dict[str, Any]) -> list[Path]:
        """Write the report of all complete cells and print its tables; return the paths of its
        files. If no cell is complete, nothing is written and the list is empty.
        """
        planned = {concurrency: len(blocks) for concurrency, blocks in self._blocks.items()}
        cells = collect_cells(self.measured, planned)
        if not cells:
            return []
        summary = summarize(cells, greedy=self._parameters["temperature"] == 0)
        notes = [*self.notes, *summary.pop("notes")]
        seconds = round(self.progress.total_seconds, 1)
        report = {"meta": {**meta, "seconds": seconds, "notes": notes}, **summary}
        written = write_report(report, cells, self.directory)
        self.progress.console.print(terminal_report(report))
        return written


def connect(cfg: EvalConfig, url: str, concurrency: int) -> Servers:
    """Return the client of a server.

    With `--serve`, retries are short: a server of this machine that does not answer has ended.
    """
    return Servers(
        [url],
        key_variable=KEY_VARIABLE if cfg.serve else cfg.api_key_env,
        timeout=cfg.request_timeout,
        retry_seconds=min(cfg.retry_seconds, 5.0) if cfg.serve else cfg.retry_seconds,
        concurrency=concurrency,
    )


def running_servers(targets: Sequence[MeasuredServer]) -> MeasuredServers:
    """Return servers that already run, as one session. Nothing is known about their models except
    their names.
    """
    turns = "in turns, block by block" if len(targets) > 1 else "one server alone"
    metadata = {
        "model": targets[-1].model,
        "servers": {target.name: f"{target.model} at {target.url}" for target in targets},
        "turns": turns,
    }
    settings = {"servers": [[target.name, target.url, target.model] for target in targets]}
    return MeasuredServers({"running servers": lambda: nullcontext(targets)}, settings, metadata)


def find_servers(cfg: EvalConfig) -> list[MeasuredServer]:
    """Check the servers and find their models' names; return them with the plain server first.

    Raises:
        ConfigError: a server does not serve the model, or the model to measure is ambiguous.
        ServerError: a server cannot be reached.
    """
    assert cfg.server_url is not None
    urls = {ALONE: cfg.server_url}
    if cfg.against is not None:
        urls = {PLAIN: cfg.against, HEADS: cfg.server_url}
    return [_find_server(name, url, cfg) for name, url in urls.items()]


def _find_server(name: str, url: str, cfg: EvalConfig) -> MeasuredServer:
    (server,) = connect(cfg, url, concurrency=1).servers
    model = cfg.base_model

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
    if model is None:
        if len(models) != 1:
            problem = "lists no models (does the URL end with /v1?)"
            if models:
                problem = f"lists several models ({listed})"
            raise ConfigError(
                f"server {server.url}: {problem}; set base_model to the name of the one to measure"
            )
        (model,) = models
    elif models and model not in models:
        raise ConfigError(
            f"server {server.url}: does not serve {model}; its models: {listed} (set base_model)"
        )
    is_vllm = models.get(model, {}).get("owned_by") == "vllm"
    return MeasuredServer(name, server.url, model, is_vllm)


def request_settings(
    cfg: EvalConfig, mode: DecodingMode, paths: ModelPaths | None
) -> dict[str, Any]:
    """Return the parameters that all requests share, except the model.

    The variables of the chat template are the ones that the run was trained with. vLLM does not
    look in the chat template for the tokens that end answers, so a server started by `--serve`
    gets them as `stop_token_ids`.
    """
    parameters = request_parameters(
        temperature=0.0,
        max_new_tokens=cfg.max_new_tokens,
        chat_template_kwargs=paths.chat_template_kwargs if paths else cfg.chat_template_kwargs,
    )
    rule = mode.baseline_rule
    if isinstance(rule, Sampling):
        parameters |= {"temperature": rule.temperature, "top_p": rule.top_p}
        if rule.top_k:  # 0: all tokens
            parameters["top_k"] = rule.top_k
    if cfg.serve and paths is not None:
        parameters["stop_token_ids"] = list(read_stop_tokens(paths)[0].ids)
    return parameters


def output_directory(
    cfg: EvalConfig, name: str, paths: ModelPaths | None, targets: Sequence[MeasuredServer]
) -> Path:
    """Return the directory of the report: inside the run directory if there is one, else a
    directory named after the server's model.
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
