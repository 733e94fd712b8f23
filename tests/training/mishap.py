"""`medusa-train` in a process of its own to which something happens at a moment that a test
chooses.

The processes are forked from one that has imported everything and computed nothing: a second each
instead of ten.
"""

import gc
import importlib
import multiprocessing
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from medusa_train.config.load import dump_config
from medusa_train.config.schema import TrainConfig

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(
    ["medusa_train.cli.train", "medusa_train.training.stages", "tests.training.worker"]
)

#: Mark of tests that fork: in one xdist worker they share the process that has imported everything.
forks = pytest.mark.xdist_group("forks")


def die() -> None:
    """As by `kill -9`, a power cut or the kernel's memory killer."""
    os.kill(os.getpid(), signal.SIGKILL)


def fill_the_disk() -> None:
    """No file may grow beyond 60 kB from here on: enough for texts, too little for any weights."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))


def terminate() -> None:
    """As a batch system does before it kills."""
    os.kill(os.getpid(), signal.SIGTERM)


def terminate_twice() -> None:
    """As supervisors do that signal the process and its group: SIGTERM, and in a moment SIGINT."""
    second = threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT))
    second.daemon = True
    second.start()
    terminate()


@dataclass(frozen=True)
class Mishap:
    """`what` happens when `place`, as "module:name" or "module:Class.method", is called for the
    `count`-th time.
    """

    place: str
    count: int = 1
    what: Callable[[], None] = die

    def arrange(self) -> None:
        """Lie in wait, in the process that it is to happen to."""
        module, _, path = self.place.partition(":")
        *outer, name = path.split(".")
        owner: Any = importlib.import_module(module)
        for part in outer:
            owner = getattr(owner, part)
        real, calls = getattr(owner, name), 0

        def wrapper(*given: Any, **keys: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == self.count:
                self.what()
            return real(*given, **keys)

        setattr(owner, name, wrapper)


def command(cfg: TrainConfig, *overrides: str) -> list[str]:
    """Write `cfg` as CONFIG.yaml beside its run directory; return the arguments of `medusa-train`
    for it.
    """
    path = Path(f"{cfg.output_dir}.yaml")
    path.write_text(dump_config(cfg), encoding="utf-8")
    return [str(path), *overrides]


def medusa_train(arguments: list[str], mishap: Mishap | None = None) -> tuple[int, str]:
    """Run the command to its end; return its exit code (-9: killed), and all that it printed."""
    log = Path(f"{arguments[0]}.log")
    return wait(start(log, run_command, arguments, mishap)), log.read_text(encoding="utf-8")


def start(log: Path, target: Callable[..., None], *arguments: Any, **environ: str) -> BaseProcess:
    """Start `target(*arguments)` in a process of its own that prints to `log`."""
    process = _PROCESSES.Process(target=_run, args=(log, environ, target, arguments))
    process.start()
    return process


def wait(process: BaseProcess, timeout: float = 500) -> int:
    """Return a process's exit code; one that takes longer is killed."""
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        raise TimeoutError(f"process {process.pid} has not ended after {timeout} s")
    return process.exitcode


def run_command(arguments: list[str], mishap: Mishap | None = None) -> None:
    """Run `medusa-train` with `arguments` in this process."""
    from medusa_train.cli.train import app

    if mishap is not None:
        mishap.arrange()
    sys.argv = ["medusa-train", *arguments]
    app()


def _run(
    log: Path, environ: dict[str, str], target: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(handle, stream)
    os.environ.update(environ)
    gc.freeze()  # a collection need not look at what is imported
    target(*arguments)
