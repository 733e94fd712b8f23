"""Command-line options. Each option sets a key, and has the key's description.

`--max-new-tokens 3` means `max_new_tokens=3`; `Config.options` lists the options whose names differ
from their keys.
"""

from __future__ import annotations

import functools
import inspect
import re
import shlex
import types
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from itertools import zip_longest
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from typer.core import TyperCommand

from medusa_train.cli.common import error_console, print_error, run_command
from medusa_train.config.keys import Config
from medusa_train.config.problems import COMMON_NAMES
from medusa_train.config.removed_keys import REMOVED_KEYS
from medusa_train.errors import ConfigError
from medusa_train.hide_secrets import remember_written
from medusa_train.io import installed_version

#: Type of a key -> name of the option's value in `--help`; a switch has no value.
_VALUE_NAMES: dict[Any, str] = {
    bool: "",
    int: "<int>",
    float: "<number>",
    Literal: "<name>",
}
#: More choices than this are not listed after the description.
_MANY_CHOICES = 9


def switch(name: str, help_text: str, group: str | None = None) -> Any:
    """Declare a switch that sets no key, as a parameter's default value."""
    return typer.Option(False, name, metavar="", help=help_text, rich_help_panel=group)


def check_one_switch(**switches: bool) -> None:
    """Raise ConfigError if several of these switches are given."""
    given = [f"--{name.replace('_', '-')}" for name, is_given in switches.items() if is_given]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} exclude each other; give one of them")


def _print_version(asked: bool) -> None:
    if asked:
        print(f"medusa-train {installed_version('medusa-train')}")
        raise typer.Exit


_VERSION = inspect.Parameter(
    "version",
    inspect.Parameter.KEYWORD_ONLY,
    annotation=bool,
    default=typer.Option(
        False,
        "--version",
        callback=_print_version,
        is_eager=True,
        metavar="",
        help="Print the version.",
    ),
)
#: A switch of all commands but medusa-export.
PRINT_CONFIG = switch("--print-config", "Print all values and where they are set, then exit.")
#: The words of a command line that are not options.
Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG.yaml] [key=value ...]",
        help="Configuration file, and overrides of its keys.",
        show_default=False,
    ),
]


def join_lines(text: str) -> str:
    """Join the lines of each paragraph of a help text, because typer would keep the line breaks at
    any width of the terminal.
    """
    return re.sub(r"(?<=\S)\n(?=\S)", " ", text)


class CommandOfOptions(TyperCommand):
    """A command that prints a note on options that are given several times (the last one counts).
    If a key is typed as an option, its error says what to write.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line."""
        parser = self.make_parser(ctx)
        parser.ignore_unknown_options = True
        values, _, given = parser.parse_args(args=list(args))
        self._explain_keys(ctx, values.get("arguments") or ())
        single = [
            param.opts[0]
            for param in given
            if not getattr(param, "is_flag", False) and not getattr(param, "multiple", False)
        ]
        for name, count in Counter(single).items():
            if count > 1:
                error_console().print(
                    f"{name} is given {count} times; the last one counts", style="dim"
                )
        return super().parse_args(ctx, args)

    def _explain_keys(self, ctx: Any, words: Sequence[str]) -> None:
        """End the command with an error at the first unknown option that is a key or similar to
        one. typer reports other unknown options.
        """
        keys = getattr(self.callback, "keys_of_command", ())
        options = {_key_of(option) for param in self.get_params(ctx) for option in param.opts}
        for word, following in zip_longest(words, words[1:], fillvalue=""):
            option, equals, value = word.partition("=")
            if not option.startswith("--"):
                continue
            key = _key_of(option)
            if not equals:
                value = "VALUE" if following.startswith("--") else following or "VALUE"
            remember_written(value, key)
            advice = _advice(key, value, keys, options)
            if advice is not None:
                print_error(f"{option}: no such option; {advice}")
                raise typer.Exit(2)


def _advice(key: str, value: str, keys: Collection[str], options: set[str]) -> str | None:
    """Return what to write in place of an unknown option with this key's name; None if nothing is
    similar, or only another option.
    """
    removed = REMOVED_KEYS.get(f"--{key.replace('_', '-')}") or REMOVED_KEYS.get(key)
    if removed is not None:
        return removed
    if key.partition(".")[0] in keys:
        return "write " + shlex.quote(f"{key}={value}")
    meant = [name for name in COMMON_NAMES.get(key, ()) if name in keys]
    nearest = meant or get_close_matches(key, {*keys, *options}, n=1)
    if not nearest or nearest[0] in options:
        return None
    return f"did you mean {shlex.quote(f'{nearest[0]}={value}')}?"


def _key_of(option: str) -> str:
    """Return the key with the name of an option: `--max-new-tokens` -> `max_new_tokens`."""
    return option.removeprefix("--").replace("-", "_")


def command_app(
    cls: type[Config], groups: Mapping[str, Sequence[str]], help_text: str, **settings: Any
) -> Callable[[Callable[..., Any]], typer.Typer]:
    """Turn a function into a command whose options are keys of `cls`, with the schema's
    descriptions. The function gets their values as `flags`.

    Args:
        groups: group in `--help` -> keys that have an option in this group.
        settings: arguments of `typer.Typer.command`.
    """

    def decorate(command: Callable[..., Any]) -> typer.Typer:
        options = [_option(cls, name, group) for group, names in groups.items() for name in names]

        @functools.wraps(command)
        def wrapper(**values: Any) -> Any:
            values.pop("version")
            return command(flags={key.name: values.pop(key.name) for key in options}, **values)

        signature = inspect.signature(command, eval_str=True)
        others = [one for one in signature.parameters.values() if one.name != "flags"]
        wrapper.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*others, *options, _VERSION]
        )
        run = run_command(wrapper)
        run.keys_of_command = tuple(cls.model_fields)  # type: ignore[attr-defined]
        app = typer.Typer(
            add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich"
        )
        app.command(cls=CommandOfOptions, help=join_lines(help_text), **settings)(run)
        return app

    return decorate


def _option(cls: type[Config], name: str, group: str) -> inspect.Parameter:
    """Return the parameter of a key's option, which typer uses to parse and describe it."""
    field = cls.model_fields[name]
    kind = bool if field.annotation is bool else str
    types_of_key = _types(field.annotation)
    described = field.description or ""
    choices = [
        str(value) for one in types_of_key if get_origin(one) is Literal for value in get_args(one)
    ]
    if len(choices) <= _MANY_CHOICES and not all(choice in described for choice in choices):
        described += f" ({', '.join(choices)})"
    if kind is str and field.default is not None:
        described += f"; default: {field.default}"
    option = typer.Option(
        *cls.option_of(name).split(),
        help=described,
        metavar=_VALUE_NAMES.get(get_origin(types_of_key[0]) or types_of_key[0], "<text>"),
        rich_help_panel=group,
    )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, option],
    )


def _types(annotation: Any) -> list[Any]:
    """Return the types of the values that a key accepts, without limits and None."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _types(get_args(annotation)[0])
    if origin not in (Union, types.UnionType):
        return [annotation]
    parts = [part for part in get_args(annotation) if part is not type(None)]
    return [one for part in parts for one in _types(part)]
