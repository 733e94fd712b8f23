"""The commands. Heavy imports happen inside the functions, so that usage errors appear at once.

Ctrl-C while a command is imported, and a help text that cannot be printed, end it with one line;
`run_command` handles those of the command itself.
"""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from types import TracebackType
from typing import NoReturn

#: Errors of a write to a console that is full or gone.
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def _end_quietly(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if issubclass(kind, KeyboardInterrupt):
        print("error: interrupted", file=sys.stderr)
        sys.exit(130)
    # of a write to a stream that is open, which names no file; commands explain their own, but not
    # where their traces are asked for
    debugging = os.environ.get("MEDUSA_DEBUG", "") not in ("", "0")
    if isinstance(error, OSError) and error.filename is None:
        is_unwritable = error.errno in _UNWRITABLE
        if is_unwritable and not debugging:
            _end_without_output(error)
    sys.__excepthook__(kind, error, trace)


def _end_without_output(error: OSError) -> NoReturn:
    with suppress(OSError):
        print(f"error: stdout: {error.strerror}", file=sys.stderr)
    os._exit(1)  # the interpreter would try to write the rest, and say that it cannot


sys.excepthook = _end_quietly
