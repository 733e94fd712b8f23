"""Worker processes: started afresh, reached through a pipe, and killed with the processes that they started."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any


@dataclass(frozen=True)
class Worker:
    """A process, and this side of the pipe to it. Reading raises EOFError once the process has ended."""

    process: BaseProcess
    connection: Connection


def start_worker(target: Callable[..., None], *args: Any) -> Worker:
    """Start a process that runs `target(connection, *args)`; `target` must be a function of a module.

    It is spawned, not forked: this process has threads by now (progress, gloo, NCCL), whose locks a fork would copy.
    A terminal sends Ctrl-C to all processes; it is blocked in the workers from their start, or each would print a
    traceback. On its other side of the pipe, the worker reads EOFError once this process has ended.
    """
    context = multiprocessing.get_context("spawn")
    resource_tracker.ensure_running()  # it would unblock Ctrl-C if it were started with the first worker
    connection, other = context.Pipe()
    try:
        with _ctrl_c_blocked():
            process = context.Process(target=_run, args=(target, other, args), daemon=True)
            process.start()
    except BaseException:
        connection.close()
        raise
    finally:
        other.close()
    return Worker(process, connection)


def kill_workers(workers: Iterable[Worker]) -> None:
    """Kill the workers and the processes that they started (compilers), whatever they are doing."""
    workers = list(workers)
    for worker in workers:
        if hasattr(os, "killpg") and worker.process.pid is not None and worker.process.is_alive():
            with contextlib.suppress(ProcessLookupError):  # it leads no group yet, and has started nothing
                os.killpg(worker.process.pid, signal.SIGKILL)
        worker.process.kill()
    for worker in workers:
        worker.process.join()
        worker.connection.close()


def end_worker() -> None:
    """End this worker process at once, with the processes that it started: its parent is gone."""
    if hasattr(os, "killpg"):
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _run(target: Callable[..., None], connection: Connection, args: tuple[Any, ...]) -> None:
    if hasattr(os, "setpgrp"):
        os.setpgrp()  # a group for this process and those that it starts
    with contextlib.suppress(EOFError, ConnectionError):  # the parent was killed
        target(connection, *args)


@contextlib.contextmanager
def _ctrl_c_blocked() -> Iterator[None]:
    """Block Ctrl-C, also in processes that are started here; this process receives it afterwards."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
