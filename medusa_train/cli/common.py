"""Shared code of all commands: parse arguments, print errors, set exit codes. Does not import
torch.

Exit codes: 0 success, 1 failure, 2 usage or configuration error, 130 interrupted (Ctrl-C), 143
terminated (SIGTERM). `MEDUSA_DEBUG=1` shows stack traces and the libraries' warnings.
"""

from __future__ import annotations

import errno
import functools
import inspect
import io
import logging
import os
import re
import shlex
import sys
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin

import typer
from pydantic.fields import FieldInfo
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text
from typer.core import TyperCommand

from medusa_train.config.load import load_config
from medusa_train.config.problems import COMMON_NAMES
from medusa_train.config.removed_keys import REMOVED_KEYS
from medusa_train.config.types import Config
from medusa_train.console_streams import (
    DISK_ERRORS,
    console_streams,
    debugging,
    failed_streams,
    print_uncaught,
)
from medusa_train.errors import ConfigError, MedusaError, Terminated, signal_exit_code
from medusa_train.hide_secrets import forget_and_read_environment, mask, remember_written
from medusa_train.io import installed_version
from medusa_train.training.stop_signals import signals_as_interrupts

P = ParamSpec("P")
C = TypeVar("C", bound=Config)

#: Width of tables where the output is not a terminal.
PIPE_WIDTH = 120

#: The option of all commands that have a configuration.
PrintConfig = Annotated[
    bool,
    typer.Option(
        "--print-config", metavar="", help="Print all values and where they are set, then exit."
    ),
]

OVERRIDE = re.compile(r"[A-Za-z_][\w.\[\]-]*=")
_QUIET = {
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "DATASETS_VERBOSITY": "error",
    "HF_HUB_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
}


