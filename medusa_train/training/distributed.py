"""Communication between the processes of a run: sums, gathering, work for rank 0, errors that end
all of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from medusa_train.errors import ConfigError, MedusaError
from medusa_train.training.process_info import ProcessInfo

T = TypeVar("T")

#: How long one process waits for another. Rank 0 may be writing a large checkpoint to a slow disk.
TIMEOUT = timedelta(hours=2)
#: How long the processes wait until all have started.
JOIN_TIMEOUT = timedelta(minutes=15)
#: Parts of the error messages of gloo, NCCL and torch's store if another process closed the
#: connection.
_LOST = (
    "by peer",
    "by remote peer",
    "peer closed",
    "likely closed",
    "broken pipe",
    "connection refused",
)
#: A JSON string with a slash: a path, which may differ between machines.
_PATH = re.compile(r'"[^"]*/[^"]*"')
_BACK_ENDS = ("gloo", "nccl", "socket")


class PeerError(MedusaError):
    """Another process failed and prints the reason; this one exits silently with the same exit
    code.
    """

    def __init__(self, exit_code: int) -> None:
        super().__init__("another process failed")
        self.exit_code = exit_code


@dataclass(eq=False)
class DistributedContext:
    """All processes of a run, seen from one of them; a single process communicates with none.

    All processes must call every method (not the properties), in the same order. They communicate
    through CPU memory (gloo), so that a process that waits for a disk does not keep a GPU
    collective open.

    Attributes:
        rank, size: see `ProcessInfo`.
        group: torch's process group for CPU memory; None: the default group.
    """

    rank: int = 0
    size: int = 1
    group: Any = None

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the process that prints and writes files."""
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        """This process's device: one GPU, or the CPU."""
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of all processes' tensors, on the device of `tensor`. They must have equal
        shape and dtype.
        """
        if self.size == 1:
            return tensor
        total = tensor.detach().to("cpu", copy=True)
        dist.all_reduce(total, group=self.group)
        return total.to(tensor.device)

    def any(self, flag: bool) -> bool:
        """Return whether `flag` is True in any process."""
        return bool(self.sum(torch.tensor(int(flag))))

    def gather(self, value: T) -> list[T]:
        """Return all processes' values, ordered by rank, in every process."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, value: T) -> T:
        """Return rank 0's value in every process."""
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]

    def run_on_main(self, function: Callable[..., T], *args: Any) -> T:
        """Call `function(*args)` in rank 0 and return its result in every process; if it fails, the
        other processes raise PeerError.
        """
        result: Any = None
        with self.failing_together():
            if self.is_main:
                result = function(*args)
        return cast(T, self.broadcast(result))

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[None]:
        """Run a block in every process. If it fails in any, the lowest rank that failed raises its
        error, and all other processes raise PeerError.
        """
        error: MedusaError | None = None
        try:
            yield
        except MedusaError as raised:
            error = raised
        exit_codes = self.gather(None if error is None else error.exit_code)
        for rank, exit_code in enumerate(exit_codes):
            if exit_code is not None:
                raise error if error is not None and rank == self.rank else PeerError(exit_code)

    def error_on_main(self, error: MedusaError) -> MedusaError:
        """Return the exception to raise for an error that occurs in all processes: `error` in rank
        0, PeerError elsewhere.
        """
        if self.is_main:
            return error
        return PeerError(error.exit_code)

    def destroy(self) -> None:
        """Destroy the process group."""
        dist.destroy_process_group()


SINGLE_PROCESS = DistributedContext()


