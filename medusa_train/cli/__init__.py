"""The commands. Heavy imports happen inside the functions, so that usage errors appear at once.

Ctrl-C while a command is imported ends it with one line; `run_command` handles that of the command
itself.
"""

from __future__ import annotations

import sys
from types import TracebackType


def _end_quietly(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    print("error: interrupted", file=sys.stderr)
    sys.exit(130)


sys.excepthook = _end_quietly
