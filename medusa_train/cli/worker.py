"""Train as one of several processes that a launcher started, on this machine or on several."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import NoReturn

from rich.console import Console

from medusa_train.cli.common import print_error, read_arguments, report_failed_streams
from medusa_train.config.schema import TrainConfig
from medusa_train.errors import ConfigError, MedusaError
from medusa_train.progress import RunProgress
from medusa_train.training.process_info import ProcessInfo

#: How long a process that cannot train waits for the other processes, to tell them so.
_TELL_TIMEOUT = timedelta(minutes=1)
_PR_SET_PDEATHSIG = 1  # option of Linux's prctl


def run_worker(process: ProcessInfo, arguments: Sequence[str], flags: Mapping[str, object]) -> int:
    """Train as a process with rank 1 or above. It prints nothing, except errors that only this
    process has.
    """
    try:
        cfg = read_arguments(TrainConfig, arguments, flags=flags, quiet=True)
    except ConfigError as error:
        if process.local_rank == 0:  # the configuration may differ on this machine
            print_error(f"process {process.rank} of {process.size}: {error}")
        # Join the other processes to tell them, because no launcher ends processes on other
        # machines. If rank 0 cannot read the configuration either, it does not join, and this
        # times out.
        from medusa_train.training.distributed import check_same_config, init_distributed

        with suppress(MedusaError):
            check_same_config(init_distributed(process, _TELL_TIMEOUT), None)
        return error.exit_code
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    quiet = Console(quiet=True)
    return train_distributed(process, cfg, quiet, quiet)


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
    report_failed_streams()  # flushes stdout
    sys.stderr.flush()
    os._exit(code)
