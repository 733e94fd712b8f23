"""One entry of `datasets` -> conversations, from files or from the Hugging Face hub; knows no tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from medusa_train.config.paths import resolve_path
from medusa_train.config.schema import DatasetConfig
from medusa_train.data.formats import ReadResult, read_conversations, read_records
from medusa_train.errors import DataError

_FILES = (".jsonl", ".json")
_OTHER_FILES = (".parquet", ".csv", ".tsv", ".txt", ".arrow", ".gz", ".zip", ".zst")


def read_source(source: DatasetConfig, *, skip_bad: bool = False) -> ReadResult:
    """Read a file, a directory of files, or a dataset of the hub (if nothing of that name is on this machine).

    Raises:
        DataError: nothing of that name, or bad records (`read_conversations`).
    """
    found = resolve_path(source.path)
    if found is None:
        return _read_hub(source, skip_bad=skip_bad)
    if found.is_dir():
        return _read_directory(found, source, skip_bad=skip_bad)
    if found.suffix in _OTHER_FILES:
        raise DataError(f"{found}: only JSON and JSONL files are read; convert it first")
    return read_conversations(found, source.type, skip_bad=skip_bad)


def _read_directory(directory: Path, source: DatasetConfig, *, skip_bad: bool) -> ReadResult:
    paths = sorted(path for path in directory.iterdir() if path.suffix in _FILES and path.is_file())
    if not paths:
        raise DataError(f"{directory}: no {' or '.join(_FILES)} file in this directory")
    results = [read_conversations(path, source.type, skip_bad=skip_bad) for path in paths]
    return ReadResult(
        [conversation for result in results for conversation in result.conversations],
        [skipped for result in results for skipped in result.skipped],
    )


def _read_hub(source: DatasetConfig, *, skip_bad: bool) -> ReadResult:
    if _looks_like_a_file(source.path):
        raise DataError(f"{source.path}: no such file or directory")
    import datasets  # takes a second to load, and most configurations name files

    split = source.split or "train"
    try:
        rows: Any = datasets.load_dataset(source.path, source.name, split=split)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise DataError(
            f"{source.path}: no file or directory of that name is here, and the hub gave no dataset of that name: "
            f"{reason}\nCheck the name and the connection, or give the path of a JSONL file."
        ) from None
    return read_records(rows, source.type, name=f"{source.path}[{split}]", skip_bad=skip_bad)


def _looks_like_a_file(name: str) -> bool:
    """Tell a mistyped path from a name of the hub, which is `NAME` or `OWNER/NAME`."""
    path = Path(name)
    return name.startswith((".", "/", "~")) or len(path.parts) > 2 or path.suffix in (*_FILES, *_OTHER_FILES)
