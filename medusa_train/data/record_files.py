"""Raw records of JSON, JSON Lines (also gzipped) and parquet files, each with the `file:line` that
it was read from.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa_train.errors import DataError
from medusa_train.io import RepeatedKeyError, unique_object

PARQUET = ".parquet"
#: First bytes of a gzip file. The file may lack the suffix `.gz`.
_GZIP = b"\x1f\x8b"
#: Byte order marks of other encodings. UTF-32 comes first, since one of its marks begins with one
#: of UTF-16's.
_OTHER_ENCODINGS = {
    "UTF-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE),
    "UTF-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE),
}
#: At most this many characters of a name from the data are shown.
_MAX_NAME = 80


@dataclass(frozen=True, slots=True)
class RawRecord:
    """One record before it is parsed.

    Attributes:
        source: position for error messages: `file:line`, `file:record N` in an array, or
            `name:number` in a table.
        number: the number of the line or record, counted from 1.
        value: the decoded JSON value.
        error: why it could not be decoded, or None.
    """

    source: str
    number: int
    value: Any = None
    error: str | None = None


def read_file(path: Path) -> Iterator[RawRecord]:
    """Yield the records of a JSON Lines file, a JSON file (one array of records) or a parquet file.

    The content decides between JSON, JSON Lines and gzip. Blank lines are skipped. A line that
    cannot be decoded is a record with `error` set.

    Raises:
        DataError: the file cannot be read, has the suffix `.gz` but other content, is UTF-16 or
            UTF-32, or holds a broken array.
    """
    if path.suffix.lower() == PARQUET:
        yield from number_records(parquet_records(path), str(path))
        return
    try:
        data = path.read_bytes()
        if path.suffix.lower() == ".gz" or data.startswith(_GZIP):
            data = gzip.decompress(data)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path}: cannot be read: {reason}") from None
    for encoding, marks in _OTHER_ENCODINGS.items():
        if data.startswith(marks):
            raise DataError(
                f"{path}: {encoding} text; convert it: iconv -f {encoding} -t UTF-8 OLD > NEW"
            )
    data = data.removeprefix(codecs.BOM_UTF8)
    if data.lstrip()[:1] == b"[" and not _ends_with_its_first_line(data):
        values, reason = _decode(data)
        if reason is not None:
            raise DataError(f"{path}: {reason}")
        for number, value in enumerate(values, start=1):
            yield RawRecord(f"{path}:record {number}", number, value)
    else:
        yield from _read_lines(path, data)


def parquet_records(path: Path) -> Iterator[Any]:
    """Stream a parquet file's records, without the copy that `datasets` would write to its cache."""
    from pyarrow import ArrowException  # takes long to import
    from pyarrow.parquet import ParquetFile

    try:
        for batch in ParquetFile(path).iter_batches(1024):
            yield from batch.to_pylist()
    except (OSError, ArrowException) as error:
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise DataError(f"{path}: cannot be read as parquet: {reason}") from None


def _ends_with_its_first_line(data: bytes) -> bool:
    """Return whether the first line is complete JSON and more lines follow: the file is JSON Lines,
    not one array.
    """
    first, _, rest = data.strip().partition(b"\n")
    return bool(rest) and _decode(first)[1] is None


def _read_lines(path: Path, data: bytes) -> Iterator[RawRecord]:
    # Split bytes, not text: str.splitlines would also break at U+2028, which JSON strings may hold
    # unescaped.
    for number, line in enumerate(io.BytesIO(data), start=1):
        if not line.strip():
            continue
        value, error = _decode(line.strip())
        if error is not None and number == 1:
            whole, _ = _decode(data)
            if isinstance(whole, dict):
                raise DataError(
                    f"{path}: the file is one JSON object over several lines; one object per line,"
                    " or an array of objects, is expected"
                )
        yield RawRecord(f"{path}:{number}", number, value, error)


def _decode(data: bytes) -> tuple[Any, str | None]:
    """Return (value, None) for a line or a whole file, or (None, why it cannot be decoded)."""
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=unique_object), None
    except (ValueError, RecursionError) as error:
        return None, _reason(error)


def _reason(error: Exception) -> str:
    """Return why text could not be decoded. Valid JSON may exceed a limit of Python."""
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 text (byte {error.start + 1})"
    if isinstance(error, RepeatedKeyError):
        return str(error)
    if isinstance(error, json.JSONDecodeError):
        place = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno}"
        return f"not valid JSON: {error.msg} ({place})"
    if isinstance(error, RecursionError):
        return "not valid JSON: nested too deeply"
    return "not valid JSON: a number has thousands of digits"


def number_records(values: Iterable[Any], name: str) -> Iterator[RawRecord]:
    """Wrap records of tables; their sources are `name:1`, `name:2`, ..."""
    for number, value in enumerate(values, start=1):
        yield RawRecord(f"{name}:{number}", number, value)


def settings_path(path: Path) -> Path:
    """Return the path of the settings with which medusa-selfdistill wrote the file at `path`."""
    return path.with_name(path.name.removesuffix(".gz")).with_suffix(".settings.json")


def shown_name(name: str) -> str:
    """Return a name that was read from data, in a form that fits on one line of a terminal."""
    if name.strip() and name.isprintable() and len(name) <= _MAX_NAME:
        return name
    return repr(name[:_MAX_NAME]) + ("..." if len(name) > _MAX_NAME else "")
