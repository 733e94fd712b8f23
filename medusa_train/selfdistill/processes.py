"""Choose how many processes generate answers on a CPU, and divide cores, threads and rows of the batch among them.

A small model decodes by many short matrix products, after each of which the threads of a process wait for each other.
Processes of one thread each do not wait, but every process reads all weights for its rows only.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from medusa_train.errors import ConfigError

MIN_ROWS = 4  # of a process by default: with fewer, reading the weights again costs more than waiting threads
SMALL_MODEL_BYTES = 2**30  # of weights, above which products are long enough for the threads of one process
MEMORY_SHARE = 0.6  # of the free memory that further copies of the model may take

_CPUS = Path("/sys/devices/system/cpu")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container with cgroup v2


@dataclass(frozen=True)
class Share:
    """The part of one process: rows of the batch, threads, and the CPUs that it is bound to (None: not bound)."""

    rows: int
    threads: int
    cpus: frozenset[int] | None

    def apply(self) -> None:
        """Bind all threads of this process, and set the number of threads of a matrix product."""
        import torch  # in a worker, not imported before its first share binds the process

        if self.cpus is not None:
            for task in Path("/proc/self/task").iterdir():
                with contextlib.suppress(ProcessLookupError):  # the thread has ended
                    os.sched_setaffinity(int(task.name), self.cpus)
        torch.set_num_threads(self.threads)


def choose_processes(setting: int | Literal["auto"], batch_size: int) -> int:
    """Return the number of processes for the key `processes`; "auto" still depends on the model, see `limit_processes`.

    "auto" is one process on a GPU and under a launcher, which starts processes itself.

    Raises:
        ConfigError: several processes on a GPU.
    """
    import torch

    on_gpu = torch.cuda.is_available()
    if setting != "auto":
        if on_gpu and setting > 1:
            raise ConfigError(f"processes: {setting} are for a CPU, a GPU runs one; raise batch_size, or use --shard")
        return setting
    if on_gpu or _has_launcher():
        return 1
    return max(1, min(thread_budget(physical_cores()), batch_size // MIN_ROWS))


def limit_processes(planned: int, weight_bytes: int, private_bytes: int | None, free_bytes: int | None) -> int:
    """Return how many of the planned processes suit the model, one of which is loaded.

    Args:
        weight_bytes: size of the weights. private_bytes: memory of the loaded process that no other one can share.
        free_bytes: free memory. The last two are None where the system does not report them.
    """
    if weight_bytes > SMALL_MODEL_BYTES:
        return 1
    if private_bytes is None or free_bytes is None:
        return planned
    return min(planned, 1 + int(MEMORY_SHARE * free_bytes / max(private_bytes, 1)))


def divide(processes: int, batch_size: int) -> list[Share]:
    """Divide cores, threads and rows among processes. Neighbouring cores stay together, as they may share a cache.

    Processes are bound to cores only where they take all of them: containers with a CPU quota see the same cores, and
    would all be bound to the first ones.
    """
    cores = physical_cores()
    budget = thread_budget(cores)
    binds = hasattr(os, "sched_setaffinity") and processes <= len(cores) == budget and not _has_launcher()
    shares = []
    for index in range(processes):
        mine = cores[len(cores) * index // processes : len(cores) * (index + 1) // processes]
        threads = len(mine) if binds else max(1, budget // processes)
        rows = batch_size * (index + 1) // processes - batch_size * index // processes
        shares.append(Share(rows, threads, frozenset().union(*mine) if binds else None))
    return shares


def physical_cores() -> list[frozenset[int]]:
    """Return the physical cores that this process may use, each as its logical CPUs, in the system's order."""
    try:
        allowed = os.sched_getaffinity(0)
    except AttributeError:  # macOS, Windows
        allowed = set(range(os.cpu_count() or 1))
    cores = {frozenset(_siblings(cpu) & allowed) for cpu in allowed}
    return sorted(cores, key=min)


def thread_budget(cores: Sequence[frozenset[int]]) -> int:
    """Return how many threads all processes may use: the cores, or fewer by OMP_NUM_THREADS or a CPU quota."""
    import torch

    quota = _cpu_quota()
    return max(1, min(len(cores), torch.get_num_threads(), len(cores) if quota is None else round(quota)))


def private_memory() -> int | None:
    """Return the bytes of memory of this process alone, shared with no process and no file; None if unknown."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    match = re.search(r"^RssAnon:\s+(\d+) kB$", status, re.MULTILINE)
    return None if match is None else 1024 * int(match[1])


def _has_launcher() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def _siblings(cpu: int) -> set[int]:
    """Return the logical CPUs of a CPU's core; without Linux's topology files, the CPU alone."""
    try:
        text = (_CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text(encoding="ascii")
    except OSError:
        return {cpu}
    siblings: set[int] = {cpu}
    for part in text.strip().split(","):  # "0,64" or "0-1"
        first, _, last = part.partition("-")
        siblings.update(range(int(first), int(last or first) + 1))
    return siblings


def _cpu_quota() -> float | None:
    """Return the CPUs that a container may use at a time; None without a limit."""
    try:
        quota, period = _QUOTA.read_text(encoding="ascii").split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None
