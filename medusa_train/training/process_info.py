"""Which of how many processes this one is, by what a launcher put into the environment. Knows no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from medusa_train.errors import ConfigError

_PORT = 29500  # torch's own default, for launchers that name none


@dataclass(frozen=True)
class ProcessInfo:
    """One process among those that train together.

    Attributes:
        rank: 0 .. size - 1; 0 is the one that prints and writes. size: how many there are, on all machines.
        local_rank: the same on this machine; the number of its GPU.
        address, port: where rank 0 waits for the others.
    """

    rank: int
    size: int
    local_rank: int
    address: str
    port: int


def process_info_from_env(environ: Mapping[str, str] = os.environ) -> ProcessInfo | None:
    """What torchrun, DeepSpeed's launcher or srun announced to this process; None: it is alone.

    Raises:
        ConfigError: the variables contradict each other, or are no numbers.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        rank, size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
        local = _number(environ, "LOCAL_RANK") if "LOCAL_RANK" in environ else rank
        port = _number(environ, "MASTER_PORT") if "MASTER_PORT" in environ else _PORT
        place = ProcessInfo(rank, size, local, environ.get("MASTER_ADDR", "127.0.0.1"), port)
    elif "SLURM_PROCID" in environ and "SLURM_STEP_NUM_TASKS" in environ:
        # a batch script itself is task 0 too, of a step that srun did not start: there the second variable is missing
        place = _of_slurm(environ)
    else:
        return None
    if not 0 <= place.rank < place.size:
        raise ConfigError(f"the environment says that this is process {place.rank} of {place.size}, which can't be")
    return place if place.size > 1 else None


def is_main_process(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is alone, or the one of several that speaks."""
    place = process_info_from_env(environ)
    return place is None or place.rank == 0


def first_host(nodes: str) -> str:
    """The first host of a SLURM node list: `gpu[003-004,007],login` is gpu003."""
    match = re.match(r"([^\[,]+)(?:\[(\w+))?", nodes)
    return "".join(part for part in match.groups() if part) if match else "127.0.0.1"


def _of_slurm(environ: Mapping[str, str]) -> ProcessInfo:
    rank, size = _number(environ, "SLURM_PROCID"), _number(environ, "SLURM_STEP_NUM_TASKS")
    local = _number(environ, "SLURM_LOCALID") if "SLURM_LOCALID" in environ else rank
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    address = environ.get("MASTER_ADDR") or first_host(nodes)
    if "MASTER_PORT" in environ:
        return ProcessInfo(rank, size, local, address, _number(environ, "MASTER_PORT"))
    # all tasks of a step have to arrive at the same free port without talking to each other
    job, step = (int(environ.get(name, "0")) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return ProcessInfo(rank, size, local, address, 20000 + (31 * job + step) % 20000)


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise ConfigError(f"the environment variable {name} is {environ[name]!r}, not a number") from None
