"""Read this process's rank and the number of processes from the environment. The command line uses
it, so it does not import torch.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from medusa_train.errors import ConfigError

_DEFAULT_PORT = 29500  # torch's default, for launchers that set no port


def free_port() -> int:
    """Return a free port on the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class ProcessInfo:
    """One of the processes that train together.

    Attributes:
        rank: 0 .. size - 1; rank 0 prints and writes files.
        size: number of processes on all machines.
        local_rank: rank on this machine; also the index of the process's GPU.
        address, port: address and port on which rank 0 listens.
    """

    rank: int
    size: int
    local_rank: int
    address: str
    port: int


def process_info_from_env(environ: Mapping[str, str] = os.environ) -> ProcessInfo | None:
    """Read the variables set by torchrun, DeepSpeed's launcher or srun; None for
    a single process.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        rank = _number(environ, "RANK")
        info = ProcessInfo(
            rank,
            size=_number(environ, "WORLD_SIZE"),
            local_rank=_number(environ, "LOCAL_RANK", rank),
            address=environ.get("MASTER_ADDR", "127.0.0.1"),
            port=_number(environ, "MASTER_PORT", _DEFAULT_PORT),
        )
    elif "SLURM_PROCID" in environ and "SLURM_STEP_NUM_TASKS" in environ:
        # a batch script outside srun also has SLURM_PROCID=0, but no SLURM_STEP_NUM_TASKS
        info = _from_slurm(environ)
    else:
        if "WORLD_SIZE" in environ:
            _number(environ, "WORLD_SIZE")  # an invalid value is an error that names the variable
        return None
    if not 0 <= info.rank < info.size:
        raise ConfigError(f"invalid process environment: rank {info.rank} of {info.size} processes")
    return info if info.size > 1 else None


def first_host(nodes: str) -> str:
    """Return the first host of a SLURM node list: gpu003 for `gpu[003-004,007],login`."""
    match = re.match(r"([^\[,]+)(?:\[(\w+))?", nodes)
    if match is None:
        return "127.0.0.1"
    name, first_number = match.groups(default="")
    return name + first_number


def _from_slurm(environ: Mapping[str, str]) -> ProcessInfo:
    rank = _number(environ, "SLURM_PROCID")
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    # all tasks of a step must derive the same port without communicating
    job = _number(environ, "SLURM_JOB_ID", 0)
    step = _number(environ, "SLURM_STEP_ID", 0)
    port_of_step = 20000 + (31 * job + step) % 20000
    return ProcessInfo(
        rank,
        size=_number(environ, "SLURM_STEP_NUM_TASKS"),
        local_rank=_number(environ, "SLURM_LOCALID", rank),
        address=environ.get("MASTER_ADDR") or first_host(nodes),
        port=_number(environ, "MASTER_PORT", port_of_step),
    )


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    if default is not None and name not in environ:
        return default
    try:
        return int(environ[name])
    except ValueError:
        raise ConfigError(
            f"environment variable {name}={environ[name]!r} is not a number"
        ) from None