def init_distributed(
    info: ProcessInfo, join_timeout: timedelta = JOIN_TIMEOUT
) -> DistributedContext:
    """Initialize the process group; returns when all processes have joined.

    Raises:
        MedusaError: not all processes joined within `join_timeout`, or the back end cannot connect.
    """
    os.environ.update(
        RANK=str(info.rank),
        WORLD_SIZE=str(info.size),
        LOCAL_RANK=str(info.local_rank),
        MASTER_ADDR=info.address,
        MASTER_PORT=str(info.port),
    )
    cuda = torch.cuda.is_available()
    # if it is not set, DeepSpeed guesses the accelerator and prints a warning
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if cuda else "cpu")
    if cuda:
        device = gpu_index(info, torch.cuda.device_count())
        torch.cuda.set_device(device)
        os.environ["LOCAL_RANK"] = str(device)  # DeepSpeed reads the GPU's index from it
    try:
        store, rank, size = next(dist.rendezvous("env://", timeout=join_timeout))
        store.set_timeout(TIMEOUT)
        backend = "nccl" if cuda else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
        group = None
        if cuda:
            group = dist.new_group(backend="gloo", timeout=TIMEOUT)
    except (RuntimeError, ValueError) as error:
        raise MedusaError(
            f"process {info.rank} of {info.size} cannot connect to the others at"
            f" {info.address}:{info.port}: {error}"
        ) from error
    distributed = DistributedContext(info.rank, info.size, group)
    if cuda:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        # not every build of torch has `uuid`
        check_distinct_gpus(distributed, str(getattr(properties, "uuid", info.rank)))
    return distributed


def check_same_config(distributed: DistributedContext, values: Mapping[str, Any] | None) -> None:
    """Check that all processes have the same configuration; only paths may differ between machines.

    Args:
        values: this process's configuration; None if it could not be read.

    Raises:
        ConfigError: in rank 0; it lists the keys that differ. Other processes raise PeerError.
    """
    # 1. Gather the host and the values of each process, by rank. Paths are left out.
    configurations = distributed.gather((socket.gethostname(), _without_paths(values)))
    # 2. Compare with rank 0.
    expected = configurations[0][1] or {}
    lines = []
    for rank, (host, found) in enumerate(configurations):
        if found is None:
            lines.append(f"process {rank} on {host} cannot read its configuration")
            continue
        keys = {key for key, _ in expected.items() ^ found.items()}
        if keys:
            lines.append(
                f"process {rank} on {host} has other values than process 0 of:"
                f" {', '.join(sorted(keys))}."
                " The configuration file or an environment variable differs between the machines"
            )
    if lines:
        raise distributed.error_on_main(ConfigError(lines))


def _without_paths(values: Mapping[str, Any] | None) -> dict[str, str] | None:
    if values is None:
        return None
    return {key: _PATH.sub('"path"', json.dumps(value)) for key, value in values.items()}


def gpu_index(info: ProcessInfo, visible: int) -> int:
    """Return the index of this process's GPU among the `visible` GPUs; MedusaError if there is
    none.

    If a process sees only one GPU, it uses that one, whatever its local rank (srun
    --gpus-per-task=1).
    """
    if visible == 1:
        return 0
    if info.local_rank >= visible:
        raise MedusaError(
            f"process {info.rank} of {info.size} has no GPU: it sees {visible} for at least"
            f" {info.local_rank + 1} processes on this machine; start one process per GPU"
            " (--num-gpus)"
        )
    return info.local_rank


def check_distinct_gpus(distributed: DistributedContext, uuid: str) -> None:
    """Check that no two processes use the same GPU, because NCCL would report it only in its log.

    Args:
        uuid: the UUID of this process's GPU.
    """
    uuids = distributed.gather(uuid)
    if len(set(uuids)) < distributed.size:
        raise distributed.error_on_main(
            MedusaError(
                f"{distributed.size} processes share {len(set(uuids))} GPUs; start one process per"
                " GPU (--num-gpus)"
            )
        )


def is_lost_peer(error: BaseException) -> bool:
    """Return whether `error` only says that another process closed the connection; that process
    prints the reason.
    """
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _LOST)


def is_communication_error(error: BaseException) -> bool:
    """Return whether `error` comes from gloo, NCCL or torch's store, such as NCCL without enough
    shared memory.
    """
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(
        word in str(error).lower() for word in _BACK_ENDS
    )
