"""Crash-safe files: atomic replacement, locks, messages for a full disk; and
versions of packages.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import secrets
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from medusa_train.errors import MedusaError
from medusa_train.hide_secrets import mask_keys

WRITE_ERRORS = (OSError, SafetensorError)
"""Exceptions that writing raises when the disk is full; safetensors defines its own."""

# no space, quota exceeded, above the process's file size limit
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
BUSY = "another process is writing to it; wait for it, or choose another output"


def installed_version(package: str) -> str:
    """Return the version of a package, or "not installed"."""
    if package == "medusa-train":  # a checkout that is not installed has no metadata
        return str(sys.modules["medusa_train"].__version__)
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


@cache
def warn_once(message: str) -> None:
    """Log a warning; the same one only once per process."""
    logging.getLogger("medusa_train").warning(message)


class RepeatedKeyError(ValueError):
    """A JSON object has a key twice. Python's reader would silently keep the last value."""


def unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object; raise RepeatedKeyError if a key occurs twice."""
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        (name, _), *_ = counts.most_common(1)
        raise RepeatedKeyError(f"the key {name!r} occurs twice in an object")
    return mapping


def parse_json(text: str | bytes) -> Any:
    """Parse JSON; raise ValueError if it is invalid, too deeply nested, or has a key twice in an
    object.
    """
    try:
        return json.loads(text, object_pairs_hook=unique_object)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Replace `path` atomically: readers see the old content or the new one, after a crash too.

    `write` fills a temporary file in the same directory, which is flushed to disk and renamed. Its
    name is random, so that processes writing the same file don't disturb each other. Parent
    directories are created.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        write(temporary)
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    except OSError as error:
        # A full disk is found while writing, where Python names no file. An error without a number
        # has a message of its own, which a file name would hide.
        if error.errno is not None and error.filename in (None, str(temporary)):
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def replace_bytes(path: Path, chunks: Iterable[bytes]) -> None:
    """Replace `path` by the concatenated `chunks`, atomically (see `replace_file`)."""

    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:
            file.writelines(chunks)

    replace_file(path, write)


def replace_text(path: Path, text: str) -> None:
    """Replace `path` by `text` in UTF-8, keys masked, atomically (see `replace_file`)."""
    replace_bytes(path, [mask_keys(text).encode()])


def mask_file(path: Path) -> None:
    """Mask the keys in a file that another program wrote."""
    content = path.read_bytes()
    text = content.decode("utf-8", "surrogateescape")
    masked = mask_keys(text).encode("utf-8", "surrogateescape")
    if masked != content:
        replace_bytes(path, [masked])


def sync(path: Path) -> None:
    """Flush a file, or the entries of a directory, to disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def strict_json(value: Any, **options: Any) -> str:
    """Encode `value` by `json.dumps`. NaN and infinite numbers become null.

    JSON has no such numbers: Python's `NaN` makes other programs reject the whole file.
    """
    try:
        return json.dumps(value, allow_nan=False, **options)
    except ValueError:
        finite = json.loads(json.dumps(value), parse_constant=lambda name: None)
        return json.dumps(finite, **options)


def write_failure(what: str, directory: Path, error: Exception, needed: int | None = None) -> str:
    """Describe why `what` could not be written to `directory`; for a full disk, with the bytes
    `needed` and free.

    Remove partly written files first: they count as used space.
    """
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    if _errno(error) in _DISK_FULL:
        free = f"{describe_size(shutil.disk_usage(existing_parent(directory)).free)} free"
        reason += f" ({free})" if needed is None else f" ({describe_size(needed)} needed, {free})"
    return f"could not write {what} to {directory}: {reason}"


def existing_parent(path: Path) -> Path:
    """Return `path` if it exists, else the nearest directory above it that does."""
    return next((parent for parent in (path, *path.parents) if os.path.exists(parent)), Path())


@contextmanager
def locked(directory: Path, busy: MedusaError) -> Iterator[None]:
    """Lock an existing directory against other processes that lock it; raises `busy`
    if one does.
    """
    if os.name == "nt":  # directories cannot be opened, and there are no such locks
        yield
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        lock(handle, busy)
        yield
    finally:
        os.close(handle)


def lock(handle: int, busy: MedusaError) -> None:
    """Lock an open file or directory; without locks (Windows, some network file systems) do
    nothing.
    """
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise busy from None
    except OSError:
        return  # the file system has no locks


def _errno(error: Exception) -> int | None:
    """Return the error number; safetensors gives it only within its message."""
    if isinstance(error, OSError):
        return error.errno
    match = re.search(r"os error (\d+)", str(error))
    return int(match[1]) if match else None


def make_readable(directory: Path) -> None:
    """Give all files below a directory the mode that new files get. safetensors makes its files
    readable only for their owner.
    """
    probe = directory / ".mode"
    probe.touch()
    mode = probe.stat().st_mode
    probe.unlink()
    for path in directory.rglob("*"):
        if path.is_file():
            path.chmod(mode & 0o777)


def describe_size(size: int) -> str:
    """Format a number of bytes: 31.2 GiB, 4.0 KiB, 17 bytes."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:,.1f} {name}"
    return f"{size} bytes"