class MaskingConsole(Console):
    """A console that masks keys before it wraps and colors texts: the stream would not find them."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render anything that can be printed; strings and `Text` are masked."""
        if isinstance(renderable, Text) and mask(renderable.plain) != renderable.plain:
            renderable = Text(mask(renderable.plain), style=renderable.style, end=renderable.end)
        return super().render(renderable, options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Convert a string to `Text`, masked."""
        return super().render_str(mask(text), **options)


def error_console() -> Console:
    """Return a console on stderr, for errors, notes and progress."""
    return MaskingConsole(markup=False, emoji=False, stderr=True, highlight=False, soft_wrap=True)


def output_console(**options: Any) -> Console:
    """Return a console that prints names and paths as they are: `[x]` is no markup, and `:x:` no
    emoji.
    """
    return MaskingConsole(markup=False, emoji=False, **options)


def table_console() -> Console:
    """Return a console for tables, which is wide in a log file or a pipe."""
    console = output_console()
    if console.is_terminal:
        return console
    return output_console(width=PIPE_WIDTH)


def join_lines(text: str) -> str:
    """Join the lines of each paragraph of a help text: typer keeps its line breaks at every width
    of the terminal.
    """
    return re.sub(r"(?<=\S)\n(?=\S)", " ", text)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"medusa-train {installed_version('medusa-train')}")
        raise typer.Exit


_VERSION = Annotated[
    bool,
    typer.Option(
        "--version",
        callback=_print_version,
        is_eager=True,
        metavar="",
        help="Print the version.",
    ),
]


#: How `--help` names the value of an option, by the type of its key; switches have none.
_VALUE_NAMES = {bool: "", int: "<int>", float: "<number>", str: "<text>", dict: "<mapping>"}


def _value_name(annotation: Any) -> str:
    """Return how `--help` names the value of a key of this type."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _value_name(get_args(annotation)[0])
    if origin in (list, tuple):
        return "<list>"
    if origin is Literal:
        return "<name>"
    if origin in (Union, types.UnionType):
        parts = [part for part in get_args(annotation) if part is not type(None)]
        return _value_name(parts[0])
    return _VALUE_NAMES.get(origin or annotation, "<text>")


class CommandOfOptions(TyperCommand):
    """A command that names the options that are given several times: the last one counts. For a key
    that is typed as an option it says what to write.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line."""
        parser = self.make_parser(ctx)
        parser.ignore_unknown_options = True
        values, _, given = parser.parse_args(args=list(args))
        self._explain_keys(ctx, values.get("arguments") or ())
        names = []
        for param in given:
            is_switch = getattr(param, "is_flag", False)
            if not is_switch and not getattr(param, "multiple", False):
                names.append(param.opts[0])
        for name, count in Counter(names).items():
            if count > 1:
                error_console().print(
                    f"{name} is given {count} times; the last one counts", style="dim"
                )
        return super().parse_args(ctx, args)

    def _explain_keys(self, ctx: Any, words: Sequence[str]) -> None:
        """End the command at the first word that is a key, or similar to one, typed as an option;
        typer reports other unknown options.
        """
        keys = getattr(self.callback, "keys_of_command", ())
        options = {_key_of(option) for param in self.get_params(ctx) for option in param.opts}
        for word, following in zip_longest(words, words[1:], fillvalue=""):
            option, equals, value = word.partition("=")
            if not option.startswith("--"):
                continue
            if option in REMOVED_KEYS:
                print_error(f"{option}: no such option; {REMOVED_KEYS[option]}")
                raise typer.Exit(2)
            key = _key_of(option)
            if not equals:
                value = "VALUE" if following.startswith("--") else following or "VALUE"
            remember_written(value, key)
            advice = "write {}"
            if key.partition(".")[0] not in keys:
                meant = [name for name in COMMON_NAMES.get(key, ()) if name in keys]
                nearest = meant or get_close_matches(key, {*keys, *options}, n=1)
                if not nearest or nearest[0] in options:
                    continue
                key = nearest[0]
                advice = "did you mean {}?"
            setting = shlex.quote(f"{key}={value}")
            print_error(f"{option}: no such option; {advice.format(setting)}")
            raise typer.Exit(2)


def _key_of(option: str) -> str:
    """Return the key that an option would set if every key had an option of its name."""
    return option.removeprefix("--").replace("-", "_")


def with_keys(cls: type[Config], *names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a command so that keys of `cls` have options, described as in the schema; it gets
    them as `flags`.

    Args:
        names: keys; see `Config.option_of` for the names of their options.
    """
    keys = {name: cls.option_of(name) for name in names}

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def wrapper(**values: Any) -> Any:
            values.pop("version")
            return command(flags={name: values.pop(name) for name in keys}, **values)

        keyword = inspect.Parameter.KEYWORD_ONLY
        signature = inspect.signature(command, eval_str=True)
        parameters = list(signature.parameters.values())
        parameters = [parameter for parameter in parameters if parameter.name != "flags"]
        for name, option in keys.items():
            hint = _option_hint(cls.model_fields[name], option)
            parameters.append(inspect.Parameter(name, keyword, default=None, annotation=hint))
        parameters.append(inspect.Parameter("version", keyword, default=False, annotation=_VERSION))
        wrapper.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        wrapper.keys_of_command = tuple(cls.model_fields)  # type: ignore[attr-defined]
        return wrapper

    return decorate


def _option_hint(field: FieldInfo, option: str) -> Any:
    """Return the annotation of a key's option, by which typer reads and describes it."""
    kind = bool if field.annotation is bool else str
    described = field.description or ""
    choices: list[str] = []
    for part in (field.annotation, *get_args(field.annotation)):
        if get_origin(part) is Literal:
            choices += [str(value) for value in get_args(part)]
    if not all(choice in described for choice in choices):
        described += f" ({', '.join(choices)})"
    if kind is str and field.default is not None:
        described += f"; default: {field.default}"
    metavar = _value_name(field.annotation)
    option_info = typer.Option(*option.split(), help=described, metavar=metavar)
    return Annotated[kind | None, option_info]


def run_command(command: Callable[P, int | None]) -> Callable[P, None]:
    """Decorate a command so that its result is the exit code, and errors of users end it with a
    message and a code.

    Other exceptions are bugs and propagate; `print_uncaught` prints their traceback. What
    cannot be printed is dropped (`console_streams`), and named at the end where the other stream
    can be written. The signature is kept for typer.
    """

    @functools.wraps(command)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> None:
        if os.name == "nt":
            sys.exit("error: Windows is not supported; use WSL (Linux in Windows)")
        if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
            # a name that the terminal's encoding lacks is no error
            sys.stdout.reconfigure(errors="replace")
        forget_and_read_environment()
        with console_streams(), signals_as_interrupts():
            quiet_libraries()
            # Huge pages make a step on a CPU faster; torch reads this when it allocates first.
            os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
            try:
                code = command(*args, **kwargs) or 0
            except (Exception, KeyboardInterrupt) as error:
                explained = _explain(error)
                if explained is None or debugging():
                    sys.excepthook = print_uncaught  # typer has set its own
                    raise
                code, message = explained
                print_error(message)
            report_failed_streams()
        if code:
            sys.exit(code)

    return wrapper


def _explain(error: BaseException) -> tuple[int, str] | None:
    """Return exit code and message of an error that is no bug."""
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
    """Print what to do next, as a line that can be copied; nothing for None."""
    if command is not None:
        console.print(f"next: {command}", style="bold", highlight=False, soft_wrap=True)


def report_failed_streams() -> None:
    """Name a stream that could not be written, on the other one; of a closed pipe
    (`medusa-eval ... | head`) say nothing.
    """
    sys.stdout.flush()
    for failure in failed_streams():
        if failure.endswith(os.strerror(errno.EPIPE)):
            continue
        other = output_console()
        if failure.startswith("stdout"):
            other = error_console()
        other.print(f"{failure}; what was printed there is incomplete", soft_wrap=True)


def quiet_libraries() -> None:
    """Silence warnings of libraries that users cannot act on; must be called before the libraries
    are imported.
    """
    if debugging():
        return
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    if not sys.stderr.isatty():
        # also of loading; useless in a log file
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        hub = sys.modules.get("huggingface_hub.utils")
        if hub is not None:  # it has read the variable already
            hub.disable_progress_bars()
    # warns about kernels that are not installed
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
    cls: type[C], arguments: Iterable[str], *, flags: Mapping[str, object] | None = None
) -> C:
    """Load a configuration from `[CONFIG.yaml] [key=value ...]` and `flags`, and print which keys
    were ignored.
    """
    path, overrides = split_arguments(arguments)
    cfg = load_config(cls, path, overrides, flags=flags)
    if cfg.ignored:
        error_console().print(f"ignored keys (no effect): {', '.join(cfg.ignored)}", style="dim")
    return cfg
