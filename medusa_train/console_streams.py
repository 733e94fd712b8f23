"""stdout and stderr of a command. No key is printed, and a failing terminal, pipe or log file never
ends the command.

This module imports no other packages, so that it also handles errors while they are imported.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, TextIO, cast

from medusa_train.hide_secrets import mask

#: Errors of a write to an open file: no space, quota exceeded, file too large, device failed. They
#: name no file.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
#: Errors of a write after which a later write can succeed: full disk, quota, size limit, slow
#: reader. After any other error the stream is gone: EIO of a terminal, EPIPE of a pipe.
_PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EAGAIN)


def debugging() -> bool:
    """Return whether the user asks for stack traces."""
    return os.environ.get("MEDUSA_DEBUG", "") not in ("", "0")


class ConsoleStream:
    """A text stream that drops failed writes and remembers the error, instead of raising it.

    Everything that is printed passes through `write`. Attributes that are not defined here are
    those of the wrapped stream.

    Attributes:
        label: "stdout" or "stderr".
        failure: the first error of a write; None if there was none.
    """

    def __init__(self, stream: TextIO, label: str) -> None:
        self.label = label
        self.failure: OSError | None = None
        self._stream = stream
        self._gone = False

    def write(self, text: str) -> int:
        """Write `text` with keys masked, or drop it if the stream fails."""
        shown = mask(text)
        self._try(lambda: self._stream.write(shown))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each line."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush what was written, or drop it."""
        self._try(self._stream.flush)

    def describe_failure(self) -> str | None:
        """Return a message such as "stdout: No space left on device"; None if nothing failed."""
        if self.failure is None:
            return None
        return f"{self.label}: {self.failure.strerror or self.failure}"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _try(self, action: Callable[[], object]) -> None:
        if self._gone:
            return
        try:
            action()
        except OSError as error:
            self.failure = self.failure or error
            self._gone = error.errno not in _PASSING

    def discard(self) -> None:
        """Redirect a failed stream to /dev/null. Otherwise the interpreter would flush its buffer
        at exit, and report that as a failure.
        """
        if self.failure is None:
            return
        nowhere = os.open(os.devnull, os.O_WRONLY)
        with suppress(OSError):  # no file descriptor
            os.dup2(nowhere, self.fileno())
        os.close(nowhere)


@contextmanager
def console_streams() -> Iterator[None]:
    """Make `sys.stdout` and `sys.stderr` ConsoleStreams within the `with` block.

    If a standard descriptor is closed when the command starts, it is opened on /dev/null first.
    Otherwise the next file would get its number, and libraries would print into that file.
    """
    _open_closed_descriptors()
    before = (sys.stdout, sys.stderr)
    out = ConsoleStream(sys.stdout, "stdout")
    err = ConsoleStream(sys.stderr, "stderr")
    sys.stdout = cast(TextIO, out)
    sys.stderr = cast(TextIO, err)
    try:
        yield
    finally:
        for stream in (out, err):
            stream.flush()
            stream.discard()
        sys.stdout, sys.stderr = before


def _open_closed_descriptors() -> None:
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
    # the interpreter has no streams for descriptors that were closed when it started
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def failed_streams() -> list[str]:
    """Return which of stdout and stderr could not be written, and why; empty without a failure."""
    streams = (_console_stream(sys.stdout), _console_stream(sys.stderr))
    failures = [stream.describe_failure() for stream in streams if stream is not None]
    return [failure for failure in failures if failure is not None]


def printed_all() -> int:
    """Return the exit code of a command that only prints: 1 if stdout could not take everything."""
    stream = _console_stream(sys.stdout)
    if stream is None:
        return 0
    stream.flush()
    return 0 if stream.failure is None else 1


def _console_stream(stream: object) -> ConsoleStream | None:
    """Return the ConsoleStream of `stream`, which a bar of rich may wrap; None if there is none."""
    stream = getattr(stream, "rich_proxied_file", stream)
    return stream if isinstance(stream, ConsoleStream) else None


def print_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print an uncaught exception as the interpreter does, with keys masked. Ctrl-C while a command
    is imported, and a full disk under a help text, are printed in one line.
    """
    if issubclass(kind, KeyboardInterrupt) and not debugging():
        print("error: interrupted", file=sys.stderr)
        sys.exit(130)
    if (
        isinstance(error, OSError)
        and error.filename is None
        and error.errno in DISK_ERRORS
        and not debugging()
    ):
        with suppress(OSError):
            print(f"error: stdout: {error.strerror}", file=sys.stderr)
        os._exit(1)  # the interpreter would try to write the rest, and report an error
    sys.stderr.write(mask("".join(traceback.format_exception(kind, error, trace))))
