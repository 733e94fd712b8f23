"""Entry points of the commands, which import almost nothing."""

from __future__ import annotations

from importlib import import_module


def train() -> None:
    """Run `medusa-train`."""
    import_module("medusa_train.cli.train").main()


def selfdistill() -> None:
    """Run `medusa-selfdistill`."""
    import_module("medusa_train.cli.selfdistill").main()


def evaluate() -> None:
    """Run `medusa-eval`."""
    import_module("medusa_train.cli.evaluate").main()


def export() -> None:
    """Run `medusa-export`."""
    import_module("medusa_train.cli.export").main()
