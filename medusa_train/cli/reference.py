"""Write the page on commands and their options: `python -m medusa_train.cli.reference`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer
from typer.main import get_command

from medusa_train.config.paths import PROJECT_ROOT
from medusa_train.io import replace_text

PAGE = PROJECT_ROOT / "docs" / "reference" / "cli.md"
COMMANDS = {
    "medusa-selfdistill": "selfdistill",
    "medusa-train": "train",
    "medusa-eval": "evaluate",
    "medusa-export": "export",
}
INTRODUCTION = """\
# Commands

Each command takes a configuration file, options, and `key=value` for every [key](configuration.md). An option is a
short form of a key; if both are given, the option wins. `--help` shows the same with examples. `--print-config`,
which medusa-export lacks, prints what the keys resolve to, and runs nothing.

Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted by Ctrl-C, 143 by SIGTERM.

<!-- written by `python -m medusa_train.cli.reference` -->
"""


def command_page() -> str:
    """Return the page: for each command its usage, and a table of options per group."""
    parts = [INTRODUCTION]
    for name, module in COMMANDS.items():
        command = get_command(import_module(f"medusa_train.cli.{module}").app)
        context = typer.Context(command, info_name=name)
        parts.append(f"## {name}\n\n```\n{command.get_usage(context)}\n```\n")
        groups: dict[str, list[str]] = {}
        parameters: list[Any] = command.get_params(context)
        for option in parameters:
            if option.param_type_name != "option" or option.hidden:
                continue
            group = getattr(option, "rich_help_panel", None) or "Options"
            groups.setdefault(group, []).append(_row(option))
        for group, rows in groups.items():
            if len(groups) > 1:
                parts.append(f"### {name}: {group}\n")
            parts.append("| option | value | meaning |\n| --- | --- | --- |\n" + "".join(rows))
    return "\n".join(parts)


def _row(option: Any) -> str:
    names = ", ".join(f"`{name}`" for name in option.opts)
    value = "" if option.is_flag else option.metavar or "<text>"
    help_text = option.help.replace("|", "\\|").replace("\n", " ")
    return f"| {names} | {value and f'`{value}`'} | {help_text} |\n"


if __name__ == "__main__":
    replace_text(PAGE, command_page())
