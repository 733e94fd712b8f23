"""The disk: files that reach it whole, and what is said when it takes no more. Knows nothing of content, no torch."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

WRITE_ERRORS = (OSError, SafetensorError)
"""What writing raises when the disk is full; safetensors has an error of its own for it."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # no space, no quota, a file beyond the limit of the process


def replace_file(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary file beside `path` and rename it: a reader sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        write(temporary)
        temporary.replace(path)
        sync(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def replace_text(path: Path, text: str) -> None:
    """Write `text` as `replace_file` does, flushed to the disk before it takes the old one's place."""

    def write(temporary: Path) -> None:
        temporary.write_text(text, encoding="utf-8")
        sync(temporary)

    replace_file(path, write)


def sync(path: Path) -> None:
    """Flush a file's or a directory's own entry to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_failure(error: Exception, directory: Path, needed: int | None = None) -> str:
    """Say why writing to `directory` failed; where the disk is full, with the bytes that are `needed` and free.

    Ask after whatever was written in vain is gone again, or it counts as taken.
    """
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    if _number(error) not in _FULL:
        return reason
    there = next((path for path in (directory, *directory.parents) if path.exists()), Path())
    room = f"{_size(shutil.disk_usage(there).free)} are free there"
    return f"{reason} ({room})" if needed is None else f"{reason} ({_size(needed)} are needed, {room})"


def _number(error: Exception) -> int | None:
    """The errno; safetensors gives it in its text only."""
    if isinstance(error, OSError):
        return error.errno
    match = re.search(r"os error (\d+)", str(error))
    return int(match[1]) if match else None


def _size(size: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:,.1f} {name}"
    return f"{size} bytes"
