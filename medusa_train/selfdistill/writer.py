"""The output file: one JSON line per conversation, appended whole, and resumed after any kind of end.

Knows nothing of models or seeds. Beside `NAME.jsonl` stand `NAME.settings.json`, how it was made, and
`NAME.dropped.jsonl`, the conversations of which nothing was left, so that they are not tried again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from medusa_train.errors import ConfigError, DataError

FSYNC_EVERY = 16  # lines; a crash of the machine, not of the process, can cost that many


class AppendOnly:
    """A JSONL file that holds complete lines only, but for what a crash tears off the last one.

    Opening mends that: whatever follows the last newline is cut off.

    Raises:
        DataError: a complete line is no JSON object with an `id`, or another process has the file open.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file: BinaryIO = path.open("ab+", buffering=0)
        try:
            _lock(self._file, path)
            self.records = self._mend_and_read()
        except BaseException:
            self._file.close()
            raise
        self._unsynced = 0

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line in one piece; it is on disk after `FSYNC_EVERY` lines at the latest."""
        line = (json.dumps(record, ensure_ascii=False) + "\n").encode()
        while line:
            line = line[self._file.write(line) :]
        self._unsynced += 1
        if self._unsynced >= FSYNC_EVERY:
            self.sync()

    def sync(self) -> None:
        """Put everything on disk."""
        os.fsync(self._file.fileno())
        self._unsynced = 0

    def close(self) -> None:
        """Put everything on disk and let go of the file."""
        self.sync()
        self._file.close()

    def _mend_and_read(self) -> list[dict[str, Any]]:
        self._file.seek(0)
        data = self._file.read()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            self._file.truncate(whole)
        records = []
        for number, line in enumerate(data[:whole].split(b"\n")[:-1], start=1):
            try:
                record = json.loads(line)
                record["id"]
            except (ValueError, TypeError, KeyError):
                raise DataError(
                    f"{self.path}:{number}: not a line of ours (a JSON object with an id); name another output, "
                    "or mend or delete this file"
                ) from None
            records.append(record)
        return records


def _lock(file: BinaryIO, path: Path) -> None:
    """Keep a second process from appending to the same file; where there are no such locks, hope."""
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DataError(f"{path}: another process is writing to it; wait for it, or name another output") from None
    except OSError:
        return  # a file system without locks


class Writer:
    """Appends conversations to `output`; knows which ones an earlier run has finished.

    Args:
        output: the JSONL file. settings: everything that the conversations depend on.

    Attributes:
        done: ids of the finished conversations, dropped ones included.
        earlier: the lines that were there already. earlier_dropped: the same of the dropped ones.

    Raises:
        ConfigError: `output` was made with other settings, or holds lines and no settings stand beside it.
        DataError: it holds lines that are not ours, or another process writes to it.
    """

    def __init__(self, output: Path, settings: Mapping[str, Any]) -> None:
        self.output = output
        _check_settings(output, settings)
        self._lines = AppendOnly(output)
        try:
            self._dropped = AppendOnly(output.with_suffix(".dropped.jsonl"))
        except BaseException:
            self._lines.close()
            raise
        self.earlier = self._lines.records
        self.earlier_dropped = self._dropped.records
        self.done = {str(record["id"]) for record in (*self.earlier, *self.earlier_dropped)}

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a conversation; `record["id"]` must be new."""
        self._mark(record)
        self._lines.append(record)

    def drop(self, record: Mapping[str, Any]) -> None:
        """Note a conversation of which nothing is left."""
        self._mark(record)
        self._dropped.append(record)

    def _mark(self, record: Mapping[str, Any]) -> None:
        name = str(record["id"])
        if name in self.done:
            raise ValueError(f"conversation {name} is written already")
        self.done.add(name)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._lines.close()
        self._dropped.close()
        if not self.done:  # nothing was made, so nothing is worth keeping settings for
            self.output.with_suffix(".settings.json").unlink(missing_ok=True)
        for file in (self._lines, self._dropped):
            if file.path.stat().st_size == 0:
                file.path.unlink()


def _check_settings(output: Path, settings: Mapping[str, Any]) -> None:
    """Compare with the settings beside `output`, or store them there before its first line is written."""
    if output.suffix != ".jsonl":
        raise ConfigError(f"output {output}: its name has to end with .jsonl")
    path = output.with_suffix(".settings.json")
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        stored = None
    except ValueError:
        raise ConfigError(f"{path}: not valid JSON; mend it, or name another output") from None
    if output.exists() and output.stat().st_size and stored is None:
        raise ConfigError(f"output {output}: it exists, and no {path.name} says how it was made; name another output")
    if stored is not None and (differing := _differing(stored, settings)):
        if output.exists() and output.stat().st_size:
            raise ConfigError(_differences(output, differing, stored, settings))
        stored = None  # nothing was made with them
    if stored is None:
        output.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(path.name + ".new")
        fresh.write_text(json.dumps(dict(settings), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(fresh, path)


def _differing(stored: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """Names of the settings that are not the same; one that is not there says no more than None."""
    return [name for name in {**stored, **settings} if stored.get(name) != settings.get(name)]


def _differences(output: Path, differing: Sequence[str], stored: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    lines = [f"  {name}: {stored.get(name)!r} there, {settings.get(name)!r} now" for name in differing]
    return "\n".join(
        [
            f"output {output}: it holds conversations made with other settings",
            *lines,
            "Name another output=FILE.jsonl, or delete this one and the files beside it.",
        ]
    )
