"""Entry points of the commands, which import almost nothing: Ctrl-C while a command is imported ends quietly."""

from __future__ import annotations

import sys
from importlib import import_module


def train() -> None:
    """Run `medusa-train`."""
    _run("train")


def selfdistill() -> None:
    """Run `medusa-selfdistill`."""
    _run("selfdistill")


def evaluate() -> None:
    """Run `medusa-eval`."""
    _run("evaluate")


def export() -> None:
    """Run `medusa-export`."""
    _run("export")


def _run(command: str) -> None:
    try:
        import_module(f"medusa_train.cli.{command}").main()
    except KeyboardInterrupt:  # of the imports; `run_command` handles that of the command itself
        print("error: interrupted", file=sys.stderr)
        sys.exit(130)
