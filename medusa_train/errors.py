"""The errors that a user can cause; each message says what was wrong, where, and what to do. Knows no library.

A command prints such an error without a stack trace and exits with its `exit_code` (see `cli/common.py`).
Anything else that is raised is a bug of this project and keeps its trace.
"""

from __future__ import annotations

from collections.abc import Sequence


class MedusaError(Exception):
    """Something a user can mend; `str(error)` is the whole message."""

    exit_code = 1


class ConfigError(MedusaError):
    """A configuration or command line that cannot be used: every problem of it at once."""

    exit_code = 2

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        if not self.problems:
            raise ValueError("a ConfigError needs at least one problem")
        super().__init__(self._message())

    def _message(self) -> str:
        if len(self.problems) == 1:
            return self.problems[0]
        lines = "\n".join(f"  {problem}" for problem in self.problems)
        return f"{len(self.problems)} problems in the configuration:\n{lines}"


class DataError(MedusaError):
    """A data file that is missing, broken or empty; the message names file and line."""


class CheckpointError(MedusaError):
    """A run directory, checkpoint or heads file that cannot be read, or that does not fit."""


class BackboneError(MedusaError):
    """A backbone that cannot be found, downloaded, loaded or used."""


class ServerError(MedusaError):
    """A server that can't be reached, that gives no answer, or that refuses every request."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, in a command that ends on it as it does on Ctrl-C."""


def signal_exit_code(stopped: KeyboardInterrupt) -> int:
    """What a shell shows for a process that the signal ended: 130 for Ctrl-C, 143 for SIGTERM."""
    return 143 if isinstance(stopped, Terminated) else 130
