"""stdout and stderr of a command: no key is printed, and a failing terminal, pipe or log file never
ends its work. Imports no other packages, so that it handles what happens while they are imported.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, TextIO, cast

from medusa_train.hide_secrets import mask

#: Errors of a write to an open file, which names no file: no space, quota exceeded, file too
# large, device failed.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
#: Errors of a write after which a later one can succeed: a full disk, a quota, a limit of size, a
# reader that is slow. After any other the stream is gone: EIO of a terminal, EPIPE of a pipe.
_PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EAGAIN)


def debugging() -> bool:
    """Return whether the user asks for stack traces."""
    return os.environ.get("MEDUSA_DEBUG", "") not in ("", "0")


class ConsoleStream(io.TextIOBase):
    """A text stream whose failed writes are dropped and remembered, in place of raised.

    Everything that is printed passes through `write`. Whatever is not defined here is the wrapped
    stream's.

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
        """Write `text` with keys masked, or drop it where the stream fails."""
        shown = mask(text)
        self._try(lambda: self._stream.write(shown))
        return len(text)

    def flush(self) -> None:
        """Flush what was written, or drop it."""
        self._try(self._stream.flush)

    def describe_failure(self) -> str | None:
        """Return "stdout: No space left on device", or None if all could be written."""
        if self.failure is None:
            return None
        return f"{self.label}: {self.failure.strerror or self.failure}"

    def fileno(self) -> int:
        """Return the file descriptor."""
        return self._stream.fileno()

    def isatty(self) -> bool:
        """Return whether the stream is a terminal."""
        return self._stream.isatty()

    def writable(self) -> bool:
        """Return True: nothing that is written raises."""
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The wrapped stream's encoding."""
        return self._stream.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        """What the wrapped stream does with characters that its encoding lacks."""
        return self._stream.errors

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
        """Send the buffered rest of a failed stream nowhere: the interpreter flushes it at exit,
        and would report that as a failure.
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

    A descriptor that was closed by whoever started the command is opened on /dev/null first: the
    next file would get its number, and libraries would print into it.
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
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
    # the interpreter has no streams for descriptors that were closed when it started
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def failed_streams() -> list[str]:
    """List which of stdout and stderr could not be written and why; empty without a failure."""
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
    """Return `stream`, or what it passes its text on to: a bar of rich may be in between."""
    stream = getattr(stream, "rich_proxied_file", stream)
    return stream if isinstance(stream, ConsoleStream) else None


def print_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print what ends the process, as the interpreter does, with keys masked; Ctrl-C while a command
    is imported, and a help text that cannot be printed, in one line.
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
        os._exit(1)  # the interpreter would try to write the rest, and say that it cannot
    sys.stderr.write(mask("".join(traceback.format_exception(kind, error, trace))))
