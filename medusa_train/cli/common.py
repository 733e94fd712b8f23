"""What every command does the same way: arguments in, errors and exit codes out. Knows no command, and no torch.

Exit codes: 0 done, 1 failed, 2 usage or configuration, 130 interrupted (Ctrl-C), 143 terminated (SIGTERM).
`MEDUSA_DEBUG=1` shows stack traces and what the libraries have to say.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import ParamSpec, TypeVar

from rich.console import Console

from medusa_train.config.load import load_config
from medusa_train.config.types import Config
from medusa_train.errors import ConfigError, MedusaError, Terminated, signal_exit_code

P = ParamSpec("P")
C = TypeVar("C", bound=Config)

EXIT_INTERRUPTED = 130

_OVERRIDE = re.compile(r"[A-Za-z_][\w.\[\]]*=")
_QUIET = {
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "DATASETS_VERBOSITY": "error",
    "HF_HUB_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
}


def error_console() -> Console:
    """The console for what is not a command's result: errors, notes, progress. Plain text where it is no terminal."""
    return Console(stderr=True, highlight=False, markup=False, soft_wrap=True)


def run_command(command: Callable[P, int | None]) -> Callable[P, None]:
    """Decorate a command function so that it ends with an exit code instead of a stack trace.

    A `MedusaError` prints "error:" and its message on stderr and exits with its code, Ctrl-C exits 130 (a command
    that has something to say about it catches KeyboardInterrupt itself and returns 130), SIGTERM 143 where it is
    handled as Ctrl-C is. An integer that the command returns is the exit code. Other exceptions are bugs and pass
    through with their trace. The signature stays visible to typer.
    """

    @functools.wraps(command)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> None:
        quiet_libraries()
        try:
            code = command(*args, **kwargs) or 0
        except MedusaError as error:
            if _debugging():
                raise
            print_error(str(error))
            code = error.exit_code
        except KeyboardInterrupt as stopped:
            if _debugging():
                raise
            print_error("terminated" if isinstance(stopped, Terminated) else "interrupted")
            code = signal_exit_code(stopped)
        except BrokenPipeError:
            # The reader of our output went away (`medusa-eval ... | head`): nobody is left to tell.
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (the interpreter flushes it at exit)
            code = 1
        if code:
            sys.exit(code)

    return wrapper


def print_error(message: str) -> None:
    """Print `message` on stderr after a red "error:"."""
    console = error_console()
    console.print("error: ", style="bold red", end="")
    console.print(message)


def quiet_libraries() -> None:
    """Silence warnings of the libraries that a user can do nothing about. Works only before they are imported."""
    if _debugging():
        return
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # loading bars too; no use in a log file
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # says which fast kernels it did not find
    for category in (FutureWarning, DeprecationWarning):
        warnings.filterwarnings("ignore", category=category)


def split_arguments(arguments: Iterable[str]) -> tuple[Path | None, list[str]]:
    """Split `[CONFIG.yaml] [key=value ...]` into the path (or None) and the overrides, in any order.

    Raises:
        ConfigError: more than one argument is no override.
    """
    overrides: list[str] = []
    paths: list[str] = []
    for argument in arguments:
        (overrides if _OVERRIDE.match(argument) else paths).append(argument)
    if len(paths) > 1:
        raise ConfigError(
            f"one configuration file at a time, got {' and '.join(paths)}; overrides are written key=value, "
            "without spaces around the ="
        )
    return (Path(paths[0]) if paths else None), overrides


def read_arguments(cls: type[C], arguments: Iterable[str], *, flags: Mapping[str, object] | None = None) -> C:
    """Turn `[CONFIG.yaml] [key=value ...]` and `flags` into a configuration, and say which keys were ignored.

    Raises:
        ConfigError: as `load_config` does.
    """
    path, overrides = split_arguments(arguments)
    cfg = load_config(cls, path, overrides, flags=flags)
    if cfg.ignored:
        error_console().print(f"ignored, they change nothing here: {', '.join(cfg.ignored)}", style="dim")
    return cfg


def _debugging() -> bool:
    return os.environ.get("MEDUSA_DEBUG", "") not in ("", "0")
