"""Start several processes of `medusa-train` with torch's launcher, and train in each of them."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import logging
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from rich.console import Console

from medusa_train.checkpoint.run_directory import CONFIG, check_output_dir
from medusa_train.cli.common import (
    error_console,
    print_error,
    report_failed_streams,
    split_arguments,
)
from medusa_train.config.load import load_config
from medusa_train.config.schema import TrainConfig
from medusa_train.errors import ConfigError, MedusaError
from medusa_train.progress import RunProgress
from medusa_train.training.preflight import check_files
from medusa_train.training.process_info import ProcessInfo
from medusa_train.training.stop_signals import ignore_signals, stop_signals

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

MODULE = "medusa_train.cli.train"
#: Seconds that a process may take to save after a request to stop.
SAVE_SECONDS = 600
#: How long a process that cannot train waits for the other processes, to tell them so.
_TELL_TIMEOUT = timedelta(minutes=1)
_CAUSES: dict[int, str] = {
    signal.SIGKILL: (
        "; the likely cause is that the machine's memory was full (`dmesg` shows `Out of memory`)"
    ),
    signal.SIGBUS: "; the likely cause is that /dev/shm or a disk was full",
}
_PR_SET_PDEATHSIG = 1  # option of Linux's prctl


def launch(arguments: Sequence[str], flags: Mapping[str, object], num_gpus: int) -> int:
    """Check the configuration, run `medusa-train ARGUMENTS` in processes on this machine, wait for
    them and return the exit code.

    Ctrl-C reaches only this process, because the others run in their own sessions. The launcher
    forwards Ctrl-C, SIGTERM and SIGHUP to them, and they save a checkpoint together.

    Args:
        flags: key -> value of its option.
    """
    # 1. Check everything that can be checked before processes are started.
    if num_gpus < 1:
        raise ConfigError(f"--num-gpus: must be at least one, got {num_gpus}")
    path, overrides = split_arguments(arguments)
    cfg = load_config(TrainConfig, path, overrides, flags=flags)
    check_output_dir(cfg)
    check_files(cfg, num_gpus)
    if importlib.util.find_spec("deepspeed") is None:
        raise MedusaError("training in several processes requires DeepSpeed: pip install deepspeed")
    with RunProgress(error_console()).phase("importing torch", ticking=True):
        import torch
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch
    visible = torch.cuda.device_count()
    if 0 < visible < num_gpus:
        raise ConfigError(
            f"--num-gpus: {num_gpus}, but {visible} GPUs are visible (`nvidia-smi -L` and"
            " CUDA_VISIBLE_DEVICES list them)"
        )
    # 2. Run the processes. The timeout is set in the environment, because not every version of
    # torch has an argument for it.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SAVE_SECONDS))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_gpus,
        run_id=str(os.getpid()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # a free port
        local_addr="localhost",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
        signals_to_handle=",".join(number.name for number in stop_signals()),
    )
    words = [*arguments, *_words_of_flags(flags)]
    words = [word.replace("$", "$$") for word in words]  # the launcher substitutes ${...}
    logging.disable(logging.ERROR)  # this function reports what the launcher would log
    try:
        elastic_launch(config, sys.executable)("-m", MODULE, *words)
    except SignalException as error:
        ignore_signals()
        return 130 if error.sigval == signal.SIGINT else 143
    except ChildFailedError as error:
        return _report_failure(error.failures, Path(cfg.output_dir), num_gpus)
    finally:
        logging.disable(logging.NOTSET)
    return 0


def _words_of_flags(flags: Mapping[str, object]) -> list[str]:
    """Return the command-line words that set these options, for the workers."""
    words = []
    for name, value in flags.items():
        option = TrainConfig.option_of(name).split()[0]
        if value is True:
            words.append(option)
        elif value is not None:
            words.append(f"{option}={value}")
    return words


def _report_failure(failures: Mapping[int, ProcessFailure], output_dir: Path, num_gpus: int) -> int:
    """If a process was killed, print which one, and how to resume; return the exit code.

    A process that fails in another way prints its own error.

    Args:
        failures: rank -> failure.
    """
    # Find the process that failed first. Timestamps have seconds: within the same second, the
    # launcher may end other processes by SIGTERM, and processes that lost a peer may fail.
    rank, first = min(
        failures.items(),
        key=lambda item: (
            item[1].timestamp,
            item[1].exitcode == -signal.SIGTERM,
            item[1].exitcode,
        ),
    )
    if first.exitcode >= 0:
        return first.exitcode if first.exitcode in (2, 130, 143) else 1
    number = -first.exitcode
    message = f"the process of rank {rank} was ended by {first.signal_name()} (signal {number})"
    message += _CAUSES.get(number, "")
    saved = [*output_dir.glob("checkpoints/step-*"), *output_dir.glob("stage_one/**/step-*")]
    if saved:
        config = str(output_dir / CONFIG)
        command = ["medusa-train", config, "resume_from_checkpoint=auto"]
        message += f". To resume: {shlex.join([*command, '--num-gpus', str(num_gpus)])}"
    else:
        message += ". No checkpoint was saved yet: start the run again"
    print_error(message)
    return 1


def run_worker(process: ProcessInfo, arguments: Sequence[str], flags: Mapping[str, object]) -> int:
    """Train as a process with rank 1 or above. It prints nothing, except errors that only this
    process has.
    """
    path, overrides = split_arguments(arguments)
    try:
        cfg = load_config(TrainConfig, path, overrides, flags=flags)
    except ConfigError as error:
        if process.local_rank == 0:  # the configuration may differ on this machine
            print_error(f"process {process.rank} of {process.size}: {error}")
        _report_bad_config(process)
        return error.exit_code
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    quiet = Console(quiet=True)
    return train_distributed(process, cfg, quiet, quiet)


def _report_bad_config(process: ProcessInfo) -> None:
    """Join the other processes to tell them that this process cannot train, because no launcher
    ends processes on other machines. If rank 0 cannot read the configuration either, it does not
    join, and this times out.
    """
    from medusa_train.training.distributed import check_same_config, init_distributed

    with contextlib.suppress(MedusaError):
        check_same_config(init_distributed(process, _TELL_TIMEOUT), None)


def train_distributed(
    process: ProcessInfo, cfg: TrainConfig, console: Console, results: Console
) -> int:
    """Join the process group and train; return the exit code.

    If a process fails, it reports the error, and all other processes exit too.
    """
    progress = RunProgress(console)
    with progress.phase("importing torch and transformers", ticking=True):
        from medusa_train.training.distributed import (
            PeerError,
            check_same_config,
            init_distributed,
            is_communication_error,
            is_lost_peer,
        )
        from medusa_train.training.stages import train_stages

    try:
        stop_with_launcher()
        with progress.phase(f"waiting for {process.size} processes", ticking=True):
            distributed = init_distributed(process)
        check_same_config(distributed, cfg.model_dump(mode="json"))
        code = train_stages(cfg, console, results, distributed)
        distributed.destroy()
        if code:
            exit_now(code)
        return code
    except PeerError as error:
        return error.exit_code
    except MedusaError as error:
        if process.rank == 0:
            raise
        print_error(f"process {process.rank} of {process.size}: {error}")
        return error.exit_code
    except Exception as error:
        if is_lost_peer(error):
            if process.rank == 0:
                print_error("another process exited, so training cannot continue")
        elif is_communication_error(error):
            print_error(f"process {process.rank} of {process.size}: {error}")
        else:
            raise
        return 1


def stop_with_launcher() -> None:
    """Let Linux send SIGTERM to this process if torch's launcher is killed, so that it saves and
    stops. Otherwise it would continue to train and keep its GPU.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))


def exit_now(code: int) -> NoReturn:
    """Exit without Python's cleanup, after a run has written everything.

    There are two reasons. gloo's threads may still hold tensors, because DeepSpeed keeps a
    reference to the process group; if one is freed while Python shuts down, the process aborts
    (pytorch issue 190489). And after an interruption, the launcher ends processes that are still
    cleaning up when the first process has exited.
    """
    report_failed_streams()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
