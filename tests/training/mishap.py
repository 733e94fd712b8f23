"""`medusa-train` in a process of its own to which something happens at a moment that a test chooses.

The processes are forked from one that has imported everything and computed nothing: a second each instead of ten.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa_train.config.load import dump_config
from medusa_train.config.schema import TrainConfig

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["medusa_train.cli.train", "medusa_train.training.run"])


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


@dataclass(frozen=True)
class Mishap:
    """`what` happens when `place`, as "module:name" or "module:Class.method", is called for the `count`-th time."""

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
    """Write `cfg` as CONFIG.yaml beside its run directory; return the arguments of `medusa-train` for it."""
    path = Path(f"{cfg.output_dir}.yaml")
    path.write_text(dump_config(cfg), encoding="utf-8")
    return [str(path), *overrides]


def medusa_train(arguments: list[str], mishap: Mishap | None = None) -> tuple[int, str]:
    """Run the command to its end; return its exit code (-9: killed), and all that it printed."""
    log = Path(f"{arguments[0]}.log")
    process = _PROCESSES.Process(target=_run, args=(arguments, mishap, log))
    process.start()
    process.join(timeout=500)
    if process.exitcode is None:
        process.kill()
        raise TimeoutError(log.read_text(encoding="utf-8"))
    return process.exitcode, log.read_text(encoding="utf-8")


def _run(arguments: list[str], mishap: Mishap | None, log: Path) -> None:
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(handle, stream)
    from medusa_train.cli.train import main

    if mishap is not None:
        mishap.arrange()
    sys.argv = ["medusa-train", *arguments]
    main()
