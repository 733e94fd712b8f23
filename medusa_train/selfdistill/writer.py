"""The output file: one JSON line per conversation, appended whole, and resumed after any kind of end.

Knows nothing of models or seeds. Beside `NAME.jsonl` stand `NAME.settings.json`, how it was made, and
`NAME.dropped.jsonl`, the conversations of which nothing was left, so that they are not tried again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from medusa_train.errors import ConfigError, DataError

FSYNC_EVERY = 16  # lines; a crash of the machine, not of the process, can cost that many


class AppendOnly:
    """A JSONL file that holds complete lines only, but for what a crash tears off the last one.

    Opening mends that: whatever follows the last newline is cut off.

    Attributes:
        places: where each line stands, (offset, length) in bytes, by its `id`; of lines that were there at opening.

    Raises:
        DataError: a complete line is no JSON object with an `id`, or another process has the file open.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file: BinaryIO = path.open("ab+", buffering=0)
        try:
            _lock(self._file, path)
            self.places = self._mend_and_read()
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

    def _mend_and_read(self) -> dict[str, tuple[int, int]]:
        places: dict[str, tuple[int, int]] = {}
        offset = 0
        with self.path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.endswith(b"\n"):
                    self._file.truncate(offset)
                    break
                try:
                    places[str(json.loads(line)["id"])] = (offset, len(line))
                except (ValueError, TypeError, KeyError):
                    raise DataError(
                        f"{self.path}:{number}: not a line of ours (a JSON object with an id); name another output, "
                        "or mend or delete this file"
                    ) from None
                offset += len(line)
        return places


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
        lines, dropped: the two files.

    Raises:
        ConfigError: `output` was made with other settings, or holds lines and no settings stand beside it.
        DataError: it holds lines that are not ours, or another process writes to it.
    """

    def __init__(self, output: Path, settings: Mapping[str, Any]) -> None:
        self.output = output
        _are_stored(output, settings)  # before a file that may be somebody else's is opened and mended
        self.lines = AppendOnly(output)
        try:
            # again, and stored, while no other process can begin or go on with other ones
            if not _are_stored(output, settings):
                put_settings(output, settings)
            self.dropped = AppendOnly(dropped_file(output))
        except BaseException:
            self.lines.close()
            raise
        self.done = {*self.lines.places, *self.dropped.places}

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a conversation; `record["id"]` must be new."""
        self._mark(record)
        self.lines.append(record)

    def drop(self, record: Mapping[str, Any]) -> None:
        """Note a conversation of which nothing is left."""
        self._mark(record)
        self.dropped.append(record)

    def _mark(self, record: Mapping[str, Any]) -> None:
        name = str(record["id"])
        if name in self.done:
            raise ValueError(f"conversation {name} is written already")
        self.done.add(name)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.lines.close()
        self.dropped.close()
        if not self.done:  # nothing was made, so nothing is worth keeping settings for
            settings_file(self.output).unlink(missing_ok=True)
        for file in (self.lines, self.dropped):
            if file.path.stat().st_size == 0:
                file.path.unlink()


def settings_file(output: Path) -> Path:
    """The file beside `output` that says how it was made."""
    return output.with_suffix(".settings.json")


def dropped_file(output: Path) -> Path:
    """The file beside `output` that names the conversations of which nothing was left."""
    return output.with_suffix(".dropped.jsonl")


def holds_lines(output: Path) -> bool:
    """Whether any conversation is finished in `output`, written or dropped."""
    return any(file.exists() and file.stat().st_size for file in (output, dropped_file(output)))


def put_settings(output: Path, settings: Mapping[str, Any]) -> None:
    """Store the settings beside `output`, whole or not at all."""
    path = settings_file(output)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(dict(settings), indent=2, ensure_ascii=False) + "\n"
    put_file(path, [text.encode()])


def put_file(path: Path, pieces: Iterable[bytes]) -> None:
    """Write a file beside `path`, bring it to disk and let it take that name: no crash leaves half of it there."""
    fresh = path.with_name(path.name + ".new")
    with fresh.open("wb") as file:
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)


def _are_stored(output: Path, settings: Mapping[str, Any]) -> bool:
    """Whether `settings` stand beside `output`, as they have to before its first line is written.

    Raises:
        ConfigError: `output` was made with others, or nobody knows how, or it has not the name of a JSONL file.
    """
    if output.suffix != ".jsonl":
        raise ConfigError(f"output {output}: its name has to end with .jsonl")
    path = settings_file(output)
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        stored = None
    except ValueError:
        raise ConfigError(f"{path}: not valid JSON; mend it, or name another output") from None
    made = holds_lines(output)
    if made and stored is None:
        raise ConfigError(f"output {output}: it exists, and no {path.name} says how it was made; name another output")
    if stored is not None and (differing := _differing(stored, settings)):
        if made:
            raise ConfigError(_differences(output, differing, stored, settings))
        return False  # nothing was made with them
    return stored is not None


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
