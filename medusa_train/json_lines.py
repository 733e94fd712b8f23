"""Append-only files of JSON Lines, which a run continues after a crash; and the log of a
measurement that is resumed with the same settings.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Generic, TypeVar

from medusa_train.errors import DataError
from medusa_train.hide_secrets import mask_keys
from medusa_train.io import BUSY, lock, parse_json, replace_bytes, strict_json

if TYPE_CHECKING:
    from pydantic import TypeAdapter

Entry = TypeVar("Entry")


class JsonLinesFile:
    """An append-only JSON Lines file that recovers from a crash: opening it drops an incomplete
    last line.

    Every record is one unbuffered write, so that killing the process leaves complete lines. Parent
    directories are created.

    Args:
        path: the file, created if absent.
        exclusive: lock the file against other processes, on file systems that have locks.
        fsync_every: flush to disk after this many records and on closing; None leaves it to the
            operating system.

    Raises:
        DataError: `exclusive`, and another process has the file open.
    """

    def __init__(
        self, path: Path, *, exclusive: bool = False, fsync_every: int | None = None
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._fsync_every = fsync_every
        self._pending = b""
        self._unsynced = 0
        self._file: BinaryIO = path.open("ab", buffering=0)
        try:
            if exclusive:
                lock(self._file.fileno(), DataError(f"{path}: {BUSY}"))
            self._file.truncate(sum(map(len, complete_lines(path))))
        except BaseException:
            self._file.close()
            raise

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record. After an OSError (disk full) the record is kept, and written before the
        next one or by `flush`.
        """
        self._pending += json_line(record)
        self._unsynced += 1
        self.flush()

    @property
    def pending_lines(self) -> int:
        """Number of records that could not be written yet."""
        return self._pending.count(b"\n")

    def flush(self) -> None:
        """Write the records that an earlier `append` could not write."""
        while self._pending:
            try:
                self._pending = self._pending[self._file.write(self._pending) :]
            except OSError as error:  # errors of a write name no file
                raise OSError(error.errno, error.strerror, str(self.path)) from error
        if self._fsync_every is not None and self._unsynced >= self._fsync_every:
            self._sync()

    def close(self) -> None:
        """Flush to disk if `fsync_every` is set, and close the file; pending records are lost."""
        if self._file.closed:
            return
        try:
            if self._fsync_every is not None:
                self._sync()
        finally:
            self._file.close()

    def __enter__(self) -> JsonLinesFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _sync(self) -> None:
        os.fsync(self._file.fileno())
        self._unsynced = 0


class MeasurementLog(Generic[Entry]):
    """Log of a measurement: a file to which results are appended, to resume after an interruption.

    Args:
        path: the file; created by `start`.
        settings: everything that answers and their times depend on, as plain JSON values.
        entry: reads and writes the JSON value of a line.

    Attributes:
        header: header of an existing file with the same settings; else empty.
        entries: entries of this file up to the first invalid line; else empty.
        differing: settings that differ in an existing file. Nothing of that file is used then.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], entry: TypeAdapter[Entry]) -> None:
        self.path = path
        self.header: dict[str, Any] = {}
        self.entries: list[Entry] = []
        self.differing: list[str] = []
        self._settings: dict[str, Any] = json.loads(json_line(settings))
        self._entry = entry
        self._file: JsonLinesFile | None = None
        self._read()

    def _read(self) -> None:
        """Read an existing file; one that cannot be read counts as none."""
        try:
            header, *lines = read_records(self.path)
            self.differing = differing_keys(header["settings"], self._settings)
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return
        if self.differing:
            return
        with contextlib.suppress(ValueError):
            for line in lines:
                self.entries.append(self._entry.validate_python(line))
        if self.entries:
            self.header = header

    def resumption(self, what: str, units: str, count: int) -> str | None:
        """Return a message on whether an interrupted measurement with `count` finished units is
        resumed; None if there is none.
        """
        if self.differing:
            names = ", ".join(self.differing)
            return (
                f"the interrupted {what} in {self.path.parent} had a different {names}: starting"
                " over"
            )
        if not count:
            return None
        return (
            f"resuming an interrupted {what}: {count} {units} are measured (delete {self.path} to"
            " start over)"
        )

    def start(self, entries: Iterable[Entry], **header: Any) -> None:
        """Replace the file by a header and `entries`, and open it for appending."""
        lines = [{"settings": self._settings, **header}, *map(self._as_json, entries)]
        replace_bytes(self.path, [json_line(line) for line in lines])
        self._file = JsonLinesFile(self.path)

    def append(self, entry: Entry) -> None:
        """Append one entry, which survives a crash of the process."""
        if self._file is None:
            raise ValueError("the log was not started")
        self._file.append(self._as_json(entry))

    def _as_json(self, entry: Entry) -> Any:
        return self._entry.dump_python(entry, mode="json")

    def close(self) -> None:
        """Close the file and keep it."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def remove(self) -> None:
        """Delete the file: the report is complete."""
        self.close()
        self.path.unlink(missing_ok=True)


def json_line(record: Mapping[str, Any]) -> bytes:
    """Encode `record` as one line of JSON Lines, with its newline; keys are masked, lone surrogates
    escaped, and numbers that are NaN or infinite become null.
    """
    try:
        return (mask_keys(strict_json(record, ensure_ascii=False)) + "\n").encode()
    except UnicodeEncodeError:
        return (mask_keys(strict_json(record)) + "\n").encode()


def complete_lines(path: Path) -> Iterator[bytes]:
    """Yield every complete line, with its newline."""
    with path.open("rb") as file:
        yield from (line for line in file if line.endswith(b"\n"))


def read_records(path: Path) -> Iterator[Any]:
    """Yield the JSON value of every complete line; None for a line that is not valid JSON."""
    for line in complete_lines(path):
        try:
            yield parse_json(line)
        except ValueError:
            yield None


def differing_keys(stored: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the settings that differ; a missing one equals None."""
    return [key for key in {**stored, **now} if stored.get(key) != now.get(key)]
