"""Serve a run's backbone with vLLM, without heads and with them (`--serve`): export, options and server processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from medusa_train.checkpoint.resolve import ModelPaths, heads_layout
from medusa_train.checkpoint.serialize import read_json
from medusa_train.config.schema import EvalConfig
from medusa_train.data.builtin_templates import get_template
from medusa_train.errors import ConfigError, ServerError
from medusa_train.export.write import export_run
from medusa_train.io import replace_text
from medusa_train.progress import RunProgress
from medusa_train.server_bench.measure import PLAIN, Target
from medusa_train.server_bench.vllm_process import (
    SERVED_NAME,
    VLLMServer,
    free_port,
    serve_command,
    vllm_python,
    vllm_version,
)

#: Seconds to wait for the end of a server that has stopped answering, to explain it.
STOPPING_SECONDS = 5.0
FOREIGN_WEIGHTS = "this run's heads were trained on a quantized backbone; vLLM serves {base} without quantization"


@dataclass(frozen=True)
class Session:
    """Servers that run at the same time.

    Attributes:
        name: in the log and in reports.
        speculative_tokens: num_speculative_tokens of each server; 0: without heads.
    """

    name: str
    speculative_tokens: tuple[int, ...]

    @property
    def servers(self) -> tuple[str, ...]:
        """Names of the servers."""
        return tuple(server_name(tokens) for tokens in self.speculative_tokens)


def server_name(speculative_tokens: int) -> str:
    """Return the name of a server in reports."""
    return f"k={speculative_tokens}" if speculative_tokens else PLAIN


def plan_sessions(speculative_tokens: Iterable[int], *, together: bool) -> list[Session]:
    """Return which servers run at the same time: the plain one beside each other one, or alone, first and last."""
    if together:
        return [Session(f"{PLAIN} and k={tokens}", (0, tokens)) for tokens in speculative_tokens]
    alone = [Session(server_name(tokens), (tokens,)) for tokens in speculative_tokens]
    return [Session(f"{PLAIN}, first", (0,)), *alone, Session(f"{PLAIN}, last", (0,))]


@dataclass(frozen=True)
class ServedModel:
    """What `--serve` serves.

    Attributes:
        python: the interpreter that vLLM is installed for.
        version: name and version of its vLLM.
        backbone: directory or hub name.
        heads: directory in vLLM's layout.
        sessions: the servers to start, in order.
        options: arguments of every server.
        notes: remarks for the report.
    """

    python: str
    version: str
    backbone: str
    heads: Path
    sessions: tuple[Session, ...]
    options: tuple[str, ...]
    notes: tuple[str, ...]


def prepare_model(cfg: EvalConfig, paths: ModelPaths, directory: Path, progress: RunProgress) -> ServedModel:
    """Export what vLLM loads to `directory`, and decide which servers to start.

    Heads in vLLM's layout are served as they are. A backbone that was trained with an adapter is merged first.

    Raises:
        ConfigError: vLLM is not installed, there are no heads, or fewer than `serve_speculative_tokens` asks for.
        CheckpointError: the heads cannot be exported.
    """
    python = vllm_python()
    version = vllm_version(python)
    if paths.heads is None:
        raise ConfigError(f"serve: {paths.base_model} has no heads; name a run or an export by --model")
    backbone, heads = paths.base_model, paths.heads
    if heads_layout(heads) != "vllm":
        with progress.phase("exporting for vLLM", ticking=True):
            if paths.adapter is not None:
                backbone = str(export_run(paths, "merged", directory / "merged").target.resolve())
            exported = export_run(paths, "vllm", directory / "export", base_model=backbone)
        heads = exported.target
        for warning in exported.warnings:
            progress.print(f"warning: {warning}", style="yellow")
    notes = []
    if paths.quantization is not None and paths.adapter is None:
        notes.append(FOREIGN_WEIGHTS.format(base=backbone))
    count = int(read_json(heads / "config.json").get("num_heads", 0))
    tokens = list(dict.fromkeys(cfg.serve_speculative_tokens or range(1, count + 1)))
    if max(tokens) > count:
        raise ConfigError(f"serve_speculative_tokens: {max(tokens)} is more than the {count} heads of {heads}")
    together = not torch.cuda.is_available() if cfg.serve_together == "auto" else cfg.serve_together
    options = _options(cfg, paths, directory)
    sessions = plan_sessions(tokens, together=together)
    return ServedModel(python, version, backbone, heads, tuple(sessions), tuple(options), tuple(notes))


def _options(cfg: EvalConfig, paths: ModelPaths, directory: Path) -> list[str]:
    options = []
    if cfg.dtype != "auto":
        options += ["--dtype", cfg.dtype]
    if paths.trust_remote_code:
        options.append("--trust-remote-code")
    if paths.chat_template is not None:
        template = directory / "chat_template.jinja"
        replace_text(template, get_template(paths.chat_template).source)
        options += ["--chat-template", str(template.resolve())]
    return options + list(cfg.serve_args or ())


class ServerPool:
    """The running servers of `--serve`, within a `with` block: all are stopped at its end, whatever happens.

    Args:
        model: what to serve.
        directory: for the servers' logs.
        seconds: in which a server has to be ready.
    """

    def __init__(self, model: ServedModel, directory: Path, seconds: float, progress: RunProgress) -> None:
        self._model, self._directory, self._seconds, self._progress = model, directory, seconds, progress
        self._running: dict[int, VLLMServer] = {}

    def __enter__(self) -> ServerPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._keep(())

    def targets(self, session: Session) -> list[Target]:
        """Return the servers of a session; those that don't run yet are started, and others stopped.

        Raises:
            ServerError: a server does not start; with the last lines of its log.
        """
        self._keep(session.speculative_tokens)
        for tokens in session.speculative_tokens:
            if tokens not in self._running:
                self._start(tokens)
        return [
            Target(server_name(tokens), self._running[tokens].url, SERVED_NAME, tokens > 0, True)
            for tokens in session.speculative_tokens
        ]

    def explain(self, error: ServerError) -> ServerError:
        """Return the error with the end of the server that caused it, if one has ended."""
        for server in self._running.values():
            if server.has_ended(STOPPING_SECONDS):
                return ServerError(server.explain())
        return error

    def _start(self, tokens: int) -> None:
        name, port = server_name(tokens), free_port()
        speculative: dict[str, Any] | None = None
        if tokens:
            heads = str(self._model.heads.resolve())
            speculative = {"method": "medusa", "model": heads, "num_speculative_tokens": tokens}
        command = serve_command(self._model.python, self._model.backbone, port, self._model.options, speculative)
        log = self._directory / f"vllm-{name}.log"
        server = VLLMServer(name, command, port, log, has_heads=tokens > 0)
        self._running[tokens] = server
        server.start()
        server.wait_ready(self._seconds, self._progress)

    def _keep(self, wanted: Sequence[int]) -> None:
        """Stop all servers but the wanted ones, even if stopping one is interrupted."""
        unwanted = [tokens for tokens in self._running if tokens not in wanted]
        try:
            for tokens in unwanted:
                self._running[tokens].stop()
        finally:
            for tokens in unwanted:
                self._running.pop(tokens).kill()
