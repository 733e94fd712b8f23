"""Errors that users can cause; messages say what is wrong, where, and what to do.

Commands print them without a stack trace and exit with their `exit_code` (see `cli/common.py`). Any
other exception is a bug and keeps its trace. Most functions may raise them; docstrings name those
that a caller handles.
"""

from __future__ import annotations

from collections.abc import Sequence

from medusa_train.hide_secrets import mask


class MedusaError(Exception):
    """Base class of errors that users can fix; `str(error)` is the complete
    message, keys masked.
    """

    exit_code = 1

    def __init__(self, message: str = "") -> None:
        super().__init__(mask(message))


class ConfigError(MedusaError):
    """Invalid configuration or command line; lists all problems."""

    exit_code = 2

    def __init__(self, problems: str | Sequence[str]) -> None:
        given = [problems] if isinstance(problems, str) else problems
        self.problems = tuple(given)
        text = self.problems[0]
        if len(self.problems) > 1:
            lines = [f"{len(self.problems)} problems in the configuration:"]
            lines += [f"  {problem}" for problem in self.problems]
            text = "\n".join(lines)
        super().__init__(text)


class DataError(MedusaError):
    """Missing, invalid or empty data file; the message names file and line."""


class CheckpointError(MedusaError):
    """Run directory, checkpoint or heads file that cannot be read, written, or used
    with the model.
    """


class TargetModelError(MedusaError):
    """Target model that cannot be found, downloaded, loaded or used."""


class ServerError(MedusaError):
    """Server that is not reachable, does not answer, or rejects all requests."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, raised by commands that handle it like Ctrl-C."""


def signal_exit_code(signal: KeyboardInterrupt) -> int:
    """Return the exit code for a signal, as shells define it: 130 for Ctrl-C, 143 for SIGTERM."""
    return 143 if isinstance(signal, Terminated) else 130
