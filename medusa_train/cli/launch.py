"""`medusa-train --num-gpus N`: the command in several processes, by DeepSpeed's own launcher. Knows no training."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rich.console import Console

from medusa_train.checkpoint.run_layout import check_inputs, check_output_dir
from medusa_train.cli.common import print_error, split_arguments
from medusa_train.config.load import load_config
from medusa_train.config.schema import TrainConfig
from medusa_train.errors import ConfigError, MedusaError
from medusa_train.training.process_info import ProcessInfo

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


def start_all(
    arguments: Sequence[str], flags: Mapping[str, object], num_gpus: int | None, hostfile: Path | None
) -> int:
    """Start the command in several processes, once its configuration is known to be good; return the exit code."""
    path, overrides = split_arguments(arguments)
    cfg = load_config(TrainConfig, path, overrides, flags=flags)
    check_output_dir(cfg)
    check_inputs(cfg)
    again = [f"{name}={json.dumps(value)}" for name, value in flags.items() if value is not None]
    return launch([*arguments, *again], num_gpus, hostfile)


def follow(place: ProcessInfo, arguments: Sequence[str], flags: Mapping[str, object]) -> int:
    """Be any process but the first: silent, unless it fails where the others did not."""
    path, overrides = split_arguments(arguments)
    try:
        cfg = load_config(TrainConfig, path, overrides, flags=flags)
    except ConfigError as error:
        if place.local_rank == 0:  # another machine, which may hold another file
            raise
        return error.exit_code
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    nowhere = Console(quiet=True)
    return train_with_others(place, cfg, nowhere, nowhere)


def train_with_others(place: ProcessInfo, cfg: TrainConfig, console: Console, results: Console) -> int:
    """Meet the other processes and train with them; return the exit code.

    One process's failure ends all: it says what was wrong; the others end because they can't go on without it.
    """
    from medusa_train.training.distributed import PeerError, init_distributed, is_lost_peer

    try:
        world = init_distributed(place)
        from medusa_train.training.run import train

        code = train(cfg, console, results, world)
        world.destroy()
        if code:
            _end_now(code)
        return code
    except PeerError as error:
        return error.exit_code
    except MedusaError as error:
        if place.rank == 0:
            raise
        print_error(f"process {place.rank} of {place.size}: {error}")
        return error.exit_code
    except Exception as error:
        if not is_lost_peer(error):
            raise
        if place.rank == 0:
            print_error("another process has ended, and training can't go on without it")
        return 1


def _end_now(code: int) -> NoReturn:
    """End a stopped process, which has saved and said all, with the others and not some time after them.

    The launcher kills who is still cleaning up when the first one has gone, and takes that for a failure.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
