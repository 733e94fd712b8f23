"""The public commands in processes of their own, which a test can kill.

They are forked from one that has imported what takes long and computed nothing.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(
    [
        *("torch", "transformers", "datasets", "peft"),
        *(f"medusa_train.cli.{name}" for name in ("train", "evaluate", "selfdistill")),
    ]
)
SECONDS = 120


class Process:
    """A command that runs beside the test and prints to a file."""

    def __init__(self, log: Path, name: str, *words: object) -> None:
        self.log = log
        arguments = [str(word) for word in words]
        self._process: BaseProcess = _PROCESSES.Process(target=_run, args=(log, name, arguments))
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""

    def wait_for(self, condition: Callable[[], bool]) -> bool:
        """Wait until `condition` holds; False if the process ends before."""
        ends = time.monotonic() + SECONDS
        while not condition():
            if self._process.exitcode is not None:
                return False
            if time.monotonic() > ends:
                self._process.kill()
                raise TimeoutError(f"it never came to this:\n{self.text}")
            time.sleep(0.002)
        return True

    def send(self, number: int) -> int:
        """Send a signal; return the exit code, which is minus the signal if it killed."""
        os.kill(self.pid, number)
        return self.end()

    def end(self) -> int:
        """Wait for the end; return the exit code."""
        self._process.join(SECONDS)
        if self._process.exitcode is None:
            self._process.kill()
            raise TimeoutError(f"it has not ended:\n{self.text}")
        return self._process.exitcode


def _run(log: Path, name: str, arguments: list[str]) -> None:
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(handle, stream)
    import importlib

    gc.freeze()  # a collection need not look at what is imported
    module = {"eval": "evaluate"}.get(name, name)
    sys.argv = [f"medusa-{name}", *arguments]
    importlib.import_module(f"medusa_train.cli.{module}").app()
