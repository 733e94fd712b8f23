"""One entry of `datasets` -> conversations, from files or from the Hugging Face hub; knows no tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from medusa_train.config.paths import looks_like_path, resolve_path
from medusa_train.config.schema import DatasetConfig
from medusa_train.data.records import ReadResult, read_conversations, read_records
from medusa_train.errors import ConfigError, DataError
from medusa_train.hub import hub_is_unreachable

_PARQUET = ".parquet"
_FILES = (".jsonl", ".json", _PARQUET)
_OTHER_FILES = (".csv", ".tsv", ".txt", ".arrow", ".gz", ".zip", ".zst")


class RecordSource(Protocol):
    """Records that were found, and can be read."""

    def read(self, type: str, *, skip_bad: bool) -> ReadResult:
        """Read all chats; raises DataError as `read_conversations` does."""

    def fingerprint(self) -> str:
        """A digest of everything that `read` follows from but its arguments."""


@dataclass(frozen=True)
class LocalFiles:
    """JSON, JSONL and parquet files of this machine."""

    paths: tuple[Path, ...]

    def read(self, type: str, *, skip_bad: bool) -> ReadResult:
        """Read the files one after the other."""
        results = [_read_file(path, type, skip_bad=skip_bad) for path in self.paths]
        return ReadResult(
            [conversation for result in results for conversation in result.conversations],
            [skipped for result in results for skipped in result.skipped],
        )

    def fingerprint(self) -> str:
        """Digest names and contents; an edit that leaves size and time alone shows too."""
        digest = hashlib.sha256()
        for path in self.paths:
            try:
                digest.update(f"{path}\0{path.stat().st_size}\0".encode())
                with path.open("rb") as file:
                    while block := file.read(1 << 20):
                        digest.update(block)
            except OSError as error:
                raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
        return digest.hexdigest()


@dataclass(frozen=True)
class HubSplit:
    """A split of a data set of the hub, as `datasets` gives it."""

    name: str
    rows: Any

    def read(self, type: str, *, skip_bad: bool) -> ReadResult:
        """Read the rows in their order."""
        return read_records(self.rows, type, name=self.name, skip_bad=skip_bad)

    def fingerprint(self) -> str:
        """Digest the split's name and the fingerprint by which `datasets` tells contents apart."""
        return hashlib.sha256(f"{self.name}\0{self.rows._fingerprint}".encode()).hexdigest()


def open_source(source: DatasetConfig) -> LocalFiles | HubSplit:
    """Find a file, a directory of files, or a data set of the hub (if nothing of that name is on this machine).

    Raises:
        DataError: nothing of that name, or nothing in it that can be read.
        ConfigError: `name`, or another `split` than train, beside a path of this machine, which is read whole.
    """
    found = resolve_path(source.path)
    if found is None:
        return _open_hub(source)
    said = {"name": source.name, "split": None if source.split == "train" else source.split}  # a whole file is train
    if idle := [key for key in ("split", "name") if said[key] is not None]:
        raise ConfigError(
            f"datasets: {source.path} is on this machine and is read whole, so {' and '.join(idle)} would mean "
            "nothing: only data sets of the hub have parts. Leave it out, or give the path of the file that is meant"
        )
    if found.is_dir():
        paths = tuple(sorted(path for path in found.iterdir() if path.suffix in _FILES and path.is_file()))
        if not paths:
            raise DataError(f"{found}: no {', '.join(_FILES[:-1])} or {_FILES[-1]} file in this directory")
        return LocalFiles(paths)
    if found.suffix in _OTHER_FILES:
        raise DataError(f"{found}: only JSON, JSONL and parquet files are read; convert it first")
    return LocalFiles((found,))


def read_source(source: DatasetConfig, *, skip_bad: bool = False) -> ReadResult:
    """Find and read a source.

    Raises:
        DataError: nothing of that name, or bad records (`read_conversations`).
    """
    return open_source(source).read(source.type, skip_bad=skip_bad)


def _read_file(path: Path, type: str, *, skip_bad: bool) -> ReadResult:
    if path.suffix == _PARQUET:
        return read_records(parquet_rows(path), type, name=str(path), skip_bad=skip_bad)
    return read_conversations(path, type, skip_bad=skip_bad)


def parquet_rows(path: Path) -> Iterator[Any]:
    """Stream a parquet file's rows: `datasets` would otherwise write a copy of it to its own cache."""
    import datasets  # takes a second to load

    try:
        yield from datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise DataError(f"{path}: cannot be read as parquet: {reason}") from None


def _open_hub(source: DatasetConfig) -> HubSplit:
    if names_a_file(source.path):
        raise DataError(f"{source.path}: no such file or directory")
    import datasets  # takes a second to load, and most configurations name files

    if hub_is_unreachable():
        datasets.config.HF_HUB_OFFLINE = True  # what was downloaded before is still found, and nothing is retried
    split = source.split or "train"
    try:
        rows: Any = datasets.load_dataset(source.path, source.name, split=split)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise DataError(
            f"{source.path}: no file or directory of that name is here, and the hub gave no dataset of that name: "
            f"{reason}\nCheck the name and the connection, or give the path of a JSONL file."
        ) from None
    return HubSplit(f"{source.path}[{split}]", rows)


def names_a_file(name: str) -> bool:
    """Tell a mistyped path to data from a name of the hub."""
    return looks_like_path(name) or Path(name).suffix in (*_FILES, *_OTHER_FILES)
