"""`medusa-train --num-gpus N`: the command in several processes, by DeepSpeed's own launcher. Knows no training."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from medusa_train.errors import ConfigError, MedusaError

#: What a run may end with on its own account; a launcher's other codes all mean that it failed.
_CODES = (0, 1, 2, 130, 143)
_MODULE = "medusa_train.cli.train"


def launch(arguments: Sequence[str], num_gpus: int | None, hostfile: Path | None) -> int:
    """Start `medusa-train ARGUMENTS` in every process and wait for all of them.

    The processes are in a session of their own, so that Ctrl-C reaches this process alone, which hands it (and
    SIGTERM) to each of them once: they save together. Where they run on other machines, it ends them through the
    launcher.

    Args:
        arguments: of the command, but for those that made it come here.
        num_gpus: processes on each machine (on machines without GPUs too). hostfile: `HOST slots=N` lines.

    Returns:
        The exit code.

    Raises:
        ConfigError: the number is too small, or there is no such file. MedusaError: DeepSpeed is not installed.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise MedusaError("several processes need DeepSpeed, which is not installed: pip install deepspeed")
    command = launcher_command(arguments, num_gpus, hostfile)
    import torch

    environment = {"DS_ACCELERATOR": "cuda" if torch.cuda.is_available() else "cpu", **os.environ}
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    with _handing_on(process, remote=hostfile is not None):
        code = process.wait()
    return code if code in _CODES else 1


def launcher_command(arguments: Sequence[str], num_gpus: int | None, hostfile: Path | None) -> list[str]:
    """Write DeepSpeed's command line for `launch`."""
    if num_gpus is not None and num_gpus < 1:
        raise ConfigError(f"--num-gpus: needs at least one process, got {num_gpus}")
    if hostfile is not None and not hostfile.is_file():
        raise ConfigError(f"--hostfile: {hostfile}: no such file; it names one machine per line, `HOST slots=GPUS`")
    where = [f"--num_gpus={num_gpus}"] if num_gpus is not None else []
    if hostfile is None:
        # without one DeepSpeed looks for /job/hostfile; the port is free now, and a second run gets another
        where += ["--hostfile=/dev/null", f"--master_port={_free_port()}"]
    else:
        where.append(f"--hostfile={hostfile}")
    quiet = ["--no_local_rank", "--log_level=critical"]
    return [sys.executable, "-m", "deepspeed.launcher.runner", *where, *quiet, "--module", _MODULE, *arguments]


@contextlib.contextmanager
def _handing_on(process: subprocess.Popen[bytes], *, remote: bool) -> Iterator[None]:
    """Within: signals go to the training processes, not to the launchers, which would kill them."""

    def hand_on(number: int, frame: FrameType | None) -> None:
        training = [] if remote else _training_processes(process.pid)
        for pid in training:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        if not training:  # elsewhere, or only being started: the launcher ends them
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)

    before = {number: signal.signal(number, hand_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _training_processes(launcher: int) -> list[int]:
    """The processes below the launcher that train."""
    import psutil  # comes with DeepSpeed

    found = []
    with contextlib.suppress(psutil.Error):  # it has ended
        for child in psutil.Process(launcher).children(recursive=True):
            with contextlib.suppress(psutil.Error):  # this one has
                line = child.cmdline()
                if _MODULE in line and "deepspeed.launcher.launch" not in line:
                    found.append(child.pid)
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
