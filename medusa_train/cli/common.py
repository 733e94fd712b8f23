"""Shared code of all commands: print errors, set exit codes, load the configuration. This module
does not import torch.

Exit codes: 0 success, 1 failure, 2 usage or configuration error, 130 interrupted (Ctrl-C), 143
terminated (SIGTERM). `MEDUSA_DEBUG=1` shows stack traces and the libraries' warnings.
"""

from __future__ import annotations

import errno
import functools
import io
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from medusa_train.config.keys import Config
from medusa_train.config.load import load_config
from medusa_train.console_streams import (
    DISK_ERRORS,
    console_streams,
    debugging,
    failed_streams,
    print_uncaught,
)
from medusa_train.errors import ConfigError, MedusaError, Terminated, signal_exit_code
from medusa_train.hide_secrets import forget_and_read_environment, mask
from medusa_train.training.stop_signals import signals_as_interrupts

P = ParamSpec("P")
C = TypeVar("C", bound=Config)

#: Width of tables if the output is not a terminal.
PIPE_WIDTH = 120

OVERRIDE = re.compile(r"[A-Za-z_][\w.\[\]-]*=")
_QUIET = {
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "DATASETS_VERBOSITY": "error",
    "HF_HUB_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
}


class MaskingConsole(Console):
    """A console that masks API keys before it wraps and colors text. Afterwards, the stream's own
    masking could not find them.
    """

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render anything that can be printed, with keys in strings and `Text` masked."""
        if isinstance(renderable, Text) and mask(renderable.plain) != renderable.plain:
            renderable = Text(mask(renderable.plain), style=renderable.style, end=renderable.end)
        return super().render(renderable, options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Convert a string to `Text`, with keys masked."""
        return super().render_str(mask(text), **options)


def error_console() -> Console:
    """Return a console on stderr, for errors, notes and progress."""
    return MaskingConsole(markup=False, emoji=False, stderr=True, highlight=False, soft_wrap=True)


def output_console(**options: Any) -> Console:
    """Return a console that prints names and paths unchanged: `[x]` is not markup, and `:x:` is not
    an emoji.
    """
    return MaskingConsole(markup=False, emoji=False, **options)


def table_console() -> Console:
    """Return a console for tables; in a log file or a pipe it is `PIPE_WIDTH` wide."""
    console = output_console()
    if console.is_terminal:
        return console
    return output_console(width=PIPE_WIDTH)


def run_command(command: Callable[P, int | None]) -> Callable[P, None]:
    """Decorate a command so that its result is the exit code, and user errors end it with a message
    and an exit code.

    Other exceptions are bugs and propagate; `print_uncaught` prints their traceback. Output to a
    stream that cannot be written is dropped (`console_streams`); the other stream reports this at
    the end. The signature is kept for typer.
    """

    @functools.wraps(command)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> None:
        if os.name == "nt":
            sys.exit("error: Windows is not supported; use WSL (Linux in Windows)")
        if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
            # printing a name that the terminal's encoding lacks must not be an error
            sys.stdout.reconfigure(errors="replace")
        forget_and_read_environment()
        with console_streams(), signals_as_interrupts():
            quiet_libraries()
            # Huge pages make a step on a CPU faster. torch reads this at its first allocation.
            os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
            try:
                code = command(*args, **kwargs) or 0
            except (Exception, KeyboardInterrupt) as error:
                explained = _explain(error)
                if explained is None or debugging():
                    sys.excepthook = print_uncaught  # replaces typer's hook
                    raise
                code, message = explained
                print_error(message)
            report_failed_streams()
        if code:
            sys.exit(code)

    return wrapper


def _explain(error: BaseException) -> tuple[int, str] | None:
    """Return exit code and message of an error that is not a bug; None for a bug."""
    if isinstance(error, MedusaError):
        return error.exit_code, str(error)
    if isinstance(error, Terminated):
        return signal_exit_code(error), "terminated"
    if isinstance(error, KeyboardInterrupt):
        return signal_exit_code(error), "interrupted"
    if isinstance(error, OSError) and error.filename is not None:
        return 1, f"{error.filename}: {error.strerror}"
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        return 1, str(error.strerror)
    if type(error).__name__ == "OutOfMemoryError":  # torch's, which not every command imports
        return (
            1,
            f"not enough GPU memory; a smaller batch_size or max_new_tokens takes less: {error}",
        )
    return None


def print_error(message: str) -> None:
    """Print "error: " and `message` to stderr."""
    console = error_console()
    console.print("error: ", style="bold red", end="")
    console.print(message)


def print_next(command: str | None, console: Console) -> None:
    """Print the next command as a line that can be copied; print nothing for None."""
    if command is not None:
        console.print(f"next: {command}", style="bold", highlight=False, soft_wrap=True)


def report_failed_streams() -> None:
    """If stdout or stderr could not be written, report it on the other stream. A closed pipe
    (`medusa-eval ... | head`) is not reported.
    """
    sys.stdout.flush()
    for failure in failed_streams():
        if failure.endswith(os.strerror(errno.EPIPE)):
            continue
        console = output_console()
        if failure.startswith("stdout"):
            console = error_console()
        console.print(f"{failure}; what was printed there is incomplete", soft_wrap=True)


def quiet_libraries() -> None:
    """Silence warnings of libraries that users cannot act on. Call this before the libraries are
    imported.
    """
    if debugging():
        return
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    if not sys.stderr.isatty():
        # progress bars of downloads and of loading are useless in a log file
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        hub = sys.modules.get("huggingface_hub.utils")
        if hub is not None:  # it has already read the variable
            hub.disable_progress_bars()
    # bitsandbytes warns about kernels that are not installed
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    for category in (FutureWarning, DeprecationWarning):
        warnings.filterwarnings("ignore", category=category)


def split_arguments(arguments: Iterable[str]) -> tuple[Path | None, list[str]]:
    """Split `[CONFIG.yaml] [key=value ...]` into the path (or None) and the overrides, in any
    order.
    """
    overrides: list[str] = []
    paths: list[str] = []
    for argument in arguments:
        if OVERRIDE.match(argument) and not os.path.isfile(argument):
            overrides.append(argument)
        else:
            paths.append(argument)
    if len(paths) > 1:
        raise ConfigError(
            f"expected one configuration file, got {' and '.join(paths)}; overrides are written"
            " key=value, without spaces around ="
        )
    if not paths:
        return None, overrides
    return Path(paths[0]), overrides


def read_arguments(
    cls: type[C],
    arguments: Iterable[str],
    *,
    flags: Mapping[str, object] | None = None,
    quiet: bool = False,
) -> C:
    """Load a configuration from `[CONFIG.yaml] [key=value ...]` and `flags`. Print which keys were
    ignored, unless `quiet`.
    """
    path, overrides = split_arguments(arguments)
    cfg = load_config(cls, path, overrides, flags=flags)
    if cfg.ignored and not quiet:
        error_console().print(f"ignored keys (no effect): {', '.join(cfg.ignored)}", style="dim")
    return cfg
