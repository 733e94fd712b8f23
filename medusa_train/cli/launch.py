"""Start several processes of `medusa-train` on this machine with torch's launcher. What they do is
in `worker`.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from medusa_train.checkpoint.next_command import permission
from medusa_train.checkpoint.run_directory import CONFIG, check_output_dir
from medusa_train.cli.common import error_console, print_error, read_arguments
from medusa_train.config.schema import TrainConfig
from medusa_train.errors import ConfigError, MedusaError
from medusa_train.progress import RunProgress
from medusa_train.training.preflight import check_files
from medusa_train.training.stop_signals import ignore_signals, stop_signals

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

MODULE = "medusa_train.cli.train"
#: Seconds that a process may take to save after a request to stop.
SAVE_SECONDS = 600
_CAUSES: dict[int, str] = {
    signal.SIGKILL: (
        "; the likely cause is that the machine's memory was full (`dmesg` shows `Out of memory`)"
    ),
    signal.SIGBUS: "; the likely cause is that /dev/shm or a disk was full",
}


def launch(arguments: Sequence[str], flags: Mapping[str, object], num_gpus: int) -> int:
    """Check the configuration, run `medusa-train ARGUMENTS` in processes on this machine, wait for
    them and return the exit code.

    Ctrl-C reaches only this process, because the others run in their own sessions. The launcher
    forwards Ctrl-C, SIGTERM and SIGHUP to them, and they save a checkpoint together.

    Args:
        flags: key -> value of its option.
    """
    # 1. Check everything that can be checked before processes are started.
    cfg = read_arguments(TrainConfig, arguments, flags=flags, quiet=True)
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
        return _report_failure(error.failures, cfg, num_gpus)
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


def _report_failure(failures: Mapping[int, ProcessFailure], cfg: TrainConfig, num_gpus: int) -> int:
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
    output_dir = Path(cfg.output_dir)
    saved = [*output_dir.glob("checkpoints/step-*"), *output_dir.glob("stage_one/**/step-*")]
    if saved:
        config = str(output_dir / CONFIG)
        command = ["medusa-train", config, "resume_from_checkpoint=auto"]
        command += [*permission(cfg.trust_remote_code), "--num-gpus", str(num_gpus)]
        message += f". To resume: {shlex.join(command)}"
    else:
        message += ". No checkpoint was saved yet: start the run again"
    print_error(message)
    return 1
