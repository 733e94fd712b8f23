"""Several processes that train together: sums, agreement, one speaker. Knows no model, no optimizer, no DeepSpeed."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from medusa_train.errors import MedusaError
from medusa_train.training.process_info import ProcessInfo

T = TypeVar("T")

#: Longest that one process waits for another: rank 0 may be writing a large checkpoint to a slow disk.
TIMEOUT = timedelta(hours=2)
#: What torch's back ends say when the process at the other end is gone.
_LOST = ("gloo", "nccl", "by peer", "broken pipe", "connection refused", "socket")


class PeerError(MedusaError):
    """Another process failed and says why; this one ends with it, silently and with the same exit code."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("another process failed")
        self.exit_code = exit_code


class World:
    """All processes of a run, seen from one of them; a lone process is a world of one, where nothing is sent.

    Every method but the properties has to be called by all processes, in the same order. What is sent travels through
    the CPUs' memory (gloo), so that a process that waits for a disk keeps no GPU's communication open.

    Attributes:
        rank, size, local_rank: see `ProcessInfo`.
    """

    def __init__(self, place: ProcessInfo | None = None, group: Any = None) -> None:
        self.rank = 0 if place is None else place.rank
        self.size = 1 if place is None else place.size
        self.local_rank = 0 if place is None else place.local_rank
        self._group = group

    @property
    def is_main(self) -> bool:
        """Whether this process prints and writes."""
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        """Where this process computes: a GPU of its own, or the CPU."""
        return torch.device("cuda", self.local_rank) if torch.cuda.is_available() else torch.device("cpu")

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of all processes' tensors, of the same shape and dtype everywhere; on this one's device."""
        if self.size == 1:
            return tensor
        total = tensor.detach().to("cpu", copy=True)
        dist.all_reduce(total, group=self._group)
        return total.to(tensor.device)

    def any(self, flag: bool) -> bool:
        """Whether any process says so."""
        return bool(flag) if self.size == 1 else bool(self.sum(torch.tensor(int(flag))))

    def gather(self, value: T) -> list[T]:
        """All processes' values, by rank, in every process."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def broadcast(self, value: T) -> T:
        """Rank 0's value, in every process."""
        if self.size == 1:
            return value
        values: list[Any] = [value if self.is_main else None]
        dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def run_on_main(self, action: Callable[[], T]) -> T:
        """Let rank 0 do something while the others wait; all return what it returned.

        Raises:
            MedusaError: rank 0's own, in rank 0. PeerError: in the others.
        """
        if self.size == 1:
            return action()
        error: MedusaError | None = None
        result: Any = None
        if self.is_main:
            try:
                result = action()
            except MedusaError as raised:
                error = raised
        result, code = self.broadcast((result, None if error is None else error.exit_code))
        if code is not None:
            raise error or PeerError(code)
        return result

    def run_on_all(self, action: Callable[[], T]) -> T:
        """Do something in every process, and go on only where it went well in all of them.

        Raises:
            MedusaError: this process's own, where no process of a lower rank failed too. PeerError: otherwise.
        """
        if self.size == 1:
            return action()
        error: MedusaError | None = None
        result: Any = None
        try:
            result = action()
        except MedusaError as raised:
            error = raised
        codes = self.gather(None if error is None else error.exit_code)
        failed = [rank for rank, code in enumerate(codes) if code is not None]
        if not failed:
            return result
        if error is not None and self.rank == failed[0]:
            raise error
        raise PeerError(codes[failed[0]] or 1)

    def error_on_main(self, error: MedusaError) -> MedusaError:
        """The error to raise where all processes found the same: rank 0 tells it, the others end silently."""
        return error if self.is_main else PeerError(error.exit_code)

    def destroy(self) -> None:
        """Close the connections; nothing can be sent afterwards."""
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()


SINGLE_PROCESS = World()


def init_distributed(place: ProcessInfo) -> World:
    """Meet the other processes; returns when all of them have come.

    Raises:
        MedusaError: they can't be reached, or this process would have no GPU of its own.
    """
    os.environ.update(
        RANK=str(place.rank),
        WORLD_SIZE=str(place.size),
        LOCAL_RANK=str(place.local_rank),
        MASTER_ADDR=place.address,
        MASTER_PORT=str(place.port),
    )
    cuda = torch.cuda.is_available()
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if cuda else "cpu")  # or DeepSpeed warns that it had to guess
    if cuda:
        if place.local_rank >= torch.cuda.device_count():
            raise MedusaError(
                f"process {place.rank} of {place.size} has no GPU: there are {torch.cuda.device_count()} on this "
                f"machine, and it is number {place.local_rank + 1} here; start as many processes as there are GPUs"
            )
        torch.cuda.set_device(place.local_rank)
    try:
        dist.init_process_group("nccl" if cuda else "gloo", timeout=TIMEOUT)
        group = dist.new_group(backend="gloo", timeout=TIMEOUT) if cuda else None
    except (RuntimeError, ValueError) as error:
        raise MedusaError(
            f"process {place.rank} of {place.size} could not meet the others at {place.address}:{place.port}: {error}"
        ) from error
    return World(place, group)


def is_lost_peer(error: BaseException) -> bool:
    """Whether an exception only says that another process is gone."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in _LOST)
