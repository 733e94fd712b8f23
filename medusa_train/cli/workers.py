"""Watch between the launcher and its training processes: which one was killed, and whether the
launcher is still there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from pathlib import Path

#: Environment variable with the process id of `medusa-train --num-gpus`, for its workers.
LAUNCHER = "MEDUSA_LAUNCHER"
MODULE = "medusa_train.cli.train"
_LOOK_SECONDS = 0.1
#: Looks between two searches for new training processes, which read all of /proc.
_SEARCH_EVERY = 20
_CAUSES: dict[int, str] = {
    signal.SIGKILL: (
        "; the likely cause is that the machine's memory was full (`dmesg` shows `Out of memory`)"
    ),
    signal.SIGBUS: "; the likely cause is that /dev/shm or a disk was full",
}


def training_processes(launcher: int) -> list[int]:
    """Return the ids of the training processes among the launcher's descendants."""
    import psutil  # a dependency of DeepSpeed

    pids = []
    with contextlib.suppress(psutil.Error):  # the launcher has exited
        for child in psutil.Process(launcher).children(recursive=True):
            with contextlib.suppress(psutil.Error):  # the child has exited
                line = child.cmdline()
                if MODULE in line and "deepspeed.launcher.launch" not in line:
                    pids.append(child.pid)
    return pids


class WorkerWatch:
    """Finds which training process of this machine ended first, and by which signal.

    DeepSpeed's launcher collects the processes and tells neither, so this reads /proc while a
    process that ended has not been collected yet (up to a second). On a busy machine a look may
    come too late: then the process that was gone first is named, without its signal.

    Attributes:
        rank, signal: of the first process that failed; None where unknown. `signal` is None as
            well for a process that exited by itself.
    """

    def __init__(self, launcher: int) -> None:
        self.rank: int | None = None
        self.signal: int | None = None
        self._launcher = launcher
        self._ranks: dict[int, int] = {}
        self._has_all = False  # two searches found the same processes
        self._done_pids: set[int] = set()  # seen to end without a failure
        self._gone: int | None = None  # the first whose end was not seen
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def start(self) -> None:
        """Look from now on, in a thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._done.set()
        self._thread.join()
        if self.rank is None:
            self.rank = self._gone

    def alive(self) -> list[int]:
        """Return the ranks that still run."""
        return [rank for pid, rank in self._ranks.items() if _ending(pid)[0]]

    def _watch(self) -> None:
        looks = 0
        while not self._done.is_set() and self.rank is None:
            if not self._has_all and looks % _SEARCH_EVERY == 0:
                self._search()
            self._look()
            looks += 1
            self._done.wait(_LOOK_SECONDS)

    def _search(self) -> None:
        import psutil

        before = len(self._ranks)
        for pid in training_processes(self._launcher):
            with contextlib.suppress(psutil.Error, KeyError, ValueError):
                self._ranks[pid] = int(psutil.Process(pid).environ()["RANK"])
        # a search takes long on a busy machine, and a process may end and be collected in it
        self._has_all = 0 < before == len(self._ranks)

    def _look(self) -> None:
        """Note the process that failed since the last look, first of all one ended by a signal:
        the others fail because of it.
        """
        for pid, rank in self._ranks.items():
            running, status = _ending(pid)
            if running or pid in self._done_pids:
                continue
            if status is None:
                if self._gone is None:
                    self._gone = rank
                continue
            if status == 0:
                self._done_pids.add(pid)
                continue
            number = status & 0x7F  # as of waitpid
            if self.rank is None or (number and not self.signal):
                self.rank = rank
                self.signal = number or None


def _ending(pid: int) -> tuple[bool, int | None]:
    """Return whether a process runs, and its status for waitpid where it ended and was not
    collected; (False, None) where nothing is left of it.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False, None
    fields = text.rpartition(")")[2].split()  # from field 3, the state
    if fields[0] not in "ZX":
        return True, 0
    return False, int(fields[49])


def describe_ending(rank: int | None, number: int) -> str:
    """Say which process was ended by which signal, and why that happens."""
    who = "a training process" if rank is None else f"the process of rank {rank}"
    try:
        name = f"{signal.Signals(number).name} (signal {number})"
    except ValueError:
        name = f"signal {number}"
    cause = _CAUSES.get(number, "")
    return f"{who} was ended by {name}{cause}"


def stop_without_launcher() -> None:
    """Ask this process to save and stop, as by SIGTERM, once its launcher or parent is gone.

    Without it, a launcher that was killed leaves processes that train on and hold their GPUs.
    """
    name = os.environ.get(LAUNCHER, "")
    if not name.isdecimal():
        return  # started by torchrun or srun, or on another machine
    import psutil

    launcher = None
    with contextlib.suppress(psutil.NoSuchProcess):
        launcher = psutil.Process(int(name))
    parent = os.getppid()

    def here() -> bool:
        if launcher is None or os.getppid() != parent or not launcher.is_running():
            return False
        try:
            return launcher.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def watch() -> None:
        waiting = threading.Event()
        while here():
            waiting.wait(1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
